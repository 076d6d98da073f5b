// Up-projection of cached rows: keys [128 x nope] and values [128 x value] of one head from 128
// rows, at depth 512, 64 a stage, in equal turns of nope / turns and 128 columns.
//
//   rows [128 x 64] --+-- K = rows W_UK^T   (W_UK [128 or 96 x 64], along its rows)
//                     +-- V = rows W_UV     (W_UV [64 x 128], down its rows)
//
// Each wave keeps its rows' keys and values of a turn in registers. While one stage is multiplied,
// the copies of later stages are in flight. For attention with 8-bit products, the product of the
// values is formed transposed, as the workspace stores it, and rounded at the end
// (device/amd/prefill/code_results.h).
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_EXPAND_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_EXPAND_H_

#include "kernels/hip/device/amd/formats/fp8_format.h"
#include "kernels/hip/device/primitives/expanded_pairs.h"

namespace mla::kernels::hip {

// If Codes is not void, it stores keys and values as codes (CodeResults); otherwise they are stored
// as bf16.
template <class C, ExpandedDims kDims, KvFormat kFormat, class Codes = void>
class Expand {
 public:
  struct Dims {
    static constexpr int kTileKv = kExpandedRows, kLora = kExpandedLora, kRope = kExpandedRope;
  };
  using Layout = StageLayout<kFormat, Dims>;
  using W = tile::Wave<C::kWaveRows>;
  static constexpr int kWaves = C::kRowWaves * C::kColWaves;
  static constexpr int kThreads = kWaves * tile::kWave;
  static constexpr int kDepth = 64;
  static constexpr int kTurns = kDims.value / 128;
  static constexpr int kKeyColumns = kDims.nope / kTurns;  // columns of a turn
  static constexpr int kValueColumns = kDims.value / kTurns;
  // A stage holds its operands in this order: rows, then W_UK, then W_UV.
  static constexpr int kKeysAt = kExpandedRows * 128;
  static constexpr int kValuesAt = kKeysAt + kKeyColumns * 128;
  static constexpr int kStageBytes = kValuesAt + kDepth * kValueColumns * 2;
  static constexpr bool kCodes = !std::is_void_v<Codes>;
  static constexpr int kStagesBytes = C::kExpandStages * kStageBytes;
  static constexpr int kSharedBytes = [] {
    if constexpr (kCodes) return kStagesBytes + Codes::kScratchBytes;
    return kStagesBytes;
  }();
  static_assert(C::kRowWaves * C::kWaveRows == kExpandedRows);
  static_assert(kTurns * kValueColumns == kDims.value && kTurns * kKeyColumns == kDims.nope);
  static_assert(!kCodes || kTurns == 1);

  MLA_DEVICE static void run(const ExpandArgs& args) {
    Expand self(args);
    int turn = 0;
    for (ExpandPairs<kDims> pairs(args, block_index()); !pairs.done();) {
      if (!kCodes && turn == 0 && pairs.head == 0) {
        copy_rotated<kFormat>(pairs, thread_index(), kThreads);
      }
      self.expand(pairs, turn);
      if (++turn < kTurns) continue;
      turn = 0;
      pairs.next();
    }
  }

 private:
  using lds_t = tile::lds_t;
  static constexpr int kSteps = kExpandedLora / kDepth;
  static constexpr int kRowStepBytes = kDepth * (Layout::kFp8 ? 1 : 2);
  static constexpr int kStages = C::kExpandStages;
  static constexpr int kKeys = kKeyColumns / C::kColWaves / W::kScoreCols;
  static constexpr int kValues = kValueColumns / C::kColWaves / W::kOutCols;
  // Rows of 128 bytes that all waves copy at once, and how many such copies each operand takes.
  static constexpr int kRowsPerCopy = tile::kWave / 8;
  static constexpr int kRowsAtOnce = kWaves * kRowsPerCopy;
  static constexpr int kRowCopies = kExpandedRows / kRowsAtOnce;
  static constexpr int kKeyCopies = kKeyColumns / kRowsAtOnce;
  static constexpr int kCopies = kStageBytes / 128 / kRowsAtOnce;
  static_assert(kCopies * kRowsAtOnce * 128 == kStageBytes && 64 % kRowsAtOnce == 0);
  static_assert(kRowCopies * kRowsAtOnce == kExpandedRows);
  static_assert(kKeyCopies * kRowsAtOnce == kKeyColumns);
  static_assert(kKeys * C::kColWaves * W::kScoreCols == kKeyColumns);
  static_assert(kValues * C::kColWaves * W::kOutCols == kValueColumns);

