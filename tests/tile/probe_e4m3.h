// Probe of the products of e4m3 on sm_90, for probe.hip. A warpgroup multiplies operands in shared
// memory and in registers.
#ifndef MLA_TESTS_TILE_PROBE_E4M3_H_
#define MLA_TESTS_TILE_PROBE_E4M3_H_

#include "kernels/hip/device/sm90/e4m3_instructions.h"
#include "kernels/hip/device/sm90/tile.h"
#include "tests/tile/probe_args.h"

namespace mla::tile_test {

struct ProbeE4m3 {
  using lds_t = kernels::hip::tile::lds_t;
  static constexpr int kThreads = 128, kSteps = kE4m3Depth / 32;
  static constexpr int kNarrow = 64;  // bytes of a narrow row

  // Row and column of accumulator element i of a warpgroup.
  MLA_DEVICE static int row(int slot) {
    return (kernels::hip::thread_index() >> 5) * 16 + slot * 8 +
           (kernels::hip::tile::lane_index() >> 2);
  }
  MLA_DEVICE static int col(int i) {
    return 8 * (i >> 2) + 2 * (kernels::hip::tile::lane_index() & 3) + (i & 1);
  }
  template <int kCount>
  MLA_DEVICE static float* write(float* out, const float (&c)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[row((i >> 1) & 1) * 2 * kCount + col(i)] = c[i];
    return out + kGroupRows * 2 * kCount;
  }

  // Four numbers of a row-major matrix of kE4m3Depth columns, as codes.
  MLA_DEVICE static uint32_t codes(const uint16_t* from, int r, int k) {
    float x[4];
    for (int e = 0; e < 4; ++e) {
      const uint32_t bits = from[r * kE4m3Depth + k + e];
      x[e] = kernels::hip::bits_to_float(bits << 16);
    }
    return kernels::hip::tile::pack_e4m3(x[0], x[1], x[2], x[3]);
  }
  // Copies the first kBytes columns of `rows` rows into a tile. Chunks of narrow rows are permuted
  // by other bits of the row.
  template <int kBytes>
  MLA_DEVICE static void stage(lds_t at, const uint16_t* from, int rows) {
    constexpr int kChunks = kBytes / 16;
    for (int i = kernels::hip::thread_index(); i < rows * kChunks; i += kThreads) {
      const int r = i / kChunks, chunk = i % kChunks;
      kernels::hip::Chunk c;
      for (int w = 0; w < 4; ++w) c.w[w] = codes(from, r, 16 * chunk + 4 * w);
      const int place = kBytes == kNarrow ? chunk ^ (r / 2 % 4) : chunk ^ (r % 8);
      kernels::hip::tile::store_chunk(at + r * kBytes + place * 16, c);
    }
  }

  // `product(c, step)` starts the product of 32 columns.
  template <int kCount, class StartProduct>
  MLA_DEVICE static float* multiply(float* out, int steps, const StartProduct& product) {
    float c[kCount];
    kernels::hip::tile::pin(c);
    kernels::hip::tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step < steps) product(c, step);
    }
    kernels::hip::tile::wgmma_commit();
    kernels::hip::tile::wgmma_wait<0>();
    kernels::hip::tile::pin(c);
    return write(out, c);
  }

  MLA_DEVICE static void run(const ProbeArgs& args) {
    namespace tile = kernels::hip::tile;
    const lds_t a = tile::shared_base<kSharedBytes>(), b = a + kGroupRows * kE4m3Depth;
    const lds_t narrow_a = b + kE4m3Cols * kE4m3Depth, narrow_b = narrow_a + kGroupRows * kNarrow;
    stage<kE4m3Depth>(a, args.a, kGroupRows);
    stage<kE4m3Depth>(b, args.b, kE4m3Cols);
    stage<kNarrow>(narrow_a, args.a, kGroupRows);
    stage<kNarrow>(narrow_b, args.b, kKvRows);
    tile::publish_shared();
    kernels::hip::block_barrier();
    uint32_t held[kSteps][4];
    const int k = 4 * (tile::lane_index() & 3);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        held[step][i] = codes(args.a, row(i & 1), 32 * step + k + 16 * (i >> 1));
      }
    }
    float* out = multiply<32>(args.out, kSteps, [&](float(&c)[32], int step) {
      tile::multiply_e4m3(c, tile::along_rows(a + step * 32), tile::along_rows(b + step * 32),
                          step > 0);
    });
    out = multiply<64>(out, kSteps, [&](float(&c)[64], int step) {
      tile::multiply_e4m3(c, tile::along_rows(a + step * 32), tile::along_rows(b + step * 32),
                          step > 0);
    });
    out = multiply<32>(out, kSteps, [&](float(&c)[32], int step) {
      tile::multiply_held_e4m3(c, held[step], tile::along_rows(b + step * 32), step > 0);
    });
    out = multiply<4>(out, kSteps, [&](float(&c)[4], int step) {
      tile::multiply_held_e4m3(c, held[step], tile::along_rows(b + step * 32), step > 0);
    });
    multiply<32>(out, kNarrow / 32, [&](float(&c)[32], int step) {
      tile::multiply_e4m3(c, tile::along_narrow_rows(narrow_a + step * 32),
                          tile::along_narrow_rows(narrow_b + step * 32), step > 0);
    });
  }
};

}  // namespace mla::tile_test

#endif  // MLA_TESTS_TILE_PROBE_E4M3_H_
