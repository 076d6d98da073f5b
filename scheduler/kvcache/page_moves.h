// Rows of sequences on their way out of the pool and into it: the arguments and results of Engine's
// exports and imports. docs/cache/page_groups.md has the format in which they travel.
#ifndef MLA_SCHEDULER_KVCACHE_PAGE_MOVES_H_
#define MLA_SCHEDULER_KVCACHE_PAGE_MOVES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/formats/fp8.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/launch.h"
#include "scheduler/kvcache/pool/cache_layout.h"
#include "scheduler/kvcache/pool/page_work.h"
#include "scheduler/kvcache/pool/slab_pool.h"
#include "scheduler/kvcache/prefix/prefix_chain.h"

namespace mla::scheduler {
struct Tail;
}

namespace mla::kvcache {

struct ExportArgs {
  std::string tenant;
  uint64_t id = 0;
  uint64_t expected_epoch = 0;
  int64_t first_row = 0;           // the first of a page
  std::optional<int64_t> end_row;  // absent: after the last committed row
  // The export does not hold the rows: parts are refused once the sequence has gone or been
  // truncated, and the caller compares its epoch and length at the end.
  bool in_place = false;
};

// Properties that rows and a model must share for the rows to be valid in the model.
struct PageTags {
  kernels::Geometry geometry;
  int32_t layers = 0;
  int32_t page_size = 0;
  int32_t index_dim = 0;  // bytes of index keys in addition to the rows; 0: none
  kernels::KvFormat kv_format = kernels::KvFormat::kBf16;
  kernels::Fp8Kind fp8 = kernels::Fp8Kind::kE4m3Fn;
  std::string weights_digest;    // as ModelSpec has it
  std::vector<float> kv_scales;  // one for each layer, in formats that have such scales
  int64_t group_bytes = 0;       // payload bytes of a whole group
  int64_t first_row = 0;         // 0 with a window
  int64_t rows = 0;
  // For models with a window: its rows, as in ModelSpec; 0: no window.
  int32_t window = 0;
  std::vector<int32_t> ratios = {};
  kernels::KvFormat entry_format = kernels::KvFormat::kBf16;
  int32_t tail_bytes = 0;
  int64_t tail_position = -1;  // length that the sequence's tail belongs to; -1: no tail
  // [layers, num_heads], for models with a window. Empty: no head has a sink. Absent: not known
  // yet.
  std::optional<std::vector<float>> sinks = {};
};

// State of a sequence except for its rows, to be restored after a restart.
struct SequenceState {
  static constexpr int64_t kAllFinite = std::numeric_limits<int64_t>::max();
  uint64_t id = 0;
  uint64_t epoch = 0;
  std::string client_id;
  int64_t not_finite_from = kAllFinite;      // rows from here on may hold NaN or infinity
  std::shared_ptr<const PrefixChain> chain;  // declared contents of its rows; null: not known
  // The number of leading rows whose contents the chain gives.
  int32_t declared = 0;
  std::string contents;                         // ModelSpec::ContentsText of the chain's model
  std::shared_ptr<const scheduler::Tail> tail;  // null: no tail
};

struct ImportArgs {
  std::string tenant;
  std::string model_id;
  uint64_t id = 0;  // the sequence whose committed rows the new ones follow; 0: a new sequence
  uint64_t expected_epoch = 0;
  std::string client_id;  // for a new sequence
  int64_t lease_ms = 0;   // for a new sequence; 0: Limits::sequence_lease_ms
  PageTags tags;
  // The new sequence gets this id, and a new epoch, so that calls meant for the former sequence are
  // refused. 0: a new id.
  uint64_t restored_id = 0;
};

// An export or import that has begun.
struct MovingPages {
  // For an export: a fork that holds the rows and is released at the end, or the sequence itself
  // with `in_place`. For an import: the sequence that gets them.
  uint64_t id = 0;
  bool opened = false;  // by the import
  std::string model_id;
  GroupLayout layout;         // of rows, or of entries if there is a window
  GroupLayout window_layout;  // true for rows of the window
  PageTags tags;
  SequenceState state;  // of the exported sequence, or of the one that gets the rows
};

// Returns the first of the window's rows that move with a sequence: the first row of the page in
// which the window begins.
inline int64_t FirstWindowRow(const MovingPages& pages) {
  const int32_t page_size = pages.window_layout.page_size;
  return std::max<int64_t>(0, pages.tags.rows - pages.tags.window) / page_size * page_size;
}

// Moves a part of a page group's payload. The caller owns the memory and must not change or free it
// between the hand-over and `done`.
struct PageMove {
  std::string tenant;
  uint64_t id = 0;
  bool in = false;      // into the pool
  bool window = false;  // true for rows of the window
  int64_t page = 0;     // page number in the sequence
  int32_t rows = 0;     // rows of the page in the payload
  int64_t offset = 0;   // in the payload
  std::span<std::byte> bytes;
  // Called once, by the holder of the engine's role: it may only pass the move to another thread.
  std::function<void(const absl::Status&)> done;

  // The engine's.
  struct EngineFields {
    uint32_t entry = SlabPool::kNoEntry;  // entry of the pinned group
    TenantKey tenant = 0;
    WorkTicket ticket = 0;  // page work that must be done first
    std::vector<kernels::PageTransfer> transfers;
    // Progress by launches: transfers taken whole, bytes taken of the next one, and bytes in the
    // running launch.
    size_t transfers_taken = 0;
    int64_t bytes_taken = 0;
    int64_t bytes_running = 0;
  } engine;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PAGE_MOVES_H_