  struct Sources {  // sources of this lane, at depth 0
    const uint8_t* rows[kRowCopies];
    const uint8_t* w_uk;
    const uint8_t* w_uv;
  };
  // Scales of the row whose operand this lane holds, by group of values.
  struct Scales {
    float of[Layout::kGroups];
    // Scale of step `step`; must be called in the order of steps.
    MLA_DEVICE float take(int step) {
      const float scale = of[0];
      if constexpr (Layout::kRowScales) {
        if ((step + 1) % (Layout::kGroupValues / kDepth) == 0) {
#pragma unroll
          for (int i = 0; i + 1 < Layout::kGroups; ++i) of[i] = of[i + 1];
        }
      }
      return scale;
    }
  };
  struct Sums {
    typename W::Scores keys[kKeys];
    typename W::Out values[kValues];
  };

  MLA_DEVICE explicit Expand(const ExpandArgs& a)
      : args(a), lane(tile::lane_index()), wave(tile::wave_index()) {
    row_wave = wave / C::kColWaves;
    col_wave = wave - row_wave * C::kColWaves;
    stages = tile::shared_base<kSharedBytes>();
  }

  // Returns the row of an operand tile that this lane copies the i-th time. Its chunk is the same
  // each time, because the rows are multiples of eight apart.
  MLA_DEVICE int copied_row(int i) const {
    return i * kRowsAtOnce + wave * kRowsPerCopy + (lane >> 3);
  }
  // Waits for the scales of 8-bit rows at once, so that the loop does not wait for them.
  MLA_DEVICE Sources find(const ExpandPairs<kDims>& pairs, int turn, Scales& scales) const {
    Sources from;
    const int chunk = (lane & 7) ^ tile::swizzle(copied_row(0));
    const PagedRows pages = pairs.pages();
    if constexpr (Layout::kRowScales) {
      static_assert(Layout::kGroups == 4);
      uint32_t words[4];
      const int row = row_wave * C::kWaveRows + W::row(lane, 0);
      load_words(words, pages.row(pairs.position(row)) + Layout::kRow.scales_at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scales.of[i] = stored_scale(bits_to_float(words[i]));
      }
      wait_for_loads();
    } else {
      scales.of[0] = 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const int place = chunk & (kRowStepBytes / 16 - 1);  // a half row's chunks are copied twice
      from.rows[i] = pages.row(pairs.position(copied_row(i))) + place * 16;
    }
    const uint16_t* const w_uk = pairs.w_uk() + turn * (kKeyColumns * kExpandedLora);
    const uint16_t* const w_uv = pairs.w_uv() + turn * kValueColumns;
    from.w_uk = reinterpret_cast<const uint8_t*>(w_uk + copied_row(0) * kExpandedLora) + chunk * 16;
    from.w_uv = reinterpret_cast<const uint8_t*>(w_uv + copied_row(0) * kDims.value) + chunk * 16;
    return from;
  }

