// Declares the values that cross the engine's interface: arguments, answers, figures and reports.
#ifndef MLA_SCHEDULER_ENGINE_TYPES_H_
#define MLA_SCHEDULER_ENGINE_TYPES_H_

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "scheduler/kvcache/page_moves.h"
#include "scheduler/kvcache/prefix/prefix_cache.h"
#include "scheduler/kvcache/prefix/prefix_hasher.h"
#include "scheduler/limits.h"
#include "scheduler/model.h"
#include "scheduler/request.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

using kvcache::ExportArgs;
using kvcache::ImportArgs;
using kvcache::MovingPages;
using kvcache::PageMove;
using kvcache::PageTags;
using kvcache::SequenceState;

// Bytes that a worker stores with a sequence in addition to the rows and entries
// (mla.v1.EndStep.tails). The engine never reads them. Sequences, forks and exports share a tail;
// it counts against the tenant until the last of them is gone. The creator of a tail writes it
// before the engine gets it.
struct Tail {
  Tail(size_t bytes, TenantUse taken)
      : data(std::make_unique_for_overwrite<std::byte[]>(bytes)),
        size(bytes),
        use(std::move(taken)) {}
  const std::unique_ptr<std::byte[]> data;
  const size_t size;
  const TenantUse use;
};

// The tail of a sequence, with the length of the sequence for which it was stored.
struct SequenceTail {
  int64_t position = 0;
  std::shared_ptr<const Tail> tail;
  uint64_t serial = 0;  // a new tail of the sequence has a higher serial than the old one
};

// The lease lengths for clients that ask for none. A running engine takes other ones over.
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
  std::string tenant;  // in lists of all tenants; else empty
  int64_t age_ms = 0;  // since it was opened, forked or imported
  int64_t page_groups = 0;
  int64_t kv_bytes = 0;                  // of page_groups
  int64_t declared = 0;                  // rows whose contents the client has declared
  kvcache::PrefixMatch matched;          // the last match
  std::optional<int64_t> tail_position;  // absent: no tail
};

// The memory that an engine takes.
struct EngineBytes {
  int64_t host = 0;
  int64_t device = 0;  // 0 if the backend computes in host memory
  int64_t sum() const { return host + device; }
};

// Says what rows stand for: token ids, or keys of 32 bytes for whole pages.
struct PrefixArgs {
  std::vector<uint32_t> token_ids = {};
  std::vector<std::string> page_keys = {};
  std::string salt = {};  // rows are shared between equal salts only
  int64_t max_rows = 0;   // length limit of the sequence after the match; 0: all declared rows
  // Called by the call's thread once it has hashed all this, before it waits for anything; may be
  // empty.
  std::function<void()> hashed = {};
  bool empty() const { return token_ids.empty() && page_keys.empty(); }
};

struct OpenArgs {
  std::string tenant;
  std::string model_id;
  std::string request_id;  // empty: not idempotent
  std::string client_id;
  int64_t lease_ms = 0;        // 0: Limits::sequence_lease_ms
  PrefixArgs prefix;           // contents of its first rows; cached rows are attached at once
  SequenceId restored_id = 0;  // id of a checkpointed sequence; 0: a new id
  // Longest wait for rows in slower tiers, if it is less than Limits::tier_wait_ms.
  int64_t most_wait_ms = std::numeric_limits<int64_t>::max();
};

struct MatchArgs {
  std::string tenant;
  SequenceId id = 0;
  uint64_t expected_epoch = 0;
  int64_t first_row = 0;  // position of the first row in `prefix`; at most the rows declared before
  PrefixArgs prefix;
  int64_t most_wait_ms = std::numeric_limits<int64_t>::max();  // see OpenArgs
};

// The wishes that a client may have for cached rows. Numbered as mla.v1.HintKind.
enum class HintKind : uint8_t {
  kPin = 1,   // they stay in the pool for ttl_ms; 0 ends the pin
  kRetain,    // they go later than others
  kPrefetch,  // they come back from slower tiers
  kDemote,    // they go to a slower tier
};

struct HintArgs {
  std::string tenant;
  HintKind kind = HintKind::kPin;
  SequenceId id = 0;  // the hint is for its declared rows; 0: for the rows of `prefix`
  uint64_t expected_epoch = 0;
  std::string model_id;
  PrefixArgs prefix;
  int64_t ttl_ms = 0;
  int32_t priority = 0;  // 0 .. PrefixCache::kMostPriority
};

// The result of a hint. Numbered as mla.v1.HintOutcome.
enum class HintOutcome : uint8_t { kAccepted = 1, kClipped, kDeferred, kRefused };

struct HintAnswer {
  HintOutcome outcome = HintOutcome::kRefused;
  int64_t rows = 0;           // rows that the hint named
  int64_t rows_done = 0;      // for which it is done
  int64_t rows_deferred = 0;  // rows still moving between tiers
  const char* reason = "";    // stable token: why fewer rows than named
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
  // empty: all of the tenant's sequences, or those of client_id if it is given
  std::vector<SequenceId> ids;
  std::string client_id;
};

// A part of a list of open sequences: those with the lowest ids above `after`.
struct SequencePage {
  bool all_tenants = false;
  SequenceId after = 0;
  int32_t most = std::numeric_limits<int32_t>::max();
};

struct SequenceList {
  std::vector<SequenceInfo> sequences;
  bool more = false;  // there are sequences with ids above the last one's
  std::vector<SequenceId> not_found;
  // sequences of `ids` on another server, and its address
  std::vector<std::pair<SequenceId, std::string>> moved;
};

