// The first product of attend_fp8.h: S^T = K Q^T.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_KEYS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_KEYS_H_

#include "kernels/hip/device/primitives/item.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"

namespace mla::kernels::hip {

// Scales of a lane's two keys: a power of two each, and for each group of columns the remaining
// factor of its scale, as binary16, at most 2.
template <class C>
struct Fp8KeyScales {
  using L = Fp8Layout<C>;
  using lds_t = tile::lds_t;
  float of_key[2] = {1.0f, 1.0f};
  uint32_t remaining[2][L::kScaleGroups] = {};  // pairs of the same number

  MLA_DEVICE Fp8KeyScales(const L& shared, int slot, int key0, int key1, int lane) {
    if constexpr (L::kScaledRows) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Chunk raw =
            tile::load_chunk_shared(shared.raw_scales(slot) + (half == 0 ? key0 : key1) * 16);
        float top = kernels::kSmallestKvScale, x[L::kScaleGroups];
#pragma unroll
        for (int i = 0; i < L::kScaleGroups; ++i) {
          x[i] = kernels::KvScale(bits_to_float(raw.w[i]), kernels::Fp8Kind::kE4m3Fn);
          top = max_f(top, x[i]);
        }
        const uint32_t exponent = float_to_bits(top) & 0x7f800000u;
        of_key[half] = bits_to_float(exponent);
#pragma unroll
        for (int i = 0; i < L::kScaleGroups; ++i) {
          const float scale = x[i] * inverse(half);
          remaining[half][i] = tile::pack_f16(scale, scale);
        }
        handed |= good(remaining[half], lane & 3) << 16 * half;
      }
    }
  }
  // 1 / of_key, exact; and log2(of_key).
  MLA_DEVICE float inverse(int half) const {
    return bits_to_float((254u << 23) - float_to_bits(of_key[half]));
  }
  MLA_DEVICE float exponent(int half) const {
    return static_cast<float>(static_cast<int>(float_to_bits(of_key[half]) >> 23) - 127);
  }

  // Stores the remaining factors for the products with values, in the order of operands.
  MLA_DEVICE void publish(lds_t scales, int warp, int lane) const {
    const uint32_t next = tile::exchange_word<4>(handed);
    if ((lane & 4) != 0) return;
    const lds_t to = scales + (lane & 3) * (L::kKeys * 2) + (warp * 16 + (lane >> 2)) * 2;
    tile::store_word(to, (handed & 0xffffu) | next << 16);
    tile::store_word(to + 16, handed >> 16 | (next & 0xffff0000u));
  }

 private:
  // Returns the factor of one group of columns. A scale that stands for NaN becomes zero here,
  // because the scores of its key carry the NaN.
  MLA_DEVICE static uint32_t good(const uint32_t (&of_key)[L::kScaleGroups], int columns) {
    uint32_t mine = of_key[0] & 0xffffu;
#pragma unroll
    for (int i = 1; i < L::kScaleGroups; ++i) mine = columns == i ? of_key[i] & 0xffffu : mine;
    return (mine & 0x7fffu) > 0x7c00u ? 0 : mine;
  }

  uint32_t handed = 0;  // factors of both keys, for the group of columns that this lane passes on
};

// A lane reads keys of two rows of the operand, 16 bytes of every 64 at a time. Fp8Queries stores
// its columns in the matching order.
template <class C>
class Fp8Keys {
 public:
  using L = Fp8Layout<C>;
  using lds_t = tile::lds_t;
  static constexpr int kProduct = C::kRows / 2;

  // Returns the key of the tile in this lane's row (half 0) and in the row eight further (half 1).
  MLA_DEVICE static int key(int warp, int lane, int half) {
    return warp * 16 + half * 8 + key_of_row(lane >> 2);
  }

