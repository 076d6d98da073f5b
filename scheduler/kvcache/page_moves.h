// Rows of sequences on their way out of the pool and into it: what Engine's exports and imports
// take and give. docs/cache/page_groups.md has the format in which they travel.
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
  std::optional<int64_t> end_row;  // absent: behind the last committed row
  // Nothing holds the rows: parts are refused once the sequence has gone or been cut, and the
  // caller compares its epoch and length in the end.
  bool in_place = false;
};

// What rows must have in common with a model to be its rows.
struct PageTags {
  kernels::Geometry geometry;
  int32_t layers = 0;
  int32_t page_size = 0;
  int32_t index_dim = 0;  // of index keys beside the rows; 0: there are none
  kernels::KvFormat kv_format = kernels::KvFormat::kBf16;
  kernels::Fp8Kind fp8 = kernels::Fp8Kind::kE4m3Fn;
  std::string weights_digest;    // as ModelSpec has it
  std::vector<float> kv_scales;  // one a layer, in formats that have such scales
  int64_t group_bytes = 0;       // of the payload of a whole group
  int64_t first_row = 0;         // 0 with a window
  int64_t rows = 0;
  // Of models with a window, as ModelSpec has it; 0: without.
  int32_t window = 0;
  std::vector<int32_t> ratios = {};
  kernels::KvFormat entry_format = kernels::KvFormat::kBf16;
  int32_t tail_bytes = 0;
  int64_t tail_position = -1;  // that the sequence's tail belongs to; -1: it has none
  // [layers, num_heads] of models with a window; empty: no head has any; absent: not known.
  std::optional<std::vector<float>> sinks = {};
};

// What a sequence is beside its rows, to be had again after a restart.
struct SequenceState {
  static constexpr int64_t kAllFinite = std::numeric_limits<int64_t>::max();
  uint64_t id = 0;
  uint64_t epoch = 0;
  std::string client_id;
  int64_t not_finite_from = kAllFinite;         // row from which on some may hold what is no number
  std::shared_ptr<const PrefixChain> chain;     // what its rows stand for; null: not known
  int32_t declared = 0;                         // rows of the chain that are the sequence's
  std::string contents;                         // of the model that the chain was made for
  std::shared_ptr<const scheduler::Tail> tail;  // null: none
};

struct ImportArgs {
  std::string tenant;
  std::string model_id;
  uint64_t id = 0;  // whose committed rows the new ones follow; 0: a new sequence
  uint64_t expected_epoch = 0;
  std::string client_id;  // of a new sequence
  int64_t lease_ms = 0;   // likewise; 0: Limits::sequence_lease_ms
  PageTags tags;
  // The new sequence gets this id, and an epoch of its own: calls of before are refused. 0: an id
  // of its own.
  uint64_t restored_id = 0;
};

// An export or an import that has begun.
struct MovingPages {
  // Of an export: a fork that holds the rows, to be released at the end, or with `in_place` the
  // sequence itself. Of an import: the sequence that gets them.
  uint64_t id = 0;
  bool opened = false;  // by the import
  std::string model_id;
  GroupLayout layout;         // of rows, or of entries where there is a window
  GroupLayout window_layout;  // of the window's rows
  PageTags tags;
  SequenceState state;  // of the sequence that is exported, or that gets the rows
};

// The first of the window's rows that move with a sequence: that of the page in which it begins.
inline int64_t FirstWindowRow(const MovingPages& pages) {
  const int32_t page_size = pages.window_layout.page_size;
  return std::max<int64_t>(0, pages.tags.rows - pages.tags.window) / page_size * page_size;
}

// Part of a page group's payload on its way. Caller's memory; as it is from the hand-over until
// `done`.
struct PageMove {
  std::string tenant;
  uint64_t id = 0;
  bool in = false;      // into the pool
  bool window = false;  // of the window's rows
  int64_t page = 0;     // of the sequence
  int32_t rows = 0;     // of the page, that the payload has
  int64_t offset = 0;   // in the payload
  std::span<std::byte> bytes;
  // Called once, by the holder of the engine's role: it may do no more than hand on.
  std::function<void(const absl::Status&)> done;

  // The engine's.
  struct EngineFields {
    uint32_t entry = SlabPool::kNoEntry;  // of the group, pinned
    TenantKey tenant = 0;
    WorkTicket ticket = 0;  // of the page work that goes before
    std::vector<kernels::PageTransfer> transfers;
    // What launches have taken: transfers, bytes of the next one, and bytes in the launch that
    // runs.
    size_t transfers_taken = 0;
    int64_t bytes_taken = 0;
    int64_t bytes_running = 0;
  } engine;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PAGE_MOVES_H_
