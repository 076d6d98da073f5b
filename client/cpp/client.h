// The C++ client of mla-server: connections, models, sequences and the leases that keep them.
//
//   auto client = Client::Connect("unix:/run/mla-server/mla.sock", {});
//   (*client)->RegisterModel(spec);
//   auto sequence = (*client)->OpenSequence("my-model");
//   auto session = (*client)->OpenSession();       // session.h: steps and attention
//   auto step = (*session)->Begin("my-model", {{&*sequence, rows}});
//   (*step)->Attend(call);  ...for every layer...  (*step)->End();
//
// Every call has a deadline. A background thread renews the leases of all sequences that this
// client opened. If the server has restarted, which its new boot_id shows, all later calls fail
// with ABORTED: nothing is resumed silently.
//
// Ownership: Client must outlive its sequences and sessions. Threading: any thread may use a
// Client; one thread at a time may use a Sequence.
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

// Servers that one drain may name.
inline constexpr size_t kMostDrainPeers = 16;

struct ClientOptions {
  std::string tenant;     // sent only without TLS; empty: the server's default tenant
  std::string client_id;  // groups this client's sequences; empty: a random name
  // Paths of PEM files; either all three or none are set. With them the target must match the
  // server's certificate. They are read again when they change: calls and sessions that begin later
  // have the new ones.
  std::string tls_ca, tls_cert, tls_key;
  // If not empty, the name that the certificate must have instead of the target's host.
  std::string tls_server_name;
  // true: connects through the proxy named in the environment (http_proxy), except to this host
  bool http_proxy = false;
  // Must be at least 0. More than ten years count as no limit; INT64_MAX waits for ever.
  int64_t call_timeout_ms = 10000;     // of each unary call, and of the request for shared memory
  int64_t request_timeout_ms = 60000;  // for each request on a session
  int64_t sequence_lease_ms = 0;       // 0: the server's default; at most 2^32 - 1
  bool renew_leases = true;
  // Selects the transport of sessions. kInline: all in gRPC messages. kShm: messages over gRPC,
  // tensors in shared memory. kRing: all in shared memory. kUcx: as kRing, to a server of any host
  // over UCX, which is opened at run time (docs/rdma.md). kUcxPuts: as kUcx, and tensors are put
  // into the server's memory and outputs into this process's, if the server allows it (ucx.puts).
  // Use kUcxPuts with RDMA: over TCP, each process that reaches UCX's port could then read all
  // memory of this one. kUcxDevice: as kUcxPuts, into memory of the server's GPU; OpenSession fails
  // if the server, its UCX or its GPU cannot (ucx.device_memory). kAuto: kRing if a unix target's
  // server offers it, else kInline. With the others, OpenSession fails with UNIMPLEMENTED if the
  // server does not offer them.
  enum class Transport {
    kAuto,
    kInline,
    kShm,
    kRing,
    kUcx,
    kUcxPuts,
    kUcxDevice
  } transport = Transport::kAuto;
  // Size of one session's region, at most the server's limit. 0: 64 MiB, or 32, 16, 8 or 4 if the
  // server has less left. Another size is granted exactly or refused.
  uint64_t shared_bytes = 0;
  // Bytes of GPU memory for one session's ring, in which tensors of kernels lie
  // (Session::AllocateOnDevice). Rounded up to MiB, and granted if the server offers it and runs on
  // a GPU of this host; 0: no device memory.
  uint64_t device_bytes = 0;
  int device = 0;  // the GPU that this process uses, as numbered by the GPU's runtime
  // Library of the GPU's runtime; empty: looked for under its usual names.
  std::string device_library;
  // Returns the W3C Trace Context header `traceparent` of the calling thread's span, or "". It is
  // called for each unary call and each step, on the caller's thread. Empty: no trace.
  std::function<std::string()> traceparent;
  uint32_t spin_us = 20;  // how long a session spins on its ring before it sleeps
  // For kUcx: the path of its library (empty: libucp.so.0 where the loader finds it), and its
  // transports and network devices in the form of UCX_TLS and UCX_NET_DEVICES (empty: the
  // environment's, or UCX's choice).
  std::string ucx_library, ucx_transports, ucx_devices;
  // For unix targets: the user id of the server, if that is neither root nor this process's user.
  // In a folder that every user may write to, sockets of other users are refused with
  // PERMISSION_DENIED. -1: no other user.
  int64_t server_uid = -1;
  // A thread that waits for a reply over gRPC spins for this time before it sleeps; waking up costs
  // 5 to 50 us. -1: 200 if this process may use at least four CPUs, by its affinity and its
  // container's quota, else 0.
  int32_t stream_spin_us = -1;
  // The number of threads of a session that copy large tensors into shared memory and out of it,
  // the caller's included. They copy tensors that were not made in place (Session::Allocate). Must
  // be at least 1; numbers above 64, or above the CPUs that this process may use, are reduced to
  // that bound. If the system has no more threads, sessions use fewer. With four CPUs or more, the
  // other threads spin for a millisecond after each such copy before they sleep.
  int32_t copy_threads = 1;
};

