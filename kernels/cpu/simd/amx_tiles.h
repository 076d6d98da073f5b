// Shares code between the parts of the level `amx`: tile registers and products over them. Needs
// AMX and what bf16_common.h needs. Everything is in an unnamed namespace; fp32_kernels.h says why.
#ifndef MLA_KERNELS_CPU_SIMD_AMX_TILES_H_
#define MLA_KERNELS_CPU_SIMD_AMX_TILES_H_

#include "kernels/cpu/simd/bf16_common.h"

namespace mla::kernels::cpu {
namespace {

// Tile registers: 0-3 accumulate (16 rows x 16 fp32), 4-5 hold A (16 rows x 32 bf16), 6-7 hold B
// (16 pairs of k x 16 columns x 2 bf16). All are configured at full size; edges are padded with
// zeros in memory instead.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int32_t kRows = 16;              // rows of a tile
constexpr int32_t kDepth = 32;             // k of a tile
constexpr int32_t kTwoBlocks = 2 * kRows;  // rows that a step multiplies
constexpr int kPrefetchLines = 4;          // a step of at most four tile products

// The compiler's tile intrinsics do not declare which memory they read. This barrier makes earlier
// stores reach memory before they run, and keeps them from being dropped as dead.
inline void FinishStores() { asm volatile("" : : : "memory"); }

// Zeroes up to 2 x 2 accumulator tiles. kA and kB count the row blocks and panels in use.
template <int kA, int kB>
inline void ZeroTiles() {
  _tile_zero(0);
  if constexpr (kB == 2) _tile_zero(1);
  if constexpr (kA == 2) _tile_zero(2);
  if constexpr (kA == 2 && kB == 2) _tile_zero(3);
}

template <int kA, int kB>
inline void LoadTiles(const float* c, int64_t ldc) {
  const int64_t stride = ldc * 4;
  _tile_loadd(0, c, stride);
  if constexpr (kB == 2) _tile_loadd(1, c + kPanel, stride);
  if constexpr (kA == 2) _tile_loadd(2, c + kRows * ldc, stride);
  if constexpr (kA == 2 && kB == 2) _tile_loadd(3, c + kRows * ldc + kPanel, stride);
}

template <int kA, int kB>
inline void StoreTiles(float* c, int64_t ldc) {
  const int64_t stride = ldc * 4;
  _tile_stored(0, c, stride);
  if constexpr (kB == 2) _tile_stored(1, c + kPanel, stride);
  if constexpr (kA == 2) _tile_stored(2, c + kRows * ldc, stride);
  if constexpr (kA == 2 && kB == 2) _tile_stored(3, c + kRows * ldc + kPanel, stride);
}

// Operands of a product: up to 32 rows of A, the second 16 of them at a[1], and panels of B.
struct TileOperands {
  const uint8_t* a[2];
  int64_t stride_a;  // bytes between rows of A
  const uint8_t* b;
  int64_t panel_bytes;

  void Advance() {  // by 32 of k
    a[0] += 64;
    a[1] += 64;
    b += 1024;
  }
};

// Work that a product does next to its steps; none here.
struct NoWork {
  inline void Step() {}
};

// Fetches lines of the next tile.
struct FetchWork {
  Prefetcher& next;
  const int lines;  // a step
  inline void Step() { next.Step(lines); }
};

// Multiplies over 32 of k. kStreamsA: A does not stay in the first-level cache. kLoadsC: each
// accumulator is loaded from C just before its product.
template <int kA, int kB, bool kStreamsA, bool kLoadsC>
inline void MultiplyStep(const TileOperands& of, const float* c, int64_t ldc) {
  const int64_t stride = ldc * 4;
  _tile_loadd(6, of.b, 64);
  if constexpr (kStreamsA) {
    _tile_stream_loadd(4, of.a[0], of.stride_a);
  } else {
    _tile_loadd(4, of.a[0], of.stride_a);
  }
  if constexpr (kLoadsC) _tile_loadd(0, c, stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kB == 2) {
    _tile_loadd(7, of.b + of.panel_bytes, 64);
    if constexpr (kLoadsC) _tile_loadd(1, c + kPanel, stride);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (kA == 1) return;
  if constexpr (kStreamsA) {
    _tile_stream_loadd(5, of.a[1], of.stride_a);
  } else {
    _tile_loadd(5, of.a[1], of.stride_a);
  }
  if constexpr (kLoadsC) _tile_loadd(2, c + kRows * ldc, stride);
  _tile_dpbf16ps(2, 5, 6);
  if constexpr (kB == 1) return;
  if constexpr (kLoadsC) _tile_loadd(3, c + kRows * ldc + kPanel, stride);
  _tile_dpbf16ps(3, 5, 7);
}

// Multiplies over steps x 32 of k. `work` gets a turn before each step, so that its instructions
// run while the tile unit multiplies.
template <int kA, int kB, bool kStreamsA = false, typename Work>
inline void Multiply(TileOperands of, int32_t steps, Work& work) {
  for (; steps > 0; --steps, of.Advance()) {
    work.Step();
    MultiplyStep<kA, kB, kStreamsA, false>(of, nullptr, 0);
  }
}

// As LoadTiles and Multiply, but products begin when the first accumulator is loaded. REQUIRES: a
// step.
template <int kA, int kB, typename Work>
inline void MultiplyInto(TileOperands of, const float* c, int64_t ldc, int32_t steps, Work& work) {
  work.Step();
  MultiplyStep<kA, kB, false, true>(of, c, ldc);
  of.Advance();
  Multiply<kA, kB>(of, steps - 1, work);
}

// Returns true if `count` rows, a multiple of 16, lie evenly in each block of 16, all blocks with
// one stride.
inline bool Even(const void* const* rows, int32_t count) {
  if (count < kRows || count % kRows != 0) return false;
  const auto* first = static_cast<const uint8_t*>(rows[0]);
  const int64_t stride = static_cast<const uint8_t*>(rows[1]) - first;
  for (int32_t block = 0; block < count; block += kRows) {
    const auto* start = static_cast<const uint8_t*>(rows[block]);
    for (int32_t i = 1; i < kRows; ++i) {
      if (static_cast<const uint8_t*>(rows[block + i]) - start != i * stride) return false;
    }
  }
  return true;
}

// Transposes 16 vectors of 16 dwords: t[i][j] becomes t[j][i].
inline void Transpose16(__m512i (&t)[16]) {
  __m512i u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    u[2 * i] = _mm512_unpacklo_epi32(t[2 * i], t[2 * i + 1]);
    u[2 * i + 1] = _mm512_unpackhi_epi32(t[2 * i], t[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[4 * i] = _mm512_unpacklo_epi64(u[4 * i], u[4 * i + 2]);
    t[4 * i + 1] = _mm512_unpackhi_epi64(u[4 * i], u[4 * i + 2]);
    t[4 * i + 2] = _mm512_unpacklo_epi64(u[4 * i + 1], u[4 * i + 3]);
    t[4 * i + 3] = _mm512_unpackhi_epi64(u[4 * i + 1], u[4 * i + 3]);
  }
  // Now lane q of t[4 g + c] holds column 4 q + c of rows 4 g .. 4 g + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xdd);
    const __m512i e = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xdd);
    u[c] = _mm512_shuffle_i32x4(a, b, 0x88);
    u[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
    u[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
    u[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) t[i] = u[i];
}

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_AMX_TILES_H_
