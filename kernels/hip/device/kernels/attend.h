// Absorbed attention over a plan: the persistent decode / extend kernel.
//
// One block serves one unit: it walks the unit's work items and, for each, streams the item's KV
// rows through shared memory once. Scores, softmax statistics and output accumulators stay in
// registers:
//
//              kv tile (kTileKv rows x D, kStages deep in shared memory)
//                 |                         |
//   Q [rows x D] -+-> S = Q K^T -> P  ------+-> O [rows x lora] += P V   (V = first lora columns)
//
// The waves of a block form a grid of kRowWaves x kColWaves. Waves of one row group split the KV
// rows of a tile for S and the columns of O. With kColWaves = 1 no wave shares rows, so P stays in
// registers. Heads and query rows are packed: row p of a tile is query row p / heads, head p %
// heads; rows past the item's are computed on zeros and not stored.
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_ATTEND_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_ATTEND_H_

#include "kernels/hip/device/kernels/attend_results.h"
#include "kernels/hip/device/kernels/turn_pieces.h"
#include "kernels/hip/device/kv/kv_stream.h"
#include "kernels/hip/device/kv/visibility.h"
#include "kernels/hip/device/kv/window_source.h"
#include "kernels/hip/device/primitives/item.h"
#include "kernels/hip/device/primitives/memory.h"
#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/primitives/softmax.h"
#include "kernels/hip/device/primitives/wave_exchange.h"
#if MLA_AMD
#include "kernels/hip/device/amd/formats/tile_format_of.h"
#else
#include "kernels/hip/device/sm90/tile_format_of.h"
#endif

namespace mla::kernels::hip {

// C is an AttendConfig. With index lists and windows an item has one query row, whose list or
// window names the KV rows. Args is AttendArgs, or SplitArgs in a kernel that merges parts itself.
template <class C, AttentionKind kKind = AttentionKind::kDense, class Args = AttendArgs>
class Attend {
 public:
  using W = typename TileFormatOf<C::kFormat, C>::Wave;
  using Format = typename TileFormatOf<C::kFormat, C>::Type;
  using Layout = typename Format::Layout;
  using Shape = TileShape<C, W>;
  static constexpr int kDim = C::kLora + C::kRope;
  static constexpr int kWaves = C::kRowWaves * C::kColWaves;
  static constexpr int kThreads = kWaves * tile::kWave;
  static constexpr int kRows = C::kRowWaves * C::kWaveRows;
  using Source = RowSource<kKind>;
  using Copies = typename Format::Copies;
  using Stream = KvStream<Source, Layout, C::kStages, kWaves, Copies>;
  static constexpr int kStageBytes = Stream::kStageBytes;
  static constexpr bool kSharedP = C::kColWaves > 1;
  using Between = WaveExchange<C, W, (C::kOriginSlack > 0)>;
  static constexpr int kLookUpBytes = Stream::kLookUpBytes;
  static constexpr int kKeptAt = C::kStages * kStageBytes + Between::kBytes + kLookUpBytes;
  static constexpr int kSharedBytes = kKeptAt + Format::kKeptBytes * kThreads;

  MLA_DEVICE static void run(const Args& args) {
    if constexpr (!Args::kSplit) prefetch_records<kThreads>(args);
    Attend self(args);
    let_next_kernel_start();
    for_each_item<kRows>(args, [&self](const Item& item) { self.attend(item); });
  }

 private:
  static constexpr int kWaveCols = Shape::kWaveCols;
  static constexpr int kScoreFragments = Shape::kScoreFragments;
  static constexpr int kOutFragments = Shape::kOutFragments;
  static constexpr int kScoreSteps = Format::kScoreSteps;
  static constexpr int kPvSteps = Shape::kPvSteps;
  // If false, queries pass through shared memory, in the layout that matrix loads need.
  static constexpr bool kOwnQueries = tile::kDirectQueries;
  // A wave that is alone on its SIMD starts copies between products of scores, where issuing them
  // takes no extra time.
  static constexpr bool kCopiesBetween = C::kKeysAhead > 0 && !Copies::kThroughRegisters;
  static constexpr int kProductsBefore = 2;
  static constexpr int kAhead = C::kStages - 1;  // tiles
  // Such a wave also writes tiles that come through registers to shared memory one tile ahead.
  static constexpr bool kLandsAhead = Copies::kThroughRegisters && C::kStages > 1;
  static constexpr bool kInPieces = kLandsAhead && Stream::kInPieces;
  // Waves of a row exchange maxima only in tiles that move an origin.
  static constexpr bool kLazyShare = kSharedP && C::kOriginSlack > 0;
  static constexpr bool kHeldP = C::kValuesAhead > 0;  // registers hold P of all steps
  static_assert(C::kLora % 64 == 0 && C::kRope % 64 == 0 && kWaveCols <= 64);
  // 8-bit products round probabilities so much that outputs are divided by the sum of the results.
  static constexpr bool kCodes = Format::kCodes;
  static_assert(!kCodes || (!kSharedP && kHeldP));

