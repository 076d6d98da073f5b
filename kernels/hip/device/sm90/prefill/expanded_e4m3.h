// Attention of the expanded form on sm_90a over keys and values of e4m3 (code_results.h): 128 query
// rows of one head over tiles of 128 KV rows, with 8-bit operands in both products.
//
//   warp 0:            keys, values and their scales of the next tiles, by bulk copies, four deep
//   warps 1 to 3:      queries of the next item as e4m3, and its records
//   warpgroups 1, 2:   64 query rows each
//
//        O += P V (first columns, of tile t)  |  S = Q K^T (of t + 1)  |  O += P V (the others)
//                                             |     sums of the first  |  softmax of t + 1
//
// The matrix unit aligns addends to the largest and keeps 13 bits below it. So it sums only the
// keys of one tile; sums of tiles are added in fp32, times the tile's factor and the scale of its
// values (code_softmax.h). A group gives the turn away when its scores are complete, so one group's
// exponentials overlap with the other's products.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPANDED_E4M3_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPANDED_E4M3_H_

#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/code_scale.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"
#include "kernels/hip/device/sm90/e4m3_instructions.h"
#include "kernels/hip/device/sm90/prefill/code_softmax.h"
#include "kernels/hip/device/sm90/prefill/expanded_results.h"

namespace mla::kernels::hip {

class ExpandedE4m3 {
 public:
  static constexpr int kThreads = 384;
  static constexpr int kTile = 128;  // kv rows
  static constexpr int kNope = kDims128.nope, kValue = kDims128.value;
  static constexpr int kStages = 4, kQueryTiles = 2, kRecords = 4;
  static constexpr int kKeyBytes = kTile * kNope, kRotatedBytes = kTile * kExpandedRope;
  static constexpr int kValueBytes = kValue * kTile;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes + kRotatedBytes;
  static constexpr int kQueryBytes = kExpandedRows * (kNope + kExpandedRope);
  static constexpr int kScaleBytes = 16;
  static constexpr int kQueryScaleBytes = kExpandedRows * 4;
  static constexpr int kBarriers = 2 * kStages + 2 * kQueryTiles;
  static constexpr int kBarrierBytes = 128;
  static_assert(kBarriers * 8 <= kBarrierBytes);
  // An item and its segment.
  struct Records {
    ExpandedItem item;
    SegmentRecord segment;
  };
  static constexpr int kRecordBytes = 256;
  static_assert(sizeof(Records) <= kRecordBytes && sizeof(Records) % 4 == 0);
  static constexpr int kSharedBytes = kQueryTiles * (kQueryBytes + kQueryScaleBytes) +
                                      kStages * (kStageBytes + kScaleBytes) + kBarrierBytes +
                                      kRecords * kRecordBytes;
  static_assert(kTile == kExpandedRows && kStageBytes % 1024 == 0 && kQueryBytes % 1024 == 0);

  MLA_DEVICE static void run(const ExpandedArgs& args) {
    const ExpandedE4m3 self(args);
    self.prepare();
    if (tile::wave_index() > 0) self.bring_first_item();
    if (self.group == 0) {
      tile::give_registers<56>();
      if (tile::wave_index() == 0) {
        if (thread_index() == 0) self.copy_tiles();
      } else {
        self.bring_items();
      }
    } else {
      tile::take_registers<224>();
      self.attend_items();
    }
  }

 private:
  using Rows = WarpgroupRows<kTile>;
  using Scores = typename Rows::Scores[1];
  static constexpr int kScores = Rows::kScoreElems;
  static constexpr int kOutputs = ExpandedResults<kValue>::kOutputs;
  // Named barriers.
  static constexpr int kTurn = 1;  // warpgroup 1's; kTurn + 1 is warpgroup 2's
  static constexpr int kBoth = 3, kFirst = 4;
  static constexpr int kBringers = 3;  // warps that copy queries

  struct State {
    float o[kOutputs];
    CodeSoftmax rows;
    int limit[2];
  };
  using Stages = Ring<kStages>;
  struct Tiles {
    int first, count, unmasked_end, query_tile;
  };

