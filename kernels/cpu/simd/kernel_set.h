// The inner loops of one CPU dispatch level, as a table of functions.
//
// Control flow (which rows, which tiles, masking limits, merging) is written once in item_runner.cc
// for the baseline instruction set; every loop that costs time is in this table. Each level has a
// source (cpu/levels/) and compiler options of its own. Level sources define nothing with external
// linkage except their table, and call no inline function of other headers. Otherwise the linker
// could keep a level's instructions in code that other levels run.
//
// Operands. A level multiplies either bf16 pairs (`bf16_operands`, accumulating in fp32) or fp32.
//   rows    A operand: pointers to rows of `k` elements, contiguous, any alignment.
//   panels  B operand: 16 columns each, zero-padded; panel p starts at p * panel_bytes.
//             bf16, k_group 2: [k / 2][16 columns][2]        one vector holds a pair of each column
//             bf16, k_group 8: [k / 8][4][4][8], column n at [n % 4][n / 4]   one vector holds 4
//                              pairs of every 4th column, in its 128-bit lanes
//             fp32, k_group 1: [k][16 columns]
//           k is padded with zeros to a multiple of `k_align`; PanelOffset finds an element.
//   C       fp32, row-major, `ldc` floats between rows, with room for `rows` rounded up to 16.
// Attention keeps packed rows (query row, head) in columns: logits are S^T [kv rows][packed rows],
// so a KV row is used in its page without a copy, and softmax runs down the columns.
#ifndef MLA_KERNELS_CPU_SIMD_KERNEL_SET_H_
#define MLA_KERNELS_CPU_SIMD_KERNEL_SET_H_

#include <stdint.h>

namespace mla::kernels::cpu {

inline constexpr int32_t kPanel = 16;  // columns a panel
// A block has at most kTileRows packed rows. A tile has at most kTileRows KV rows, and at most
// kMostKvRows where a level takes taller tiles.
inline constexpr int32_t kTileRows = 128;
inline constexpr int32_t kMostKvRows = 256;

// Computes C[i][n] (+)= sum_k A[i][k] B[k][n] for all columns of `panels` panels.
struct GemmArgs {
  const void* const* a_rows;
  int32_t rows;
  int32_t k;  // elements, before padding
  const void* b;
  int64_t panel_bytes;
  int32_t panels;
  float* c;
  int64_t ldc;
  bool accumulate;
  // The rows of the next tile, which this product fetches into the L2 cache; none if next_count is
  // 0.
  const void* const* next_rows;
  int32_t next_count;
  int32_t next_bytes;  // bytes of each
  // Null, or receives the first `value_dim` elements of the rows, packed as by pack_values.
  // REQUIRES: at most `packs_in_gemm` panels, `value_dim` a multiple of 32 and at most k.
  uint16_t* value_panels;
  int64_t value_panel_bytes;
  int32_t value_dim;
};

// Makes one online-softmax step of a tile, in base 2. For every column n, with x = s * scale2:
//   m' = max(m, max of visible x); p = 2^(x - m'); alpha = 2^(m - m'); l' = l * alpha + sum p
// Row r is visible to column n when r < visible[n] (all rows when `visible` is null); an invisible
// row has p = 0 whatever its logit. Columns that saw nothing keep m = -inf and get alpha = 0.
struct SoftmaxArgs {
  const float* s;  // [rows][lds]
  int64_t lds;
  int32_t rows;
  int32_t columns;  // multiple of kPanel
  float scale2;     // softmax scale x log2(e)
  const int32_t* visible;
  float* m;
  float* l;
  // At bf16 levels: the sum of the rounded p. O is divided by it, so that roundings common to all
  // rows cancel. Null at fp32 levels, which divide by l.
  float* norm;
  float* alpha;
  void* p;  // the level's own layout, 64 KiB at least (kTileRows x kTileRows floats)
  // bf16 levels: remainders of p after rounding, in the same layout, or null if they do not matter.
  void* p_rest;
};

// Computes O[n][d] = O[n][d] * alpha[n] + sum_r p[r][n] V[r][d]; `alpha` null starts from 0.
struct AccumulateArgs {
  const void* p;
  int32_t rows;         // KV rows
  int32_t columns;      // multiple of kPanel; as in the softmax step
  int32_t packed_rows;  // columns that hold packed rows
  const void* v;        // bf16: value panels of PackValues; fp32: rows, ldv floats apart
  int64_t ldv;
  int32_t panels;  // panels of kPanel value columns
  float* o;        // [packed rows][ldo]
  int64_t ldo;
  const float* alpha;
};

// The stages of an absorbed tile: gemm, softmax, accumulate. gemm.value_panels is null or
// accumulate.v; what GemmArgs requires for packing does not hold here, except that value_dim is at
// most k. REQUIRES: rows, no gemm.accumulate, no softmax.p_rest.
struct TileArgs {
  GemmArgs gemm;
  SoftmaxArgs softmax;
  AccumulateArgs accumulate;
};

// Widens rows of an 8-bit format (kernels/formats/kv_format.h; codes are e4m3fn) to bf16 rows:
// latent values, then rotated ones. With `group` 0 all values are codes, not scaled. Otherwise a
// latent value is its code times its group's scale, rounded to bf16, and rotated values are bf16.
struct Fp8RowsArgs {
  const uint8_t* const* rows;
  int32_t count;
  int32_t latent_dim, rope_dim;
  int32_t group;      // latent values a scale, or 0
  int32_t scales_at;  // fp32, bytes from a row's first; any alignment
  // The exponent bytes of each row's groups, used in place of the scales in the row; or null.
  const uint8_t* const* exponents;
  int32_t rope_at;  // bytes from a row's first
  uint16_t* out;
  int64_t ld;  // elements, with room for whole vectors after each row's last value
};

struct KernelSet {
  const char* name;
  bool bf16_operands;
  int32_t k_align;  // B panels are padded to a multiple of this many k
  int32_t k_group;  // elements of a column that lie together in a B panel; divides k_align
  // True if the kernels fetch ahead the rows that an index list names, and rows that products read
  // in place. With fast products, fetching takes as long as it saves.
  bool fetches_listed_rows;
  // `gemm` packs the values of its rows up to this many panels. It pays for scattered rows: the
  // product copies them anyway, so their lines are then read once.
  int32_t packs_in_gemm;

