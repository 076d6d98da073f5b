// Attention of the expanded form on sm_90a, with warpgroup products: 128 query rows of one head
// over tiles of kTile KV rows.
//
//   warp 0:            K [kTile x dim] and V [kTile x value] of the next tiles, by bulk copies, two
//                      deep
//   warps 1 to 3:      Q [128 x dim] of the next item, and its records
//   warpgroups 1, 2:   64 query rows each
//
//        S = Q K^T (of tile t + 1)  |  softmax of t + 1  ...
//        O += P V  (of tile t)      |
//
// The two warpgroups take turns: one has the matrix unit while the other computes exponentials
// (named barriers kTurn). P stays in registers, because the accumulators of S have the layout of
// operands of the second product.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPANDED_WGMMA_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPANDED_WGMMA_H_

#include "kernels/hip/device/primitives/expanded_item.h"
#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/prefill/expanded_results.h"

namespace mla::kernels::hip {

template <ExpandedDims kDims>
class ExpandedWgmma {
 public:
  static constexpr int kThreads = 384;
  // KV rows a tile. Accumulators of 64 x 256, and two stages of such wide rows, leave no room for
  // more.
  static constexpr int kTile = kDims.value > 128 ? 64 : 128;
  static constexpr int kStages = 2;
  static constexpr int kDim = kDims.nope + kExpandedRope;
  static constexpr int kQPanelBytes = kExpandedRows * 128, kPanelBytes = kTile * 128;
  static constexpr int kQBytes = kExpandedRows * kDim * 2;
  static constexpr int kKBytes = kTile * kDim * 2;
  static constexpr int kVBytes = kTile * kDims.value * 2;
  static constexpr int kBarriers = 2 + 4 * kStages;
  static constexpr int kBarrierBytes = 128;
  static_assert(kBarriers * 8 <= kBarrierBytes);
  // An item and its segment, two deep: results are written while the next item is copied.
  struct Records {
    ExpandedItem item;
    SegmentRecord segment;
  };
  static constexpr int kRecordBytes = 256;
  static_assert(sizeof(Records) <= kRecordBytes && sizeof(Records) % 4 == 0);
  static constexpr int kSharedBytes =
      kQBytes + kStages * (kKBytes + kVBytes) + kBarrierBytes + 2 * kRecordBytes;
  static_assert(kExpandedRows % kTile == 0 && kFewKeys % kTile == 0 && kStages == 2);
  static_assert(kVBytes <= kKBytes);  // rests of values overwrite keys

  MLA_DEVICE static void run(const ExpandedArgs& args) {
    const ExpandedWgmma self(args);
    if (thread_index() == 0) self.init_barriers();
    block_barrier();
    if (self.group == 0) {
      tile::give_registers<40>();
      if (tile::wave_index() == 0) {
        if (thread_index() == 0) self.copy_tiles();
      } else {
        self.bring_items();
      }
    } else {
      tile::take_registers<232>();
      self.attend_items();
    }
  }

 private:
  using Rows = WarpgroupRows<kTile>;
  using Scores = typename Rows::Scores[1];
  using Results = ExpandedResults<kDims.value>;
  static constexpr int kScores = Rows::kScoreElems;
  static constexpr int kOutputs = Results::kOutputs;
  static constexpr int kKeyPanels = kDims.key_panels(), kValuePanels = kDims.value_panels();
  static_assert(kRotatedPanels == 1);
  static constexpr float kSlack = 0.0f;
  // Named barriers.
  static constexpr int kTurn = 1;  // warpgroup 1's; kTurn + 1 is warpgroup 2's
  static constexpr int kBoth = 3;

  struct State {
    float o[kOutputs];
    typename Rows::Softmax softmax;
    int limit[2];
  };
  // A stage and the parity of its current use.
  struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    MLA_DEVICE void next() {
      stage ^= 1;
      parity ^= stage == 0 ? 1 : 0;
    }
  };

