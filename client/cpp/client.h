// C++ client of mla-server: connections, models, sequences and the leases that keep them.
//
//   auto client = Client::Connect("unix:/run/mla/mla.sock", {});
//   (*client)->RegisterModel(spec);
//   auto sequence = (*client)->OpenSequence("my-model");
//   auto session = (*client)->OpenSession();       // session.h: steps and attention
//   auto step = (*session)->Begin("my-model", {{&*sequence, rows}});
//   (*step)->Attend(call);  ...for every layer...  (*step)->End();
//
// Every call has a deadline. A background thread renews the leases of all sequences that this
// client opened. When the server turns out to have restarted (another boot_id), every later call
// fails with ABORTED: nothing is resumed silently.
//
// Ownership: Client outlives its sequences and sessions. Threading: Client may be used from any
// thread; Sequence from one at a time.
#ifndef MLA_CLIENT_CPP_CLIENT_H_
#define MLA_CLIENT_CPP_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mla/v1/admin.pb.h"
#include "mla/v1/cache.pb.h"
#include "mla/v1/model.pb.h"
#include "mla/v1/sequence.pb.h"

namespace mla::client {

class Session;
class Sequence;

struct ClientOptions {
  std::string tenant;     // sent without TLS only; empty: the server's default tenant
  std::string client_id;  // groups this client's sequences; empty: a random name
  // PEM files; all three or none. With them the target must match the server's certificate.
  std::string tls_ca, tls_cert, tls_key;
  std::string tls_server_name;  // expected instead of the target's host, if not empty
  // Connects through the proxy that the environment names (http_proxy), except to this host.
  bool http_proxy = false;
  // At least 0. More than ten years are as good as none: INT64_MAX waits for ever.
  int64_t call_timeout_ms = 10000;     // of each unary call, and of asking for shared memory
  int64_t request_timeout_ms = 60000;  // of each request on a session
  int64_t sequence_lease_ms = 0;       // 0: the server's default; at most 2^32 - 1
  bool renew_leases = true;
  // How sessions travel. kInline: all in gRPC messages. kShm: messages over gRPC, tensors in
  // shared memory. kRing: all in shared memory. kAuto: kRing where a unix target's server offers
  // it, else kInline; the others fail OpenSession with UNIMPLEMENTED where there is no shared
  // memory.
  enum class Transport { kAuto, kInline, kShm, kRing } transport = Transport::kAuto;
  // Of one session's region, at most what the server allows. 0: 64 MiB, or where the server has
  // less left 32, 16, 8 or 4. Another size is granted or refused as it is.
  uint64_t shared_bytes = 0;
  // GPU memory of one session's ring, in which tensors of kernels lie (Session::AllocateOnDevice):
  // rounded up to MiB, and had where the server offers it and runs on a GPU of this host; 0: none.
  uint64_t device_bytes = 0;
  int device = 0;              // the GPU that this process uses, by the runtime's order
  std::string device_library;  // the GPU's runtime; empty: by its usual names
  uint32_t spin_us = 20;       // how long a session spins on its ring before it sleeps
  // Of unix targets: the server's user, where that is neither root nor this process's. In a folder
  // that every user may write to, sockets of other users are refused with PERMISSION_DENIED. -1:
  // none.
  int64_t server_uid = -1;
  // How long a thread that waits for a reply over gRPC spins before it sleeps, which costs a
  // wake-up of 5 to 50 us. -1: 200 where this process may use four CPUs (its affinity and its
  // container's quota count), else 0.
  int32_t stream_spin_us = -1;
  // Threads of a session that copy large tensors into shared memory and out of it, the caller's
  // among them: for tensors that were not made in place (Session::Allocate). At least 1, at most 64
  // and the CPUs that this process may use: a figure beyond is taken as that bound. Where the
  // system has no more threads, sessions do with fewer. The others spin for a millisecond after
  // each such copy, where there are four CPUs, and then sleep.
  int32_t copy_threads = 1;
};

// Bytes of one layer's head range, in the layout of UploadWeightsRequest.Chunk.
struct WeightsChunk {
  uint32_t layer = 0;
  uint32_t head_begin = 0;
  uint32_t head_count = 0;
  std::string bytes;
};

// Layers and heads that sinks are for. A count of 0: all from the first on.
struct SinkSlice {
  uint32_t layer_begin = 0;
  uint32_t layer_count = 0;
  uint32_t head_begin = 0;
  uint32_t head_count = 0;
};

class Client final {
 public:
  // Asks for the server's limits and boot id. INVALID_ARGUMENT names an option out of range,
  // UNAVAILABLE: no answer in time, RESOURCE_EXHAUSTED: no thread for renewing leases,
  // FAILED_PRECONDITION (reason "forked"): in a child of a process that had connected.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const ClientOptions& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const v1::GetServerInfoReply& info() const;  // as of Connect
  const std::string& client_id() const;
  absl::StatusOr<v1::GetServerInfoReply> GetServerInfo();
  absl::StatusOr<v1::GetStatsReply> GetStats();
  // grpc.health.v1: whether `service` ("" for the whole server) takes new work.
  absl::StatusOr<bool> IsServing(const std::string& service = "");
  // Calls `update` with the status now, at every change and at least every `interval_ms` (0: 1000),
  // until it returns false (OK) or the server ends the watch (its status).
  absl::Status WatchStatus(uint32_t interval_ms,
                           const std::function<bool(const v1::StatusUpdate&)>& update);
  // `deadline_ms` 0: the server's. The call itself is given that time and call_timeout_ms more.
  // `to`: HOST:PORT of a server that gets the sequences, over TLS; empty: they stay.
  absl::StatusOr<v1::DrainReply> Drain(uint32_t deadline_ms, bool exit, const std::string& to = "");
  // Takes new work again after a drain, or ends one that is under way.
  absl::StatusOr<v1::CancelDrainReply> CancelDrain();
  // What tenants use and may use; those of other tenants for operators. An empty request: the
  // caller's own.
  absl::StatusOr<v1::GetQuotaReply> GetQuota(const v1::GetQuotaRequest& request = {});
  // For operators. Changes last until the server ends; only its configuration is kept.
  absl::StatusOr<v1::SetQuotaReply> SetQuota(const v1::SetQuotaRequest& request);
  // For operators: releases sequences, or a model with its sequences, of any tenant.
  absl::StatusOr<v1::EvictSequencesReply> EvictSequences(const v1::EvictSequencesRequest& request);
  absl::StatusOr<v1::EvictModelReply> EvictModel(const std::string& tenant,
                                                 const std::string& model_id);

