// Defines the tile primitives that gfx942 and gfx950 share: lane layouts and score products of a
// 64-lane wave. The architecture's tile.h supplies the matrix instructions, the transposed read of
// V and the copies.
//
// Products are formed transposed: S^T = K Q^T and O^T = V^T P^T. A lane then owns exactly one
// packed row (row = lane mod kRows), so row maxima and sums stay in registers. The probabilities of
// S^T are already in the operand order of the second product, without shared memory or shuffles.
// Element i of a 32x32 accumulator is row 8*(i/4) + 4*(lane/32) + i%4, of a 16x16 one 4*(lane/16) +
// i; the column is the packed row.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_MFMA_WAVE_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_MFMA_WAVE_H_

#include "kernels/hip/device/amd/instructions.h"
#if MLA_GFX950
#include "kernels/hip/device/amd/swizzle_gfx950.h"
#else
#include "kernels/hip/device/amd/swizzle_gfx942.h"
#endif

namespace mla::kernels::hip::tile {

inline constexpr int kWave = 64;
// Queries are loaded from memory straight into registers.
inline constexpr bool kDirectQueries = true;
// No kernel leaves parts in the order PartOrder::kPaired.
inline constexpr bool kPairsParts = false;

MLA_DEVICE int lane_index() { return thread_index() & 63; }
// As lane_index, but opaque to the compiler: derived values are computed again at each use, not
// kept in registers for a whole loop, because registers are scarce.
MLA_DEVICE int lane_again() { return opaque(lane_index()); }
// Does what lane_again does, for a number that is the same in every lane.
MLA_DEVICE int again(int x) { return uniform(opaque(x)); }
MLA_DEVICE int wave_index() { return uniform(thread_index() >> 6); }

MLA_DEVICE bool any(bool x) { return ballot(x) != 0; }
template <int kStep>
MLA_DEVICE float exchange(float x) {
  const int other = (lane_index() ^ kStep) << 2;
  return bits_to_float(static_cast<uint32_t>(permute(other, static_cast<int>(float_to_bits(x)))));
}

MLA_DEVICE uint32_t from_lane(uint32_t x, int from) {
  return static_cast<uint32_t>(permute(from << 2, static_cast<int>(x)));
}

// The values of a lane and of the lane that is 32 away, in either order.
struct Two {
  float x, y;
};
MLA_DEVICE Two with_other_half(float x) {
#if MLA_GFX950  // without a turn through LDS
  const u32x2 halves = both_halves(float_to_bits(x));
  return Two{bits_to_float(halves[0]), bits_to_float(halves[1])};
#else
  return Two{x, exchange<32>(x)};
#endif
}

// Returns the value of lane `from`, in all lanes. `from` is the same in every lane.
MLA_DEVICE float broadcast(float x, int from) {
  return bits_to_float(static_cast<uint32_t>(read_lane(static_cast<int>(float_to_bits(x)), from)));
}

MLA_DEVICE void store_chunk(lds_t at, const Chunk& c) {
  shared_store<u32x4>(at, u32x4{c.w[0], c.w[1], c.w[2], c.w[3]});
}
MLA_DEVICE Chunk load_chunk_shared(lds_t at) {
  const u32x4 v = shared_load<u32x4>(at);
  return Chunk{{v[0], v[1], v[2], v[3]}};
}
MLA_DEVICE void store_float(lds_t at, float x) { shared_store<float>(at, x); }
MLA_DEVICE float load_float(lds_t at) { return shared_load<float>(at); }
MLA_DEVICE void store_word(lds_t at, uint32_t x) { shared_store<uint32_t>(at, x); }
MLA_DEVICE uint32_t load_word_shared(lds_t at) { return shared_load<uint32_t>(at); }

MLA_DEVICE void copy_chunk(lds_t at, const void* source) {
  shared_store<u32x4>(at, *as_global<const u32x4>(source));
}

// Address of chunk `chunk` of row `row` in a tile of `kRows` rows a column block.
template <int kRows>
MLA_DEVICE lds_t chunk_at(lds_t tile, int row, int chunk) {
  return tile + (chunk >> 3) * (kRows * 128) + row * 128 + (((chunk & 7) ^ swizzle(row)) << 4);
}

// The depth order of an operand of outputs: the order of scores, from which probabilities are made,
// or eight consecutive elements, as operands of scores have it.
enum class Order { kOfScores, kAlongDepth };

template <int kRows>
struct Accumulator;
template <>
struct Accumulator<32> {
  using Type = f32x16;
};
template <>
struct Accumulator<16> {
  using Type = f32x4;
};

// Has the lane layouts and everything but the matrix instructions, for kRows_ = 16 or 32 packed
// rows.
template <int kRows_>
struct WaveBase {
  static constexpr int kRows = kRows_;
  static constexpr int kSlots = 1;
  static constexpr int kGroups = 64 / kRows;  // lane groups over the depth
  static constexpr int kDepth = 8 * kGroups;  // depth of one score step: 16 or 32
  static constexpr int kScoreCols = kRows;    // kv rows of one score fragment
  static constexpr int kScoreElems = kRows * kRows / 64;
  static constexpr int kPvDepth = kDepth;  // kv rows of one output step
  using Acc = typename Accumulator<kRows>::Type;

  struct Q {
    u32x4 r;
  };
  using K = Q;
  using P = Q;
  struct Scores {
    Acc c;
    MLA_DEVICE float at(int i) const { return c[i]; }
    MLA_DEVICE void set(int i, float x) { c[i] = x; }
  };

