#include "kernels/hip/emulator/block/products.h"

namespace mla::kernels::hip::host {
namespace {

typedef float Floats __attribute__((vector_size(32)));
constexpr int kLanes = 8;

// Computes kVectors vectors of columns from `col` on.
template <int kVectors>
void MultiplyColumns(float* d, const float* a, const float* b, int rows, int cols, int depth,
                     int col) {
  for (int r = 0; r < rows; ++r) {
    Floats sum[kVectors];
    auto* const target = reinterpret_cast<Floats*>(d + r * cols + col);
    for (int v = 0; v < kVectors; ++v) sum[v] = target[v];
    for (int k = 0; k < depth; ++k) {
      const auto* from = reinterpret_cast<const Floats*>(b + k * cols + col);
      const float x = a[r * depth + k];
      for (int v = 0; v < kVectors; ++v) sum[v] += from[v] * x;
    }
    for (int v = 0; v < kVectors; ++v) target[v] = sum[v];
  }
}

}  // namespace

void MultiplyAdd(float* d, const float* a, const float* b, int rows, int cols, int depth) {
  int col = 0;
  for (; col + 4 * kLanes <= cols; col += 4 * kLanes) {
    MultiplyColumns<4>(d, a, b, rows, cols, depth, col);
  }
  for (; col + 2 * kLanes <= cols; col += 2 * kLanes) {
    MultiplyColumns<2>(d, a, b, rows, cols, depth, col);
  }
  for (; col < cols; col += kLanes) MultiplyColumns<1>(d, a, b, rows, cols, depth, col);
}

}  // namespace mla::kernels::hip::host
