// The computing groups of attend_wgmma.h.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_CONSUMER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_CONSUMER_H_

#include "kernels/hip/device/kv/window_source.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_layout.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_rows.h"
#include "kernels/hip/device/sm90/merge/merge_parts.h"
#include "kernels/hip/device/sm90/merge/merge_pieces.h"

namespace mla::kernels::hip {

// Group kGroup of the two groups that compute. Args is AttendArgs, BoxArgs, SplitArgs or
// StreamArgs.
template <class C, int kGroup, class Args = AttendArgs>
class WgmmaConsumer {
 public:
  using L = WgmmaLayout<C>;

  MLA_DEVICE WgmmaConsumer(const Args& a, const L& layout)
      : args(a), shared(layout), lane(tile::lane_index()), warp(tile::wave_index() & 3) {}

  // The item is loaded again for its results, because keeping it would take registers.
  MLA_DEVICE void attend(const Item& item, int index, int share) {
    State state;
    const Source source(args, item);
    const int kv_begin = source.begin, kv_end = source.end;
    clear(item, kv_end, state);
    const int tiles = (kv_end - kv_begin + C::kTileKv - 1) / C::kTileKv;
    state.any = tiles > 0;
    if (state.any) {
      const int unmasked_end = L::kLists ? kv_end : item.limit(0);
      const Masks masks{unmasked_end, unmasked_end < kv_end,
                        item.segment->softmax_scale * layer_scale(item) * kLog2e};
      attend_tiles(kv_begin, masks, tiles, state);
      add_sums(state);
    }
    const Item results = load_item<L::kRows>(args, index, share);
    if constexpr (Args::kSplit) {
      write_partial(results, state);
      // After the first barrier of the merge, both groups have finished with the slots.
      merge_parts<L::kRows, PartOrder::kExchanged>(args, {index, share}, shared.slot(0), [] {
        tile::named_sync<kGroupsBarrier, 2 * L::kGroupThreads>();
      });
    } else if (results.work.partial_row >= 0) {
      write_partial(results, state);
      if constexpr (Args::kStreams) {
        const auto again = static_cast<int>(tile::unknown(static_cast<uint32_t>(index)));
        MergePieces<L::kRows>(args, load_item<L::kRows>(args, again, share), share,
                              tile::unknown(shared.turn()))
            .run([] { tile::named_sync<kGroupsBarrier, 2 * L::kGroupThreads>(); });
      }
    } else {
      write(results, state);
    }
    if constexpr (Args::kStreams) finish(args.work_info[index].segment);
  }

 private:
  using lds_t = tile::lds_t;
  using Source = RowSource<C::kAttention>;
  static constexpr int kOther = kGroup ^ 1;
  using Rows = WarpgroupRows<C::kTileKv>;
  using Scores = typename Rows::Scores[1];
  static constexpr int kScores = Rows::kScoreElems;
  static constexpr int kColumns = C::kLora / 2;  // output columns of the group
  static constexpr int kOutputs = kColumns / 2;  // accumulators a thread
  static constexpr float kSlack = 8.0f;          // probabilities stay below 2^8
  static constexpr int kGroupBarrier = 1;        // named barriers: this one and the next
  static constexpr int kGroupsBarrier = 3;       // for both groups
  // Phases counted: tiles of the own slot, tiles of the other one, items with queries.
  static constexpr int kTiles = 0, kOthers = 1, kItems = 2;

  // Counts this block's share of the item's outputs as written.
  MLA_DEVICE void finish(int segment) const {
    tile::named_sync<kGroupsBarrier, 2 * L::kGroupThreads>();
    if (thread_index() == 0) {
      tile::count_finished(args.finished + segment, args.segment_count);
    }
  }

  struct State {
    float o[kOutputs];
    typename Rows::Softmax softmax;  // of this group's tiles; origins cover both groups' tiles
    float rounded_sum[2];
    int limit[2];
    bool any;  // there are tiles
  };
  struct Masks {
    int unmasked_end;  // kv rows below it are seen by all packed rows
    bool ragged;       // some packed rows do not see all kv rows of the item
    float scale;
  };

  // Common scale of all values of the layer.
  MLA_DEVICE static float layer_scale(const Item& item) {
    return C::kFormat == KvFormat::kFp8Tensor ? item.segment->kv_scale : 1.0f;
  }