// The contents and the traffic of one slower tier.
struct TierFigures {
  int64_t bytes_total = 0, bytes_used = 0, groups = 0;
  uint64_t groups_in = 0, bytes_in = 0;    // copies that were put there
  uint64_t groups_out = 0, bytes_out = 0;  // page groups that came back from there to the pool
  // The total time of these moves, each from its beginning to its end.
  int64_t ns_in = 0, ns_out = 0;
  uint64_t dropped = 0;  // copies whose room was needed
  // Copies that failed their check when they were read back.
  uint64_t damaged = 0;
  uint64_t failed = 0;  // reads and writes that the system refused
};

struct TierStats {
  TierFigures host, file;
  int32_t moving = 0;  // page groups on their way
};

struct EngineStats {
  int32_t sequences = 0, open_steps = 0, models = 0, streams = 0;
  int32_t requests_waiting = 0, requests_running = 0;
  // Waiting time of the oldest request of each kind: decode, extend, prefill, and any request whose
  // KV rows have not arrived.
  std::array<int64_t, 4> oldest_waiting_ns = {};
  uint64_t requests_total = 0, requests_failed = 0;
  uint64_t launches = 0, launches_mixed_layers = 0, launches_mixed_clients = 0;
  int64_t longest_launch_ns = 0;  // on the device, since start
  uint64_t plan_hits = 0, plan_misses = 0;
  int64_t kv_bytes_total = 0, kv_bytes_used = 0, page_groups_used = 0, page_groups_shared = 0;
  int64_t page_groups_free = 0;
  uint64_t copies_on_write = 0, kv_bytes_copied = 0, page_groups_scrubbed = 0;
  // These groups were given back, but are kept until the page work on them is done; they count
  // neither as used nor as free.
  int64_t page_groups_pinned = 0, kv_bytes_pinned = 0;
  // Page groups handed out, and given back by reason; the two differ by page_groups_used +
  // page_groups_cached.
  uint64_t page_groups_taken = 0;
  uint64_t page_groups_released = 0, page_groups_expired = 0, page_groups_truncated = 0;
  uint64_t page_groups_uncommitted = 0, page_groups_evicted = 0;
  // Only the prefix cache holds these groups; they count neither as used nor as free.
  int64_t page_groups_cached = 0, kv_bytes_cached = 0;
  int64_t page_groups_kept = 0, kv_bytes_kept = 0;  // by pins of hints
  kvcache::PrefixStats prefix;
  TierStats tiers;
  uint64_t kv_bytes_read = 0;  // KV rows that attention records cover, each record once
  uint64_t leases_expired = 0, steps_aborted = 0, models_expired = 0;
  uint64_t pauses = 0;  // pauses of the whole process; leases do not run during them
  // Requests whose tensors did not come in time: those handed back, and launches that had waited
  // too long for them.
  uint64_t requests_handed_back = 0, launches_late = 0;
  uint64_t launches_ahead = 0;  // launches submitted before their tensors were complete
  // Launches whose expanded form would have needed more rounds than allowed.
  uint64_t rounds_refused = 0;
  uint64_t slices_fused = 0, slice_waits_expired = 0, slice_waits_skipped = 0;
  uint64_t rows_decode = 0, rows_extend = 0, rows_prefill = 0;
  kernels::HostWork host_work;
};

// Reports one launch to the observer after it has completed. Durations in nanoseconds.
struct LaunchReport {
  int32_t requests = 0, records = 0, layers = 0, clients = 0;
  int32_t rows_decode = 0, rows_extend = 0, rows_prefill = 0;
  int32_t slices_fused = 0;         // requests that were computed as one with their siblings
  int32_t slice_waits_expired = 0;  // times that a sibling slice did not come in time
  int32_t slice_waits_skipped = 0;  // times that such a sibling was not waited for again
  // 1 if the launch was computed in the absorbed form because the expanded one needs too many
  // rounds
  int32_t rounds_refused = 0;
  int64_t kv_bytes_read = 0;  // KV rows that the records cover, each record once
  int64_t schedule_ns = 0;    // time for choosing the batch, recording it and finding its plan
  int64_t plan_ns = 0;        // time for building its plan; 0 if the plan was reused
  int64_t kernel_ns = 0;
  int64_t predicted_ns = 0;  // kernel_ns as predicted before the launch
  int64_t complete_ns = 0;
  int32_t work_items = 0, partials = 0;
  double imbalance = 1.0;  // work of the busiest unit / mean work of the units
  bool plan_reused = false;
  bool ok = true;
};

// Reports one request to the observer once its answer is delivered. Durations in nanoseconds.
struct RequestReport {
  RequestKind kind;
  bool ok;
  int64_t queue_ns;  // of an Attend: from its arrival until a launch took its first rows
  int64_t total_ns;  // from its arrival to its answer
};

// Is told what happened. Its methods must not block, nor allocate in the steady state.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // Called once the answers of the launch are delivered, mostly without the role: Threads may call
  // it at the same time and in an order different from that of the launches.
  virtual void OnLaunch(const LaunchReport& report) = 0;
  // Called once for each request, in the same way as OnLaunch.
  virtual void OnRequest(const RequestReport& report) = 0;
  // Called when a sequence has gone, with the rows it had and the time for which it was open.
  virtual void OnSequenceClosed(int64_t rows, int64_t open_ns) {
    static_cast<void>(rows);
    static_cast<void>(open_ns);
  }
  // Called for a sample of the page groups with the time for which one was in use.
  virtual void OnPageGroupFreed(int64_t held_ns) { static_cast<void>(held_ns); }
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_TYPES_H_
