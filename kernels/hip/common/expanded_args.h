// Arguments of the expanded form's kernels, shared by host and device: up-projection of cached rows
// into a workspace, and attention on what lies there.
//
// The workspace holds segments: rows [kv_begin, kv_begin + rows) of one request for some of its
// heads. Everything in it is a panel: 64 bf16 columns, 128 bytes a row, rows packed, and the
// 16-byte chunk c of row r at position c ^ (r & 7), which is how tiles lie in shared memory. A tile
// of rows is therefore one contiguous copy per panel.
//
//   base | head 0: keys 0..63, keys 64..127, values 0..63, values 64..127, rests | head 1 ... |
//        | rotated part, for all heads |        each panel is padded_rows x 128 bytes
//
// The rests are what rounding took from the values of the request's first kExpandedRows rows, as
// two panels of so many rows (undefined in segments that begin later): where a query row sees few
// keys, roundings do not average out, and values and probabilities are multiplied with their rests
// too.
//
// Rows past `rows` are zero. Values that are not finite are stored as zero: the row holds a NaN
// then (kernels/dtype.h), which is in its keys too, so every query that sees the row has a NaN in
// its probability, and one that does not see it meets none.
#ifndef MLA_KERNELS_HIP_COMMON_EXPANDED_ARGS_H_
#define MLA_KERNELS_HIP_COMMON_EXPANDED_ARGS_H_

#include <cstdint>
#include <type_traits>

#include "kernels/attention_params.h"

namespace mla::gpu {

inline constexpr char kExpandKernel[] = "mla_expand";
inline constexpr char kExpandedKernel[] = "mla_attend_expanded";

// The dims that the kernels are written for.
inline constexpr int32_t kExpandedLora = 512;
inline constexpr int32_t kExpandedNope = 128;
inline constexpr int32_t kExpandedRope = 64;
inline constexpr int32_t kExpandedValue = 128;
// Query rows of an attention item, and what KV cut points and padded rows are multiples of.
inline constexpr int32_t kExpandedRows = 128;
inline constexpr int32_t kPanelRowBytes = 128;
inline constexpr int32_t kPanelsPerHead = (kExpandedNope + kExpandedValue) / 64;
inline constexpr int32_t kRotatedPanels = kExpandedRope / 64;
inline constexpr int64_t kRestPanelBytes = int64_t{kExpandedRows} * kPanelRowBytes;
inline constexpr int64_t kRestBytes = kExpandedValue / 64 * kRestPanelBytes;
// A query row that sees no more keys than this sees few.
inline constexpr int32_t kFewKeys = 128;
static_assert(kFewKeys <= kExpandedRows);

struct ExpandSegment {
  int64_t base;         // byte offset in the workspace
  int32_t request;      // index into the launch's records
  int32_t kv_begin;     // a multiple of kExpandedRows
  int32_t rows;         // >= 1
  int32_t padded_rows;  // `rows` rounded up to a multiple of kExpandedRows
  int32_t head_begin;   // in the request's slice
  int32_t heads;
  int32_t first_pair;  // pairs (tile of kExpandedRows rows, head) of the segments before this one
  int32_t first_head;  // heads of the segments before this one
  int32_t sections;    // for the host: groups of heads that are attended to one after the other
  int32_t pad;
};

// Up-projection. Each block serves its part of two lists of pairs: those of the segments' first
// tiles, which have rests to write, and all others, so that no block has more of the dearer ones.
// Where blocks have few pairs, one list holds all and is cheaper to walk. Block b of B takes
// [b P / B, (b + 1) P / B) of a list of P; pairs of a segment are ordered by tile, then head. The
// block that serves a tile's first head also copies its rotated part.
struct ExpandArgs {
  const kernels::RequestRecord* requests;
  const uint32_t* page_tables;
  const uint8_t* pool;
  const ExpandSegment* segments;
  const uint16_t* const* w_uk;  // by weights_slot: [heads, nope, lora]
  const uint16_t* const* w_uv;  // by weights_slot: [heads, lora, value]
  uint8_t* workspace;
  int64_t granule_bytes;
  int32_t segment_count;
  int32_t pairs;
  int32_t first_tile_pairs;  // heads of all segments; 0: one list holds all pairs
  int32_t blocks;
};

// One head, at most kExpandedRows query rows, and KV rows [kv_begin, kv_end) whose keys and values
// lie in the workspace.
struct ExpandedItem {
  kernels::WorkInfo work;  // kv_begin is a multiple of kExpandedRows
  int64_t keys;            // byte offset of row kv_begin in the head's first panel
  int64_t rotated;         // and in the rotated part
  int64_t panel_bytes;     // from one panel of the head to the next, and from the last to the rests
  // Packed row in the partial buffers where the same query rows' results over earlier KV rows lie,
  // to go on from; kUnsplit: there are none.
  int32_t carried_row;
  int32_t pad;
};

// Block b serves items unit_indptr[b] .. unit_indptr[b + 1].
struct ExpandedArgs {
  const kernels::RequestRecord* requests;
  const ExpandedItem* items;
  const int32_t* unit_indptr;
  const uint8_t* workspace;
  float* partial_o;    // [rows, kExpandedValue], normalised
  float* partial_lse;  // [rows], natural log
  int32_t o_is_f32;
};

static_assert(sizeof(ExpandSegment) == 48 && sizeof(ExpandedItem) == 64);
static_assert(std::is_trivially_copyable_v<ExpandArgs>);
static_assert(std::is_trivially_copyable_v<ExpandedArgs>);

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_COMMON_EXPANDED_ARGS_H_