  MLA_DEVICE explicit ExpandedE4m3(const ExpandedArgs& a)
      : args(a),
        group(tile::wave_index() >> 2),
        thread(thread_index() & 127),
        lane(thread & 31),
        results{a, group - 1, thread >> 5, lane},
        base(tile::shared_base<kSharedBytes>()) {}
  MLA_DEVICE uint32_t queries(int i) const { return base + i * kQueryBytes; }
  MLA_DEVICE uint32_t stage(int s) const { return queries(kQueryTiles) + s * kStageBytes; }
  MLA_DEVICE uint32_t query_scales(int i) const { return stage(kStages) + i * kQueryScaleBytes; }
  MLA_DEVICE uint32_t scales(int s) const { return query_scales(kQueryTiles) + s * kScaleBytes; }
  MLA_DEVICE uint32_t barrier(int i) const { return scales(kStages) + i * 8; }
  MLA_DEVICE uint32_t full(int s) const { return barrier(2 * s); }
  MLA_DEVICE uint32_t empty(int s) const { return barrier(2 * s + 1); }
  MLA_DEVICE uint32_t q_full(int i) const { return barrier(2 * kStages + 2 * i); }
  MLA_DEVICE uint32_t q_empty(int i) const { return barrier(2 * kStages + 2 * i + 1); }
  // Returns one of four: results of one item are written while queries of two later items are
  // copied.
  MLA_DEVICE static Records* records(int index) {
    constexpr int kAt = kSharedBytes - kRecords * kRecordBytes;
    return reinterpret_cast<Records*>(tile::shared_pointer(kAt + index % kRecords * kRecordBytes));
  }
  MLA_DEVICE void prepare() const {
    if (thread_index() == 0) {
      for (int s = 0; s < kStages; ++s) {
        tile::barrier_init(full(s), 1);
        tile::barrier_init(empty(s), 2);
      }
      for (int i = 0; i < kQueryTiles; ++i) {
        tile::barrier_init(q_full(i), 96);
        tile::barrier_init(q_empty(i), 2);
      }
      tile::barrier_init_visible();
    }
    block_barrier();
  }
  MLA_DEVICE static int tiles_of(const Item& item) {
    return (item.work.kv_end - item.work.kv_begin + kTile - 1) / kTile;
  }

  // --- Copies.
  MLA_DEVICE void copy_tiles() const {
    Stages ring;
    for_each_expanded(args, [&](const ExpandedItem& e, const Item& item) {
      const uint8_t* from = args.workspace + e.keys;
      const int64_t panel = e.panel_bytes;
      const int tiles = tiles_of(item);
      for (int t = 0; t < tiles; ++t) {
        const uint32_t target = stage(ring.slot), barrier = full(ring.slot);
        tile::barrier_wait(empty(ring.slot), ring.parity ^ 1);
        tile::barrier_arrive_expecting(barrier, kStageBytes + kScaleBytes);
        tile::bulk_copy(target, from, kKeyBytes, barrier);
        tile::bulk_copy(target + kKeyBytes + kValueBytes, from + panel, kRotatedBytes, barrier);
        tile::bulk_copy(scales(ring.slot), from + 3 * panel, kScaleBytes, barrier);
        tile::bulk_copy(target + kKeyBytes, from + 2 * panel, kValueBytes, barrier);
        from += kExpandedRows * kPanelRowBytes;
        ring.next();
      }
    });
  }

