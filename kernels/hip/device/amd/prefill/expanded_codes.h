// Computes attention of the expanded form on gfx950 over keys and values of e4m3 (code_results.h):
// 128 query rows of one head over KV tiles of 64 rows, with 8-bit operands in both products.
//
//   keys [64 x 192], values [128 x 64], transposed: kStages deep in shared memory
//      |                    |
//   Q [rows x 192] -> S = Q K^T -> P -> O [rows x 128] += P V
//
// As in device/amd/prefill/attend_expanded.h, no waves share query rows. Queries are divided by a
// power of two of their row, probabilities by one of their row and tile (code_rounding.h). Products
// apply these powers, and the powers of the tile's keys and values.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_EXPANDED_CODES_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_EXPANDED_CODES_H_

#include "kernels/hip/device/amd/formats/code_rounding.h"
#include "kernels/hip/device/amd/prefill/code_results.h"
#include "kernels/hip/device/amd/prefill/expanded_rows.h"
#include "kernels/hip/device/primitives/query_loader.h"

namespace mla::kernels::hip {

template <class C>
class ExpandedCodes {
 public:
  using W = tile::CodeWave<C::kWaveRows>;
  static constexpr int kWaves = C::kRowWaves;
  static constexpr int kThreads = kWaves * tile::kWave;
  static constexpr int kTile = CodeTile::kRows;
  static constexpr int kStages = C::kCodeStages;
  // The places of the parts of a stage. Each wave copies the exponents for itself, so that it waits
  // only for its own copies.
  static constexpr int kValuesAt = CodeTile::kKeyBytes;
  static constexpr int kRotatedAt = kValuesAt + CodeTile::kValueBytes;
  static constexpr int kExponentsAt = kRotatedAt + CodeTile::kRotatedBytes;
  static constexpr int kExponentBytes = tile::kWave * 4;
  static constexpr int kStageBytes = kExponentsAt + kWaves * kExponentBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(C::kRowWaves * W::kRows == kExpandedRows && kStageBytes % 128 == 0);
  static_assert(kTile == W::kPvDepth && kExponentBytes <= CodeTile::kPanelBytes);

  MLA_DEVICE static void run(const ExpandedArgs& args) {
    ExpandedCodes self(args);
    for_each_expanded(args,
                      [&self](const ExpandedItem& e, const Item& item) { self.attend(e, item); });
  }

 private:
  using lds_t = tile::lds_t;
  static constexpr int kScoreFragments = kTile / W::kScoreCols;
  static constexpr int kScoreSteps = (kDims128.nope + kExpandedRope) / W::kDepth;
  static constexpr int kNopeSteps = kDims128.nope / W::kDepth;
  static constexpr int kScoreReads = kScoreSteps * kScoreFragments;
  using Rows = ExpandedRows<W, kDims128, kScoreFragments>;
  static constexpr int kOutFragments = Rows::kOutFragments;
  // Copies of a wave: 16 bytes a lane, 4 KiB at once by all waves; then the exponents.
  static constexpr int kBytesAtOnce = kThreads * 16;
  static constexpr int kKeyCopies = CodeTile::kKeyBytes / kBytesAtOnce;
  static constexpr int kValueCopies = CodeTile::kValueBytes / kBytesAtOnce;
  static constexpr int kRotatedCopies = CodeTile::kRotatedBytes / kBytesAtOnce;
  static constexpr int kCopies = kKeyCopies + kValueCopies + kRotatedCopies + 1;

  struct State {
    Rows rows;
    CodeSums<W> rounded;
  };

  MLA_DEVICE explicit ExpandedCodes(const ExpandedArgs& a)
      : args(a), lane(tile::lane_index()), wave(tile::wave_index()) {
    stages = tile::shared_base<kSharedBytes>();
  }

  // --- Copies. `from` is this lane's address in the tile's first panel.
  MLA_DEVICE void issue(const uint8_t* from, int64_t panel_bytes, int stage) {
    const lds_t base = stages + stage * kStageBytes + wave * (tile::kWave * 16);
    for_constants<kKeyCopies>([&](auto i) {
      copies.template issue<i, i * kBytesAtOnce>(base, lane, from + i * kBytesAtOnce);
    });
    for_constants<kRotatedCopies>([&](auto i) {
      copies.template issue<i, kRotatedAt + i * kBytesAtOnce>(
          base, lane, from + panel_bytes + i * kBytesAtOnce);
    });
    for_constants<kValueCopies>([&](auto i) {
      copies.template issue<i, kValuesAt + i * kBytesAtOnce>(
          base, lane, from + 2 * panel_bytes + i * kBytesAtOnce);
    });
    copies.template issue_word<kExponentsAt>(
        stages + stage * kStageBytes + wave * kExponentBytes, lane,
        from + 3 * panel_bytes - wave * (tile::kWave * 16) - lane * 12);
  }