  template <int kIndex = 0>
  MLA_DEVICE void issue(const Sources& from, int stage) {
    if constexpr (kIndex < kCopies) {
      constexpr int of_keys = kIndex - kRowCopies, of_values = of_keys - kKeyCopies;
      const uint8_t* source = nullptr;
      if constexpr (of_keys < 0) {
        source = from.rows[kIndex];
      } else if constexpr (of_values < 0) {
        source = from.w_uk + of_keys * (kRowsAtOnce * kExpandedLora * 2);
      } else {
        constexpr int row = of_values * kRowsAtOnce % 64, block = of_values * kRowsAtOnce / 64;
        source = from.w_uv + block * 128 + row * (kDims.value * 2);
      }
      copies.template issue<kIndex, kIndex * kRowsAtOnce * 128>(base(stage), lane, source);
      issue<kIndex + 1>(from, stage);
    }
  }
  template <int kIndex = 0>
  MLA_DEVICE void land() {
    if constexpr (kIndex < kCopies) {
      copies.template land<kIndex, kIndex * kRowsAtOnce * 128>(base(0), lane);
      land<kIndex + 1>();
    }
  }
  // Moves to the next depth.
  MLA_DEVICE static void advance(Sources& from) {
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) from.rows[i] += kRowStepBytes;
    from.w_uk += kDepth * 2;
    from.w_uv += kDepth * kDims.value * 2;
  }
  MLA_DEVICE lds_t base(int stage) const {
    return stages + stage * kStageBytes + wave * kRowsPerCopy * 128;
  }

  MLA_DEVICE void expand(const ExpandPairs<kDims>& pairs, int turn) {
    Scales scales;
    Sources from = find(pairs, turn, scales);
    Sums sums;
    clear(sums);
    block_barrier();  // the previous turn's readers are done with shared memory
    if constexpr (tile::Copies::kThroughRegisters) {
      issue(from, 0);
      for (int step = 0; step < kSteps; ++step) {
        land();
        block_barrier();
        advance(from);
        if (step + 1 < kSteps) issue(from, 0);
        multiply(stages, scales.take(step), sums);
        block_barrier();
      }
    } else {
#pragma unroll
      for (int s = 0; s < kStages - 1; ++s) {
        issue(from, s);
        advance(from);
        copies.close_stage();
      }
      for (int step = 0; step < kSteps; ++step) {
        if (step + kStages - 2 < kSteps) {
          copies.template wait<kStages - 2, kCopies>();
        } else {
          copies.template wait<0, kCopies>();
        }
        block_barrier();
        const int ahead = step + kStages - 1;
        if (ahead < kSteps) issue(from, ahead % kStages);
        advance(from);
        copies.close_stage();
        multiply(stages + step % kStages * kStageBytes, scales.take(step), sums);
      }
    }
    if constexpr (kCodes) {
      // Opaque copies: otherwise the compiler keeps derived values in scalar registers all loop.
      Codes(pairs, stages + kStagesBytes, tile::again(wave), tile::lane_again())
          .store(sums.keys, sums.values);
    } else {
      store(pairs, turn, sums);
    }
  }