  struct State {
    typename W::Out o[kOutFragments];
    OnlineSoftmax<W, kScoreFragments> softmax;
    Visibility<kKind, C, W> visible;
    typename Format::Rounded rounded;
  };
  struct Probabilities {
    typename W::P of_step[kHeldP ? kPvSteps : 1];
  };
  struct ValueReads {
    typename Format::Values::Raw first[C::kValuesAhead > 0 ? C::kValuesAhead : 1];
  };
  struct Queries {
    typename W::Q q[kScoreSteps];
  };

 public:
  MLA_DEVICE explicit Attend(const Args& a)
      : args(a),
        wave(tile::wave_index()),
        row_wave(wave / C::kColWaves),
        col_wave(wave - row_wave * C::kColWaves),
        stages(tile::shared_base<kSharedBytes>()),
        entries(stages + C::kStages * kStageBytes + Between::kBytes),
        between(stages + C::kStages * kStageBytes, wave) {}

  MLA_DEVICE void attend(const Item& item) {
    MLA_RECORD const SegmentRecord& r = *item.segment;
    const Source source(args, item);
    const int tiles = (source.end - source.begin + C::kTileKv - 1) / C::kTileKv;
    float scale = r.softmax_scale * (Layout::kLayerScale ? r.kv_scale : 1.0f) * kLog2e;

    block_barrier();  // the previous item's readers are done with shared memory
    Queries queries;
    Stream kv(source, stages, entries, wave);
    State state;
    state.visible.begin(item);
    if (tiles > 0) {
      kv.look_up_first();
      state.visible.look_at_first(kv);
    }
    if constexpr (kOwnQueries) {
      scale *= load_queries(item, kv, queries);
      clear(item, state);
      wait_for_loads();
    }
    start_queries(item, kv);
    if (tiles > 0) kv.start(tiles);
    if constexpr (!kOwnQueries) {
      // Without tiles no copies follow the queries' copies, so a wait by count would not suffice.
      if (tiles == 0) kv.template wait<0>();
      load_queries(item, kv, queries);
      clear(item, state);
    }

    for (int t = 0; t < tiles; ++t) {
      await_tile(kv, t, tiles);
      state.visible.of_tile(kv, t);
      const lds_t tile_base = stages + t % C::kStages * kStageBytes;
      typename Stream::Ahead next;
      state.visible.read_ahead(kv, t + 1);
      if constexpr (kCopiesBetween) {
        kv.read_ahead(t + kAhead, next);
        schedule_fence();
      }
      step(tile_base, queries, state, scale,
           [&](auto read) { bring_later<read>(kv, t, tiles, state, next); });
      if constexpr (Copies::kThroughRegisters && !kLandsAhead) block_barrier();
    }
    if constexpr (!Copies::kThroughRegisters) kv.template wait<0>();
    finish(item, state);
  }

 private:
  using lds_t = tile::lds_t;

  // --- Tiles.
  // Waits until tile t is in its stage and all readers of the one before are done.
  MLA_DEVICE void await_tile(Stream& kv, int t, int tiles) const {
    if constexpr (kLandsAhead) {
      block_barrier();
    } else if constexpr (Copies::kThroughRegisters) {
      kv.land(t);
      block_barrier();
      if (t + 1 < tiles) kv.issue(t + 1);
      kv.look_up_and_fetch(t + 2);
    } else {
      kv.await(tiles - 1 - t);
      block_barrier();
      if constexpr (!kCopiesBetween) {
        if (t + kAhead < tiles) kv.issue(t + kAhead);
        kv.close_stage();
        kv.look_up_and_fetch(t + kAhead + Stream::kLookAhead);
      }
    }
  }

