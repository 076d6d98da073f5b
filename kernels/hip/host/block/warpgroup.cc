#include "kernels/hip/host/block/warpgroup.h"

#include <bit>
#include <cstring>
#include <vector>

#include "kernels/hip/host/block/block.h"
#include "kernels/hip/host/block/products.h"

namespace mla::kernels::hip::host {
namespace {

constexpr int kDepth = 16, kRows = 16, kMostCols = 256;

float Widen(uint16_t x, bool of_binary16) {
  return of_binary16 ? static_cast<float>(std::bit_cast<_Float16>(x)) : WideBf16(x);
}

// An operand in shared memory: the start, and what lies between groups of eight rows and between
// column blocks of 64.
struct Operand {
  Operand(uint64_t descriptor, bool values_of_binary16)
      : of_binary16(values_of_binary16),
        start(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        block(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        group(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) Fault("a descriptor without the 128-byte exchange of chunks");
  }
  // Eight elements from column `col` of row `row` on. The exchange is by bits of the address.
  void Load(int row, int col, float (&out)[8]) const {
    const uint32_t at =
        start + static_cast<uint32_t>(row / 8) * group + static_cast<uint32_t>(row % 8) * 128 +
        static_cast<uint32_t>(col / 64) * block + static_cast<uint32_t>(col % 64) * 2;
    const char* const from = the_block->shared.base() + (at ^ (at >> 7 & 7) << 4);
    the_block->shared.Read(from, 16, the_lane->wave->index);
    uint16_t x[8];
    std::memcpy(x, from, sizeof(x));
    for (int e = 0; e < 8; ++e) out[e] = Widen(x[e], of_binary16);
  }
  bool of_binary16;
  uint32_t start, block, group;
};

void LoadLeft(const Wave& wave, size_t index, float (&left)[kRows * kDepth]) {
  const Product& first = wave.lane[0]->products[index];
  if (!first.a_held) {
    const Operand a(first.a, first.of_binary16);
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kDepth; k += 8) {
        float x[8];
        a.Load(wave.index % 4 * kRows + row, k, x);
        std::memcpy(left + row * kDepth + k, x, sizeof(x));
      }
    }
    return;
  }
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = wave.lane[static_cast<size_t>(lane)]->products[index];
    for (int i = 0; i < 4; ++i) {
      float* const to = left + (lane / 4 + 8 * (i % 2)) * kDepth + 2 * (lane % 4) + 8 * (i / 2);
      to[0] = Widen(static_cast<uint16_t>(p.held[i]), p.of_binary16);
      to[1] = Widen(static_cast<uint16_t>(p.held[i] >> 16), p.of_binary16);
    }
  }
}

void LoadRight(const Product& p, float* right) {
  const Operand b(p.b, p.of_binary16);
  float x[8];
  if (p.b_down) {
    for (int k = 0; k < kDepth; ++k) {
      for (int col = 0; col < p.cols; col += 8) {
        b.Load(k, col, x);
        std::memcpy(right + k * p.cols + col, x, sizeof(x));
      }
    }
    return;
  }
  for (int col = 0; col < p.cols; ++col) {
    for (int k = 0; k < kDepth; k += 8) {
      b.Load(col, k, x);
      for (int e = 0; e < 8; ++e) right[(k + e) * p.cols + col] = x[e];
    }
  }
}

// Calls `each(element of c, place in the warp's sums)` for what lane `lane` holds.
template <class Each>
void ForElements(int lane, int cols, const Each& each) {
  for (int i = 0; i < cols / 2; ++i) {
    const int row = lane / 4 + 8 * (i >> 1 & 1), col = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
    each(i, row * cols + col);
  }
}

void Multiply(Wave& wave, size_t index) {
  alignas(32) float left[kRows * kDepth];
  alignas(32) float right[kDepth * kMostCols];
  alignas(32) float sums[kRows * kMostCols];
  const Product& first = wave.lane[0]->products[index];
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = wave.lane[static_cast<size_t>(lane)]->products[index];
    if (p.a != first.a || p.b != first.b || p.cols != first.cols ||
        p.of_binary16 != first.of_binary16) {
      Fault("lanes of a warp start different products");
    }
    ForElements(lane, p.cols, [&](int i, int at) { sums[at] = p.accumulate ? p.c[i] : 0.0f; });
  }
  LoadLeft(wave, index, left);
  LoadRight(first, right);
  MultiplyAdd(sums, left, right, kRows, first.cols, kDepth);
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = wave.lane[static_cast<size_t>(lane)]->products[index];
    ForElements(lane, p.cols, [&](int i, int at) { p.c[i] = sums[at]; });
  }
}

}  // namespace

void StartProduct(Product product) {
  product.group = the_lane->product_group;
  the_lane->products.push_back(product);
}

void FinishProducts(int pending) {
  uint64_t before = the_lane->product_group;
  before = before < static_cast<uint64_t>(pending) ? 0 : before - static_cast<uint64_t>(pending);
  Meet(
      [](Wave& wave) {
        size_t count = 0;
        const std::vector<Product>& all = wave.lane[0]->products;
        while (count < all.size() && all[count].group < wave.slot<uint64_t>(0)) ++count;
        for (int lane = 0; lane < 32; ++lane) {
          if (wave.lane[static_cast<size_t>(lane)]->products.size() != all.size()) {
            Fault("lanes of a warp start different products");
          }
        }
        for (size_t i = 0; i < count; ++i) Multiply(wave, i);
        for (int lane = 0; lane < 32; ++lane) {
          auto& products = wave.lane[static_cast<size_t>(lane)]->products;
          products.erase(products.begin(), products.begin() + static_cast<ptrdiff_t>(count));
        }
      },
      &before);
  Barrier(the_block->groups[static_cast<size_t>(the_lane->index / kGroupLanes)], kGroupLanes, true,
          false);
}

}  // namespace mla::kernels::hip::host