  // `lease_ms` > 0: the model is unregistered after this time without a call that names it and
  // without an open sequence of it. 0: as the server is configured, by default never.
  // `kv_scales`: one a layer, for KV_FORMAT_FP8_TENSOR; may come later, by UploadScales.
  // `sinks`: [layers, num_heads], of ATTENTION_KIND_SPARSE_V4, each finite, or -inf: none; empty:
  // none, or those that UploadSinks will bring (ModelSpec.needs_sinks).
  // UNIMPLEMENTED if the server is too old for the model's kv_format, attention or needs_sinks;
  // DATA_LOSS if it says another shape than was asked for, also later in ListModels.
  absl::StatusOr<v1::RegisterReply> RegisterModel(const v1::ModelSpec& model, uint32_t lease_ms = 0,
                                                  std::span<const float> kv_scales = {},
                                                  std::span<const float> sinks = {});
  absl::Status UploadScales(const std::string& model_id, std::span<const float> scales);
  // Those of the layers and heads of `at`, [layer_count, head_count], layer by layer. Values in
  // force may be sent again, others while no sequence of the model is open: else ALREADY_EXISTS.
  absl::StatusOr<v1::UploadSinksReply> UploadSinks(const std::string& model_id,
                                                   std::span<const float> sinks,
                                                   const SinkSlice& at = {});
  // Calls `next` until it returns nullopt, sends what it returns and the digest over all of it. A
  // chunk has at most info().limits().weight_chunk_bytes() bytes.
  absl::StatusOr<v1::UploadWeightsReply> UploadWeights(
      const std::string& model_id, const std::function<std::optional<WeightsChunk>()>& next);
  absl::StatusOr<v1::ListModelsReply> ListModels();
  absl::Status UnregisterModel(const std::string& model_id);

  // `request_id` makes a retry safe; empty: a random one, and the call is repeated once when the
  // connection broke under it.
  // With `prefix` the sequence starts with as many of these rows as are cached, its length(); with
  // none where the server lacks the capability `prefix_cache`. `match` receives where that ended.
  absl::StatusOr<Sequence> OpenSequence(const std::string& model_id,
                                        const std::string& request_id = "",
                                        const v1::Prefix& prefix = {},
                                        v1::PrefixMatch* match = nullptr);
  // What a sequence with this prefix would find now, in whole pages, and how busy the server is.
  // Leaves no trace. Without a model and a prefix it is about the server alone. UNIMPLEMENTED by
  // servers without the capability "probe".
  absl::StatusOr<v1::ProbeReply> Probe(const std::string& model_id, const v1::Prefix& prefix = {});
  // One that is open already: of another client of the tenant's, or handed over to this server. A
  // failure with the reason "moved" names the server that has it (DetailOf(status)->peer()).
  absl::StatusOr<Sequence> Attach(uint64_t id);
  // No ids: all of the tenant's, or only this client's.
  absl::StatusOr<v1::GetReply> GetSequences(const std::vector<uint64_t>& ids, bool own_only);
  absl::StatusOr<v1::ReleaseReply> ReleaseSequences(const std::vector<uint64_t>& ids);
  absl::StatusOr<v1::RenewLeaseReply> RenewLeases();