  // Work for later tiles that follows read kRead of tile t.
  template <int kRead>
  MLA_DEVICE void bring_later(Stream& kv, int t, int tiles, State& state,
                              typename Stream::Ahead& next) const {
    if constexpr (kRead == kProductsBefore) {
      state.visible.look_ahead(kv, t + 1);
      if constexpr (kLandsAhead && !kInPieces) kv.bring_next(t, tiles);
      if constexpr (kCopiesBetween) {
        if (t + kAhead < tiles) kv.bring(t + kAhead, next);
      }
    }
    if constexpr (kInPieces) {
      using Pieces = TurnPieces<Format::Keys::kReads, Format::Values::kReads, Stream::kPieces,
                                C::kPiecesOfValues, kProductsBefore>;
      constexpr int kFirst = Pieces::first(kRead), kCount = Pieces::first(kRead + 1) - kFirst;
      for_constants<kCount>([&](auto i) { kv.template bring_piece<kFirst + i>(t, next); });
    }
  }

  // --- Queries. If several waves need the same queries, they pass through the last stage. No copy
  // of KV rows fills that stage before the first tile is consumed.
  MLA_DEVICE lds_t last_stage() const { return stages + (C::kStages - 1) * kStageBytes; }

  MLA_DEVICE void start_queries(const Item& item, Stream& kv) const {
    if constexpr (kOwnQueries) return;
    QueryLoader(item).copy_tile<kRows, kDim, kWaves>(last_stage(), wave, tile::lane_again());
    kv.close_stage();
  }

  // Returns the remaining factor of the logits.
  MLA_DEVICE float load_queries(const Item& item, Stream& kv, Queries& queries) {
    if constexpr (Format::kRoundsQueries) {
      return Format::load_queries(QueryLoader(item), row_wave * C::kWaveRows, tile::lane_again(),
                                  queries.q);
    } else if constexpr (kOwnQueries) {
      QueryLoader(item).load<W, typename Format::Order>(row_wave * C::kWaveRows, tile::lane_again(),
                                                        queries.q);
    } else {
      kv.template wait<C::kStages - 1>();
      block_barrier();
      const int lane = tile::lane_again();
#pragma unroll
      for (int s = 0; s < kScoreSteps; ++s) {
        Format::template load_q<kRows>(queries.q[s], last_stage(), row_wave * C::kWaveRows, s,
                                       lane);
      }
    }
    return 1.0f;
  }

  MLA_DEVICE void clear(const Item& item, State& state) const {
    const int lane = tile::lane_again();
#pragma unroll
    for (int f = 0; f < kOutFragments; ++f) W::clear(state.o[f]);
    if constexpr (kCodes) state.rounded.clear();
#pragma unroll
    for (int s = 0; s < W::kSlots; ++s) state.softmax.clear(s);
    state.visible.begin(item, row_wave * C::kWaveRows, lane);
  }

  // --- One tile. `start_next(n)` is called after the read of keys n has been used, for work on
  // later tiles.
  template <class StartNext>
  MLA_DEVICE void step(lds_t tile_base, const Queries& queries, State& state, float scale,
                       const StartNext& start_next) {
    typename W::Scores s[kScoreFragments];
    const bool grouped = visible_scores(tile_base, queries, state, s, start_next);
    typename Format::Values::RowScales scales;
    Format::Values::load_scales(scales, tile_base);
    bool moves = false;
    if constexpr (kLazyShare) {
      moves = tile::any(state.softmax.exceeded(s, scale, C::kOriginSlack));
    } else {
      follow(state, scale, s, true);
    }
    if (state.visible.hides_values()) {
      exclude_from_report_begin();
      if constexpr (!kSharedP || kLazyShare) block_barrier();
      Format::template hide_unseen<kThreads>(tile_base, state.visible.first_hidden(),
                                             wave * tile::kWave + tile::lane_again());
      if constexpr (!kSharedP) block_barrier();
      Format::Values::load_scales(scales, tile_base);
      exclude_from_report_end();
    }
    const typename Format::Values values(tile_base, col_wave, tile::lane_again());
    Probabilities p;
    ValueReads reads;
    if constexpr (kLazyShare) {
      if (!moves) state.softmax.exponentials(s, scale);
      between.store_flag(moves);
      between.store_p(s);
      block_barrier();
      between.load_p(p.of_step);
      const float flags = between.read_flags();
      begin_reads(values, reads);
      if (between.some(flags)) {
        exclude_from_report_begin();
        follow(state, scale, s, moves);
        between.store_p(s);
        block_barrier();
        between.load_p(p.of_step);
        exclude_from_report_end();
      }
    } else {
      if constexpr (kSharedP) {
        between.store_p(s);
        block_barrier();
      }
      begin_reads(values, reads);
    }
    if constexpr (Layout::kRowScales) {
      if (grouped) [[unlikely]] {
        exclude_from_report_begin();
        values.keep_p(stages + kKeptAt, s);
        exclude_from_report_end();
      }
      values.make_p(p.of_step, s, scales);
    }
    accumulate(values, reads, s, p, state, grouped, start_next);
  }