  // Computes logits, as powers of two, of the tile in `slot`.
  MLA_DEVICE static void score(const L& shared, int slot, const SegmentRecord& segment, int warp,
                               int lane, const Fp8KeyScales<C>& scales, float (&s)[kProduct]) {
    const uint64_t queries = tile::along_rows(shared.queries());
    Chunk codes[kAhead + 1][2];
    uint32_t operand[2][kSteps][4];
    for_constants<kAhead>([&](auto block) { read<block>(shared, slot, warp, lane, codes[block]); });
    for_constants<kBlocks>([&](auto block) {
      if constexpr (block + kAhead < kBlocks) {
        read<block + kAhead>(shared, slot, warp, lane, codes[(block + kAhead) % (kAhead + 1)]);
      }
      if constexpr (block > 1) tile::wgmma_wait<1>();  // the operand is free after this
      widen<block>(codes[block % (kAhead + 1)], scales, operand[block % 2]);
      tile::pin(s);
      tile::wgmma_begin();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        tile::multiply_held_f16(s, operand[block % 2][step],
                                queries + ((block * L::kQueryBlockBytes + step * 32) >> 4),
                                block > 0 || step > 0);
      }
      tile::wgmma_commit();
    });
    const float scale = segment.softmax_scale * kLog2e;
    if constexpr (kScaled) {
      add_rotated(shared, slot, warp, lane, scales, scale, s);
    } else {
      tile::wgmma_wait<0>();
      tile::pin(s);
      multiply(shared, lane, scale * segment.kv_scale, s);
    }
  }

 private:
  static constexpr bool kScaled = L::kScaledRows;
  static constexpr int kSteps = 4;  // steps of depth 16 of a block
  // Blocks of 64 columns whose keys are e4m3.
  static constexpr int kBlocks = C::kLora / 64 + (kScaled ? 0 : 1);
  static constexpr int kAhead = 1;  // blocks that are read before their use

  template <int kBlock>
  MLA_DEVICE static lds_t place(const L& shared, int slot, int key, int quarter) {
    if constexpr (kBlock < C::kLora / 64) {
      return tile::chunk_at<L::kKeys>(shared.slot(slot), key, 4 * kBlock + quarter);
    }
    static_assert(C::kRope == 64);
    return shared.rope(slot) + key * 64 + (quarter ^ narrow_swizzle(key)) * 16;
  }
  template <int kBlock>
  MLA_DEVICE static void read(const L& shared, int slot, int warp, int lane, Chunk (&codes)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[half] =
          tile::load_chunk_shared(place<kBlock>(shared, slot, key(warp, lane, half), lane & 3));
    }
  }
  template <int kBlock>
  MLA_DEVICE static void widen(const Chunk (&codes)[2], const Fp8KeyScales<C>& scales,
                               uint32_t (&operand)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t low = tile::fp8_to_f16<0>(codes[half].w[step]);
        uint32_t high = tile::fp8_to_f16<1>(codes[half].w[step]);
        if constexpr (kScaled) {
          low = tile::multiply_f16_pairs(low, scales.remaining[half][kBlock / 2]);
          high = tile::multiply_f16_pairs(high, scales.remaining[half][kBlock / 2]);
        }
        operand[step][half] = low;
        operand[step][2 + half] = high;
      }
    }
  }

  // Multiplies by the scales of the queries.
  MLA_DEVICE static void multiply(const L& shared, int lane, float scale, float (&s)[kProduct]) {
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float of_row[2];
      tile::load_two_floats(of_row, shared.query_scale() + (8 * j + 2 * (lane & 3)) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * j + i] *= of_row[i & 1] * scale;
    }
  }

  // Adds the products of the rotated part in bf16, after the sum of the latent part.
  MLA_DEVICE static void add_rotated(const L& shared, int slot, int warp, int lane,
                                     const Fp8KeyScales<C>& scales, float scale,
                                     float (&s)[kProduct]) {
    uint32_t operand[kSteps][4];
    const int row = lane & 7, half = lane >> 3 & 1;
    const int from = warp * 16 + half * 8 + key_of_row(row);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      tile::load_matrices(
          operand[step], tile::chunk_at<L::kKeys>(shared.rope(slot), from, 2 * step + (lane >> 4)));
    }
    float rotated[kProduct];
    tile::pin(rotated);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      tile::multiply_held_bf16(
          rotated, operand[step],
          tile::along_rows(shared.queries() + kBlocks * L::kQueryBlockBytes + step * 32), step > 0);
    }
    tile::wgmma_commit();
    tile::wgmma_wait<0>();
    tile::pin(s);
    tile::pin(rotated);
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float of_row[2];
      tile::load_two_floats(of_row, shared.query_scale() + (8 * j + 2 * (lane & 3)) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float latent = s[4 * j + i] * scales.of_key[i >> 1];
        s[4 * j + i] = fma_f(latent, of_row[i & 1] * scale, rotated[4 * j + i] * scale);
      }
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_KEYS_H_
