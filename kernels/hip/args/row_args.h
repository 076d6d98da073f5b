// Declares the arguments of the products of whole rows with W_UQ and W_O (Launch::queries,
// Launch::hiddens), shared by host and device. All addresses are device addresses.
#ifndef MLA_KERNELS_HIP_ARGS_ROW_ARGS_H_
#define MLA_KERNELS_HIP_ARGS_ROW_ARGS_H_

#include <cstdint>
#include <type_traits>

namespace mla::kernels::hip {

// A product takes up to three kernels: mla_pack_rows if rows cannot be read in place, one of
// mla_row_product_*, and mla_finish_rows unless that one finishes rows itself.
inline constexpr char kPackRowsKernel[] = "mla_pack_rows";
inline constexpr char kFewRowsKernel[] = "mla_row_product_few";
inline constexpr char kManyRowsKernel[] = "mla_row_product_many";
inline constexpr char kFewRowsOfCodesKernel[] = "mla_row_product_few_e4m3";
inline constexpr char kManyRowsOfCodesKernel[] = "mla_row_product_many_e4m3";
inline constexpr char kFinishRowsKernel[] = "mla_finish_rows";

inline constexpr int32_t kRowProductFew = 32;    // most rows of mla_row_product_few*
inline constexpr int32_t kRowProductMany = 128;  // most rows of a product
inline constexpr int32_t kRowProductDepth = 64;  // depth of a step; rows of weights are padded
inline constexpr int32_t kRowRun = 4;            // columns that a thread finishes
// Groups of neighbouring columns of W_UQ or W_O in e4m3 share scales. Each group begins at a
// multiple of this number of columns.
inline constexpr int32_t kLeastScaleColumns = 16;
// Sizes the launch of a kernel of row products: the columns that a block computes, and the blocks
// that a unit holds at a time.
struct RowProductShape {
  int32_t columns, blocks_per_unit;
  int32_t shared_bytes;       // dynamic shared memory
  int32_t code_shared_bytes;  // the same over weights of e4m3
  bool finishes;              // its blocks can do what mla_finish_rows does
};

struct RowProductRow {
  const void* in;         // [depth]
  void* out;              // [columns]
  const float* rotation;  // cosines of the pairs, then their sines; null: none
};

// sums[s, r, :] = in[r, steps of s] x weights[:, steps of s]^T for r < count and s < splits; then
// out[r, :] = rotate(sum of sums[:, r, :]). Splits share the steps, and fp32 rows have twice as
// many: first the steps of their rounded values, then the steps of the remainders.
struct RowProductArgs {
  const RowProductRow* rows;
  const uint16_t* weights;  // [columns, padded depth]; null: `codes` are the weights
  // The scale of code (c, k) is scales[c >> scale_column_shift, k / kRowProductDepth >>
  // scale_step_shift], as the codes of the architecture's kind (ArchTraits::fp8) need it.
  const uint8_t* codes;  // [columns, padded depth], e4m3 without NaN and -0
  const float* scales;   // [.., scale_pitch]
  int32_t scale_column_shift, scale_step_shift, scale_pitch;
  uint16_t* packed;  // [count, planes, padded depth]; null: rows are read in place
  float* sums;       // [splits, count, pitch]
  int32_t count;     // 1 .. kRowProductMany
  int32_t columns;
  int32_t pitch;  // `columns`, rounded up to a multiple of kRowRun
  int32_t depth;
  int32_t padded_depth;  // a multiple of kRowProductDepth
  int32_t planes;        // 2 for fp32 rows, else 1
  int32_t splits;
  int32_t in_is_f32;
  int32_t out_is_f32;
  // Rotated are the last 2 * pairs of every `head` columns. pairs is 0 if none are.
  int32_t head;
  int32_t pairs;
  int32_t halves;  // nonzero for RopeLayout::kHalves
  // Nonzero if the blocks of the product finish rows: there is one split, and a block has all
  // columns of the pairs that it has some of (FinishesRows).
  int32_t finishes;
  const uint32_t* late;
};

// Splits of a product that takes `steps` steps: as many as give every unit its blocks, unless a
// block then had too few steps to fill its pipeline. They do not depend on the number of rows, so a
// row's sums do not either.
inline constexpr int32_t kMostRowSplits = 8;
constexpr int32_t RowSplits(const RowProductShape& shape, int32_t columns, int32_t steps,
                            int32_t units) {
  constexpr int32_t kLeastSteps = 12;
  const int32_t tiles = (columns + shape.columns - 1) / shape.columns;
  int32_t splits = shape.blocks_per_unit * units / tiles;
  if (splits > steps / kLeastSteps) splits = steps / kLeastSteps;
  if (splits > kMostRowSplits) splits = kMostRowSplits;
  return splits < 1 ? 1 : splits;
}

constexpr int32_t LargestDivisor(int32_t a, int32_t b) {
  return b == 0 ? a : LargestDivisor(b, a % b);
}

// Returns true if the blocks of a product with these arguments can finish its rows.
constexpr bool FinishesRows(const RowProductShape& shape, const RowProductArgs& args) {
  if (!shape.finishes || args.splits != 1) return false;
  if (args.pairs == 0) return true;
  // Heads begin at every multiple of `step` after the beginning of some block, and at no other
  // place.
  const int32_t step = LargestDivisor(args.head, shape.columns);
  if (args.halves == 0) return step % 2 == 0;  // neighbours, of which the first is even
  return (args.head - 2 * args.pairs) % step + 2 * args.pairs <= step;
}

static_assert(std::is_trivially_copyable_v<RowProductRow>);
static_assert(std::is_trivially_copyable_v<RowProductArgs>);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_ARGS_ROW_ARGS_H_