// The weights of a range of heads of one layer, in the layout of UploadWeightsRequest.Chunk.
struct WeightsChunk {
  uint32_t layer = 0;
  uint32_t head_begin = 0;
  uint32_t head_count = 0;
  std::string bytes;
  v1::WeightPart part = v1::WEIGHT_PART_UP;
  v1::DType dtype = v1::DTYPE_BF16;  // DTYPE_F8_E4M3: codes, then the scales of blocks
};

// The layers and heads of an upload of sinks. A count of 0 means all from the first one on.
struct SinkSlice {
  uint32_t layer_begin = 0;
  uint32_t layer_count = 0;
  uint32_t head_begin = 0;
  uint32_t head_count = 0;
};

class Client final {
 public:
  // Connects, and asks for the server's limits and boot id. INVALID_ARGUMENT names an option that
  // is out of range. UNAVAILABLE: there was no answer in time. RESOURCE_EXHAUSTED: no thread for
  // renewing leases could be started. FAILED_PRECONDITION (reason "forked"): the call came from a
  // child of a process that had connected.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const ClientOptions& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const v1::GetServerInfoReply& info() const;  // as of Connect; sends no request
  const std::string& client_id() const;
  // Asks the server for its version, backend, limits and boot id.
  absl::StatusOr<v1::GetServerInfoReply> GetServerInfo();
  // Returns the server's counters and gauges.
  absl::StatusOr<v1::GetStatsReply> GetStats();
  // Asks grpc.health.v1: returns true if `service` ("" for the whole server) takes new work.
  absl::StatusOr<bool> IsServing(const std::string& service = "");
  // Calls `update` with the status at once, at every change, and at least every `interval_ms` (0:
  // 1000). Returns OK when `update` returns false, or the server's status when the server ends the
  // watch.
  absl::Status WatchStatus(uint32_t interval_ms,
                           const std::function<bool(const v1::StatusUpdate&)>& update);
  // Makes the server refuse new work and wait for open steps; with `exit` its process then ends.
  // Only operators may call it. The call may take `deadline_ms` plus call_timeout_ms. `deadline_ms`
  // 0 means the server's default, for which the call waits however long it is. `peers` has
  // HOST:PORT of the servers that take over the sequences, over TLS, at most kMostDrainPeers; if it
  // is empty, the sequences stay. A server without the capability "hand_over_many" uses only the
  // first one.
  absl::StatusOr<v1::DrainReply> Drain(uint32_t deadline_ms, bool exit,
                                       const std::vector<std::string>& peers = {});
  // Ends a drain, whether it is under way or done, so that the server takes new work again.
  absl::StatusOr<v1::CancelDrainReply> CancelDrain();
  // Returns use and bounds of tenants: the caller's own for an empty request. Only operators see
  // other tenants.
  absl::StatusOr<v1::GetQuotaReply> GetQuota(const v1::GetQuotaRequest& request = {});
  // For operators. Changes last until the server ends, which keeps only its configuration.
  absl::StatusOr<v1::SetQuotaReply> SetQuota(const v1::SetQuotaRequest& request);
  // Releases sequences of any tenant, or a model with its sequences. Only operators may call these.
  absl::StatusOr<v1::EvictSequencesReply> EvictSequences(const v1::EvictSequencesRequest& request);
  absl::StatusOr<v1::EvictModelReply> EvictModel(const std::string& tenant,
                                                 const std::string& model_id);