  // Computes scores, -inf where a row does not see the key. Returns true if the scales of some row
  // differ.
  template <class StartNext>
  MLA_DEVICE bool visible_scores(lds_t tile_base, const Queries& queries, const State& state,
                                 typename W::Scores (&s)[kScoreFragments],
                                 const StartNext& start_next) const {
    typename Format::Keys keys(tile_base, col_wave, tile::lane_again());
    score(keys, queries, s, start_next);
    bool grouped = false;
    if constexpr (Layout::kRowScales) {
      // Scales are checked late, when they have surely arrived. All waves find the same.
      grouped = keys.grouped();
      if (keys.odd()) [[unlikely]] {
        exclude_from_report_begin();
        Format::template settle_scales<kThreads>(tile_base);
        keys.score_exactly(queries.q, s);
        exclude_from_report_end();
      }
    }
    if (state.visible.masked()) {
      hide_unseen_scores<Format>(state.visible, col_wave * kWaveCols, s);
    }
    return grouped;
  }

  // Lets origins follow the maxima and turns scores into probabilities. If `scores` is false, `s`
  // holds probabilities already, and they are rescaled.
  MLA_DEVICE void follow(State& state, float scale, typename W::Scores (&s)[kScoreFragments],
                         bool scores) const {
    float factor[W::kSlots];
    const auto share_all = [&](float(&top)[W::kSlots]) {
      if constexpr (kSharedP) between.maximum(top);
    };
    bool moved;
    if constexpr (kCodes) {
      moved = state.rounded.update(state.softmax, s, scale, C::kOriginSlack, factor);
    } else if (!kLazyShare || scores) {
      moved = state.softmax.update(s, scale, C::kOriginSlack, factor, share_all);
    } else {
      moved = state.softmax.follow_others(s, scale, C::kOriginSlack, factor, share_all);
    }
    if (moved) {
      exclude_from_report_begin();
#pragma unroll
      for (int f = 0; f < kOutFragments; ++f) {
        schedule_fence();
        W::scale(state.o[f], factor);
      }
      if constexpr (kCodes) state.rounded.scale(factor);
      exclude_from_report_end();
    }
  }

  // If a wave is alone on its SIMD, no other wave works while it waits for LDS. Reads then run
  // kKeysAhead products ahead of their use, in an order that the compiler must keep.
  template <class StartNext>
  MLA_DEVICE void score(typename Format::Keys& keys, const Queries& queries,
                        typename W::Scores (&s)[kScoreFragments],
                        const StartNext& start_next) const {
    using Keys = typename Format::Keys;
    using Raw = typename Keys::Raw;
#pragma unroll
    for (int f = 0; f < kScoreFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) s[f].set(i, 0.0f);
    }
    const auto use = [&](const Raw& raw, auto n) {
      // All operands are widened before the first is used, so that no product waits for its own.
      typename W::K k[Keys::products(n)];
#pragma unroll
      for (int j = 0; j < Keys::products(n); ++j) keys.widen(k[j], raw, n, j);
#pragma unroll
      for (int j = 0; j < Keys::products(n); ++j) {
        Keys::multiply(s[Keys::fragment(n)], queries.q[Keys::step(n, j)], k[j], n);
      }
    };
    if constexpr (C::kKeysAhead == 0) {
      for_constants<Keys::kReads>([&](auto n) {
        if constexpr (n % 4 == 0) schedule_fence();
        Raw raw;
        keys.load(raw, n);
        use(raw, n);
        start_next(n);
      });
    } else {
      read_ahead<Raw, Keys::kReads, C::kKeysAhead>([&](Raw& raw, int n) { keys.load(raw, n); },
                                                   [&](const Raw& raw, auto n) {
                                                     use(raw, n);
                                                     start_next(n);
                                                   });
    }
  }

