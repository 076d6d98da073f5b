// The engine: one role that owns scheduler and cache state and drives the backend.
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
// or, while the next launch runs, a thread of their own (answer_queue.h).
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

<<<<<<< HEAD
=======
using kvcache::ExportArgs;
using kvcache::ImportArgs;
using kvcache::MovingPages;
using kvcache::PageMove;
using kvcache::PageTags;
using kvcache::SequenceState;

// What a worker keeps of a sequence beside its rows and entries (mla.v1.EndStep.tails): bytes that
// the engine never looks at. Sequences, forks and exports share them; they count against the tenant
// until the last of these is gone. Written by who made it, before the engine gets it.
struct Tail {
  Tail(size_t bytes, TenantUse taken)
      : data(std::make_unique_for_overwrite<std::byte[]>(bytes)),
        size(bytes),
        use(std::move(taken)) {}
  const std::unique_ptr<std::byte[]> data;
  const size_t size;
  const TenantUse use;
};

// The tail of a sequence, and the length that it belongs to.
struct SequenceTail {
  int64_t position = 0;
  std::shared_ptr<const Tail> tail;
  uint64_t serial = 0;  // of the sequence's tails: what takes a tail's place has a higher one
};

// Lease lengths for clients that ask for none. A running engine takes other ones over.
struct DefaultLeases {
  int64_t sequence_ms = 0, model_ms = 0, step_ms = 0;  // as in Limits
};

struct SequenceInfo {
  SequenceId id = 0;
  uint64_t epoch = 0;
  int64_t length = 0;
  int64_t lease_ms = 0;
  int64_t lease_left_ms = 0;
  bool in_step = false;
  StepId open_step = 0;
  std::string model_id;
  std::string client_id;
  int64_t page_groups = 0;
  int64_t declared = 0;                  // rows of which is known what they stand for
  kvcache::PrefixMatch matched;          // the last match
  std::optional<int64_t> tail_position;  // absent: it has no tail
};

// Memory that an engine takes.
struct EngineBytes {
  int64_t host = 0;
  int64_t device = 0;  // of a backend whose memory is not the host's
  int64_t sum() const { return host + device; }
};

// What rows stand for: token ids, or keys of 32 bytes for whole pages.
struct PrefixArgs {
  std::vector<uint32_t> token_ids;
  std::vector<std::string> page_keys;
  std::string salt;      // rows are shared between equal salts only
  int64_t max_rows = 0;  // of the sequence after the match; 0: as many as are declared
  // Called by the call's thread once it has hashed all this, before it waits for anything; empty:
  // nobody asks.
  std::function<void()> hashed = {};
  bool empty() const { return token_ids.empty() && page_keys.empty(); }
};

struct OpenArgs {
  std::string tenant;
  std::string model_id;
  std::string request_id;  // empty: not idempotent
  std::string client_id;
  int64_t lease_ms = 0;  // 0: Limits::sequence_lease_ms
  PrefixArgs prefix;     // what its first rows stand for; those that are cached are there at once
  SequenceId restored_id = 0;  // of a sequence that was checkpointed; 0: a new id
  // For rows of slower tiers, where it is less than Limits::tier_wait_ms.
  int64_t most_wait_ms = std::numeric_limits<int64_t>::max();
};

struct MatchArgs {
  std::string tenant;
  SequenceId id = 0;
  uint64_t expected_epoch = 0;
  int64_t first_row = 0;  // that `prefix` is about; at most what was declared before
  PrefixArgs prefix;
  int64_t most_wait_ms = std::numeric_limits<int64_t>::max();  // as of OpenArgs
};

// What a client asks for cached rows. Numbers of mla.v1.HintKind.
enum class HintKind : uint8_t {
  kPin = 1,   // they stay in the pool for ttl_ms; 0: no more
  kRetain,    // they go later than others
  kPrefetch,  // they come back from slower tiers
  kDemote,    // they go to a slower tier
};