  MLA_DEVICE explicit ExpandedWgmma(const ExpandedArgs& a)
      : args(a),
        group(tile::wave_index() >> 2),
        thread(thread_index() & 127),
        lane(thread & 31),
        results{a, group - 1, thread >> 5, lane} {
    q_tile = tile::shared_base<kSharedBytes>();
    k_tiles = q_tile + kQBytes;
    v_tiles = k_tiles + kStages * kKBytes;
    barriers = v_tiles + kStages * kVBytes;
  }
  MLA_DEVICE static Records* records(int slot) {
    constexpr int kAt = kSharedBytes - 2 * kRecordBytes;
    return reinterpret_cast<Records*>(tile::shared_pointer(kAt + slot * kRecordBytes));
  }
  MLA_DEVICE uint32_t q_full() const { return barriers; }
  MLA_DEVICE uint32_t q_empty() const { return barriers + 8; }
  MLA_DEVICE uint32_t k_full(int s) const { return barriers + 16 + s * 32; }
  MLA_DEVICE uint32_t k_empty(int s) const { return barriers + 24 + s * 32; }
  MLA_DEVICE uint32_t v_full(int s) const { return barriers + 32 + s * 32; }
  MLA_DEVICE uint32_t v_empty(int s) const { return barriers + 40 + s * 32; }
  MLA_DEVICE void init_barriers() const {
    tile::barrier_init(q_full(), 96);
    tile::barrier_init(q_empty(), 2);
    for (int s = 0; s < kStages; ++s) {
      tile::barrier_init(k_full(s), 1);
      tile::barrier_init(k_empty(s), 2);
      tile::barrier_init(v_full(s), 1);
      tile::barrier_init(v_empty(s), 2);
    }
    tile::barrier_init_visible();
  }
  MLA_DEVICE static int tiles_of(const Item& item) {
    return (item.work.kv_end - item.work.kv_begin + kTile - 1) / kTile;
  }

  // --- Copies.
  MLA_DEVICE void copy_tiles() const {
    Ring ring;
    for_each_expanded(args, [&](const ExpandedItem& e, const Item& item) {
      const uint8_t* keys = args.workspace + e.keys;
      const uint8_t* rotated = args.workspace + e.rotated;
      const int64_t panel = e.panel_bytes;
      const int tiles = tiles_of(item);
      for (int t = 0; t < tiles; ++t) {
        const uint32_t k = k_tiles + ring.stage * kKBytes, v = v_tiles + ring.stage * kVBytes;
        tile::barrier_wait(k_empty(ring.stage), ring.parity ^ 1);
        tile::barrier_arrive_expecting(k_full(ring.stage), kKBytes);
#pragma unroll
        for (int i = 0; i < kKeyPanels; ++i) {
          tile::bulk_copy(k + i * kPanelBytes, keys + i * panel, kPanelBytes, k_full(ring.stage));
        }
        tile::bulk_copy(k + kKeyPanels * kPanelBytes, rotated, kPanelBytes, k_full(ring.stage));
        tile::barrier_wait(v_empty(ring.stage), ring.parity ^ 1);
        tile::barrier_arrive_expecting(v_full(ring.stage), kVBytes);
#pragma unroll
        for (int i = 0; i < kValuePanels; ++i) {
          tile::bulk_copy(v + i * kPanelBytes, keys + (kKeyPanels + i) * panel, kPanelBytes,
                          v_full(ring.stage));
        }
        keys += kPanelBytes;
        rotated += kPanelBytes;
        ring.next();
      }
    });
  }

