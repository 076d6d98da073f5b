// Tile primitives on sm_90: mma.sync m16n8k16, ldmatrix, cp.async. A wave is a warp of 32 lanes.
//
// Every operand tile in shared memory is a list of column blocks of 64 bf16 (128 bytes) a row; the
// 16-byte chunk c of row r lies at chunk position c ^ (r & 7), which makes each ldmatrix of eight
// rows touch all 32 banks once. See docs/kernels/sm90.md.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_TILE_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_TILE_H_

#include "kernels/hip/device/sm90/instructions.h"
#include "kernels/hip/device/sm90/swizzle.h"

namespace mla::kernels::hip::tile {

inline constexpr int kWave = 32;
// Queries take the way of matrix loads into registers.
inline constexpr bool kDirectQueries = false;
// Kernels leave parts in the order PartOrder::kPaired.
inline constexpr bool kPairsParts = true;

MLA_DEVICE int lane_index() {
  return static_cast<int>(static_cast<uint32_t>(thread_index()) & 31u);
}
MLA_DEVICE int lane_again() { return lane_index(); }
MLA_DEVICE int again(int x) { return x; }
MLA_DEVICE int wave_index() {
  return uniform(static_cast<int>(static_cast<uint32_t>(thread_index()) >> 5));
}

// Asynchronous copies of 16 bytes a lane to consecutive chunks from `wave_base` on.
struct Copies {
  static constexpr bool kThroughRegisters = false;
  static constexpr bool kLookUpInLds = false;
  template <int kIndex, int kOffset>
  MLA_DEVICE void issue(lds_t wave_base, int lane, const void* source) {
    copy_chunk(wave_base + kOffset + lane * 16, source);
  }
  // Copies four bytes.
  MLA_DEVICE void issue_word(lds_t at, const void* source) { copy_word(at, source); }
  MLA_DEVICE void close_stage() { close_copies(); }
  // Waits until at most `kYounger` stages closed later than the wanted one are still under way.
  template <int kYounger, int kPerStage>
  MLA_DEVICE void wait() {
    wait_for_copies<kYounger>();
  }
};
// As Copies, for row products, which read each weight once and in order.
struct WeightCopies : Copies {
  template <int kIndex, int kOffset>
  MLA_DEVICE void issue(lds_t wave_base, int lane, const void* source) {
    copy_weights_chunk(wave_base + kOffset + lane * 16, source);
  }
};

// Returns the address of chunk `chunk` of row `row` in a tile of `kRows` rows a column block.
template <int kRows>
MLA_DEVICE lds_t chunk_at(lds_t tile, int row, int chunk) {
  return tile + (chunk >> 3) * (kRows * 128) + row * 128 + (((chunk & 7) ^ swizzle(row)) << 4);
}

// Returns two codes of the low or the high half of a word as bf16.
template <bool kHigh>
MLA_DEVICE uint32_t plain_bf16_of(uint32_t codes) {
  return bf16_of_codes(kHigh ? codes >> 16 : codes);
}

// The work of one wave on `kRows_` packed rows.
template <int kRows_>
struct Wave {
  static constexpr int kRows = kRows_;
  static constexpr int kBlocks = kRows / 16;  // m16 fragments
  static constexpr int kSlots = 2 * kBlocks;  // rows a lane holds statistics of
  static constexpr int kDepth = 32;           // depth of one score step
  static constexpr int kScoreCols = 8;        // kv rows of one score fragment
  static constexpr int kScoreElems = 4 * kBlocks;
  static constexpr int kPvDepth = 16;  // kv rows of one output step
  static constexpr int kOutCols = 16;  // columns of one output fragment
  static constexpr int kOutElems = 8 * kBlocks;
  static constexpr int kRun = 2;  // consecutive columns among elements

  struct Q {
    uint32_t r[kBlocks][2][4];
  };
  struct K {
    uint32_t r[4];
  };
  struct P {
    uint32_t r[kBlocks][4];
  };
  struct V {
    uint32_t r[4];
  };
  struct Scores {
    float c[kBlocks][4];
    MLA_DEVICE float at(int i) const { return c[i >> 2][i & 3]; }
    MLA_DEVICE void set(int i, float x) { c[i >> 2][i & 3] = x; }
  };
  struct Out {
    float c[kBlocks][2][4];
    MLA_DEVICE float at(int i) const { return c[i >> 3][(i >> 2) & 1][i & 3]; }
    MLA_DEVICE void set(int i, float x) { c[i >> 3][(i >> 2) & 1][i & 3] = x; }
  };

  MLA_DEVICE static void clear(Out& o) {
#pragma unroll
    for (int i = 0; i < kOutElems; ++i) o.set(i, 0.0f);
  }
  // Multiplies each row by the factor of its slot.
  MLA_DEVICE static void scale(Out& o, const float (&factor)[kSlots]) {
#pragma unroll
    for (int i = 0; i < kOutElems; ++i) o.set(i, o.at(i) * factor[out_slot(i)]);
  }