struct HintArgs {
  std::string tenant;
  HintKind kind = HintKind::kPin;
  SequenceId id = 0;  // whose declared rows are meant; 0: those of `prefix`
  uint64_t expected_epoch = 0;
  std::string model_id;
  PrefixArgs prefix;
  int64_t ttl_ms = 0;
  int32_t priority = 0;  // 0 .. PrefixCache::kMostPriority
};

// What became of it. Numbers of mla.v1.HintOutcome.
enum class HintOutcome : uint8_t { kAccepted = 1, kClipped, kDeferred, kRefused };

struct HintAnswer {
  HintOutcome outcome = HintOutcome::kRefused;
  int64_t rows = 0;           // that the hint named
  int64_t rows_done = 0;      // for which it is done
  int64_t rows_deferred = 0;  // that are on their way between tiers
  const char* reason = "";    // a stable token: why it was not all of them
};

struct ForkArgs {
  std::string tenant;
  SequenceId parent = 0;
  uint64_t expected_epoch = 0;
  std::optional<int64_t> length;  // absent: all committed rows
  std::string request_id;
  std::string client_id;  // empty: the parent's
  int64_t lease_ms = 0;
};

struct SequenceSelection {
  std::string tenant;
  std::vector<SequenceId> ids;  // empty: all of the tenant's, or of client_id if given
  std::string client_id;
};

struct SequenceList {
  std::vector<SequenceInfo> sequences;
  std::vector<SequenceId> not_found;
  std::vector<std::pair<SequenceId, std::string>> moved;  // of these, and to which server
};

// A sequence, and whose it is.
struct TenantSequence {
  std::string tenant;
  SequenceInfo info;
};

// What a slower tier has, and what has passed through it.
struct TierFigures {
  int64_t bytes_total = 0, bytes_used = 0, groups = 0;
  uint64_t groups_in = 0, bytes_in = 0;    // copies that were put there
  uint64_t groups_out = 0, bytes_out = 0;  // page groups that came back to the pool from there
  int64_t ns_in = 0, ns_out = 0;           // from the beginning of such a move to its end
  uint64_t dropped = 0;                    // copies whose room was needed
  uint64_t damaged = 0;                    // copies that were not what had been put there
  uint64_t failed = 0;                     // reads and writes that the system refused
};

struct TierStats {
  TierFigures host, file;
  int32_t moving = 0;  // page groups on their way
};

struct EngineStats {
  int32_t sequences = 0, open_steps = 0, models = 0, streams = 0;
  int32_t requests_waiting = 0, requests_running = 0;
  // Since the arrival of the oldest request that waits: decode, extend, prefill, and any of these
  // that waits for KV rows which have not arrived.
  std::array<int64_t, 4> oldest_waiting_ns = {};
  uint64_t requests_total = 0, requests_failed = 0;
  uint64_t launches = 0, launches_mixed_layers = 0, launches_mixed_clients = 0;
  int64_t longest_launch_ns = 0;  // on the device, since start
  uint64_t plan_hits = 0, plan_misses = 0;
  int64_t kv_bytes_total = 0, kv_bytes_used = 0, page_groups_used = 0, page_groups_shared = 0;
  int64_t page_groups_free = 0;
  uint64_t copies_on_write = 0, kv_bytes_copied = 0, page_groups_scrubbed = 0;
  // Given back, and kept until page work on them is done; part of neither used nor free.
  int64_t page_groups_pinned = 0, kv_bytes_pinned = 0;
  // Page groups handed out, and given back by reason; the difference is page_groups_used and
  // page_groups_cached.
  uint64_t page_groups_taken = 0;
  uint64_t page_groups_released = 0, page_groups_expired = 0, page_groups_truncated = 0;
  uint64_t page_groups_uncommitted = 0, page_groups_evicted = 0;
  // Held by the prefix cache alone; part of neither used nor free.
  int64_t page_groups_cached = 0, kv_bytes_cached = 0;
  int64_t page_groups_kept = 0, kv_bytes_kept = 0;  // by pins of hints
  kvcache::PrefixStats prefix;
  TierStats tiers;
  uint64_t kv_bytes_read = 0;  // KV rows that attention records cover, each record once
  uint64_t leases_expired = 0, steps_aborted = 0, models_expired = 0;
  uint64_t pauses = 0;  // of the process, which leases do not count
  // Requests whose tensors were not there: handed back, and launches of such that waited too long.
  uint64_t requests_handed_back = 0, launches_late = 0;
  uint64_t launches_ahead = 0;  // that were submitted before their tensors were there
  uint64_t rounds_refused = 0;  // launches whose expanded form has more rounds than there may be
  uint64_t slices_fused = 0, slice_waits_expired = 0, slice_waits_skipped = 0;
  uint64_t rows_decode = 0, rows_extend = 0, rows_prefill = 0;
  kernels::HostWork host_work;
};