  // Records are read ahead and queries are prefetched, so that the copy takes little time once the
  // tile of the queries is free.
  MLA_DEVICE void bring_items() const {
    const int wave = tile::wave_index() - 1;
    uint32_t parity = 0;
    for_each_expanded(args, [&](const ExpandedItem& e, const Item& item) {
      prefetch_queries(item, wave * 32 + lane);
      const auto* from_item = reinterpret_cast<const uint32_t*>(&e);
      const auto* from_segment = reinterpret_cast<const uint32_t*>(item.segment);
      constexpr int kItemWords = sizeof(ExpandedItem) / 4,
                    kSegmentWords = sizeof(SegmentRecord) / 4;
      const int word = wave * 32 + lane;
      static_assert(kItemWords + kSegmentWords <= 96);
      uint32_t value = 0;
      if (word < kItemWords) {
        value = from_item[word];
      } else if (word < kItemWords + kSegmentWords) {
        value = from_segment[word - kItemWords];
      }
      tile::barrier_wait(q_empty(), parity ^ 1);
      if (word < kItemWords + kSegmentWords) {
        reinterpret_cast<uint32_t*>(records(parity))[word] = value;
      }
      copy_queries(item, word);
      tile::close_copies();
      tile::wait_for_copies<0>();
      tile::publish_shared();
      tile::barrier_arrive(q_full());
      parity ^= 1;
    });
  }
  MLA_DEVICE void copy_queries(const Item& item, int t) const {
    const QueryLoader queries(item);
    if (queries.aligned) {
      copy_rows<true>(item, queries.row(0), t);
    } else {
      copy_rows<false>(item, queries.row(0), t);
    }
  }
  // Thread t of 96 copies chunk t % kChunks of every kRowsAtOnce-th row. Rows of one head are a
  // stride apart. Computing their addresses one by one with QueryLoader::row costs short items 8 %
  // of their time.
  template <bool kAligned>
  MLA_DEVICE void copy_rows(const Item& item, const uint16_t* queries, int t) const {
    constexpr int kChunks = kDim / 8, kRowsAtOnce = 96 / kChunks;
    static_assert(kRowsAtOnce * kChunks == 96);
    const int chunk = t % kChunks, first = t / kChunks;
    const uint16_t* first_row = queries + chunk * 8;
    const uint16_t* row = first_row + first * item.segment->q_row_stride;
    const int64_t stride = kRowsAtOnce * item.segment->q_row_stride;
#pragma unroll(kAligned ? 2 : 1)
    for (int p = first; p < kExpandedRows; p += kRowsAtOnce, row += stride) {
      QueryLoader::copy<kAligned>(tile::chunk_at<kExpandedRows>(q_tile, p, chunk),
                                  p < item.rows ? row : first_row);
    }
  }
  MLA_DEVICE static void prefetch_queries(const Item& item, int first) {
    const QueryLoader queries(item);
    for (int p = first; p < item.rows; p += 96) {
      const auto* row = reinterpret_cast<const uint8_t*>(queries.row(p));
#pragma unroll
      for (int at = 0; at < kDim * 2; at += 128) {
        tile::prefetch(row + at);
      }
    }
  }

  // --- Attention.
  MLA_DEVICE void await_turn() const { tile::named_wait(kTurn + group - 1, 256); }
  MLA_DEVICE void give_turn() const { tile::named_arrive(kTurn + 2 - group, 256); }
  MLA_DEVICE void release(uint32_t barrier) const {
    if (thread == 0) tile::barrier_arrive(barrier);
  }

  MLA_DEVICE void attend_items() const {
    Ring ring;
    uint32_t parity = 0;
    if (group == 2) give_turn();  // warpgroup 1 has the first turn
    const int items = args.unit_indptr[block_index() + 1] - args.unit_indptr[block_index()];
    for (int i = 0; i < items; ++i) {
      tile::barrier_wait(q_full(), parity);
      const Records& r = *records(parity);
      Item item = as_item(args, r.item);
      item.segment = &r.segment;
      attend(r.item, item, ring);
      parity ^= 1;
    }
    if (group == 1) await_turn();  // takes the turn that was given away last
  }