  // Returns true if a read of values is the first of its step and group of columns.
  MLA_DEVICE static constexpr bool begins_step(int n) {
    return n % (Format::Values::kGroupReads / kPvSteps) == 0;
  }
  MLA_DEVICE static void begin_reads(const typename Format::Values& values, ValueReads& reads) {
    if constexpr (C::kValuesAhead > 0) {
      read_first<Format::Values::kReads>(
          reads.first, [&](typename Format::Values::Raw& raw, int n) { values.load(raw, n); });
    }
  }
  template <class StartNext>
  MLA_DEVICE void accumulate(const typename Format::Values& values, ValueReads& reads,
                             const typename W::Scores (&s)[kScoreFragments], Probabilities& held,
                             State& state, bool grouped, const StartNext& start_next) const {
    using Values = typename Format::Values;
    using Raw = typename Values::Raw;
    auto& p = held.of_step;
    if constexpr (kCodes) {
#pragma unroll
      for (int step = 0; step < kPvSteps; ++step) state.rounded.make_p(p[step], s, step);
    } else if constexpr (kHeldP && !kSharedP && !Layout::kRowScales) {
#pragma unroll
      for (int step = 0; step < kPvSteps; ++step) W::make_p(p[step], s, step);
    }
    // Operands of a read are widened before the operands of the previous read are used.
    constexpr int kLag = Layout::kFp8 && kHeldP ? 1 : 0;
    typename W::V v[kLag + 1];
    const auto multiply = [&](auto n) {
      if constexpr (!kHeldP) {
        static_assert(kSharedP);
        if (begins_step(n)) {
          between.load_p(p[0], Values::step(n));
        }
      }
      if constexpr (Layout::kRowScales) {
        if (n > 0 && n % Values::kGroupReads == 0 && grouped) [[unlikely]] {
          exclude_from_report_begin();
          values.make_p_of_group(p, stages + kKeptAt, n);
          exclude_from_report_end();
        }
      }
      W::outputs(state.o[Values::fragment(n)], p[kHeldP ? Values::step(n) : 0], v[n % (kLag + 1)]);
    };
    const auto use = [&](const Raw& raw, auto n) {
      values.widen(v[n % (kLag + 1)], raw);
      if constexpr (n >= kLag) multiply(Constant<n - kLag>());
      start_next(Constant<Format::Keys::kReads + n>());
    };
    if constexpr (C::kValuesAhead == 0) {
      for_constants<Values::kReads>([&](auto n) {
        if constexpr (n % 4 == 0) schedule_fence();
        Raw raw;
        values.load(raw, n);
        use(raw, n);
      });
    } else {
      read_on<Values::kReads>(
          reads.first, [&](Raw& raw, int n) { values.load(raw, n); }, use);
    }
    if constexpr (kLag > 0) multiply(Constant<Values::kReads - 1>());
  }

  // --- Results.
  MLA_DEVICE void finish(const Item& item, State& state) {
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot)
      state.softmax.sum[slot] = W::row_sum(state.softmax.sum[slot]);
    if constexpr (kSharedP) between.add(state.softmax.sum);
    // Opaque copies: without them the compiler keeps derived values in scalar registers all loop.
    const int columns = (kSharedP ? tile::again(col_wave) : col_wave) * kOutFragments;
    const int first = row_wave * C::kWaveRows;
    if constexpr (Source::kLists) {
      Args again = args;
      again.o_is_f32 = tile::again(args.o_is_f32);
      write_results<Format, kOutFragments, C::kLora, kKind>(again, item, state, first, columns);
    } else {
      write_results<Format, kOutFragments, C::kLora, kKind>(args, item, state, first, columns);
    }
  }

  const Args& args;
  const int wave, row_wave, col_wave;
  const lds_t stages, entries;
  const Between between;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_ATTEND_H_
