// Converts the queries of an item of attend_fp8.h into shared memory.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_QUERIES_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_QUERIES_H_

#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"

namespace mla::kernels::hip {

// Latent queries become binary16. Each row is multiplied by a power of two that brings its largest
// magnitude to [2^14, 2^15); what binary16 drops of the other values is below 2^-38 of that.
template <class C>
class Fp8Queries {
 public:
  using L = Fp8Layout<C>;
  using lds_t = tile::lds_t;

  // Run by one of the L::kScoreWarps warps that share the rows.
  MLA_DEVICE static void write(const L& shared, const Item& item, int warp, int lane) {
    const QueryLoader queries(item);
#pragma unroll 1
    for (int first = warp; first < C::kRows; first += kAtOnce * L::kScoreWarps) {
      Chunk chunks[kAtOnce][kChunks];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint16_t* row = queries.row(first + i * L::kScoreWarps);
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
        write_row(shared, first + i * L::kScoreWarps, chunks[i], lane);
      }
    }
  }

 private:
  static constexpr int kAtOnce = 2;
  static constexpr int kRowChunks = (C::kLora + C::kRope) / 8;
  static constexpr int kChunks = (kRowChunks + 31) / 32;  // chunks a lane
  // Chunks that become binary16.
  static constexpr int kScaledChunks = L::kScaledRows ? C::kLora / 8 / 32 : kChunks;
  static_assert(C::kRows % (kAtOnce * L::kScoreWarps) == 0 && C::kLora % 256 == 0);

  MLA_DEVICE static void write_row(const L& shared, int row, const Chunk (&chunks)[kChunks],
                                   int lane) {
    uint32_t largest = 0;  // the bits of a magnitude
#pragma unroll
    for (int c = 0; c < kScaledChunks; ++c) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t high = chunks[c].w[w] & 0x7fff0000u,
                       low = chunks[c].w[w] << 16 & 0x7fffffffu;
        largest = high > largest ? high : largest;
        largest = low > largest ? low : largest;
      }
    }
    largest = greater(largest, tile::exchange_word<1>(largest));
    largest = greater(largest, tile::exchange_word<2>(largest));
    largest = greater(largest, tile::exchange_word<4>(largest));
    largest = greater(largest, tile::exchange_word<8>(largest));
    largest = greater(largest, tile::exchange_word<16>(largest));
    // 2^(14 - exponent), with the exponent bounded so that both the scale and its inverse are
    // normal.
    const uint32_t found = largest >> 23;
    const uint32_t exponent = found < 20 ? 20 : found > 250 ? 250 : found;
    const float scale = bits_to_float((127 + 127 + 14 - exponent) << 23);
    if (lane == 0) {
      tile::store_float(shared.query_scale() + row * 4, bits_to_float((exponent - 14) << 23));
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int chunk = c * 32 + lane;
      if (chunk >= kRowChunks) continue;
      if (c < kScaledChunks) {
        write_chunk(shared, row, chunk, chunks[c], scale);
      } else {
        tile::store_chunk(tile::chunk_at<C::kRows>(shared.queries(), row, chunk), chunks[c]);
      }
    }
  }
  MLA_DEVICE static uint32_t greater(uint32_t a, uint32_t b) { return a > b ? a : b; }

  // Stores eight columns. A lane's 16 bytes of a key serve four steps of a product of depth 16. In
  // each 64 columns, column 16 t + 4 s + r belongs to step s, where it is column 2 t + r % 2 + 8 (r
  // / 2).
  MLA_DEVICE static void write_chunk(const L& shared, int row, int chunk, const Chunk& values,
                                     float scale) {
    const int block = chunk >> 3, t = chunk >> 1 & 3, step = (chunk & 1) * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = values.w[i];
      const lds_t to =
          tile::chunk_at<C::kRows>(shared.queries(), row, block * 8 + (step + i / 2) * 2 + i % 2);
      tile::store_word(to + t * 4, tile::pack_f16(bits_to_float(pair << 16) * scale,
                                                  bits_to_float(pair & 0xffff0000u) * scale));
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_QUERIES_H_