  MLA_DEVICE static int row(int lane, int) { return lane & (kRows - 1); }
  // A shift: dividing a number whose sign the compiler does not know takes four instructions.
  MLA_DEVICE static int group(int lane) {
    return static_cast<int>(static_cast<unsigned>(lane) / kRows);
  }
  // Returns the row of element i of a transposed accumulator.
  MLA_DEVICE static int acc_row(int lane, int i) {
    return 4 * kGroups * (i >> 2) + 4 * group(lane) + (i & 3);
  }
  MLA_DEVICE static constexpr int score_slot(int) { return 0; }
  MLA_DEVICE static int score_col(int lane, int i) { return acc_row(lane, i); }
  MLA_DEVICE static constexpr int out_slot(int) { return 0; }

  MLA_DEVICE static float row_max(float x) {
    const Two halves = with_other_half(x);
    x = max_f(halves.x, halves.y);
    return kRows == 32 ? x : max_f(x, exchange<16>(x));
  }
  MLA_DEVICE static float row_sum(float x) {
    const Two halves = with_other_half(x);
    x = halves.x + halves.y;
    return kRows == 32 ? x : x + exchange<16>(x);
  }

  template <int kTileRows>
  MLA_DEVICE static void load_k(K& k, lds_t tile, int kv0, int step, int lane) {
    k.r = shared_load<u32x4>(
        chunk_at<kTileRows>(tile, kv0 + (lane & (kRows - 1)), step * kGroups + group(lane)));
  }
  // As load_k, from precomputed addresses: inside a column block they differ in bits of the chunk,
  // elsewhere in constants. The tile begins at a multiple of 128 bytes, and kv0 is a multiple of
  // kRows.
  template <int kTileRows>
  struct KeyRows {
    static constexpr int kSteps = 8 / kGroups;
    lds_t addresses[kSteps];
    // Rows from `row0` on; `row0` is a multiple of 32.
    MLA_DEVICE KeyRows(lds_t tile, int row0, int lane) {
      addresses[0] = chunk_at<kTileRows>(tile + row0 * 128, lane & (kRows - 1), group(lane));
#pragma unroll
      for (int s = 1; s < kSteps; ++s) addresses[s] = flip(addresses[0], s * kGroups * 16);
    }
    MLA_DEVICE void load(K& k, int kv0, int step) const {
      const lds_t column = flip(addresses[step % kSteps], swizzle(kv0) * 16);
      k.r = shared_load<u32x4>(column + step / kSteps * (kTileRows * 128) + kv0 * 128);
    }
  };
  // Loads queries of a tile in LDS. Both operands of a score product have the same layout.
  template <int kTileRows>
  MLA_DEVICE static void load_q(Q& q, lds_t tile, int row0, int step, int lane) {
    load_k<kTileRows>(q, tile, row0, step, lane);
  }
  // Depth order of an output operand: lane group g holds 4g .. 4g+3, and the same again half a step
  // further. Score accumulators have this order.
  template <int kFragments>
  MLA_DEVICE static void make_p(P& p, const Scores (&s)[kFragments], int step) {
    p.r = u32x4{pack_bf16(p_of(s, step, 0), p_of(s, step, 1)),
                pack_bf16(p_of(s, step, 2), p_of(s, step, 3)),
                pack_bf16(p_of(s, step, 4), p_of(s, step, 5)),
                pack_bf16(p_of(s, step, 6), p_of(s, step, 7))};
  }
  // Returns element i of the operand.
  template <int kFragments>
  MLA_DEVICE static float p_of(const Scores (&s)[kFragments], int step, int i) {
    if constexpr (kRows == 32) return s[step >> 1].c[(step & 1) * 8 + i];
    return s[2 * step + (i >> 2)].c[i & 3];
  }
  // Stores probabilities for waves that share rows, in a tile in LDS. Operands are as make_p makes
  // them; group g's are in chunk g of a step. Scores are of kv rows from kv0 on, a multiple of
  // kRows.
  template <int kTileRows>
  MLA_DEVICE static void store_p(lds_t tile, int row0, int kv0, const Scores& s, int lane) {
    static_assert(kRows == 32);
    const lds_t address = shared_p_at(tile, row0, lane);
    const Scores of_fragment[1] = {s};
#pragma unroll
    for (int step = 0; step < kRows / kPvDepth; ++step) {
      P p;
      make_p(p, of_fragment, step);
      shared_store<u32x4>(flip(address, (kv0 / kPvDepth + step) * kGroups * 16), p.r);
    }
  }
  template <int kTileRows, int kSteps>
  MLA_DEVICE static void load_shared_p(P (&p)[kSteps], lds_t tile, int row0, int lane) {
    static_assert(kSteps * kGroups <= 8);
    const lds_t at = shared_p_at(tile, row0, lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      p[step].r = shared_load<u32x4>(flip(at, step * kGroups * 16));
    }
  }
  MLA_DEVICE static lds_t shared_p_at(lds_t tile, int row0, int lane) {
    const int row = row0 + (lane & (kRows - 1));
    return tile + row * 128 + ((group(lane) ^ written_swizzle(row)) << 4);
  }
  // Loads the same operand from a row-major tile in LDS.
  template <int kTileRows>
  MLA_DEVICE static void load_p(P& p, lds_t tile, int row0, int step, int lane) {
    const int r = row0 + (lane & (kRows - 1));
    const int first = step * kPvDepth + 4 * group(lane), second = first + kPvDepth / 2;
    const u32x2 a = shared_load<u32x2>(chunk_at<kTileRows>(tile, r, first >> 3) + (first & 4) * 2);
    const u32x2 b =
        shared_load<u32x2>(chunk_at<kTileRows>(tile, r, second >> 3) + (second & 4) * 2);
    p.r = u32x4{a[0], a[1], b[0], b[1]};
  }
};

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_MFMA_WAVE_H_