  // Run by all warps except the first, which would have to wait for it.
  MLA_DEVICE void bring_first_item() const {
    const int index = args.unit_indptr[block_index()];
    if (index == args.unit_indptr[block_index() + 1]) return;
    const ExpandedItem& e = read_record(args.items + index);
    const Item item = as_item(args, e);
    const int warp = tile::wave_index() - 1;
    if (warp < kBringers) store_records(e, item, 0, warp * 32 + lane);
    bring_queries<kThreads / 32 - 1>(item, 0, warp);
    tile::named_sync<kFirst, kThreads - 32>();
    if (warp < kBringers) tile::barrier_arrive(q_full(0));
  }
  MLA_DEVICE void bring_items() const {
    const int warp = tile::wave_index() - 1, word = warp * 32 + lane;
    int index = 0;
    for_each_expanded(args, [&](const ExpandedItem& e, const Item& item) {
      if (index == 0) {  // already copied
        ++index;
        return;
      }
      const QueryLoader loader(item);
      for (int p = word; p < item.rows; p += 32 * kBringers) {
        const auto* row = reinterpret_cast<const uint8_t*>(loader.row(p));
#pragma unroll
        for (int line = 0; line < kQueryChunks * 16; line += 128) tile::prefetch(row + line);
      }
      const int place = index % kQueryTiles;
      tile::barrier_wait(q_empty(place), (index / kQueryTiles & 1) ^ 1);
      store_records(e, item, index, word);
      bring_queries<kBringers>(item, place, warp);
      tile::barrier_arrive(q_full(place));
      ++index;
    });
  }
  // Run by thread `word` of the copying warps.
  MLA_DEVICE void store_records(const ExpandedItem& e, const Item& item, int index,
                                int word) const {
    const auto* from_item = reinterpret_cast<const uint32_t*>(&e);
    const auto* from_segment = reinterpret_cast<const uint32_t*>(item.segment);
    constexpr int kItemWords = sizeof(ExpandedItem) / 4, kSegmentWords = sizeof(SegmentRecord) / 4;
    static_assert(kItemWords + kSegmentWords <= 32 * kBringers);
    auto* const target = reinterpret_cast<uint32_t*>(records(index));
    if (word < kItemWords) {
      target[word] = from_item[word];
    } else if (word < kItemWords + kSegmentWords) {
      target[word] = from_segment[word - kItemWords];
    }
  }
  template <int kWarps>
  MLA_DEVICE void bring_queries(const Item& item, int place, int warp) const {
    const QueryLoader loader(item);
    if (loader.aligned) {
      bring_rows<true, kWarps>(item, loader.row(0), place, warp);
    } else {
      bring_rows<false, kWarps>(item, loader.row(0), place, warp);
    }
    tile::publish_shared();
  }
  // Every kWarps-th group of eight rows belongs to this warp, four lanes a row. Lane i of a row has
  // the columns of three chunks of codes, 16 columns from 16 i on in every 64. Rows of one head are
  // a stride apart; rows past the item's end repeat its first row.
  template <bool kAligned, int kWarps>
  MLA_DEVICE void bring_rows(const Item& item, const uint16_t* first, int place, int warp) const {
    const int64_t stride = item.segment->q_row_stride;
    const float scale = item.segment->softmax_scale * item.segment->kv_scale * kLog2e;
    // Assigned so that rows of the eight lanes that store at a time lie in different banks.
    const int own = (lane >> 2 & 1) * 4 + (lane >> 3);
#pragma unroll 1
    for (int begin = warp * kAtOnce; begin < kExpandedRows; begin += kWarps * kAtOnce) {
      const int row = begin + own;
      const uint16_t* const from = first + (row < item.rows ? row * stride : 0);
      Chunk chunks[kLaneChunks][2];
#pragma unroll
      for (int j = 0; j < kLaneChunks; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          chunks[j][half] = load_chunk(from, j * 64 + (lane & 3) * 16 + half * 8, false, kAligned);
        }
      }
      write_row(chunks, place, row, scale);
    }
  }
  static constexpr int kAtOnce = 8;
  static constexpr int kLaneChunks = (kNope + kExpandedRope) / 64;
  static constexpr int kQueryChunks = (kNope + kExpandedRope) / 8;

