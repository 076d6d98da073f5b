// Exchange through shared memory between waves that share packed rows: probabilities, row maxima
// and sums, and a flag of each wave for all waves of a block.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_WAVE_EXCHANGE_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_WAVE_EXCHANGE_H_

#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

// C is an AttendConfig, W the type of its waves. `at`: kBytes of shared memory.
template <class C, class W, bool kFlags>
class WaveExchange {
 public:
  using lds_t = tile::lds_t;
  static constexpr bool kShared = C::kColWaves > 1;
  static constexpr int kWaves = C::kRowWaves * C::kColWaves;
  static constexpr int kRows = C::kRowWaves * C::kWaveRows;
  static constexpr int kWaveCols = C::kTileKv / C::kColWaves;
  static constexpr int kPBytes = kShared ? kRows * C::kTileKv * 2 : 0;
  static constexpr int kStatsBytes = kShared ? kRows * C::kColWaves * 4 : 0;
  static constexpr int kFlagBytes = kShared && kFlags ? kWaves * 4 : 0;
  static constexpr int kBytes = kPBytes + kStatsBytes + kFlagBytes;

  MLA_DEVICE WaveExchange(lds_t at, int wave_number)
      : p_tile(at),
        stats(at + kPBytes),
        wave(wave_number),
        row_wave(wave_number / C::kColWaves),
        col_wave(wave_number - wave_number / C::kColWaves * C::kColWaves) {}

  template <int kFragments>
  MLA_DEVICE void store_p(const typename W::Scores (&s)[kFragments]) const {
    const int col0 = col_wave * kWaveCols, lane = tile::lane_again();
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      W::template store_p<kRows>(p_tile, row_wave * C::kWaveRows, col0 + f * W::kScoreCols, s[f],
                                 lane);
    }
  }
  // Loads the probabilities of all steps of a tile, or of one step.
  template <int kSteps>
  MLA_DEVICE void load_p(typename W::P (&p)[kSteps]) const {
    W::template load_shared_p<kRows>(p, p_tile, row_wave * C::kWaveRows, tile::lane_again());
  }
  MLA_DEVICE void load_p(typename W::P& p, int step) const {
    W::template load_p<kRows>(p, p_tile, row_wave * C::kWaveRows, step, tile::lane_again());
  }

  MLA_DEVICE void store_flag(bool moves) const {
    tile::store_float(flags() + wave * 4, moves ? 1.0f : 0.0f);
  }
  // Reads the flags in two steps, for callers that have other reads to start in between. some() is
  // true if any wave of the block has stored true.
  MLA_DEVICE float read_flags() const {
    static_assert((kWaves & (kWaves - 1)) == 0);
    return tile::load_float(flags() + (tile::lane_again() & (kWaves - 1)) * 4);
  }
  MLA_DEVICE static bool some(float found) { return tile::any(found != 0.0f); }

  // Computes the row maxima over all waves of the row group.
  MLA_DEVICE void maximum(float (&top)[W::kSlots]) const {
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      tile::store_float(stat(slot) + col_wave * 4, top[slot]);
    }
    block_barrier();
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
#pragma unroll
      for (int c = 0; c < C::kColWaves; ++c) {
        top[slot] = max_f(top[slot], tile::load_float(stat(slot) + c * 4));
      }
    }
  }
  // Sums over all waves of the row group.
  MLA_DEVICE void add(float (&sum)[W::kSlots]) const {
    block_barrier();
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      tile::store_float(stat(slot) + col_wave * 4, sum[slot]);
    }
    block_barrier();
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      sum[slot] = 0.0f;
#pragma unroll
      for (int c = 0; c < C::kColWaves; ++c) sum[slot] += tile::load_float(stat(slot) + c * 4);
    }
  }

 private:
  MLA_DEVICE lds_t flags() const { return stats + kStatsBytes; }
  MLA_DEVICE lds_t stat(int slot) const {
    return stats +
           (row_wave * C::kWaveRows + W::row(tile::lane_again(), slot)) * (C::kColWaves * 4);
  }

  const lds_t p_tile, stats;
  const int wave, row_wave, col_wave;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_WAVE_EXCHANGE_H_
