// The engine owns all state of scheduler and cache and drives the backend, under one role.
//
// The holder of the role (one mutex) runs the engine. Under load a dedicated thread keeps it: while
// a launch runs, arrivals collect in the bounded inbox, and when it ends everything ready goes
// (natural batching, no window). When the engine is idle, the thread that submits a request takes
// the role itself and may run a small launch to completion. An idle server then needs no hand-over
// between threads.
//
// Threading: every public method may be called from any thread. Submit never blocks on a launch;
// the control calls (sequences, models, stats) take the role and so wait for a running launch at
// most. Done callbacks run without the role. The thread that has just given the role up calls them,
// or, while the next launch runs, a thread of their own (steps/answers.h).
//
// Errors: canonical codes; a status brings an ErrorDetail (base/error.h) with field, got, limit and
// reason. Another tenant's sequence or model is NOT_FOUND, exactly like one that does not exist.
// Bad input never reaches a launch.
#ifndef MLA_SCHEDULER_ENGINE_H_
#define MLA_SCHEDULER_ENGINE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "scheduler/engine_types.h"
#include "scheduler/kvcache/page_moves.h"
#include "scheduler/kvcache/prefix/prefix_cache.h"
#include "scheduler/kvcache/prefix/prefix_hasher.h"
#include "scheduler/limits.h"
#include "scheduler/model.h"
#include "scheduler/probe.h"
#include "scheduler/request.h"
#include "scheduler/stream_steps.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

struct EngineOptions {
  Limits limits;
  // Bounds of the tenants. max_tenants and the server-wide bounds come from `limits`.
  TenantTableOptions tenants;
  // Work of a launch is its packed query rows x KV rows, summed over all records. Launches of at
  // most this work run on the submitting thread when the engine is idle; the engine's thread runs
  // larger ones. 0: never on the submitting thread.
  int64_t inline_work = int64_t{1} << 22;
  // Must be at least inline_work. A device launch of at most this work is awaited by the submitting
  // thread too, as long as that thread is idle (Submitter) and no other thread wants the engine.
  // After that the engine's thread awaits it.
  int64_t awaited_work = int64_t{1} << 24;
  bool dedicated_thread = true;  // false: tests step the engine by hand through Poll
  // Leases do not count time in which the process did not run; this needs the thread. Set it to
  // false in tests that move the clock by hand.
  bool notes_pauses = true;
  EngineObserver* observer = nullptr;  // may be null; outlives the engine
  // Yields sequence ids. If it is null, ids are unpredictable, as production needs. Set it for runs
  // that must repeat exactly.
  std::function<uint64_t()> ids;
  // The secret of the prefix keys. Without a value the secret is unpredictable, as production
  // needs.
  std::optional<kvcache::PrefixSecret> prefix_secret;
  // File of the slowest tier (Limits::file_tier_bytes), in an existing folder; empty: no file tier.
  std::string tier_path;
  // The number of threads that seal and check page groups which enter or leave the slower tiers,
  // and that read and write the file. 0: the engine's thread does this, so that runs can be
  // repeated exactly.
  int32_t tier_threads = 2;
};

class Clock;  // scheduler/clock.h