  // Codes have the order of keys (code_results.h).
  MLA_DEVICE void write_row(const Chunk (&values)[kLaneChunks][2], int place, int row,
                            float scale) const {
    uint32_t halves = 0;
#pragma unroll
    for (int j = 0; j < kLaneChunks; ++j) {
      halves = greater_magnitudes(greater_magnitudes(halves, values[j][0]), values[j][1]);
    }
    halves = tile::greater_halves(halves, tile::exchange_word<1>(halves));
    halves = tile::greater_halves(halves, tile::exchange_word<2>(halves));
    const uint32_t largest = greater_half(halves);
    const CodeScale of_row = code_scale(largest);
    if ((lane & 3) == 0) tile::store_float(query_scales(place) + row * 4, of_row.power * scale);
    // A row with a value that is not finite becomes all NaN, because products with NaN are NaN.
    const uint32_t by =
        largest < 0x7f800000u ? pack_bf16(of_row.inverse, of_row.inverse) : 0x7fff7fffu;
#pragma unroll
    for (int j = 0; j < kLaneChunks; ++j) {
      uint32_t c[2][2];  // four values each
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Chunk& from = values[j][i >> 1];
        c[i >> 1][i & 1] = scaled_codes(from.w[2 * (i & 1)], from.w[2 * (i & 1) + 1], by);
      }
      Chunk chunk;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        chunk.w[2 * i] = tile::choose_bytes<0x5410>(c[0][i], c[1][i]);
        chunk.w[2 * i + 1] = tile::choose_bytes<0x7632>(c[0][i], c[1][i]);
      }
      const int sixteen = j * 4 + (lane & 3);
      constexpr int kNopeChunks = kNope / 16;
      tile::store_chunk(sixteen < kNopeChunks
                            ? tile::chunk_at<kExpandedRows>(queries(place), row, sixteen)
                            : queries(place) + kExpandedRows * kNope + row * kExpandedRope +
                                  ((sixteen - kNopeChunks) ^ narrow_swizzle(row)) * 16,
                        chunk);
    }
  }

  // --- Attention.
  MLA_DEVICE void await_turn() const { tile::named_wait(kTurn + group - 1, 256); }
  MLA_DEVICE void give_turn() const { tile::named_arrive(kTurn + 2 - group, 256); }
  MLA_DEVICE void release(uint32_t barrier) const {
    if (thread == 0) tile::barrier_arrive(barrier);
  }

  MLA_DEVICE void attend_items() const {
    Stages ring;
    if (group == 2) give_turn();  // warpgroup 1 has the first turn
    const int items = args.unit_indptr[block_index() + 1] - args.unit_indptr[block_index()];
    for (int i = 0; i < items; ++i) {
      tile::barrier_wait(q_full(i % kQueryTiles), i / kQueryTiles & 1);
      const Records& r = *records(i);
      Item item = as_item(args, r.item);
      item.segment = &r.segment;
      attend(r.item, item, i % kQueryTiles, ring);
    }
    if (group == 1) await_turn();  // takes the turn that was given away last
  }

  MLA_DEVICE void attend(const ExpandedItem& e, const Item& item, int query_tile,
                         Stages& ring) const {
    const int own = (group - 1) * 64;
    const Tiles tiles{item.work.kv_begin, tiles_of(item), item.limit(own < item.rows ? own : 0),
                      query_tile};
    State state;
    clear(e, item, query_tile, state);
    if (tiles.count > 0) {
      attend_tiles(tiles, ring, state);
    } else {
      // An item without tiles has no other barrier for both groups, and its records will be reused.
      tile::named_wait(kBoth, 256);
      release(q_empty(query_tile));
    }
    finish(item, state);
  }

  MLA_DEVICE void clear(const ExpandedItem& e, const Item& item, int query_tile,
                        State& state) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) state.o[i] = 0.0f;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int r = results.row(slot);
      state.rows.origin[slot] = negative_infinity();
      state.rows.sum[slot] = 0.0f;
      state.rows.scale[slot] = tile::load_float(query_scales(query_tile) + r * 4);
      state.limit[slot] = r < item.rows ? item.limit(r) : item.work.kv_end;
    }
    // Continues as if one key with the earlier results' log-sum-exp and value had been seen.
    results.carry_in(e, item, state.o, [&](int slot, float lse) {
      state.rows.origin[slot] = lse * kLog2e;
      state.rows.sum[slot] = (lane & 3) == 0 ? 1.0f : 0.0f;
    });
  }

  // Runs the tiles as in the drawing above. The first tile's scores and the last tile's outputs
  // overlap with nothing.
  MLA_DEVICE void attend_tiles(const Tiles& tiles, Stages& ring, State& state) const {
    Scores s;
    float sums[kHalf];
    uint32_t p[kScores / 4];
    int first = tiles.first;
    tile::barrier_wait(full(ring.slot), ring.parity);
    await_turn();
    start_scores(tiles.query_tile, ring.slot, s[0].c);
    tile::wgmma_wait<0>();
    tile::pin(s[0].c);
    give_turn();
    if (tiles.count == 1) release(q_empty(tiles.query_tile));
    CodeSoftmax::Tops tops = take_tops(s, ring.slot, first, tiles.unmasked_end, state);
    CodeSoftmax::Factors factors = state.rows.take(s[0].c, tops, p);
    for (int t = 1; t < tiles.count; ++t) {
      Stages ahead = ring;
      ahead.next();
      first += kTile;
      tile::barrier_wait(full(ahead.slot), ahead.parity);
      await_turn();
      start_values(stage(ring.slot) + kKeyBytes, p, sums);
      start_scores(tiles.query_tile, ahead.slot, s[0].c);
      tile::wgmma_wait<1>();
      add<0>(sums, factors, state);
      start_values(stage(ring.slot) + kKeyBytes + kHalf * 2 * kTile, p, sums);
      tile::wgmma_wait<1>();
      tile::pin(s[0].c);
      give_turn();
      if (t == tiles.count - 1) release(q_empty(tiles.query_tile));
      tops = take_tops(s, ahead.slot, first, tiles.unmasked_end, state);
      tile::wgmma_wait<0>();
      add<kHalf>(sums, factors, state);
      factors = state.rows.take(s[0].c, tops, p);
      release(empty(ring.slot));
      ring = ahead;
    }
    start_values(stage(ring.slot) + kKeyBytes, p, sums);
    tile::wgmma_wait<0>();
    add<0>(sums, factors, state);
    start_values(stage(ring.slot) + kKeyBytes + kHalf * 2 * kTile, p, sums);
    tile::wgmma_wait<0>();
    add<kHalf>(sums, factors, state);
    release(empty(ring.slot));
    ring.next();
  }
  static constexpr int kHalf = kOutputs / 2;

  MLA_DEVICE void start_scores(int query_tile, int at, float (&s)[kScores]) const {
    const int own = group - 1;
    const uint32_t q = queries(query_tile) + own * (64 * kNope), k = stage(at);
    const uint32_t q_rotated =
        queries(query_tile) + kExpandedRows * kNope + own * (64 * kExpandedRope);
    const uint32_t k_rotated = k + kKeyBytes + kValueBytes;
    tile::pin(s);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kNope / 32; ++step) {
      tile::multiply_e4m3(s, tile::along_rows(q + step * 32), tile::along_rows(k + step * 32),
                          step > 0);
    }
