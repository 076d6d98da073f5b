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
//
// A warp has eight rows at a time, four lanes a row. Lane i of a row has 16 columns from 16 i on in
// every 64, so what a row needs once, its address and its scale, takes few instructions a warp.
// Rows past the item's end repeat its first row; their results are dropped.
template <class C, class L>
class E4m3Queries {
 public:
  using lds_t = tile::lds_t;
  static constexpr int kWarpRows = 8;

  // Starts to load the rows from `first` on, of which this lane has part of one.
  MLA_DEVICE E4m3Queries(const Item& item, int first, int lane)
      : row(first + own_row(lane)), quarter(lane & 3) {
    const QueryLoader queries(item);
    const uint16_t* const from = queries.row(row) + quarter * 16;
    if (queries.aligned) {
      load<true>(from);
    } else {
      load<false>(from);
    }
  }

  // Stores the codes, and the remaining factor of the products, which is the power of two times
  // `scale`.
  MLA_DEVICE void store(const L& shared, float scale) const {
    uint32_t halves = 0;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      halves = greater_magnitudes(greater_magnitudes(halves, values[j][0]), values[j][1]);
    }
    halves = tile::greater_halves(halves, tile::exchange_word<1>(halves));
    halves = tile::greater_halves(halves, tile::exchange_word<2>(halves));
    const uint32_t largest = greater_half(halves);
    const auto [power, inverse] = code_scale(largest);
    if (quarter == 0) {
      const bool finite = largest < 0x7f800000u;
      tile::store_float(shared.query_scale() + row * 4,
                        finite ? power * scale : bits_to_float(0x7fc00000u));
    }
    const uint32_t by = pack_bf16(inverse, inverse);
#pragma unroll
    for (int j = 0; j < kLatentPieces; ++j) {
      tile::store_chunk(tile::chunk_at<L::kRows>(shared.queries(), row, j * 4 + quarter),
                        codes(j, by));
    }
    const lds_t rotated = shared.queries() + L::kLatentBytes;
    if constexpr (L::kScaledRows) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Chunk scaled;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          scaled.w[w] = tile::multiply_bf16_pairs(values[kLatentPieces][half].w[w], by);
        }
        tile::store_chunk(tile::chunk_at<L::kRows>(rotated, row, quarter * 2 + half), scaled);
      }
    } else {
      tile::store_chunk(rotated + row * 64 + (quarter ^ narrow_swizzle(row)) * 16,
                        codes(kLatentPieces, by));
    }
  }

 private:
  static constexpr int kLatentPieces = C::kLora / 64;  // of 16 columns, a lane
  static constexpr int kPieces = kLatentPieces + C::kRope / 64;
  static_assert(C::kLora % 64 == 0 && C::kRope == 64);

  // The eight lanes that store at a time have rows i and i + 4, whose chunks lie in different
  // banks.
  MLA_DEVICE static int own_row(int lane) { return (lane >> 2 & 1) * 4 + (lane >> 3); }

  // All loads, before the first value is used.
  template <bool kAligned>
  MLA_DEVICE void load(const uint16_t* from) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        values[j][half] = load_chunk(from, j * 64 + half * 8, false, kAligned);
      }
    }
  }
  MLA_DEVICE Chunk codes(int piece, uint32_t by) const {
    Chunk out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Chunk& from = values[piece][i >> 1];
      out.w[i] = scaled_codes(from.w[2 * (i & 1)], from.w[2 * (i & 1) + 1], by);
    }
    return out;
  }

  const int row, quarter;
  Chunk values[kPieces][2];
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_QUERIES_H_
