// Converts the queries of an item of attend_e4m3.h into shared memory.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_QUERIES_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_QUERIES_H_

#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/code_scale.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/layout.h"

namespace mla::kernels::hip {

// Queries become e4m3. Each row is divided by a power of two that brings its largest magnitude to
// at most 448 and to more than 224. For fp8_row the rotated part stays bf16, divided by the same
// power of two. L: the layout of shared memory.
template <class C, class L>
class E4m3Queries {
 public:
  using lds_t = tile::lds_t;

  // Run by one of the L::kQueryWarps warps that share the rows. Stores the remaining factor of the
  // products, which is the power of two times `scale`.
  MLA_DEVICE static void write(const L& shared, const Item& item, float scale, int warp, int lane) {
    const QueryLoader queries(item);
#pragma unroll 1
    for (int first = warp; first < L::kRows; first += kAtOnce * L::kQueryWarps) {
      Chunk chunks[kAtOnce][kChunks];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint16_t* row = queries.row(first + i * L::kQueryWarps);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          chunks[i][c] = Chunk{};
          const int chunk = c * 32 + lane;
          if (chunk < kRowChunks) {
            chunks[i][c] = load_chunk(row, chunk * 8, false, queries.aligned);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        write_row(shared, first + i * L::kQueryWarps, chunks[i], scale, lane);
      }
    }
  }

 private:
  static constexpr int kAtOnce = L::kQueriesAtOnce;
  static constexpr int kLatentChunks = C::kLora / 8;
  static constexpr int kRowChunks = kLatentChunks + C::kRope / 8;
  static constexpr int kChunks = (kRowChunks + 31) / 32;  // chunks a lane
  static_assert(L::kRows % (kAtOnce * L::kQueryWarps) == 0 && kLatentChunks % 32 == 0);

  MLA_DEVICE static void write_row(const L& shared, int row, const Chunk (&chunks)[kChunks],
                                   float scale, int lane) {
    uint32_t largest = 0;  // the bits of a magnitude
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        largest = greater(largest, chunks[c].w[w] & 0x7fff0000u);
        largest = greater(largest, chunks[c].w[w] << 16 & 0x7fffffffu);
      }
    }
    largest = greater(largest, tile::exchange_word<1>(largest));
    largest = greater(largest, tile::exchange_word<2>(largest));
    largest = greater(largest, tile::exchange_word<4>(largest));
    largest = greater(largest, tile::exchange_word<8>(largest));
    largest = greater(largest, tile::exchange_word<16>(largest));
    const auto [power, inverse] = code_scale(largest);
    const bool finite = largest < 0x7f800000u;
    if (lane == 0) {
      tile::store_float(shared.query_scale() + row * 4,
                        finite ? power * scale : bits_to_float(0x7fc00000u));
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int chunk = c * 32 + lane;
      if (chunk >= kRowChunks) continue;
      if (L::kScaledRows && c == kChunks - 1) {
        write_rotated(shared, row, chunk - kLatentChunks, chunks[c], inverse);
      } else {
        write_codes(place(shared, row, chunk), chunks[c], inverse);
      }
    }
  }
  MLA_DEVICE static uint32_t greater(uint32_t a, uint32_t b) { return a > b ? a : b; }

  // Eight values fill half a chunk of codes.
  MLA_DEVICE static lds_t place(const L& shared, int row, int chunk) {
    const int wide = chunk >> 1, half = (chunk & 1) * 8;
    if (chunk < kLatentChunks) {
      return tile::chunk_at<L::kRows>(shared.queries(), row, wide) + half;
    }
    const int narrow = (wide - kLatentChunks / 2) ^ narrow_swizzle(row);
    return shared.queries() + L::kLatentBytes + row * 64 + narrow * 16 + half;
  }
  MLA_DEVICE static void write_codes(lds_t to, const Chunk& values, float inverse) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t a = values.w[2 * i], b = values.w[2 * i + 1];
      tile::store_word(to + i * 4, tile::pack_e4m3(low(a) * inverse, high(a) * inverse,
                                                   low(b) * inverse, high(b) * inverse));
    }
  }
  MLA_DEVICE static void write_rotated(const L& shared, int row, int chunk, Chunk values,
                                       float inverse) {
    const uint32_t by = pack_bf16(inverse, inverse);
#pragma unroll
    for (int w = 0; w < 4; ++w) values.w[w] = tile::multiply_bf16_pairs(values.w[w], by);
    tile::store_chunk(tile::chunk_at<L::kRows>(shared.queries() + L::kLatentBytes, row, chunk),
                      values);
  }
  MLA_DEVICE static float low(uint32_t pair) { return bits_to_float(pair << 16); }
  MLA_DEVICE static float high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_QUERIES_H_