  void (*gemm)(const GemmArgs& args);
  void (*softmax)(const SoftmaxArgs& args);
  void (*accumulate)(const AccumulateArgs& args);
  // p[row][column] of the last softmax step, for the careful path.
  float (*probability)(const SoftmaxArgs& args, int32_t row, int32_t column);
  // At bf16 levels: packs value rows into panels [d / 16][ceil(rows / 2)][16][2], which lie
  // `panel_bytes` apart. fp32 levels: null.
  void (*pack_values)(const uint16_t* const* rows, int32_t count, int32_t d, uint16_t* panels,
                      int64_t panel_bytes);
  // bf16 [count rows of dim] to fp32 rows, ld floats apart, zero-padded to a multiple of kPanel.
  void (*widen)(const uint16_t* const* rows, int32_t count, int32_t dim, float* out, int64_t ld);
  void (*widen_fp8)(const Fp8RowsArgs& args);
  // fp32 to bf16, round to nearest even, NaN kept.
  void (*narrow)(const float* in, int64_t ld_in, int32_t count, int32_t dim, uint16_t* out,
                 int64_t ld_out);
  // At bf16 levels: splits fp32 values into two parts whose sum has 16 bits of each. The low part
  // of a value that is not finite, or that rounds to an infinity, is 0.
  void (*split)(const float* in, int32_t count, uint16_t* high, uint16_t* low);
  // Packs a B panel of up to 16 query rows of k bf16 elements (bf16 levels; null at fp32 levels).
  // Writes the whole panel, padding included.
  void (*pack_rows)(const uint16_t* const* rows, int32_t count, int32_t k, uint16_t* panel);
  // out[i] = sum over j of weights[j] * rows[j][i], zeros for no row, as fp32 or rounded to bf16.
  // `out` may be one of the rows.
  void (*weighted_sum)(const float* const* rows, const float* weights, int32_t count, int32_t dim,
                       float* out);
  void (*weighted_sum_narrow)(const float* const* rows, const float* weights, int32_t count,
                              int32_t dim, uint16_t* out);
  // Called on a thread before and after its use of the table; may be null. AMX configures and
  // releases the tiles.
  void (*enter_thread)();
  void (*leave_thread)();
  // Does all stages of a tile, at the same time where it can; null if the level has no such call.
  // Results equal those of the single functions bit by bit. The call pays for more panels of
  // packed rows than `packs_in_gemm`.
  void (*attend)(const TileArgs& args) = nullptr;
  // KV rows of a tile in the absorbed form, a multiple of 32 and at most kMostKvRows. In the
  // expanded form it has kTileRows.
  int32_t kv_rows = kTileRows;
};

// Returns the bytes of one B panel of depth k.
inline constexpr int64_t PanelBytes(bool bf16_operands, int32_t k_align, int32_t k) {
  const int64_t padded = (static_cast<int64_t>(k) + k_align - 1) / k_align * k_align;
  return padded * kPanel * (bf16_operands ? 2 : 4);
}

// Returns the bytes from a B panel's start to element k of column n.
inline constexpr int64_t PanelOffset(const KernelSet& kernels, int64_t k, int64_t n) {
  switch (kernels.k_group) {
    case 1:
      return (k * kPanel + n) * 4;
    case 2:
      return (k / 2 * kPanel + n) * 4 + k % 2 * 2;
    default:
      return k / 8 * 256 + n % 4 * 64 + n / 4 * 16 + k % 8 * 2;
  }
}

extern const KernelSet kPortableKernels;
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
extern const KernelSet kAvx512Bf16Kernels;
extern const KernelSet kAmxKernels;

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_KERNEL_SET_H_