  // --- Rows out of a server and into one (docs/cache/page_groups.md; cache.cc, pages_file.h).
  // Calls `take` with each part; an error of its own ends the call, which returns it. The deadline
  // is that of a whole upload.
  absl::Status ExportPages(const v1::ExportRequest& request,
                           const std::function<absl::Status(const v1::PagesPart&)>& take);
  // Sends the parts that `next` gives, until it gives none; an error of its own ends the call,
  // which returns it, and nothing is imported. `target` without client_id: this client's.
  absl::StatusOr<Sequence> ImportPages(
      const v1::ImportTarget& target,
      const std::function<absl::StatusOr<std::optional<v1::PagesPart>>()>& next);

  // --- What becomes of cached rows, with the capability "cache_events" (docs/kv_cache.md). Calls
  // `take` with events behind number `after` (absent: from now on), at first with those that the
  // server still knows, until it returns false. OK then, else why the watch has ended. Operators
  // may see events of all tenants; `after` is 0 or absent then.
  absl::Status WatchEvents(std::optional<uint64_t> after,
                           const std::function<bool(const v1::WatchEventsReply&)>& take,
                           bool all_tenants = false);
  // The latest matches that have not found all they asked for. `most`: 0: the server's default.
  absl::StatusOr<v1::ExplainReply> Explain(uint32_t most = 0, bool all_tenants = false);

  // Asks something for cached rows, with the capability "cache_hints".
  absl::StatusOr<v1::HintReply> Hint(const v1::HintRequest& request);

  // --- Checkpoints, with the capability "checkpoints" (docs/cache/checkpoints.md). A whole
  // upload's deadline.
  absl::StatusOr<v1::CheckpointReply> Checkpoint(const std::vector<uint64_t>& ids);
  // Opens sequences that were checkpointed, for this client; their models must be registered.
  absl::StatusOr<std::vector<Sequence>> Restore(const std::vector<uint64_t>& ids);
  absl::StatusOr<v1::ListCheckpointsReply> ListCheckpoints();
  absl::StatusOr<v1::DropCheckpointsReply> DropCheckpoints(const std::vector<uint64_t>& ids);

  // A stream of steps. Sessions are independent of each other.
  absl::StatusOr<std::unique_ptr<Session>> OpenSession();

 private:
  friend class Sequence;
  friend class Session;
  struct Impl;
  uint64_t NewStepId();
  absl::StatusOr<v1::ForkReply> ForkSequence(uint64_t id, uint64_t epoch,
                                             std::optional<uint64_t> length);
  absl::StatusOr<v1::MatchReply> MatchSequence(const v1::MatchRequest& request);
  absl::StatusOr<v1::TruncateReply> TruncateSequence(uint64_t id, uint64_t epoch, uint64_t length);
  absl::StatusOr<v1::ReadTailReply> ReadTail(uint64_t id, uint64_t epoch, uint64_t offset);
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// One open sequence. Releases it when destroyed, unless Detach was called.
class Sequence final {
 public:
  Sequence(Sequence&& other) noexcept;
  Sequence& operator=(Sequence&& other) noexcept;
  ~Sequence();

  uint64_t id() const { return id_; }
  uint64_t epoch() const { return epoch_; }
  uint64_t length() const { return length_; }  // committed rows, as of the last reply

  // Shares the first `length` rows (absent: all committed ones), copy-on-write.
  absl::StatusOr<Sequence> Fork(std::optional<uint64_t> length = std::nullopt);
  // Says what the rows from `first_row` on stand for, and adds behind the committed ones what is
  // cached of the rest. FAILED_PRECONDITION if it differs from what was said of committed rows.
  absl::StatusOr<v1::PrefixMatch> Match(const v1::Prefix& prefix, uint64_t first_row = 0);
  absl::Status Truncate(uint64_t length);
  // The tail that a step has left last (Step::End), and the length that it belongs to. NOT_FOUND:
  // there is none, or the sequence was cut below it. ABORTED: it was replaced between two of its
  // parts, time and again.
  struct Tail {
    uint64_t position = 0;
    std::string bytes;
  };
  absl::StatusOr<Tail> ReadTail();
  absl::Status Refresh();  // asks for epoch and length
  absl::Status Release();
  void Detach() { client_ = nullptr; }  // the lease alone decides from now on

 private:
  friend class Client;
  friend class Step;
  Sequence(Client* client, const v1::SequenceInfo& info);

  Client* client_ = nullptr;
  uint64_t id_ = 0, epoch_ = 0, length_ = 0;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLIENT_H_