  // Packed row of this thread's slot (0 or 1).
  MLA_DEVICE int row(int slot) const { return Rows::row(warp, lane, slot); }

  MLA_DEVICE void clear(const Item& item, int kv_end, State& state) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) state.o[i] = 0.0f;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int p = row(slot);
      state.softmax.clear(slot);
      state.rounded_sum[slot] = 0.0f;
      state.limit[slot] = !L::kLists && p < item.rows ? item.limit(p) : kv_end;
    }
  }

  // Every second tile is the group's own. For the other tiles it takes the other group's
  // probabilities. Group 1 does so after computing its own scores, so that it does not idle until
  // they are published.
  MLA_DEVICE void attend_tiles(int kv_begin, const Masks& masks, int tiles, State& state) {
    const uint32_t query_phase = phases.template next<kItems>();
    if (kGroup >= tiles) release(shared.queries_emptied());
    for (int t = kGroup; t <= tiles; t += 2) {
      if (t == tiles || (kGroup == 0 && t > 0)) {
        start_other(state);
        finish_other(state);
      }
      if (t == tiles) break;
      Scores s;
      start_scores(s[0].c, t == kGroup, query_phase);
      tile::wgmma_wait<0>();
      tile::pin(s[0].c);
      release(shared.scored(kGroup));
      if (t + 2 >= tiles) release(shared.queries_emptied());
      if (kGroup == 1) start_other(state);
      const int first = kv_begin + t * C::kTileKv;
      uint32_t p[kScores / 2];
      const bool unseen = some_unseen();
      const Shift shift = make_probabilities(s, p, masks, first, unseen, state);
      // Unseen entries of a window lead to a row that is seen, so no values need hiding.
      const bool hide =
          L::kLists ? C::kAttention == AttentionKind::kSparse && unseen
                    : (Args::kBoxes || masks.ragged) && first + C::kTileKv > masks.unmasked_end;
      publish(p, hide, L::kLists ? 0 : masks.unmasked_end - first, state);
      if (kGroup == 1) finish_other(state);
      move_outputs(shift, state);
      add_own(p, state);
      add_rounded(p, state);  // overlaps with the matrix unit
      tile::wgmma_wait<0>();
      tile::pin(state.o);
      // Each thread that hid values has read some itself, so all threads arrive.
      tile::barrier_arrive(shared.emptied(kGroup, kGroup));
    }
  }

  // Starts the products with the other group's tile, once its probabilities are there.
  MLA_DEVICE void start_other(State& state) {
    tile::barrier_wait(shared.published(kOther), phases.template next<kOthers>());
    move_outputs(adopt(state), state);
    add_other(state);
  }

  MLA_DEVICE void finish_other(State& state) const {
    tile::wgmma_wait<0>();
    tile::pin(state.o);
    release(shared.emptied(kOther, kGroup));
  }

  // This warp has finished with the memory that the barrier guards.
  MLA_DEVICE void release(lds_t barrier) const {
    if (lane == 0) tile::barrier_arrive(barrier);
  }
  MLA_DEVICE void group_barrier() const {
    tile::named_sync<kGroupBarrier + kGroup, L::kGroupThreads>();
  }

  // Starts the products of the group's next tile, part by part as its columns arrive. For the first
  // tile of an item it also waits for the queries.
  MLA_DEVICE void start_scores(float (&s)[kScores], bool first, uint32_t query_phase) {
    const uint32_t phase = phases.template next<kTiles>();
    const uint64_t q = tile::along_rows(shared.queries());
    const uint64_t k = tile::along_rows(shared.slot(kGroup));
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      if (first) {
        // Queries arrive in the order of slot 0.
        const int query_part = kGroup == 0 || part == L::kParts - 1 ? part : L::kParts - 1;
        tile::barrier_wait(shared.queries_filled(query_part), query_phase);
      }
      tile::barrier_wait(shared.filled(kGroup, part), phase);
      // The copy engine writes as products read: through the async proxy. Queries come otherwise.
      if (!Args::kBoxes || first) tile::publish_shared();
      tile::wgmma_begin();
      constexpr int kSteps = 8;
#pragma unroll
      for (int step = 0; step < kSteps + (L::kRotated && part == L::kParts - 1 ? 4 : 0); ++step) {
        const int block = L::block(kGroup, 2 * part + step / 4);
        const int offset = (block * L::kBlockBytes + (step & 3) * 32) >> 4;
        tile::wgmma_64x64(s, q + offset, k + offset, part > 0 || step > 0);
      }
    }
    tile::wgmma_commit();
  }

  // A change of origins rescales the sums so far by these factors.
  struct Shift {
    bool moved;  // in any row of the warp
    float factor[2];
  };
  // Rescales the sums; move_outputs rescales the outputs.
  MLA_DEVICE static Shift set_origins(const float (&origin)[2], State& state) {
    auto& softmax = state.softmax;
    Shift shift;
    shift.moved = tile::any(origin[0] != softmax.origin[0] || origin[1] != softmax.origin[1]);
    if (!shift.moved) return shift;
    float from[2];
    softmax.move_to(origin, from, shift.factor);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) state.rounded_sum[slot] *= shift.factor[slot];
    return shift;
  }
  // Takes over the origins that the other group has published.
  MLA_DEVICE Shift adopt(State& state) const {
    const float origin[2] = {tile::load_float(shared.origin(kOther, row(0))),
                             tile::load_float(shared.origin(kOther, row(1)))};
    return set_origins(origin, state);
  }
  MLA_DEVICE static void move_outputs(const Shift& shift, State& state) {
    if (!shift.moved) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) state.o[i] *= shift.factor[(i >> 1) & 1];
  }

  // Turns scores into probabilities, and rounds these in the order of a wgmma operand in registers.
  MLA_DEVICE Shift make_probabilities(Scores& s, uint32_t (&p)[kScores / 2], const Masks& masks,
                                      int first, bool unseen, State& state) const {
    float scale = masks.scale;
    if (!(scale > 0.0f)) {  // otherwise their maximum would not belong to the largest logit
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[0].c[i] *= scale;
      scale = 1.0f;
    }
    if (unseen) mask_unseen(s[0].c);
    if (!L::kLists && first + C::kTileKv > masks.unmasked_end)
      Rows::hide(s[0], state.limit, first, lane);
    float top[2], origin[2];
    state.softmax.maxima(s, top);
    state.softmax.targets(top, scale, kSlack, origin);
    const Shift shift = set_origins(origin, state);
    state.softmax.exponentials(s, scale);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) p[i >> 1] = pack_bf16(s[0].c[i], s[0].c[i + 1]);
    return shift;
  }
  // With lists: returns true if the query row does not see some rows of the own tile.
  MLA_DEVICE bool some_unseen() const {
    if constexpr (!L::kLists) return false;
    const Chunk a = tile::load_chunk_shared(shared.seen(kGroup, 0));
    const Chunk b = tile::load_chunk_shared(shared.seen(kGroup, 4));
    return (a.w[0] & a.w[1] & a.w[2] & a.w[3] & b.w[0] & b.w[1] & b.w[2] & b.w[3]) != ~0u;
  }
  MLA_DEVICE void mask_unseen(float (&s)[kScores]) const {
    // Hidden from the compiler: it would keep what follows from the lane over the loop.
    const auto in_row = static_cast<int>(tile::unknown(static_cast<uint32_t>(lane))) & 3;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const uint32_t word = float_to_bits(tile::load_float(shared.seen(kGroup, i >> 2)));
      const int bit = 4 * (2 * in_row + (i & 1));
      s[i] = (word >> bit & 1) != 0 ? s[i] : negative_infinity();
    }
  }
  MLA_DEVICE static void add_rounded(const uint32_t (&p)[kScores / 2], State& state) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      state.rounded_sum[i & 1] += bits_to_float(p[i] << 16) + bits_to_float(p[i] & 0xffff0000u);
    }
  }

  // Passes the own tile's probabilities, origins and values to the other group. If `hide`, values
  // of rows from `first_hidden` on that are not finite are zeroed first, because some packed rows
  // do not see them, or because they came with a box past the item's end.
  MLA_DEVICE void publish(const uint32_t (&p)[kScores / 2], bool hide, int first_hidden,
                          const State& state) const {
    // P overwrites the rope columns, so all warps' scores must be complete.
    tile::barrier_wait(shared.scored(kGroup), phases.template last<kTiles>());
    const int matrix_row = warp * 16 + (lane & 15);
    // With lists, whose loop has no register to keep four places in, three follow from the first.
    const auto kept = [](lds_t place) { return L::kLists ? tile::unknown(place) : place; };
    const lds_t first_place =
        kept(tile::chunk_at<L::kRows>(shared.probabilities(kGroup), matrix_row, lane >> 4));
#pragma unroll
    for (int i = 0; i < kScores / 2; i += 4) {
      const lds_t place = L::kLists ? first_place ^ static_cast<uint32_t>((i >> 1) * 16)
                                    : tile::chunk_at<L::kRows>(shared.probabilities(kGroup),
                                                               matrix_row, (i >> 1) + (lane >> 4));
      tile::store_matrices(place, p[i], p[i + 1], p[i + 2], p[i + 3]);
    }
    if ((lane & 3) == 0) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        tile::store_float(shared.origin(kGroup, row(slot)), state.softmax.origin[slot]);
      }
    }
    if (hide) {
      if constexpr (L::kLists) {
        hide_all_values();
      } else {
        hide_unseen_values<C, L::kGroupThreads>(shared.slot(kGroup), first_hidden,
                                                thread_index() & (L::kGroupThreads - 1));
      }
    }
    tile::publish_shared();
    if (hide) group_barrier();
    tile::barrier_arrive(shared.published(kGroup));
  }

  // With lists: as hide_unseen_values for all rows, in the order of memory, which takes few
  // registers.
  MLA_DEVICE void hide_all_values() const {
    const auto thread = tile::unknown(static_cast<uint32_t>(thread_index())) &
                        static_cast<uint32_t>(L::kGroupThreads - 1);
    const lds_t end = shared.slot(kGroup) + 2 * L::kHalfBlocks * L::kBlockBytes;
#pragma unroll 1
    for (lds_t at = shared.slot(kGroup) + thread * 16; at < end; at += L::kGroupThreads * 16) {
      Chunk c = tile::load_chunk_shared(at);
      if (clear_non_finite(c)) tile::store_chunk(at, c);
    }
  }

  MLA_DEVICE uint64_t values(int slot, int step) const {
    return tile::down_rows(
        shared.slot(slot) + kGroup * L::kHalfBlocks * L::kBlockBytes + step * 2048, L::kBlockBytes);
  }
  MLA_DEVICE void add_own(const uint32_t (&p)[kScores / 2], State& state) const {
    tile::pin(state.o);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < C::kTileKv / 16; ++step) {
      tile::wgmma_64x256(state.o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                         values(kGroup, step));
    }
    tile::wgmma_commit();
  }
  MLA_DEVICE void add_other(State& state) const {
    tile::pin(state.o);
    tile::wgmma_begin();
    const uint64_t p = tile::along_rows(shared.probabilities(kOther));
#pragma unroll
    for (int step = 0; step < C::kTileKv / 16; ++step) {
      tile::wgmma_64x256(state.o, p + step * 2, values(kOther, step));
    }
    tile::wgmma_commit();
  }

  // Adds up the sums over the lanes of a row and both groups, whose origins are equal by now.
  MLA_DEVICE void add_sums(State& state) const {
    const uint32_t set = phases.template last<kItems>();
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      state.softmax.sum[slot] = Rows::row_sum(state.softmax.sum[slot]);
      state.rounded_sum[slot] = Rows::row_sum(state.rounded_sum[slot]);
      if ((lane & 3) == 0) {
        tile::store_float(shared.sums(set, kGroup, row(slot)), state.softmax.sum[slot]);
        tile::store_float(shared.sums(set, kGroup, row(slot)) + 4, state.rounded_sum[slot]);
      }
    }
    tile::barrier_arrive(shared.summed());
    tile::barrier_wait(shared.summed(), set);
    if constexpr (L::kLists) return;  // see sums_of
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      state.softmax.sum[slot] += tile::load_float(shared.sums(set, kOther, row(slot)));
      state.rounded_sum[slot] += tile::load_float(shared.sums(set, kOther, row(slot)) + 4);
    }
  }
  // A row's sums over both groups. With lists they stay in shared memory until they are needed,
  // because results take all registers.
  struct Sums {
    float exact, rounded;
  };
  MLA_DEVICE Sums sums_of(int slot, const State& state) const {
    if constexpr (!L::kLists) return {state.softmax.sum[slot], state.rounded_sum[slot]};
    Sums sums{0.0f, 0.0f};
    if (!state.any) return sums;
    const uint32_t set = phases.template last<kItems>();
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      sums.exact += tile::load_float(shared.sums(set, group, row(slot)));
      sums.rounded += tile::load_float(shared.sums(set, group, row(slot)) + 4);
    }
    return sums;
  }

  // Stores partial rows in the order PartOrder::kExchanged. It is short code on purpose: in a small
  // launch code comes from memory, not from a cache.
  MLA_DEVICE void write_partial(const Item& item, State& state) const {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int p = row(slot);
      const int64_t target = static_cast<int64_t>(item.work.partial_row) + item.first + p;
      const Sums sums = sums_of(slot, state);
      const RowScale scale(state.softmax.origin[slot], sums.exact);
      const float inverse = scale.empty ? 0.0f : layer_scale(item) / sums.rounded;
      if (tile::any(scale.empty)) {  // zero times a non-finite value is not zero
#pragma unroll
        for (int i = 2 * slot; i < kOutputs; i += 4) {
          state.o[i] = scale.empty ? 0.0f : state.o[i];
          state.o[i + 1] = scale.empty ? 0.0f : state.o[i + 1];
        }
      }
      if (p >= item.rows) continue;
      if (kGroup == 0 && (lane & 3) == 0) args.partial_lse[target] = scale.lse;
      float* output = args.partial_o + target * C::kLora + kGroup * kColumns + 4 * (lane & 3);
#pragma unroll
      for (int i = 2 * slot; i < kOutputs; i += 8) {
        const uint32_t words[4] = {
            float_to_bits(state.o[i] * inverse), float_to_bits(state.o[i + 1] * inverse),
            float_to_bits(state.o[i + 4] * inverse), float_to_bits(state.o[i + 5] * inverse)};
        store_words(output + 2 * (i - 2 * slot), words);
      }
    }
  }

  MLA_DEVICE void write(const Item& item, State& state) const {
    // Streamed kernels have no registers left for wide stores of fp32 rows.
    const bool wide = (!Args::kStreams || args.o_is_f32 == 0) &&
                      aligned_results(args, item, args.o_is_f32 ? 4 : 8);
    // With lists, pairs of results that are not aligned to eight are stored one by one: a second
    // answer would be kept over all stores.
    const bool aligned = !L::kLists && aligned_results(args, item, 2);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int p = row(slot);
      const bool mine = p < item.rows;
      const RowTarget target(args, item, mine ? p : 0, C::kLora);
      const Sums sums = sums_of(slot, state);
      const RowScale scale(state.softmax.origin[slot], sums.exact);
      // The outputs are sums over rounded probabilities, so they are divided by the sum of the
      // rounded ones.
      float inverse = scale.empty ? 0.0f : layer_scale(item) / sums.rounded;
      if constexpr (C::kAttention == AttentionKind::kWindow) {
        inverse *= sink_factor(args.windows[item.work.segment], item.head(mine ? p : 0), scale.lse);
      }
#pragma unroll
      for (int i = 2 * slot; i < kOutputs; i += 4) {
        state.o[i] = scale.empty ? 0.0f : state.o[i] * inverse;
        state.o[i + 1] = scale.empty ? 0.0f : state.o[i + 1] * inverse;
      }
      if (kGroup == 0 && mine && (lane & 3) == 0 && target.lse != nullptr) *target.lse = scale.lse;
      const int64_t index = target.index + kGroup * kColumns;
      const WgmmaRows<kOutputs> rows{state.o, lane};
      if (!wide) {
        rows.write_pairs(target, index, slot, mine, aligned);
      } else if (!Args::kStreams && target.f32) {
        rows.write_f32(target, index, slot, mine);
      } else {
        rows.write_bf16(target, index, slot, mine);
      }
    }
  }

  const Args& args;
  const L shared;
  const int lane, warp;
  Phases<3, L::kLists> phases;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_CONSUMER_H_