class Engine {
 public:
  // Makes an engine and configures the backend from the limits. INVALID_ARGUMENT names a bad limit;
  // RESOURCE_EXHAUSTED when the backend cannot provide the memory. `clock` outlives the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
      Clock* clock);
  // Returns the bytes that Create would take for pool, weights, workspaces and plans; for the
  // start-up check.
  static EngineBytes CountBytes(const Limits& limits, const kernels::AttentionBackend& backend);
  // Returns the kv_cache_bytes of a server that may choose: the device memory left after all other
  // needs of these limits, or the default of Limits if the backend computes in host memory.
  static int64_t KvCacheBytes(const Limits& limits, const kernels::AttentionBackend& backend);
  ~Engine();

  // --- Streams.
  // Opens a stream, to which the steps that it begins belong. `steps` (may be null) receives the
  // stream's open steps.
  StreamId OpenStream(const std::string& tenant,
                      std::shared_ptr<const StreamSteps>* steps = nullptr);
  // Aborts the steps that the stream began or takes part in, and answers requests that are not yet
  // answered with CANCELLED. Returns once the engine owns none of the stream's requests and has
  // delivered all their answers. Must not be called from Done.
  void CloseStream(StreamId stream);

  // Hands a request over. On RESOURCE_EXHAUSTED (the queue of the tenant or of the server is full)
  // and UNAVAILABLE (stopped) the engine has not taken the request and will not call Done.
  absl::Status Submit(StreamRequest* request);

  // --- Models of one tenant.
  // Registers a model; a repeat with equal contents succeeds. `lease_ms` says how long the model
  // stays without a call or a sequence that uses it, as Limits::model_lease_ms does. `kv_scales`
  // are those of SetScales, or empty. `sinks`, for a model with a window, has one logit for each
  // layer and head, [layers, num_heads].
  absl::StatusOr<ModelInfo> RegisterModel(const std::string& tenant, const ModelSpec& spec,
                                          int64_t lease_ms = 0,
                                          std::span<const float> kv_scales = {},
                                          std::span<const float> sinks = {});
  // Forgets the model. FAILED_PRECONDITION while sequences of it are open.
  absl::Status UnregisterModel(const std::string& tenant, const std::string& id);
  // Returns the tenant's models.
  std::vector<ModelInfo> ListModels(const std::string& tenant);
  // For operators: returns the models of all tenants, sorted by tenant and id. Takes FindModel's
  // lock.
  std::vector<std::pair<std::string, std::shared_ptr<const ModelSpec>>> AllModels();
  // For transports that need sizes before the engine sees a request; holds a lock only briefly.
  std::shared_ptr<const ModelSpec> FindModel(const std::string& tenant, const std::string& id);
  // Sets the scale of every layer's rows, for formats that need them (ModelTable::SetScales).
  absl::Status SetScales(const std::string& tenant, const std::string& id,
                         std::span<const float> scales);
  // Sets sinks of a model with a window (ModelTable::SetSinks). Returns the layers that still have
  // no sinks, if the model needs them.
  absl::StatusOr<std::vector<int32_t>> SetSinks(const std::string& tenant, const std::string& id,
                                                const SinkSlice& slice,
                                                std::span<const float> sinks);
  // Names a new upload of weights.
  UploadId NewUpload();
  // Loads weights of heads [head_begin, head_begin + head_count) of a layer: W_UK [heads, nope,
  // lora], then W_UV [heads, lora, v], bf16. They are used once the upload is committed. Heads that
  // are in use already accept the same bytes again and refuse others with ALREADY_EXISTS.
  absl::Status LoadWeights(const std::string& tenant, const std::string& id, UploadId upload,
                           int32_t layer, int32_t head_begin, int32_t head_count,
                           std::span<const std::byte> w_uk_w_uv);
  // Loads one head of W_UQ or W_O (AttentionBackend::LoadProjected), like LoadWeights.
  absl::Status LoadProjected(const std::string& tenant, const std::string& id, UploadId upload,
                             kernels::ProjectedPart part, int32_t layer, int32_t head,
                             std::span<const std::byte> weights);
  // Starts using the chunks of a complete, verified upload. Returns the layers still incomplete.
  absl::StatusOr<std::vector<int32_t>> CommitWeights(const std::string& tenant,
                                                     const std::string& id, UploadId upload);
  // Forgets the chunks of an upload that broke off or whose digest did not match. A model that has
  // no weights then takes no memory for them.
  void DiscardWeights(const std::string& tenant, const std::string& id, UploadId upload);
  // Undoes a RegisterModel of the caller that has made the model, unless another call has
  // registered it since or a sequence of it is open.
  void WithdrawModel(const std::string& tenant, const std::string& id);
  // For operators: returns the models of all tenants that have all their weights, or all their
  // sinks. If several models share their weights, one of them is in the list.
  std::vector<HeldWeights> AllWeights();
  // Copy weights of one head out, bit for bit as LoadWeights (W_UK, then W_UV) and LoadProjected
  // got them; `weights` has exactly ModelSpec::head_elements, or head_bytes. NOT_FOUND if `model`
  // is not registered any more, even if another one has its name.
  absl::Status ReadWeights(const HeldWeights& model, int32_t layer, int32_t head,
                           std::span<kernels::Bf16> weights);
  absl::Status ReadProjected(const HeldWeights& model, kernels::ProjectedPart part, int32_t layer,
                             int32_t head, std::span<std::byte> weights);

  // --- Sequences.
  // Opens a sequence, with the cached rows of its prefix if args has one. A repeat of the request
  // id gives the same sequence.
  absl::StatusOr<SequenceInfo> OpenSequence(const OpenArgs& args);
  // Opens a sequence that shares the first rows of another one, copy-on-write.
  absl::StatusOr<SequenceInfo> ForkSequence(const ForkArgs& args);
  // Declares the contents of a sequence's rows from first_row on, and appends cached rows to the
  // committed ones as far as they are found. A repeat gives the same answer.
  absl::StatusOr<SequenceInfo> MatchSequence(const MatchArgs& args);

  // Answers what a sequence with this prefix would find now. Changes nothing, and does not take the
  // role; the prefix is hashed as far as its pages are found. NOT_FOUND without the model. With
  // neither model nor prefix the answer is about the engine alone.
  absl::StatusOr<ProbeAnswer> Probe(const std::string& tenant, const std::string& model_id,
                                    const PrefixArgs& prefix);

  // Applies a client's hint about cached rows. Never waits for rows to move.
  absl::StatusOr<HintAnswer> Hint(const HintArgs& args);

  // --- Moving rows out of the pool and into it (kvcache/page_moves.h).
  // Makes a fork that holds the rows, which the caller must release; with ExportArgs::in_place
  // there is none. Works during a drain, too.
  absl::StatusOr<MovingPages> BeginExport(const ExportArgs& args);
  // Reserves pages for all rows, as a step does. Until EndImport or AbortImport, one of which must
  // follow, the sequence refuses steps, forks, matches and truncations. No sequence is restored
  // with its id until then, even if the sequence itself is gone.
  absl::StatusOr<MovingPages> BeginImport(const ImportArgs& args);
  // Starts moving one part. Returns an error, NOT_FOUND if the sequence has gone, or calls
  // move->done later.
  absl::Status StartMove(PageMove* move);
  // Moves one part, using move->done itself, and waits for it. Must not be called from Done.
  absl::Status MovePart(PageMove* move);
  // The rows have arrived: the sequence has them from now on. Rows from `not_finite_from` on may
  // hold NaN or infinity; kAllFinite says that none do.
  static constexpr int64_t kAllFinite = SequenceState::kAllFinite;
  // `state`, if not null, has the declared contents of the rows, as before a restart; contents
  // beyond the bounds of declared rows are left out. `tail`: the tail that came with the rows, if
  // any.
  absl::StatusOr<SequenceInfo> EndImport(const std::string& tenant, SequenceId id,
                                         int64_t not_finite_from,
                                         const SequenceState* state = nullptr,
                                         SequenceTail tail = {});
  // Drops the rows, and the sequence if the import opened it.
  void AbortImport(const std::string& tenant, const MovingPages& pages);

  // Drops the rows from `length` on; the sequence gets another epoch. FAILED_PRECONDITION if the
  // epoch is not the expected one.
  absl::StatusOr<SequenceInfo> TruncateSequence(const std::string& tenant, SequenceId id,
                                                int64_t length, uint64_t expected_epoch);
  // Returns the sequences of the selection. `page` counts only if the selection names no ids. If it
  // selects all tenants, `selection.tenant` is ignored.
  SequenceList GetSequences(const SequenceSelection& selection, const SequencePage& page = {});
  // Returns memory for a tail, which the caller fills. RESOURCE_EXHAUSTED (tails_exhausted) names
  // `field`. Does not take the role.
  absl::StatusOr<std::shared_ptr<Tail>> MakeTail(const TenantRef& tenant, int64_t bytes,
                                                 const char* field);
  // Returns the tail that the sequence keeps. NOT_FOUND (no_tail) if it has none.
  absl::StatusOr<SequenceTail> ReadTail(const std::string& tenant, SequenceId id,
                                        uint64_t expected_epoch);
  // Release sequences, or renew their leases, and return the number of those sequences. `not_found`
  // receives the ids that are absent.
  int32_t ReleaseSequences(const std::string& tenant, std::span<const SequenceId> ids,
                           std::vector<SequenceId>* not_found);
  int32_t RenewLeases(const SequenceSelection& selection, int64_t lease_ms,
                      std::vector<SequenceId>* not_found);

  // --- Operation.
  EngineStats Stats();
  // Returns the usage and bounds by tenant; thread-safe, and may be kept longer than the engine.
  const std::shared_ptr<TenantTable>& tenants() const;
  // Returns the log of events of cached rows; thread-safe, and may outlive the engine.
  const std::shared_ptr<kvcache::EventLog>& events() const;
  const kernels::BackendInfo& backend_info() const;
  // Returns the limits as of the start, without what SetDefaultLeases has changed since.
  const Limits& limits() const;
  // Sets the leases of sequences, models and steps that start from now on. REQUIRES: none is longer
  // than Limits::max_lease_ms, and sequence_ms and step_ms are above 0.
  void SetDefaultLeases(const DefaultLeases& leases);
  absl::Status Healthy();  // AttentionBackend::Healthy
  // Returns AttentionBackend::StuckCall. Does not take the role, because a stuck call may hold it.
  std::string StuckCall() const;
  // Returns memory that the backend's copies can reach directly, for staging requests and replies.
  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> AllocateHost(size_t bytes);
  // Lets the backend's copies reach the caller's memory directly, as they do AllocateHost's, until
  // UnregisterHost. UnregisterHost REQUIRES that no request points into the memory. Neither call
  // waits for launches that do not use the memory.
  absl::Status RegisterHost(std::span<std::byte> memory);
  void UnregisterHost(std::span<std::byte> memory);
  // Returns device memory in which tensors of requests may lie (AttendArgs::on_device), allocated
  // by the backend; the engine must outlive it. Does not take the role; takes milliseconds.
  absl::StatusOr<std::unique_ptr<kernels::SharedDeviceMemory>> AllocateShared(int64_t bytes,
                                                                              int32_t events);
  // Makes Open, Fork and BeginStep of new steps fail from now on: UNAVAILABLE with reason
  // "draining". `peer` is the server that clients are sent to, or empty.
  void StartDrain(const std::string& peer = "");
  // Undoes StartDrain.
  void CancelDrain();
  // Returns all open sequences except those being exported, sorted by tenant and id.
  std::vector<SequenceInfo> AllSequences();
  // Called once another server has the sequence as exported, with epoch and length of `info`. The
  // sequence is released, and later calls that name it are told of `peer`. Refused, without a
  // change, if the sequence has changed since or the engine is not draining.
  absl::Status EndHandOver(const SequenceInfo& sequence, const std::string& peer);
  // For operators. Releases sequences of any tenant, as ReleaseSequences does, and aborts their
  // open steps. A selection without ids means all of its tenant's. `not_found` receives absent ids.
  int32_t EvictSequences(const SequenceSelection& selection, std::vector<SequenceId>* not_found);
  // Releases the model's sequences, then unregisters it. Returns the number of sequences released.
  absl::StatusOr<int32_t> EvictModel(const std::string& tenant, const std::string& id);
  // Aborts all open steps and returns their number.
  int32_t AbortAllSteps();
  // Runs all ready work and due timers in the calling thread; returns true if there was any. Call
  // it only with dedicated_thread = false.
  bool Poll();
  // Checks the accounts of the cache; returns an empty string if they are consistent, else a
  // description of the fault. For tests.
  std::string CheckInvariants();

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_H_