  MLA_DEVICE void attend(const ExpandedItem& e, const Item& item) {
    const int kv_begin = item.work.kv_begin;
    const int tiles = (item.work.kv_end - kv_begin + kTile - 1) / kTile;
    const int own = wave * W::kRows;
    const int unmasked_end = item.limit(own < item.rows ? own : 0);
    const float scale = item.segment->softmax_scale * item.segment->kv_scale * kLog2e;
    const uint8_t* from = args.workspace + e.keys + wave * (tile::kWave * 16) + lane * 16;
    block_barrier();  // the previous item's readers are done with shared memory
    typename W::Q queries[kScoreSteps];
    load_queries(QueryLoader(item), own, queries);
    State state;
    state.rows.clear(args, e, item, own, lane);
    state.rounded.clear();
    if (e.carried_row >= 0) carry_in(state);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < tiles) issue(from, e.panel_bytes, s);
      from += CodeTile::kPanelBytes;
    }
    // Otherwise the compiler would wait for these loads in every iteration of the loop, and so for
    // copies too.
    wait_for_loads();
    for (int t = 0; t < tiles; ++t) {
      if (tiles - 1 - t >= kStages - 2) {
        copies.template wait<kStages - 2, kCopies>();
      } else {
        exclude_from_report_begin();
        copies.template wait<0, kCopies>();
        exclude_from_report_end();
      }
      block_barrier();
      if (t + kStages - 1 < tiles) issue(from, e.panel_bytes, (t + kStages - 1) % kStages);
      from += CodeTile::kPanelBytes;
      const int first = kv_begin + t * kTile;
      step(stages + t % kStages * kStageBytes, queries, state, first, first + kTile > unmasked_end,
           scale);
    }
    state.rows.write(args, item, own, lane, [&](RowScale& s) {
      s.inverse = s.empty ? 0.0f : 1.0f / state.rounded.total();
    });
  }

  // Loads queries in the order of the keys (code_results.h).
  MLA_DEVICE void load_queries(const QueryLoader& loader, int own,
                               typename W::Q (&queries)[kScoreSteps]) const {
    const uint16_t* const from = loader.row(own + W::row(lane, 0));
    const int side = W::group(lane);
    CodeQueries<W>::template round<kScoreSteps>(
        queries, [&](Chunk(&values)[CodeQueries<W>::kChunks], int step) {
#pragma unroll
          for (int c = 0; c < 2 * CodeQueries<W>::kChunks; ++c) {
            const Chunk eight = load_chunk(from, step * W::kDepth + c * 8, false, loader.aligned);
            values[c / 2].w[c % 2 * 2] = side == 0 ? eight.w[0] : eight.w[2];
            values[c / 2].w[c % 2 * 2 + 1] = side == 0 ? eight.w[1] : eight.w[3];
          }
        });
  }
  // Rows that continue from earlier results have one probability of 1 so far.
  MLA_DEVICE void carry_in(State& state) const {
    state.rounded.begin_with(W::row_sum(state.rows.softmax.sum[0]));
  }

  // --- One tile.
  MLA_DEVICE void step(lds_t base, const typename W::Q (&queries)[kScoreSteps], State& state,
                       int first, bool masked, float scale) const {
    const int again = tile::lane_again();
    const lds_t exponents = base + kExponentsAt + wave * kExponentBytes;
    const int of_keys = static_cast<int>(tile::load_word_shared(exponents));
    const int of_values = static_cast<int>(tile::load_word_shared(exponents + 4));
    // Addresses of the two chunks of each half of the lane's row of 32, from `base` on.
    lds_t addresses[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      addresses[i] =
          base + CodeTile::place(again & 31, CodeTile::chunk(i / 2, W::group(again), i % 2));
    }
    const auto load = [&](typename W::K& operand, int half, int offset) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto x = tile::shared_load<tile::u32x4>(addresses[2 * half + i] + offset);
#pragma unroll
        for (int w = 0; w < 4; ++w) operand.r[4 * i + w] = x[w];
      }
    };
    typename W::Scores s[kScoreFragments];
#pragma unroll
    for (int f = 0; f < kScoreFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) s[f].set(i, 0.0f);
    }
    constexpr int kRowsBytes = W::kScoreCols * 128;  // bytes of a fragment's rows
    read_ahead<typename W::K, kScoreReads, C::kCodesAhead>(
        [&](typename W::K& k, int n) {
          const int f = n % kScoreFragments, of_step = n / kScoreFragments;
          if (of_step < kNopeSteps) {
            load(k, of_step, f * kRowsBytes);
          } else {
            load(k, f, kRotatedAt);
          }
        },
        [&](const typename W::K& k, int n) {
          W::scores(s[n % kScoreFragments], queries[n / kScoreFragments], k, of_keys);
        });
    if (masked) state.rows.mask(s, first, lane);
    float factor[W::kSlots];
    if (state.rounded.update(state.rows.softmax, s, scale, C::kOriginSlack, factor)) {
      state.rows.rescale(factor);
      exclude_from_report_begin();
      state.rounded.scale(factor);
      exclude_from_report_end();
    }
    typename W::P p;
    state.rounded.make_p(p, s, 0);
    read_ahead<typename W::V, kOutFragments, C::kCodesAhead>(
        [&](typename W::V& v, int n) { load(v, n / 2, kValuesAt + n % 2 * kRowsBytes); },
        [&](const typename W::V& v, int n) { W::outputs(state.rows.o[n], p, v, of_values); });
  }

  const ExpandedArgs& args;
  const int lane, wave;
  lds_t stages;
  tile::Copies copies;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_EXPANDED_CODES_H_