  // `lease_ms` > 0: the model is unregistered after this time without a call that names it and
  // without an open sequence of it. 0: as the server is configured, by default never. `kv_scales`:
  // one a layer, for KV_FORMAT_FP8_TENSOR; may come later, by UploadScales. `sinks`: [layers,
  // num_heads], for ATTENTION_KIND_SPARSE_V4; each is finite, or -inf for no sink. Empty: no sinks,
  // or UploadSinks will bring them (ModelSpec.needs_sinks). UNIMPLEMENTED if the server is too old
  // for the model's kv_format, attention or needs_sinks. DATA_LOSS if it reports another shape than
  // the requested one, also later in ListModels.
  absl::StatusOr<v1::RegisterReply> RegisterModel(const v1::ModelSpec& model, uint32_t lease_ms = 0,
                                                  std::span<const float> kv_scales = {},
                                                  std::span<const float> sinks = {});
  // Returns the model as this client registered it; FAILED_PRECONDITION if it has not. A shape that
  // only the server reports says nothing about the size of a caller's tensors.
  absl::StatusOr<v1::ModelSpec> RegisteredModel(const std::string& model_id) const;
  // Sets the scales of a model with KV_FORMAT_FP8_TENSOR, one for each layer. Present values may be
  // sent again, other values only while no sequence of the model is open: else ALREADY_EXISTS.
  absl::Status UploadScales(const std::string& model_id, std::span<const float> scales);
  // Sets sinks for the layers and heads of `slice`, [layer_count, head_count], layer by layer.
  // Present values may be sent again, other values only while no sequence of the model is open:
  // else ALREADY_EXISTS.
  absl::StatusOr<v1::UploadSinksReply> UploadSinks(const std::string& model_id,
                                                   std::span<const float> sinks,
                                                   const SinkSlice& slice = {});
  // Calls `next` until it returns nullopt, and sends the chunks and then a digest over all of them.
  // A chunk has at most info().limits().weight_chunk_bytes() bytes.
  absl::StatusOr<v1::UploadWeightsReply> UploadWeights(
      const std::string& model_id, const std::function<std::optional<WeightsChunk>()>& next);
  // Returns the tenant's models.
  absl::StatusOr<v1::ListModelsReply> ListModels();
  // Forgets the model. FAILED_PRECONDITION while sequences of it are open.
  absl::Status UnregisterModel(const std::string& model_id);

  // `request_id` makes a retry safe. Empty: a random one; the call is then repeated once if the
  // connection broke during it. With `prefix` the sequence begins with as many of these rows as are
  // cached, which is its length(). Without the server's capability `prefix_cache` it begins with
  // none. Sets `match` to the place where the match ended, and why.
  absl::StatusOr<Sequence> OpenSequence(const std::string& model_id,
                                        const std::string& request_id = "",
                                        const v1::Prefix& prefix = {},
                                        v1::PrefixMatch* match = nullptr);
  // Answers what a sequence with this prefix would find now, in whole pages, and how busy the
  // server is. Leaves no trace. Without a model and a prefix the answer is about the server alone.
  // UNIMPLEMENTED from servers without the capability "probe". `timeout_ms` 0: call_timeout_ms.
  absl::StatusOr<v1::ProbeReply> Probe(const std::string& model_id, const v1::Prefix& prefix = {},
                                       int64_t timeout_ms = 0);
  // Returns a sequence that is open already: opened by another client of the tenant, or handed over
  // to this server. A failure with the reason "moved" names the server that has it
  // (DetailOf(status)->peer()).
  absl::StatusOr<Sequence> Attach(uint64_t id);
  // If `ids` is empty, returns the sequences that this client opened (own_only) or all of the
  // tenant's sequences.
  absl::StatusOr<v1::GetReply> GetSequences(const std::vector<uint64_t>& ids, bool own_only);
  // Returns the open sequences of all tenants, each with its tenant, ordered by id: for operators,
  // PERMISSION_DENIED to others. Asks for one part after another, so sequences that are opened or
  // end meanwhile may or may not be in the list. UNIMPLEMENTED from servers without the capability
  // "all_sequences".
  absl::StatusOr<v1::GetReply> GetAllSequences();
  // Releases the sequences; steps that hold them are aborted. The reply names ids that were not
  // found.
  absl::StatusOr<v1::ReleaseReply> ReleaseSequences(const std::vector<uint64_t>& ids);
  // Renews the leases of all sequences that this client opened.
  absl::StatusOr<v1::RenewLeaseReply> RenewLeases();

  // --- Rows out of a server and into one (docs/cache/page_groups.md, pages_file.h).
  // Calls `take` with each part; an error of its own ends the call, which returns it. The deadline
  // bounds the whole upload.
  absl::Status ExportPages(const v1::ExportRequest& request,
                           const std::function<absl::Status(const v1::PagesPart&)>& take);
  // Sends the parts that `next` returns until it returns none. If `next` returns an error, the call
  // ends with it and nothing is imported. If `target` has no client_id, this client's is used.
  absl::StatusOr<Sequence> ImportPages(
      const v1::ImportTarget& target,
      const std::function<absl::StatusOr<std::optional<v1::PagesPart>>()>& next);