  MLA_DEVICE static void clear(Sums& sums) {
#pragma unroll
    for (int f = 0; f < kKeys; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) sums.keys[f].set(i, 0.0f);
    }
#pragma unroll
    for (int f = 0; f < kValues; ++f) W::clear(sums.values[f]);
  }

  // Loads the operand of rows in step `step` of a stage. Codes are widened, times `scale`.
  MLA_DEVICE void load_rows(typename W::Q& q, lds_t rows, int step, float scale) const {
    const int row0 = row_wave * C::kWaveRows;
    if constexpr (!Layout::kFp8) {
      W::template load_q<128>(q, rows, row0, step, lane);
    } else {
      const int eighth = step * W::kGroups + W::group(lane);
      const auto codes = tile::shared_load<tile::u32x2>(
          tile::chunk_at<128>(rows, row0 + W::row(lane, 0), eighth >> 1) + (eighth & 1) * 8);
      q.r = Fp8Codes::template widened<Layout::kRowScales, Layout::kRowScales>(codes[0], codes[1],
                                                                               scale);
    }
  }

  MLA_DEVICE void multiply(lds_t rows, float scale, Sums& sums) const {
    constexpr int kKeySteps = kDepth / W::kDepth, kValueSteps = kDepth / W::kPvDepth;
    typename W::Q q[kKeySteps];
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      load_rows(q[step], rows, step, scale);
    }
    const typename W::template KeyRows<kKeyColumns> keys(rows + kKeysAt, 0, lane);
    read_ahead<typename W::K, kKeySteps * kKeys, C::kExpandAhead>(
        [&](typename W::K& k, int n) {
          keys.load(k, (col_wave * kKeys + n % kKeys) * W::kScoreCols, n / kKeys);
        },
        [&](const typename W::K& k, int n) { W::scores(sums.keys[n % kKeys], q[n / kKeys], k); });
    // The rows are operands of both products, so the weights use the rows' order of the depth.
    static_assert(kValueSteps == kKeySteps);
    const typename W::template ValueRows<64, tile::Order::kAlongDepth> values(rows + kValuesAt,
                                                                              lane);
    read_ahead<typename W::V, kValueSteps * kValues, C::kExpandAhead>(
        [&](typename W::V& v, int n) {
          values.load(v, n / kValues, col_wave * kValues + n % kValues);
        },
        [&](const typename W::V& v, int n) {
          if constexpr (kCodes) {
            W::turned_outputs(sums.values[n % kValues], q[n / kValues], v);
          } else {
            W::outputs(sums.values[n % kValues], q[n / kValues], v);
          }
        });
  }

  MLA_DEVICE void store(const ExpandPairs<kDims>& pairs, int turn, const Sums& sums) const {
    const int first_key = turn * kKeyColumns, first_value = turn * kValueColumns;
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      const int row = row_wave * C::kWaveRows + W::row(lane, slot);
      const bool exists = pairs.exists(row);
#pragma unroll
      for (int f = 0; f < kKeys; ++f) {
#pragma unroll
        for (int i = 0; i < W::kScoreElems; i += W::kRun) {
          if (W::score_slot(i) != slot) continue;
          const int column =
              first_key + (col_wave * kKeys + f) * W::kScoreCols + W::score_col(lane, i);
          store_run_at(pairs.panel(column >> 6), row, column, exists, [&](int j) {
            return pack_bf16(sums.keys[f].at(i + j), sums.keys[f].at(i + j + 1));
          });
        }
      }
#pragma unroll
      for (int f = 0; f < kValues; ++f) {
#pragma unroll
        for (int i = 0; i < W::kOutElems; i += W::kRun) {
          if (W::out_slot(i) != slot) continue;
          const int column = first_value + W::out_col(lane, col_wave * kValues + f, i);
          uint8_t* const values = pairs.panel(kDims.key_panels() + (column >> 6));
          store_run_at(values, row, column, exists, [&](int j) {
            return only_finite(pack_bf16(sums.values[f].at(i + j), sums.values[f].at(i + j + 1)));
          });
          uint8_t* rests = pairs.rest_panel(column >> 6);
          if (rests == nullptr) continue;
          store_run_at(rests, row, column, exists, [&](int j) {
            return rest_of(sums.values[f].at(i + j), sums.values[f].at(i + j + 1));
          });
        }
      }
    }
  }
  // `pair(j)` returns elements j and j + 1 of the run, rounded.
  template <class Pair>
  MLA_DEVICE static void store_run_at(uint8_t* panel, int row, int column, bool exists,
                                      const Pair& pair) {
    uint32_t words[W::kRun / 2];
#pragma unroll
    for (int j = 0; j < W::kRun; j += 2) words[j / 2] = exists ? pair(j) : 0;
    store_words(panel + row * kPanelRowBytes + ((((column >> 3) & 7) ^ tile::swizzle(row)) << 4) +
                    (column & 7) * 2,
                words);
  }

  const ExpandArgs& args;
  const int lane, wave;
  int row_wave, col_wave;
  lds_t stages;
  tile::Copies copies;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_EXPAND_H_