  MLA_DEVICE static int row(int lane, int slot) { return slot * 8 + (lane >> 2); }
  MLA_DEVICE static constexpr int score_slot(int i) { return (i >> 2) * 2 + ((i >> 1) & 1); }
  MLA_DEVICE static int score_col(int lane, int i) { return 2 * (lane & 3) + (i & 1); }
  MLA_DEVICE static constexpr int out_slot(int i) { return (i >> 3) * 2 + ((i >> 1) & 1); }
  MLA_DEVICE static int out_col(int lane, int fragment, int i) {
    return fragment * kOutCols + ((i >> 2) & 1) * 8 + 2 * (lane & 3) + (i & 1);
  }
  // Returns the maximum over the lanes that share a row.
  MLA_DEVICE static float row_max(float x) {
    x = max_f(x, exchange<1>(x));
    return max_f(x, exchange<2>(x));
  }
  MLA_DEVICE static float row_sum(float x) {
    x += exchange<1>(x);
    return x + exchange<2>(x);
  }

  template <int kTileRows>
  MLA_DEVICE static void load_q(Q& q, lds_t tile, int row0, int step, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_matrices(q.r[b][h], chunk_at<kTileRows>(tile, row0 + b * 16 + (lane & 15),
                                                     step * 4 + h * 2 + (lane >> 4)));
      }
    }
  }
  template <int kTileRows>
  MLA_DEVICE static void load_k(K& k, lds_t tile, int kv0, int step, int lane) {
    load_matrices(k.r, chunk_at<kTileRows>(tile, kv0 + (lane & 7), step * 4 + (lane >> 3)));
  }
  template <int kTileRows>
  struct KeyRows {
    lds_t tile;
    int row0, lane;
    MLA_DEVICE KeyRows(lds_t tile_at, int first_row, int lane_number)
        : tile(tile_at), row0(first_row), lane(lane_number) {}
    MLA_DEVICE void load(K& k, int kv0, int step) const {
      load_k<kTileRows>(k, tile, row0 + kv0, step, lane);
    }
  };
  MLA_DEVICE static void scores(Scores& s, const Q& q, const K& k) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      mma_16x8x16(s.c[b], q.r[b][0], k.r[0], k.r[1]);
      mma_16x8x16(s.c[b], q.r[b][1], k.r[2], k.r[3]);
    }
  }

  // Stores probabilities in shared memory, because the waves of a row share the output columns:
  // tile [rows][kv], 128-byte rows.
  template <int kTileRows>
  MLA_DEVICE static void store_p(lds_t tile, int row0, int kv0, const Scores& s, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row0 + b * 16 + h * 8 + (lane >> 2);
        store_word(chunk_at<kTileRows>(tile, r, kv0 >> 3) + (lane & 3) * 4,
                   pack_bf16(s.c[b][2 * h], s.c[b][2 * h + 1]));
      }
    }
  }
  // Makes probabilities straight from the scores, for a wave that shares no rows.
  template <int kFragments>
  MLA_DEVICE static void make_p(P& p, const Scores (&s)[kFragments], int step) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Scores& from = s[2 * step + (i >> 1)];
        p.r[b][i] = pack_bf16(from.c[b][2 * (i & 1)], from.c[b][2 * (i & 1) + 1]);
      }
    }
  }
  // Loads multiplicand rows (probabilities or activations) for an output step of depth kPvDepth.
  template <int kTileRows>
  MLA_DEVICE static void load_p(P& p, lds_t tile, int row0, int step, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      load_matrices(p.r[b],
                    chunk_at<kTileRows>(tile, row0 + b * 16 + (lane & 15), step * 2 + (lane >> 4)));
    }
  }
  // Loads fragment `fragment` of the depth rows [step * 16, step * 16 + 16), transposed.
  template <int kTileRows>
  MLA_DEVICE static void load_v(V& v, lds_t tile, int step, int fragment, int lane) {
    load_matrices_transposed(
        v.r, chunk_at<kTileRows>(tile, step * 16 + (lane & 15), fragment * 2 + (lane >> 4)));
  }
  template <int kTileRows>
  struct ValueRows {
    lds_t tile;
    int lane;
    MLA_DEVICE ValueRows(lds_t tile_at, int lane_number) : tile(tile_at), lane(lane_number) {}
    MLA_DEVICE void load(V& v, int step, int fragment) const {
      load_v<kTileRows>(v, tile, step, fragment, lane);
    }
  };
  MLA_DEVICE static void outputs(Out& o, const P& p, const V& v) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      mma_16x8x16(o.c[b][0], p.r[b], v.r[0], v.r[1]);
      mma_16x8x16(o.c[b][1], p.r[b], v.r[2], v.r[3]);
    }
  }
};

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_TILE_H_