// One launch, as reported to the observer after it completed. Durations in nanoseconds.
struct LaunchReport {
  int32_t requests = 0, records = 0, layers = 0, clients = 0;
  int32_t rows_decode = 0, rows_extend = 0, rows_prefill = 0;
  int32_t slices_fused = 0;         // requests that were computed as one with their siblings
  int32_t slice_waits_expired = 0;  // times that a sibling slice did not come in time
  int32_t slice_waits_skipped = 0;  // times that such a sibling was not waited for again
  int32_t rounds_refused = 0;       // 1: in the absorbed form for want of rounds of the other
  int64_t kv_bytes_read = 0;        // KV rows that the records cover, each record once
  int64_t schedule_ns = 0;          // choosing the batch and recording it
  int64_t plan_ns = 0;
  int64_t kernel_ns = 0;
  int64_t predicted_ns = 0;  // of kernel_ns, before the launch
  int64_t complete_ns = 0;
  int32_t work_items = 0, partials = 0;
  double imbalance = 1.0;  // max / mean work of a unit
  bool plan_reused = false;
  bool ok = true;
};

// One request, as reported to the observer once its answer is delivered. Durations in nanoseconds.
struct RequestReport {
  RequestKind kind;
  bool ok;
  int64_t queue_ns;  // of an Attend: from its arrival until a launch took its first rows
  int64_t total_ns;  // from its arrival to its answer
};

// Receives what happened; must not block or allocate in the steady state.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // Called once the answers of the launch are delivered, mostly without the role: threads may call
  // it at the same time, and in another order than that of the launches.
  virtual void OnLaunch(const LaunchReport& report) = 0;
  // Every request once, in the same way.
  virtual void OnRequest(const RequestReport& report) = 0;
  // A sequence is gone: the rows it had, and for how long it was open.
  virtual void OnSequenceClosed(int64_t rows, int64_t open_ns) {
    static_cast<void>(rows);
    static_cast<void>(open_ns);
  }
  // Of a sample of the page groups: for how long one was in use.
  virtual void OnPageGroupFreed(int64_t held_ns) { static_cast<void>(held_ns); }
};

>>>>>>> 923dbacb (moved form of w39)
struct EngineOptions {
  Limits limits;
  // Bounds of the tenants. max_tenants and the server-wide bounds come from `limits`.
  TenantTableOptions tenants;
  // Work of a launch is its packed query rows x KV rows, summed over all records. Launches of at
  // most this work run on the submitting thread when the engine is idle; the engine's thread runs
  // larger ones. 0: never on the submitting thread.
  int64_t inline_work = int64_t{1} << 22;
  // At least inline_work. A device launch of at most this work is awaited by the submitting thread
  // too, as long as that thread is idle (Submitter) and no other thread wants the engine. After
  // that the engine's thread awaits it.
  int64_t awaited_work = int64_t{1} << 24;
  bool dedicated_thread = true;  // false: tests step the engine by hand through Poll
  // Leases do not count time in which the process did not run; this needs the thread. Set it to
  // false in tests that move the clock by hand.
  bool notes_pauses = true;
  EngineObserver* observer = nullptr;  // may be null; outlives the engine
  // Yields sequence ids. Null, as production needs: unpredictable ids. Set it for runs that must
  // repeat exactly.
  std::function<uint64_t()> ids;
  // Secret of the prefix keys. None, as production needs: an unpredictable one.
  std::optional<kvcache::PrefixSecret> prefix_secret;
  // File of the slowest tier (Limits::file_tier_bytes), in an existing folder; empty: no file tier.
  std::string tier_path;
  // Threads that seal and check page groups entering or leaving the slower tiers, and that read and
  // write the file. 0: the engine's thread does this, so that runs can be repeated exactly.
  int32_t tier_threads = 2;
};

