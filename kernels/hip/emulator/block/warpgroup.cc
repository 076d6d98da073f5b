#include "kernels/hip/emulator/block/warpgroup.h"

#include <bit>
#include <cstring>
#include <vector>

#include "kernels/formats/fp8.h"
#include "kernels/hip/emulator/block/block.h"
#include "kernels/hip/emulator/block/products.h"

namespace mla::kernels::hip::host {
namespace {

constexpr int kDepthBytes = 32, kMostDepth = 32, kRows = 16, kMostCols = 256, kChunkBytes = 16;

int BytesOf(Element of) { return of == Element::kE4m3 ? 1 : 2; }

// Widens `count` bytes to numbers.
void Widen(const uint8_t* from, int count, Element of, float* out) {
  for (int i = 0; i < count / BytesOf(of); ++i) {
    if (of == Element::kE4m3) {
      out[i] = kernels::DecodeFp8(from[i], kernels::Fp8Kind::kE4m3Fn);
      continue;
    }
    uint16_t x;
    std::memcpy(&x, from + 2 * i, sizeof(x));
    out[i] = of == Element::kBf16 ? WideBf16(x) : static_cast<float>(std::bit_cast<_Float16>(x));
  }
}

// An operand in shared memory: its start, and the strides between groups of eight rows and between
// column blocks of a row's width.
struct Operand {
  Operand(uint64_t descriptor, Element of_values)
      : of(of_values),
        pitch(descriptor >> 62 == 1 ? 128 : 64),
        start(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        block(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        group(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1 && descriptor >> 62 != 2) {
      Fault("a descriptor without the exchange of chunks in rows of 128 or 64 bytes");
    }
  }
  // Loads the 16 bytes from byte `col` of row `row` on. The swizzle acts on bits of the address.
  void Load(int row, int col, float* out) const {
    const uint32_t from_start = static_cast<uint32_t>(col);
    const uint32_t offset = start + static_cast<uint32_t>(row / 8) * group +
                            static_cast<uint32_t>(row % 8) * pitch + from_start / pitch * block +
                            from_start % pitch;
    const char* const from =
        the_block->shared.base() + (offset ^ (offset >> 7 & (pitch / kChunkBytes - 1)) << 4);
    the_block->shared.Read(from, kChunkBytes, the_lane->wave->index);
    uint8_t x[kChunkBytes];
    std::memcpy(x, from, sizeof(x));
    Widen(x, kChunkBytes, of, out);
  }
  Element of;
  uint32_t pitch, start, block, group;
};

// The matrix unit aligns addends of e4m3 products to the largest, keeps 13 bits below it and drops
// the rest.
float KeptOfSum(float sum) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(sum) & ~((1u << (23 - 13)) - 1));
}

void LoadLeft(const Wave& wave, size_t index, float (&left)[kRows * kMostDepth]) {
  const Product& first = wave.lane[0]->products[index];
  const int bytes = BytesOf(first.of), depth = kDepthBytes / bytes;
  if (!first.a_held) {
    const Operand a(first.a, first.of);
    if (first.a_down) {
      float x[kChunkBytes];
      for (int k = 0; k < depth; ++k) {
        for (int row = 0; row < kRows; row += kChunkBytes / bytes) {
          a.Load(k, (wave.index % 4 * kRows + row) * bytes, x);
          for (int e = 0; e < kChunkBytes / bytes; ++e) left[(row + e) * depth + k] = x[e];
        }
      }
      return;
    }
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kDepthBytes; k += kChunkBytes) {
        a.Load(wave.index % 4 * kRows + row, k, left + row * depth + k / bytes);
      }
    }
    return;
  }
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = wave.lane[static_cast<size_t>(lane)]->products[index];
    for (int i = 0; i < 4; ++i) {
      const int col = (4 * (lane % 4) + kChunkBytes * (i / 2)) / bytes;
      uint8_t word[4];
      std::memcpy(word, &p.held[i], sizeof(word));
      Widen(word, 4, p.of, left + (lane / 4 + 8 * (i % 2)) * depth + col);
    }
  }
}

void LoadRight(const Product& p, float* right) {
  const Operand b(p.b, p.of);
  const int bytes = BytesOf(p.of), depth = kDepthBytes / bytes, each = kChunkBytes / bytes;
  float x[kChunkBytes];
  if (p.b_down) {
    for (int k = 0; k < depth; ++k) {
      for (int col = 0; col < p.cols; col += each) {
        b.Load(k, col * bytes, right + k * p.cols + col);
      }
    }
    return;
  }
  for (int col = 0; col < p.cols; ++col) {
    for (int k = 0; k < depth; k += each) {
      b.Load(col, k * bytes, x);
      for (int e = 0; e < each; ++e) right[(k + e) * p.cols + col] = x[e];
    }
  }
}

// Calls `each(element of c, place in the warp's sums)` for the elements of lane `lane`.
template <class Each>
void ForElements(int lane, int cols, const Each& each) {
  for (int i = 0; i < cols / 2; ++i) {
    const int row = lane / 4 + 8 * (i >> 1 & 1), col = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
    each(i, row * cols + col);
  }
}

void Multiply(Wave& wave, size_t index) {
  alignas(32) float left[kRows * kMostDepth];
  alignas(32) float right[kMostDepth * kMostCols];
  alignas(32) float sums[kRows * kMostCols];
  const Product& first = wave.lane[0]->products[index];
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = wave.lane[static_cast<size_t>(lane)]->products[index];
    if (p.a != first.a || p.b != first.b || p.cols != first.cols || p.of != first.of) {
      Fault("lanes of a warp start different products");
    }
    ForElements(lane, p.cols, [&](int i, int at) { sums[at] = p.accumulate ? p.c[i] : 0.0f; });
  }
  LoadLeft(wave, index, left);
  LoadRight(first, right);
  MultiplyAdd(sums, left, right, kRows, first.cols, kDepthBytes / BytesOf(first.of));
  if (first.of == Element::kE4m3) {
    for (int i = 0; i < kRows * first.cols; ++i) sums[i] = KeptOfSum(sums[i]);
  }
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