  MLA_DEVICE void attend(const ExpandedItem& e, const Item& item, Ring& ring) const {
    const int tiles = tiles_of(item);
    const float scale = item.segment->softmax_scale * item.segment->kv_scale * kLog2e;
    const int own = (group - 1) * 64;
    const int unmasked_end = item.limit(own < item.rows ? own : 0);
    State state;
    clear(e, item, state);
    int first = item.work.kv_begin, t = 0;
    if (sees_few(item)) {
      for (; t < tiles && first < kFewKeys; ++t, first += kTile) {
        attend_few(e, first, ring, state, unmasked_end, scale);
      }
    }
    if (t < tiles) {
      attend_tiles(ring, state, first, tiles - t, unmasked_end, scale);
    } else {
      // An item without tiles has no other barrier for both groups, and its records will be reused.
      if (tiles == 0) tile::named_wait(kBoth, 256);
      release(q_empty());
    }
    finish(item, state);
  }

  // Runs the tiles as in the drawing above. The first tile's scores and the last tile's outputs
  // overlap with nothing.
  MLA_DEVICE void attend_tiles(Ring& ring, State& state, int first, int tiles, int unmasked_end,
                               float scale) const {
    Scores s;
    float factor[2];
    uint32_t p[kScores / 2];
    tile::barrier_wait(k_full(ring.stage), ring.parity);
    await_turn();
    start_scores(ring.stage, s[0].c);
    give_turn();
    tile::wgmma_wait<0>();
    tile::pin(s[0].c);
    release(k_empty(ring.stage));
    if (tiles == 1) release(q_empty());
    softmax(s, state, first, unmasked_end, scale, factor);
    scale_outputs(state, factor);
    pack(s[0].c, p);
    Ring ahead = ring;
    for (int t = 1; t < tiles; ++t) {
      ahead.next();
      first += kTile;
      tile::barrier_wait(k_full(ahead.stage), ahead.parity);
      await_turn();
      start_scores(ahead.stage, s[0].c);
      tile::barrier_wait(v_full(ring.stage), ring.parity);
      start_outputs(v_tiles + ring.stage * kVBytes, p, state);
      give_turn();
      tile::wgmma_wait<1>();
      tile::pin(s[0].c);
      release(k_empty(ahead.stage));
      if (t == tiles - 1) release(q_empty());
      softmax(s, state, first, unmasked_end, scale, factor);
      tile::wgmma_wait<0>();
      tile::pin(state.o);
      release(v_empty(ring.stage));
      scale_outputs(state, factor);
      pack(s[0].c, p);
      ring = ahead;
    }
    tile::barrier_wait(v_full(ring.stage), ring.parity);
    start_outputs(v_tiles + ring.stage * kVBytes, p, state);
    tile::wgmma_wait<0>();
    tile::pin(state.o);
    release(v_empty(ring.stage));
    ring.next();
  }

