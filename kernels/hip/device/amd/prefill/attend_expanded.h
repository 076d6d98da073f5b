// Computes attention of the expanded form: 128 query rows of one head over KV tiles of
// kExpandedTile rows.
//
//            K tile [T x 192], V tile [T x 128], kExpandedStages deep in shared memory
//                 |                         |
//   Q [rows x 192] -> S = Q K^T -> P  ------+-> O [rows x 128] += P V
//
// or keys and values of 256 each.
//
// No waves share query rows: scores, statistics, probabilities and outputs stay in a wave's
// registers. Tiles have the same layout in the workspace as in shared memory (expanded_args.h), so
// copies need no page table.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_ATTEND_EXPANDED_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_ATTEND_EXPANDED_H_

#include "kernels/hip/device/amd/prefill/expanded_rows.h"
#include "kernels/hip/device/primitives/query_loader.h"

namespace mla::kernels::hip {

template <class C, ExpandedDims kDims>
class AttendExpanded {
 public:
  using W = tile::Wave<C::kWaveRows>;
  static constexpr int kWaves = C::kRowWaves;
  static constexpr int kThreads = kWaves * tile::kWave;
  static constexpr int kTile = C::kExpandedTile;
  static constexpr int kDim = kDims.nope + kExpandedRope;
  static constexpr int kPanelBytes = kTile * 128;
  static constexpr int kKPanels = kDim / 64, kVPanels = kDims.value_panels();
  static constexpr int kStageBytes = (kKPanels + kVPanels) * kPanelBytes;
  static constexpr int kSharedBytes = C::kExpandedStages * kStageBytes;
  static_assert(C::kRowWaves * C::kWaveRows == kExpandedRows && kExpandedRows % kTile == 0);

  MLA_DEVICE static void run(const ExpandedArgs& args) {
    AttendExpanded self(args);
    for_each_expanded(args,
                      [&self](const ExpandedItem& e, const Item& item) { self.attend(e, item); });
  }

 private:
  using lds_t = tile::lds_t;
  static constexpr int kStages = C::kExpandedStages;
  static constexpr int kAhead = kDims == kDims128 ? C::kExpandedAhead : C::kWideAhead;
  static constexpr int kScoreFragments = kTile / W::kScoreCols;
  static constexpr int kOutFragments = kDims.value / W::kOutCols;
  static constexpr int kScoreSteps = kDim / W::kDepth;
  static constexpr int kPvSteps = kTile / W::kPvDepth;
  static constexpr int kValueReads = kPvSteps * kOutFragments;
  static constexpr int kRowsPerCopy = tile::kWave / 8;
  static constexpr int kCopiesPerPanel = kTile / kRowsPerCopy / kWaves;
  static constexpr int kCopies = (kKPanels + kVPanels) * kCopiesPerPanel;
  static_assert(kCopiesPerPanel * kRowsPerCopy * kWaves == kTile);

  using State = ExpandedRows<W, kDims, kScoreFragments>;
  struct Sources {  // sources of this lane in the next tile
    const uint8_t* keys;
    const uint8_t* rotated;
    int64_t panel_bytes;
  };

  MLA_DEVICE explicit AttendExpanded(const ExpandedArgs& a)
      : args(a), lane(tile::lane_index()), wave(tile::wave_index()) {
    stages = tile::shared_base<kSharedBytes>();
  }

  // --- Copies.
  template <int kIndex = 0>
  MLA_DEVICE void issue(const Sources& from, int stage) {
    if constexpr (kIndex < kCopies) {
      constexpr int panel = kIndex / kCopiesPerPanel, i = kIndex % kCopiesPerPanel;
      constexpr bool rotated = panel >= kKPanels - kRotatedPanels && panel < kKPanels;
      constexpr int of_head = panel < kKPanels ? panel : panel - kRotatedPanels;
      const uint8_t* source = rotated ? from.rotated : from.keys + of_head * from.panel_bytes;
      copies.template issue<kIndex, offset(kIndex)>(base(stage), lane,
                                                    source + i * kWaves * kRowsPerCopy * 128);
      issue<kIndex + 1>(from, stage);
    }
  }
  template <int kIndex = 0>
  MLA_DEVICE void land() {
    if constexpr (kIndex < kCopies) {
      copies.template land<kIndex, offset(kIndex)>(base(0), lane);
      land<kIndex + 1>();
    }
  }
  MLA_DEVICE static constexpr int offset(int index) {
    return index / kCopiesPerPanel * kPanelBytes +
           index % kCopiesPerPanel * kWaves * kRowsPerCopy * 128;
  }
  MLA_DEVICE lds_t base(int stage) const {
    return stages + stage * kStageBytes + wave * kRowsPerCopy * 128;
  }
  MLA_DEVICE static void advance(Sources& from) {
    from.keys += kPanelBytes;
    from.rotated += kPanelBytes;
  }

