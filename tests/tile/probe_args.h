// Arguments of the probe kernels of tile primitives, shared by host and device. All addresses are
// device addresses; matrices are row-major and dense.
#ifndef MLA_TESTS_TILE_PROBE_ARGS_H_
#define MLA_TESTS_TILE_PROBE_ARGS_H_

#include <cstdint>

namespace mla::tile_test {

// Sizes that every architecture's fragments divide.
inline constexpr int kDepth = 64;        // depth of a score product
inline constexpr int kKvRows = 64;       // KV rows of a tile
inline constexpr int kOutCols = 128;     // columns of an output product
inline constexpr int kGroupCols = 256;   // columns of a warpgroup's output product
inline constexpr int kGroupRows = 64;    // packed rows of a warpgroup
inline constexpr int kE4m3Depth = 128;   // depth of a warpgroup's products of e4m3
inline constexpr int kE4m3Cols = 128;    // most columns of such products
inline constexpr int kMathValues = 512;  // values of a probe of arithmetic
inline constexpr int kCopyDim = 128;     // elements of a copied row
inline constexpr int kCopyPage = 7;      // rows of a page, not a power of two
inline constexpr int kSharedBytes = 98304;

// The kernels, by name; <rows> is 16 or 32 packed rows of one wave.
//   probe_scores_<rows>   out [rows, kKvRows] = a [rows, kDepth] b [kKvRows, kDepth]^T
//   probe_outputs_<rows>  out [rows, kOutCols] = a [rows, kKvRows] b [kKvRows, kOutCols]
//   probe_chain_<rows>    out [rows, kOutCols] = bf16(a [rows, kDepth] b [kKvRows, kDepth]^T) c
//   probe_rows_<rows>     out [kSlots, lanes, 2]: row_max and row_sum of c32 [kSlots, lanes]
//   probe_copy            out [kKvRows, kCopyDim]: rows of the pool a through the page table b
//   probe_math            out [3, kMathValues]: exp2, log2 and packed pairs of c32 (as words)
//   probe_lanes           out [6, lanes]: any, exchange by 1, 2 and 16, broadcast of c32 from lane
//                         13, any of nothing
// Only AMD; on gfx950 for 32 rows, with row r times 2^(r mod 4), which the products apply:
//   probe_codes_<rows>    out [rows, kKvRows] = a [rows, kDepth] b [kKvRows, kDepth]^T in 8 bits
//   probe_code_outputs_<rows>
//                         out [rows, kOutCols] = a [rows, kKvRows] b [kKvRows, kOutCols] in 8 bits,
//                         then [rows]: the sums of a's rows
// Only sm_90, by a warpgroup:
//   probe_wgmma_scores    out [kGroupRows, kKvRows] = a [kGroupRows, kDepth] b [kKvRows, kDepth]^T
//   probe_wgmma_outputs   out [2, kGroupRows, kGroupCols] = a [kGroupRows, kKvRows] b, with a in
//                         shared memory and in registers
//   probe_matrices        out [3, 16, 16]: a [16, 16] through load_matrices, transposed, and back
//                         through store_matrices
//   probe_barriers        out [kKvRows, kDepth]: a, copied by one warpgroup for another
//   probe_e4m3            a [kGroupRows, kE4m3Depth] b [kE4m3Cols, kE4m3Depth]^T in e4m3: the first
//                         kKvRows columns; all columns; all with a in registers; the first 8 with a
//                         in registers; and the first kKvRows at depth 64 in rows of 64 bytes
struct ProbeArgs {
  const uint16_t* a;  // bf16
  const uint16_t* b;
  const uint16_t* c;
  const float* c32;
  float* out;
};

}  // namespace mla::tile_test

#endif  // MLA_TESTS_TILE_PROBE_ARGS_H_
