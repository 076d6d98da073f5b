// Declares the arguments of the expanded form's kernels, shared by host and device: up-projection
// of cached rows into a workspace, and attention to the rows there.
//
// kernels/types/round_info.h says how the workspace is laid out. The 16-byte chunk c of row r of a
// panel lies at position c ^ swizzle(r), as in shared memory, so that a tile of rows is one
// contiguous copy per panel.
//
// The rests are the rounding remainders of the values of the segment's first kExpandedRows rows, as
// panels of kExpandedRows rows. They are undefined in expansions that begin later. If a query row
// sees few keys, roundings do not average out, so values and probabilities are then multiplied with
// their rests too.
//
// Rows past `rows` are zero. Values that are not finite are stored as zero. Such a row holds a NaN
// (kernels/formats/dtype.h), which is also in its keys, so every query that sees the row gets a NaN
// probability. A query that does not see it meets no NaN.
//
// With 8-bit products panels have other contents: see device/sm90/prefill/code_results.h.
#ifndef MLA_KERNELS_HIP_ARGS_EXPANDED_ARGS_H_
#define MLA_KERNELS_HIP_ARGS_EXPANDED_ARGS_H_

#include <cstdint>
#include <type_traits>

#include "kernels/types/attention_params.h"
#include "kernels/types/round_info.h"

namespace mla::kernels::hip {

inline constexpr char kExpandedPrefix[] = "mla_attend_expanded";  // prefix of the names of
                                                                  // attention's kernels

inline constexpr int32_t kExpandedLora = 512;
using kernels::ExpandedDims;
using kernels::ExpandedItem;
using kernels::Expansion;
using kernels::kDims128;
using kernels::kDims256;
using kernels::kExpandedRope;
using kernels::kExpandedRows;
using kernels::kPanelRowBytes;
using kernels::kRestPanelBytes;
using kernels::kRotatedPanels;
// A query row sees few keys if it sees at most this many.
inline constexpr int32_t kFewKeys = 128;
static_assert(kFewKeys <= kExpandedRows);

// The arguments of the up-projection. Each block serves its part of two lists of pairs: pairs of
// the expansions' first tiles, which also write rests, and all other pairs. Pairs with rests cost
// more, and two lists spread them evenly. If blocks have few pairs, one list holds all pairs,
// because it is cheaper to walk. Block b of B takes [b P / B, (b + 1) P / B) of a list of P; pairs
// of an expansion are ordered by tile, then head. The block that serves a tile's first head also
// copies its rotated part.
struct ExpandArgs {
  const kernels::SegmentRecord* segments;
  const uint32_t* page_tables;
  const uint8_t* pool;
  const Expansion* expansions;
  const uint16_t* const* w_uk;  // by weights_slot: [heads, nope, lora]
  const uint16_t* const* w_uv;  // by weights_slot: [heads, lora, value]
  uint8_t* workspace;
  int64_t granule_bytes;
  int32_t expansion_count;
  int32_t pairs;
  int32_t first_tile_pairs;  // heads of all expansions; 0: one list holds all pairs
  int32_t blocks;
};

// Block b serves items unit_indptr[b] .. unit_indptr[b + 1].
struct ExpandedArgs {
  const kernels::SegmentRecord* segments;
  const ExpandedItem* items;
  const int32_t* unit_indptr;
  const uint8_t* workspace;
  float* partial_o;    // [rows, ExpandedDims::value], normalised
  float* partial_lse;  // [rows], natural log
  int32_t o_is_f32;
};

static_assert(std::is_trivially_copyable_v<ExpandArgs>);
static_assert(std::is_trivially_copyable_v<ExpandedArgs>);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_ARGS_EXPANDED_ARGS_H_