  MLA_DEVICE void attend(const ExpandedItem& e, const Item& item) {
    const int kv_begin = item.work.kv_begin;
    const int tiles = (item.work.kv_end - kv_begin + kTile - 1) / kTile;
    const int own = wave * C::kWaveRows;
    const int unmasked_end = item.limit(own < item.rows ? own : 0);
    const float scale = item.segment->softmax_scale * item.segment->kv_scale * kLog2e;
    const int inside = wave * kRowsPerCopy * 128 + lane * 16;
    Sources from{args.workspace + e.keys + inside, args.workspace + e.rotated + inside,
                 e.panel_bytes};
    const bool few = sees_few(item);
    const uint8_t* rests = args.workspace + e.keys + kDims.panels() * e.panel_bytes;
    block_barrier();  // the previous item's readers are done with shared memory
    typename W::Q queries[kScoreSteps];
    QueryLoader(item).load<W, PlainOrder<W>>(own, lane, queries);
    State state;
    state.clear(args, e, item, own, lane);
    if constexpr (tile::Copies::kThroughRegisters) {
      if (tiles > 0) issue(from, 0);
    } else {
#pragma unroll
      for (int s = 0; s < kStages - 1; ++s) {
        if (s < tiles) issue(from, s);
        advance(from);
        copies.close_stage();
      }
    }
    // Otherwise the compiler would wait for these loads in every iteration of the loop, and so for
    // copies too.
    wait_for_loads();
    for (int t = 0; t < tiles; ++t) {
      int stage = 0;
      if constexpr (tile::Copies::kThroughRegisters) {
        land();
        block_barrier();
        advance(from);
        if (t + 1 < tiles) issue(from, 0);
      } else {
        if (tiles - 1 - t >= kStages - 2) {
          copies.template wait<kStages - 2, kCopies>();
        } else {
          exclude_from_report_begin();
          copies.template wait<0, kCopies>();
          exclude_from_report_end();
        }
        block_barrier();
        stage = t % kStages;
        if (t + kStages - 1 < tiles) issue(from, (t + kStages - 1) % kStages);
        advance(from);
        copies.close_stage();
      }
      const int first = kv_begin + t * kTile;
      step(stages + stage * kStageBytes, queries, state, first, first + kTile > unmasked_end, scale,
           few && first < kFewKeys ? rests + t * kPanelBytes : nullptr);
      if constexpr (tile::Copies::kThroughRegisters) block_barrier();
    }
    state.write(args, item, own, lane, [](RowScale&) {});
  }

  // --- One tile.
  MLA_DEVICE void step(lds_t tile_base, const typename W::Q (&queries)[kScoreSteps], State& state,
                       int first, bool masked, float scale, const uint8_t* rests) {
    typename W::Scores s[kScoreFragments];
#pragma unroll
    for (int f = 0; f < kScoreFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) s[f].set(i, 0.0f);
    }
    const typename W::template KeyRows<kTile> rows(tile_base, 0, tile::lane_again());
    read_ahead<typename W::K, kScoreSteps * kScoreFragments, kAhead>(
        [&](typename W::K& k, int n) {
          rows.load(k, n % kScoreFragments * W::kScoreCols, n / kScoreFragments);
        },
        [&](const typename W::K& k, int n) {
          W::scores(s[n % kScoreFragments], queries[n / kScoreFragments], k);
        });
    // The first values are loaded while exponentials are computed.
    const Values values(tile_base + kKPanels * kPanelBytes, tile::lane_again());
    typename W::V ahead[kAhead];
    read_first<kValueReads>(ahead, values);
    if (masked) state.mask(s, first, lane);
    float factor[W::kSlots];
    if (state.softmax.update(s, scale, C::kOriginSlack, factor, [](float(&)[W::kSlots]) {})) {
      state.rescale(factor);
    }
    accumulate(values, ahead, s, state);
    if (rests != nullptr) accumulate_rests(tile_base, rests, s, state);
  }

  // The operands of values, in the order of their products.
  struct Values {
    typename W::template ValueRows<kTile> rows;
    MLA_DEVICE Values(lds_t tile_base, int lane) : rows(tile_base, lane) {}
    MLA_DEVICE void operator()(typename W::V& v, int n) const {
      rows.load(v, n / kOutFragments, n % kOutFragments);
    }
  };
  // `ahead` holds the first operands, which have been read.
  MLA_DEVICE static void accumulate(const Values& values, typename W::V (&ahead)[kAhead],
                                    const typename W::Scores (&s)[kScoreFragments], State& state) {
    typename W::P p[kPvSteps];
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) W::make_p(p[step], s, step);
    read_on<kValueReads>(ahead, values, [&](const typename W::V& v, int n) {
      W::outputs(state.o[n % kOutFragments], p[n / kOutFragments], v);
    });
  }
  MLA_DEVICE static void accumulate(lds_t tile_base, const typename W::Scores (&s)[kScoreFragments],
                                    State& state) {
    const Values values(tile_base, tile::lane_again());
    typename W::V ahead[kAhead];
    read_first<kValueReads>(ahead, values);
    accumulate(values, ahead, s, state);
  }

  // Adds the products with rounding remainders of values and probabilities. The rests of the values
  // overwrite the keys, which no wave needs any more.
  MLA_DEVICE void accumulate_rests(lds_t tile_base, const uint8_t* rests,
                                   typename W::Scores (&s)[kScoreFragments], State& state) const {
    exclude_from_report_begin();
    block_barrier();
    for (int i = thread_index(); i < kVPanels * kTile * 8; i += kThreads) {
      Chunk c;
      load_words(c.w, rests + i / (kTile * 8) * kRestPanelBytes + i % (kTile * 8) * 16);
      tile::store_chunk(tile_base + i * 16, c);
    }
    block_barrier();
    accumulate(tile_base, s, state);
#pragma unroll
    for (int f = 0; f < kScoreFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        const float p = s[f].at(i);
        s[f].set(i, p - bits_to_float(pack_bf16(p, 0.0f) << 16));
      }
    }
    accumulate(tile_base + kKPanels * kPanelBytes, s, state);
    exclude_from_report_end();
  }

  const ExpandedArgs& args;
  const int lane, wave;
  lds_t stages;
  tile::Copies copies;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_ATTEND_EXPANDED_H_
