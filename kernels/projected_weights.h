// W_UQ and W_O of PROJECTED as matrices whose rows are multiplied with whole rows of a launch, and
// the weights of one head as they come and go (AttentionBackend::LoadProjected):
//
//   bf16   [rows, columns] of the head's window
//   e4m3   codes [rows, columns] of the window, then the fp32 scales of all blocks of 128 x 128 of
//          the matrix that the window has elements of, [block rows, block columns]
//
// A head's window need not begin where a block does, and neighbouring heads have scales of their
// own for a block that they share. Pure functions; any thread.
#ifndef MLA_KERNELS_PROJECTED_WEIGHTS_H_
#define MLA_KERNELS_PROJECTED_WEIGHTS_H_

#include <cstdint>

#include "kernels/formats/dtype.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/launch.h"

namespace mla::kernels {

inline constexpr int32_t kScaleBlock = 128;  // rows and columns of a block with one scale

// The rows and columns that one head, or some neighbouring heads, have in a matrix.
struct WeightWindow {
  int64_t row = 0, rows = 0, column = 0, columns = 0;
  int64_t elements() const { return rows * columns; }
  // Returns the number of blocks that have elements of it.
  int64_t block_rows() const { return (row + rows - 1) / kScaleBlock - row / kScaleBlock + 1; }
  int64_t block_columns() const {
    return (column + columns - 1) / kScaleBlock - column / kScaleBlock + 1;
  }
  int64_t blocks() const { return block_rows() * block_columns(); }
  // Returns the block of element (r, c) of the window among them.
  int64_t BlockOf(int64_t r, int64_t c) const {
    return ((row + r) / kScaleBlock - row / kScaleBlock) * block_columns() +
           (column + c) / kScaleBlock - column / kScaleBlock;
  }
  // Returns the bytes of its elements, and of its scales if they are e4m3.
  int64_t Bytes(DType dtype) const {
    return dtype == DType::kFp8E4m3 ? elements() + blocks() * int64_t{sizeof(float)}
                                    : elements() * int64_t{sizeof(Bf16)};
  }
};
WeightWindow WindowOf(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part,
                      int64_t head_begin, int64_t heads);

// A matrix as GPUs hold it: [rows, padded_depth], rows of W_UQ or W_O, padded with zeros. The scale
// of element (row, k) in e4m3 is element [row / scale_rows, k / scale_depth] of [.., scale_pitch]
// floats, where no scale serves two heads.
struct ProjectedMatrix {
  DType dtype = DType::kBf16;
  int32_t rows = 0, depth = 0, padded_depth = 0;
  int32_t scale_rows = 0, scale_depth = 0, scale_pitch = 0;  // 0 unless e4m3
  int64_t weight_bytes() const {
    return int64_t{rows} * padded_depth * static_cast<int64_t>(ElementSize(dtype));
  }
  // Returns the bytes of weights and scales, a multiple of 128.
  int64_t bytes() const;
};
ProjectedMatrix MatrixOf(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part);

// Returns the bytes of both matrices of a layer; 0 without PROJECTED.
int64_t ProjectedBytes(const Geometry& geometry, const ProjectedShape& shape);

// Scales of e4m3 are read for 16 rows of W_UQ and for 64 columns of W_O at a time, so the query dim
// and v_dim of a head must be multiples of these.
inline constexpr int32_t kScaledQueryStep = 16, kScaledValueStep = 64;
bool CanHoldCodes(const Geometry& geometry);

// Returns the scale of a block of the window (BlockOf); `weights` has the window's bytes.
float ScaleOf(const WeightWindow& window, const void* weights, int64_t block);

// Returns the weight of a code, as contracts say: their product, rounded to bf16. NaN for codes
// that are NaN.
Bf16 WidenedWeight(uint8_t code, float scale);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_PROJECTED_WEIGHTS_H_