  // --- Events of cached rows, with the capability "cache_events" (docs/kv_cache.md). Calls `take`
  // with events after number `after` (absent: from now on) until it returns false. The first ones
  // are events that the server still knows. Returns OK then, else the reason why the watch has
  // ended. Operators may see events of all tenants; `after` is 0 or absent then.
  absl::Status WatchEvents(std::optional<uint64_t> after,
                           const std::function<bool(const v1::WatchEventsReply&)>& take,
                           bool all_tenants = false);
  // Returns the latest matches that did not find all rows asked for. `most`: 0 means the server's
  // default.
  absl::StatusOr<v1::ExplainReply> Explain(uint32_t most = 0, bool all_tenants = false);

  // Sends a hint about cached rows; needs the capability "cache_hints".
  absl::StatusOr<v1::HintReply> Hint(const v1::HintRequest& request);

  // --- Checkpoints; they need the capability "checkpoints" (docs/cache/checkpoints.md). These
  // calls have the deadline of a whole upload.
  absl::StatusOr<v1::CheckpointReply> Checkpoint(const std::vector<uint64_t>& ids);
  // Opens sequences from their checkpoints for this client; their models must be registered.
  absl::StatusOr<std::vector<Sequence>> Restore(const std::vector<uint64_t>& ids);
  absl::StatusOr<v1::ListCheckpointsReply> ListCheckpoints();
  absl::StatusOr<v1::DropCheckpointsReply> DropCheckpoints(const std::vector<uint64_t>& ids);

  // Opens a stream of steps. Sessions do not depend on each other.
  absl::StatusOr<std::unique_ptr<Session>> OpenSession();

 private:
  friend class Probes;
  friend class Sequence;
  friend class Session;
  struct Impl;
  uint64_t NewStepId();
  std::string Traceparent() const;  // ClientOptions::traceparent's, or ""
  absl::StatusOr<v1::ForkReply> ForkSequence(uint64_t id, uint64_t epoch,
                                             std::optional<uint64_t> length);
  absl::StatusOr<v1::MatchReply> MatchSequence(const v1::MatchRequest& request);
  absl::StatusOr<v1::TruncateReply> TruncateSequence(uint64_t id, uint64_t epoch, uint64_t length);
  absl::StatusOr<v1::ReadTailReply> ReadTail(uint64_t id, uint64_t epoch, uint64_t offset);
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// One open sequence. The destructor releases it unless Detach was called.
class Sequence final {
 public:
  Sequence(Sequence&& other) noexcept;
  Sequence& operator=(Sequence&& other) noexcept;
  ~Sequence();

  uint64_t id() const { return id_; }
  uint64_t epoch() const { return epoch_; }
  uint64_t length() const { return length_; }  // committed rows as of the last reply

  // Makes a sequence that shares the first `length` rows, copy-on-write; absent: all committed
  // rows.
  absl::StatusOr<Sequence> Fork(std::optional<uint64_t> length = std::nullopt);
  // Declares the contents of the rows from `first_row` on, and appends the cached ones to the
  // committed rows. FAILED_PRECONDITION if it contradicts the declaration of committed rows.
  absl::StatusOr<v1::PrefixMatch> Match(const v1::Prefix& prefix, uint64_t first_row = 0);
  // Drops the rows from `length` on. The sequence gets another epoch.
  absl::Status Truncate(uint64_t length);
  // The tail that the last step with a tail left (Step::End), and the length to which it belongs.
  // NOT_FOUND without a tail, or if the sequence was truncated below it. ABORTED: it was repeatedly
  // replaced between two of its parts.
  struct Tail {
    uint64_t position = 0;
    std::string bytes;
  };
  absl::StatusOr<Tail> ReadTail();
  // Asks for epoch and length. NOT_FOUND as of Client::Attach.
  absl::Status Refresh();
  // Ends the sequence at the server; a step that holds it is aborted.
  absl::Status Release();
  void Detach() { client_ = nullptr; }  // from now on only the lease ends it

 private:
  friend class Client;
  friend class Step;
  Sequence(Client* client, const v1::SequenceInfo& info);

  Client* client_ = nullptr;
  uint64_t id_ = 0, epoch_ = 0, length_ = 0;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLIENT_H_