class Clock;  // scheduler/clock.h

class Engine {
 public:
  // Configures the backend from the limits. INVALID_ARGUMENT names a bad limit; RESOURCE_EXHAUSTED
  // when the backend cannot provide the memory. `clock` outlives the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
      Clock* clock);
  // Bytes that Create would take for pool, weights, workspaces and plans; for the start-up check.
  static EngineBytes CountBytes(const Limits& limits, const kernels::AttentionBackend& backend);
  // kv_cache_bytes of a server that may choose: device memory left after all other needs of these
  // limits, or the default of Limits if the backend computes in host memory.
  static int64_t KvCacheBytes(const Limits& limits, const kernels::AttentionBackend& backend);
  ~Engine();

  // --- Streams. Closing aborts the steps that the stream began or takes part in; requests not yet
  // answered are answered with CANCELLED. Returns once the engine owns none of the stream's
  // requests and has delivered all their answers. Not from Done. `steps` (may be null) receives the
  // stream's open steps.
  StreamId OpenStream(const std::string& tenant,
                      std::shared_ptr<const StreamSteps>* steps = nullptr);
  void CloseStream(StreamId stream);

  // Hands a request over. On RESOURCE_EXHAUSTED (the queue of the tenant or of the server is full)
  // and UNAVAILABLE (stopped) the engine has not taken the request and will not call Done.
  absl::Status Submit(StreamRequest* request);

  // --- Models (scoped to the tenant). `lease_ms`: how long the model stays without a call or a
  // sequence that uses it; as Limits::model_lease_ms says. `kv_scales`: see SetScales; may be
  // empty. `sinks`, for a model with a window: one logit for each layer and head, [layers,
  // num_heads].
  absl::StatusOr<ModelInfo> RegisterModel(const std::string& tenant, const ModelSpec& spec,
                                          int64_t lease_ms = 0,
                                          std::span<const float> kv_scales = {},
                                          std::span<const float> sinks = {});
  absl::Status UnregisterModel(const std::string& tenant, const std::string& id);
  std::vector<ModelInfo> ListModels(const std::string& tenant);
  // For operators: models of all tenants, sorted by tenant and id. Takes FindModel's lock.
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
  // Starts using the chunks of a complete, verified upload. Returns the layers still incomplete.
  absl::StatusOr<std::vector<int32_t>> CommitWeights(const std::string& tenant,
                                                     const std::string& id, UploadId upload);
  // Forgets the chunks of an upload that broke off or whose digest did not match.
  void DiscardWeights(const std::string& tenant, const std::string& id, UploadId upload);

  // --- Sequences.
  absl::StatusOr<SequenceInfo> OpenSequence(const OpenArgs& args);
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
  // `state`, if not null: the declared contents of the rows, as before a restart; contents beyond
  // the bounds of declared rows are left out. `tail`: the tail that came with the rows, if any.
  absl::StatusOr<SequenceInfo> EndImport(const std::string& tenant, SequenceId id,
                                         int64_t not_finite_from,
                                         const SequenceState* state = nullptr,
                                         SequenceTail tail = {});
  // Drops the rows, and the sequence if the import opened it.
  void AbortImport(const std::string& tenant, const MovingPages& pages);

  absl::StatusOr<SequenceInfo> TruncateSequence(const std::string& tenant, SequenceId id,
                                                int64_t length, uint64_t expected_epoch);
  SequenceList GetSequences(const SequenceSelection& selection);
  // Memory for a tail, which the caller fills. RESOURCE_EXHAUSTED (tails_exhausted) names `field`.
  // Does not take the role.
  absl::StatusOr<std::shared_ptr<Tail>> MakeTail(const TenantRef& tenant, int64_t bytes,
                                                 const char* field);
  // NOT_FOUND (no_tail) if the sequence does not have a tail.
  absl::StatusOr<SequenceTail> ReadTail(const std::string& tenant, SequenceId id,
                                        uint64_t expected_epoch);
  // `not_found` receives the absent ids. Both return the number of sequences released or renewed.
  int32_t ReleaseSequences(const std::string& tenant, std::span<const SequenceId> ids,
                           std::vector<SequenceId>* not_found);
  int32_t RenewLeases(const SequenceSelection& selection, int64_t lease_ms,
                      std::vector<SequenceId>* not_found);

  // --- Operation.
  EngineStats Stats();
  // Usage and bounds by tenant; thread-safe, and may be kept longer than the engine.
  const std::shared_ptr<TenantTable>& tenants() const;
  // Log of events of cached rows; thread-safe, and may outlive the engine.
  const std::shared_ptr<kvcache::EventLog>& events() const;
  const kernels::BackendInfo& backend_info() const;
  // As of the start: what SetDefaultLeases has changed since is not in it.
  const Limits& limits() const;
  // In force for what is opened, registered or begun from now on. REQUIRES: none is longer than
  // Limits::max_lease_ms, and sequence_ms and step_ms are above 0.
  void SetDefaultLeases(const DefaultLeases& leases);
  absl::Status Healthy();  // AttentionBackend::Healthy
  // AttentionBackend::StuckCall. Does not take the role, because a stuck call may hold it.
  std::string StuckCall() const;
  // Memory that the backend's copies can reach directly, for staging requests and replies.
  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> AllocateHost(size_t bytes);
  // Lets the backend's copies reach the caller's memory directly, as they do AllocateHost's, until
  // UnregisterHost. UnregisterHost REQUIRES that no request points into the memory. Neither call
  // waits for launches that do not use the memory.
  absl::Status RegisterHost(std::span<std::byte> memory);
  void UnregisterHost(std::span<std::byte> memory);
  // Device memory in which tensors of requests may lie (AttendArgs::on_device), allocated by the
  // backend; the engine must outlive it. Does not take the role; takes milliseconds.
  absl::StatusOr<std::unique_ptr<kernels::SharedDeviceMemory>> AllocateShared(int64_t bytes,
                                                                              int32_t events);
  // From now on Open, Fork and BeginStep of new steps are UNAVAILABLE with reason "draining".
  // `peer`, if not empty: the server that clients are sent to.
  void StartDrain(const std::string& peer = "");
  // Undoes StartDrain.
  void CancelDrain();
  // All open sequences except those being exported, sorted by tenant and id.
  std::vector<TenantSequence> AllSequences();
  // Called once another server has the sequence as exported, with epoch and length of `info`. The
  // sequence is released, and later calls that name it are told of `peer`. Refused, without a
  // change, if the sequence has changed since or the engine is not draining.
  absl::Status EndHandOver(const TenantSequence& sequence, const std::string& peer);
  // For operators. Releases sequences of any tenant, as ReleaseSequences does, and aborts their
  // open steps. A selection without ids means all of its tenant's. `not_found` receives absent ids.
  int32_t EvictSequences(const SequenceSelection& selection, std::vector<SequenceId>* not_found);
  // Releases the model's sequences, then unregisters it. Returns the number of sequences released.
  absl::StatusOr<int32_t> EvictModel(const std::string& tenant, const std::string& id);
  // Aborts all open steps and returns their number.
  int32_t AbortAllSteps();
  // Runs all ready work and due timers in the calling thread; returns true if there was any. For
  // dedicated_thread = false.
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
