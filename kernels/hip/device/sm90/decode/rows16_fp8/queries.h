// Converts the queries of an item of attend_fp8.h into shared memory.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_QUERIES_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_QUERIES_H_

#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/code_scale.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"

namespace mla::kernels::hip {

// Latent queries become binary16. Each row is multiplied by a power of two that brings its largest
// magnitude to [2^14, 2^15); what binary16 drops of the other values is below 2^-38 of that.
//
// A warp has two rows at a time, 16 lanes a row. Rows past the item's end repeat its first
// row; their results are dropped.
template <class C>
class Fp8Queries {
 public:
  using L = Fp8Layout<C>;
  using lds_t = tile::lds_t;

  static constexpr int kWarpRows = 2;

  // Starts to load the rows from `first` on, of which this lane has part of one.
  MLA_DEVICE Fp8Queries(const Item& item, int first, int lane)
      : row(first + lane / kLanes), part(lane & (kLanes - 1)) {
    const QueryLoader queries(item);
    const uint16_t* const from = queries.row(row);
    if (queries.aligned) {
      load<true>(from);
    } else {
      load<false>(from);
    }
  }

  MLA_DEVICE void store(const L& shared) const {
    uint32_t halves = 0;
#pragma unroll
    for (int c = 0; c < kScaledChunks; ++c) halves = greater_magnitudes(halves, values[c]);
    halves = tile::greater_halves(halves, tile::exchange_word<1>(halves));
    halves = tile::greater_halves(halves, tile::exchange_word<2>(halves));
    halves = tile::greater_halves(halves, tile::exchange_word<4>(halves));
    halves = tile::greater_halves(halves, tile::exchange_word<8>(halves));
    // 2^(14 - exponent), with the exponent bounded so that both the scale and its inverse are
    // normal.
    const uint32_t found = greater_half(halves) >> 23;
    const uint32_t exponent = found < 20 ? 20 : found > 250 ? 250 : found;
    const float scale = bits_to_float((127 + 127 + 14 - exponent) << 23);
    if (part == 0) {
      tile::store_float(shared.query_scale() + row * 4, bits_to_float((exponent - 14) << 23));
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c == kChunks - 1 && part >= kRowChunks % kLanes) break;
      if (c < kScaledChunks) {
        write_chunk(shared, chunk(c), values[c], scale);
      } else {
        tile::store_chunk(tile::chunk_at<C::kRows>(shared.queries(), row, chunk(c)), values[c]);
      }
    }
  }

 private:
  static constexpr int kLanes = 16;  // of a row
  static constexpr int kRowChunks = (C::kLora + C::kRope) / 8;
  static constexpr int kChunks = kRowChunks / kLanes + 1;  // chunks a lane; half of them lack one
  // Chunks that become binary16.
  static constexpr int kScaledChunks = L::kScaledRows ? C::kLora / 8 / kLanes : kChunks;
  static_assert(C::kRows % (kWarpRows * L::kScoreWarps) == 0 && kRowChunks % kLanes == kLanes / 2);

  // Lanes that lack the last chunk have the other lanes' again, so that no load needs a branch.
  MLA_DEVICE int chunk(int c) const {
    return c * kLanes + (c == kChunks - 1 ? part & (kLanes / 2 - 1) : part);
  }
  // All loads, before the first value is used.
  template <bool kAligned>
  MLA_DEVICE void load(const uint16_t* from) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      values[c] = load_chunk(from, chunk(c) * 8, false, kAligned);
    }
  }

  // Stores eight columns. A lane's 16 bytes of a key serve four steps of a product of depth 16. In
  // each 64 columns, column 16 t + 4 s + r belongs to step s, where it is column 2 t + r % 2 + 8 (r
  // / 2).
  MLA_DEVICE void write_chunk(const L& shared, int chunk, const Chunk& of, float scale) const {
    const int block = chunk >> 3, t = chunk >> 1 & 3, step = (chunk & 1) * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = of.w[i];
      const lds_t to =
          tile::chunk_at<C::kRows>(shared.queries(), row, block * 8 + (step + i / 2) * 2 + i % 2);
      tile::store_word(to + t * 4, tile::pack_f16(bits_to_float(pair << 16) * scale,
                                                  bits_to_float(pair & 0xffff0000u) * scale));
    }
  }

  const int row, part;
  Chunk values[kChunks];
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_QUERIES_H_