  // A tile of the first keys, if some row sees few: values and probabilities are used together with
  // their rounding remainders. The rests of the values overwrite the keys once both warpgroups have
  // computed their scores.
  MLA_DEVICE void attend_few(const ExpandedItem& e, int first, Ring& ring, State& state,
                             int unmasked_end, float scale) const {
    Scores s;
    float factor[2];
    uint32_t p[kScores / 2];
    tile::barrier_wait(k_full(ring.stage), ring.parity);
    start_scores(ring.stage, s[0].c);
    tile::wgmma_wait<0>();
    tile::pin(s[0].c);
    tile::named_wait(kBoth, 256);
    const uint32_t rests_at = k_tiles + ring.stage * kKBytes;
    const uint8_t* rests =
        args.workspace + e.keys + kDims.panels() * e.panel_bytes + first * kPanelRowBytes;
    constexpr int kPanelChunks = kPanelBytes / 16;
    for (int i = thread_index() - 128; i < kValuePanels * kPanelChunks; i += 256) {
      Chunk c;
      load_words(c.w, rests + i / kPanelChunks * kRestPanelBytes + i % kPanelChunks * 16);
      tile::store_chunk(rests_at + i * 16, c);
    }
    tile::publish_shared();
    tile::named_wait(kBoth, 256);
    softmax(s, state, first, unmasked_end, scale, factor);
    if constexpr (kTile < kFewKeys) scale_outputs(state, factor);
    pack(s[0].c, p);
    tile::barrier_wait(v_full(ring.stage), ring.parity);
    start_outputs(v_tiles + ring.stage * kVBytes, p, state);
    start_outputs(rests_at, p, state);
    tile::wgmma_wait<0>();
    tile::pin(state.o);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      s[0].c[2 * i] -= bits_to_float(p[i] << 16);
      s[0].c[2 * i + 1] -= bits_to_float(p[i] & 0xffff0000u);
    }
    pack(s[0].c, p);
    start_outputs(v_tiles + ring.stage * kVBytes, p, state);
    tile::wgmma_wait<0>();
    tile::pin(state.o);
    release(k_empty(ring.stage));
    release(v_empty(ring.stage));
    ring.next();
  }

  MLA_DEVICE void clear(const ExpandedItem& e, const Item& item, State& state) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) state.o[i] = 0.0f;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int r = results.row(slot);
      state.softmax.clear(slot);
      state.limit[slot] = r < item.rows ? item.limit(r) : item.work.kv_end;
    }
    // Continues as if one key with the earlier results' log-sum-exp and value had been seen.
    results.carry_in(e, item, state.o, [&](int slot, float lse) {
      state.softmax.origin[slot] = lse * kLog2e;
      state.softmax.sum[slot] = (lane & 3) == 0 ? 1.0f : 0.0f;
    });
  }
  MLA_DEVICE void start_scores(int stage, float (&s)[kScores]) const {
    const uint32_t q = q_tile + (group - 1) * (64 * 128), k = k_tiles + stage * kKBytes;
    tile::pin(s);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const uint32_t inside = (step & 3) * 32;
      tile::multiply_rows(s, tile::along_rows(q + (step >> 2) * kQPanelBytes + inside),
                          tile::along_rows(k + (step >> 2) * kPanelBytes + inside), step > 0);
    }
    tile::wgmma_commit();
  }

  MLA_DEVICE static void start_outputs(uint32_t v, const uint32_t (&p)[kScores / 2], State& state) {
    tile::pin(state.o);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      tile::multiply_held(state.o, p + 4 * step, tile::down_rows(v + step * 2048, kPanelBytes));
    }
    tile::wgmma_commit();
  }

  // Replaces scores by probabilities, and computes the factors of the earlier sums.
  MLA_DEVICE void softmax(Scores& s, State& state, int first, int unmasked_end, float scale,
                          float (&factor)[2]) const {
    if (first + kTile > unmasked_end) Rows::hide(s[0], state.limit, first, lane);
    float top[2], next[2], from[2];
    state.softmax.maxima(s, top);
    state.softmax.targets(top, scale, kSlack, next);
    state.softmax.move_to(next, from, factor);
    state.softmax.exponentials(s, scale, from, [](float p, int) { return p; });
  }
  MLA_DEVICE static void scale_outputs(State& state, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) state.o[i] *= factor[(i >> 1) & 1];
  }
  // Packs scores as operands: register 4 k + r of the k-th depth of 16.
  MLA_DEVICE static void pack(const float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  MLA_DEVICE void finish(const Item& item, const State& state) const {
    RowScale scale[2] = {statistics(state, 0), statistics(state, 1)};
    scale[0].inverse *= item.segment->kv_scale;
    scale[1].inverse *= item.segment->kv_scale;
    results.store(item, scale, state.o);
  }
  MLA_DEVICE static RowScale statistics(const State& state, int slot) {
    return RowScale(state.softmax.origin[slot], Rows::row_sum(state.softmax.sum[slot]));
  }

  const ExpandedArgs& args;
  const int group, thread, lane;
  const Results results;
  uint32_t q_tile, k_tiles, v_tiles, barriers;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPANDED_WGMMA_H_