#pragma unroll
    for (int step = 0; step < kExpandedRope / 32; ++step) {
      tile::multiply_e4m3(s, tile::along_narrow_rows(q_rotated + step * 32),
                          tile::along_narrow_rows(k_rotated + step * 32), 1);
    }
    tile::wgmma_commit();
  }
  // For 64 columns.
  MLA_DEVICE static void start_values(uint32_t values, const uint32_t (&p)[kScores / 4],
                                      float (&sums)[kHalf]) {
    tile::pin(sums);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kTile / 32; ++step) {
      const uint32_t operand[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
      tile::multiply_held_e4m3(sums, operand, tile::along_rows(values + step * 32), step > 0);
    }
    tile::wgmma_commit();
  }
  // Adds the sums of a tile to the outputs of columns 2 kBegin and on.
  template <int kBegin>
  MLA_DEVICE static void add(float (&sums)[kHalf], const CodeSoftmax::Factors& f, State& state) {
    tile::pin(sums);
    if (f.moved) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) state.o[kBegin + i] *= f.old[i >> 1 & 1];
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      state.o[kBegin + i] = fma_f(sums[i], f.value[i >> 1 & 1], state.o[kBegin + i]);
    }
    tile::pin(sums);  // before their registers are reused
  }

  // Hides keys that rows do not see, and takes the maxima of the others.
  MLA_DEVICE CodeSoftmax::Tops take_tops(Scores& s, int place, int first, int unmasked_end,
                                         const State& state) const {
    if (first + kTile > unmasked_end) Rows::hide(s[0], state.limit, first, lane);
    float of_tile[2];
    tile::load_two_floats(of_tile, scales(place));
    return state.rows.tops(s[0].c, of_tile);
  }

  MLA_DEVICE void finish(const Item& item, const State& state) const {
    RowScale scale[2] = {state.rows.statistics(0), state.rows.statistics(1)};
    scale[0].inverse *= item.segment->kv_scale;
    scale[1].inverse *= item.segment->kv_scale;
    results.store(item, scale, state.o);
  }

  const ExpandedArgs& args;
  const int group, thread, lane;
  const ExpandedResults<kValue> results;
  const uint32_t base;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPANDED_E4M3_H_
