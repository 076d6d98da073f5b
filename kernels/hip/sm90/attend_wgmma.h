// Absorbed attention for tiles of 17 to 64 packed rows on sm_90a, with warpgroup products: where
// the matrix unit is the limit, or near it.
//
// A block has two groups of four warps that compute and one that copies. The KV tiles of an item,
// 64 rows each, alternate between two slots of shared memory. Group g computes the scores and
// probabilities of the tiles in slot g, and accumulates output columns [256 g, 256 g + 256) of all
// tiles, so each tile's probabilities also go to the other group:
//
//     group 0:  S0 = Q K0^T, softmax | O left  += P0 V0 |                        | O left  += P1 V1
//     group 1:                       | O right += P0 V0 | S1 = Q K1^T, softmax   | O right += P1 V1
//
// A group lets go of its half of a tile's columns as soon as its product is done; the copying group
// refills it with the next tile in this slot, of the next item where this one has ended. Group g's
// P lies where its tile had the rope columns, which only the scores need.
//
// Probabilities are 2^(x - origin), one origin a row, which the groups hand to and fro with the
// probabilities. The origin follows the row's maximum only when that has grown by more than
// kSlack, so that the accumulators are hardly ever rescaled; any origin gives the same quotient.
#ifndef MLA_KERNELS_HIP_SM90_ATTEND_WGMMA_H_
#define MLA_KERNELS_HIP_SM90_ATTEND_WGMMA_H_

#include "kernels/hip/common/item.h"
#include "kernels/hip/sm90/barriers.h"
#include "kernels/hip/sm90/tile.h"
#include "kernels/hip/sm90/wgmma.h"

namespace mla::gpu {

// Shared memory of a block and the barriers in it, which both roles address.
template <class C>
struct WgmmaLayout {
  using lds_t = tile::lds_t;
  static constexpr int kRows = 64;
  static constexpr int kDim = C::kLora + C::kRope;
  static constexpr int kBlocks = kDim / 64;        // column blocks of a tile
  static constexpr int kBlockBytes = kRows * 128;  // of 64 rows
  static constexpr int kTileBytes = kBlocks * kBlockBytes;
  static constexpr int kHalfBlocks = C::kLora / 128;  // of a group's output columns
  static constexpr int kGroupThreads = 128;
  static constexpr int kGroupWarps = 4;
  static constexpr int kParts = 4;  // of a tile, each with its own barrier: the scores start early
  static_assert(C::kTileKv == kRows && C::kLora == 512 && C::kRope == 64);

  static constexpr int kOriginBytes = 2 * kRows * 4;
  static constexpr int kSumBytes = 2 * 2 * kRows * 8;
  static constexpr int kBarriers = 2 * kParts + 2 * 2 + 2;
  static constexpr int kSharedBytes =
      3 * kTileBytes + kOriginBytes + kSumBytes + (kBarriers * 8 + 127) / 128 * 128;

  lds_t base;

  MLA_DEVICE lds_t slot(int s) const { return base + s * kTileBytes; }
  MLA_DEVICE lds_t queries() const { return base + 2 * kTileBytes; }
  MLA_DEVICE lds_t probabilities(int s) const { return slot(s) + (kBlocks - 1) * kBlockBytes; }
  MLA_DEVICE lds_t origin(int group, int row) const {
    return base + 3 * kTileBytes + (group * kRows + row) * 4;
  }
  // Two sums of a row. Items alternate between two sets, so that a group may be an item ahead.
  MLA_DEVICE lds_t sums(int set, int group, int row) const {
    return base + 3 * kTileBytes + kOriginBytes + ((set * 2 + group) * kRows + row) * 8;
  }
  MLA_DEVICE lds_t barrier(int i) const {
    return base + 3 * kTileBytes + kOriginBytes + kSumBytes + i * 8;
  }
  // Part of a slot's tile is there; group `half` is done with its columns; the same for queries.
  MLA_DEVICE lds_t filled(int s, int part) const { return barrier(s * kParts + part); }
  MLA_DEVICE lds_t emptied(int s, int half) const { return barrier(2 * kParts + s * 2 + half); }
  MLA_DEVICE lds_t queries_filled() const { return barrier(kBarriers - 2); }
  MLA_DEVICE lds_t queries_emptied() const { return barrier(kBarriers - 1); }

  MLA_DEVICE void init_barriers() const {
    if (thread_index() == 0) {
      for (int i = 0; i < 2 * kParts; ++i) tile::barrier_init(barrier(i), kGroupThreads);
      for (int i = 2 * kParts; i < kBarriers - 2; ++i) tile::barrier_init(barrier(i), kGroupWarps);
      tile::barrier_init(queries_filled(), kGroupThreads);
      tile::barrier_init(queries_emptied(), 2 * kGroupWarps);
      tile::publish_shared();
    }
    block_barrier();
  }
  // Column block `i` (0 to kBlocks - 1) of slot s in the order of copies and scores: first the half
  // that group s reads last, so the first to be refilled is the first to be needed.
  MLA_DEVICE static constexpr int block(int s, int i) {
    return i == kBlocks - 1 ? i : s == 0 ? i : (i + kHalfBlocks) % (2 * kHalfBlocks);
  }
};

// The group that copies queries and KV rows of one item after the other.
template <class C>
class WgmmaProducer {
 public:
  using L = WgmmaLayout<C>;
  using lds_t = tile::lds_t;

  MLA_DEVICE WgmmaProducer(const AttendArgs& a, const L& layout)
      : args(a), shared(layout), lane(tile::lane_index()), warp(tile::wave_index() & 3) {}

  MLA_DEVICE void produce(const Item& item) {
    const RequestRecord& r = *item.request;
    const PagedRows pages(args.page_tables, r.page_table, args.pool, r.layer_offset, r.row_stride,
                          r.page_size, args.granule_bytes);
    const int kv_begin = item.work.kv_begin, kv_end = item.work.kv_end;
    if (kv_begin >= kv_end) return;
    copy_item_queries(item);
    find(pages, kv_begin, kv_end);
    for (int first = kv_begin; first < kv_end; first += 2 * C::kTileKv) {
      copy_tile<0>();
      find(pages, first + C::kTileKv, kv_end);
      if (first + C::kTileKv >= kv_end) break;
      copy_tile<1>();
      find(pages, first + 2 * C::kTileKv, kv_end);
    }
  }

 private:
  static constexpr int kCopyRows = 4;  // rows of a tile a lane copies chunks of

  MLA_DEVICE int row(int g) const { return (g * 4 + warp) * 4 + (lane >> 3); }
  // The chunk a lane copies lies at chunk position lane mod 8 of its rows, all congruent mod 8.
  MLA_DEVICE int chunk_bytes() const { return ((lane & 7) ^ (row(0) & 7)) * 16; }

  // Where this lane's rows of the tile at `first` lie. Rows past the range repeat its last row, so
  // that masked probabilities, which are zero, always meet values that exist.
  MLA_DEVICE void find(const PagedRows& pages, int first, int kv_end) {
#pragma unroll
    for (int g = 0; g < kCopyRows; ++g) {
      const int position = first + row(g);
      source[g] = pages.row(position < kv_end ? position : kv_end - 1) + chunk_bytes();
    }
  }

  MLA_DEVICE void copy_block(lds_t tile_base, int block) const {
#pragma unroll
    for (int g = 0; g < kCopyRows; ++g) {
      tile::copy_chunk(tile_base + block * L::kBlockBytes + row(g) * 128 + (lane & 7) * 16,
                       source[g] + block * 128);
    }
  }

  template <int kSlot>
  MLA_DEVICE void copy_tile() {
    const uint32_t n = used[kSlot]++;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (n > 0) tile::barrier_wait(shared.emptied(kSlot, half ^ kSlot), (n - 1) & 1);
#pragma unroll
      for (int part = 2 * half; part < 2 * half + 2; ++part) {
        copy_block(shared.slot(kSlot), L::block(kSlot, 2 * part));
        copy_block(shared.slot(kSlot), L::block(kSlot, 2 * part + 1));
        if (part == L::kParts - 1) copy_block(shared.slot(kSlot), L::kBlocks - 1);
        tile::barrier_arrive_after_copies(shared.filled(kSlot, part));
      }
    }
  }

  // Rows past the item's repeat its first: their results are dropped.
  MLA_DEVICE void copy_item_queries(const Item& item) {
    const RequestRecord& r = *item.request;
    const uint32_t n = items++;
    if (n > 0) tile::barrier_wait(shared.queries_emptied(), (n - 1) & 1);
    const bool aligned = aligned_to(r.q, r.q_row_stride, r.q_head_stride, 2, 16);
    if (!aligned) {
      copy_queries<L::kRows, L::kDim, L::kGroupWarps>(item, shared.queries(), warp, lane);
      tile::barrier_arrive(shared.queries_filled());
      return;
    }
#pragma unroll
    for (int g = 0; g < kCopyRows; ++g) {
      const int p = row(g) < item.rows ? row(g) : 0;
      source[g] = static_cast<const uint8_t*>(r.q) +
                  2 * (item.query(p) * r.q_row_stride + item.head(p) * r.q_head_stride) +
                  chunk_bytes();
    }
#pragma unroll
    for (int block = 0; block < L::kBlocks; ++block) copy_block(shared.queries(), block);
    tile::barrier_arrive_after_copies(shared.queries_filled());
  }

  const AttendArgs& args;
  const L shared;
  const int lane, warp;
  const uint8_t* source[kCopyRows];
  uint32_t used[2] = {0, 0};
  uint32_t items = 0;
};

// Group kGroup of the two that compute.
template <class C, int kGroup>
class WgmmaConsumer {
 public:
  using L = WgmmaLayout<C>;

  MLA_DEVICE WgmmaConsumer(const AttendArgs& a, const L& layout)
      : args(a), shared(layout), lane(tile::lane_index()), warp(tile::wave_index() & 3) {}

  MLA_DEVICE void attend(const Item& item) {
    State state;
    clear(item, state);
    const int tiles = (item.work.kv_end - item.work.kv_begin + C::kTileKv - 1) / C::kTileKv;
    if (tiles > 0) {
      Masks masks{item.limit(0), item.limit(item.rows - 1) != item.limit(0),
                  item.request->softmax_scale * kLog2e};
      attend_tiles(item, masks, tiles, state);
      add_sums(state);
    }
    write(item, state);
  }

 private:
  using lds_t = tile::lds_t;
  static constexpr int kOther = kGroup ^ 1;
  static constexpr int kScores = 32;             // of a thread, of a tile
  static constexpr int kColumns = C::kLora / 2;  // output columns of the group
  static constexpr int kOutputs = kColumns / 2;  // of a thread
  static constexpr float kSlack = 8.0f;          // probabilities stay below 2^8
  static constexpr int kPublished = 1, kGroupBarrier = 3, kBoth = 5;  // named barriers

  struct State {
    float o[kOutputs];
    float origin[2], sum[2], rounded_sum[2];  // by row slot; the sums of this group's tiles
    int limit[2];
  };
  struct Masks {
    int unmasked_end;  // kv rows below it are seen by all packed rows
    bool ragged;       // some packed rows see fewer kv rows than others
    float scale;
  };

  // Packed row of this thread's slot (0 or 1).
  MLA_DEVICE int row(int slot) const { return warp * 16 + slot * 8 + (lane >> 2); }

  MLA_DEVICE void clear(const Item& item, State& state) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) state.o[i] = 0.0f;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int p = row(slot);
      state.origin[slot] = negative_infinity();
      state.sum[slot] = state.rounded_sum[slot] = 0.0f;
      state.limit[slot] = p < item.rows ? item.limit(p) : item.work.kv_end;
    }
  }

  // Every second tile is the group's own; of each other one it takes the probabilities.
  MLA_DEVICE void attend_tiles(const Item& item, const Masks& masks, int tiles, State& state) {
    tile::barrier_wait(shared.queries_filled(), items++ & 1);
    if (kGroup >= tiles) release(shared.queries_emptied());
    for (int t = kGroup; t <= tiles; t += 2) {
      if (t > 0) take_other(state);
      if (t == tiles) break;
      float s[kScores];
      start_scores(s);
      tile::wgmma_wait<0>();
      tile::pin(s);
      if (t + 2 >= tiles) release(shared.queries_emptied());
      const int first = item.work.kv_begin + t * C::kTileKv;
      uint32_t p[kScores / 2];
      const Shift shift = make_probabilities(s, p, masks, first, state);
      publish(p, masks, first, state);
      move_outputs(shift, state);
      add_own(p, state);
      tile::wgmma_wait<0>();
      tile::pin(state.o);
      release(shared.emptied(kGroup, kGroup));
    }
  }

  // The products with the other group's tile, once its probabilities are there.
  MLA_DEVICE void take_other(State& state) const {
    tile::named_sync<kPublished + kOther, 2 * L::kGroupThreads>();
    move_outputs(adopt(state), state);
    add_other(state);
    tile::wgmma_wait<0>();
    tile::pin(state.o);
    release(shared.emptied(kOther, kGroup));
  }

  // This warp is done with what the barrier guards.
  MLA_DEVICE void release(lds_t barrier) const {
    if (lane == 0) tile::barrier_arrive(barrier);
  }
  MLA_DEVICE void group_barrier() const {
    tile::named_sync<kGroupBarrier + kGroup, L::kGroupThreads>();
  }

  // Starts the products of the group's next tile, part by part as its columns arrive.
  MLA_DEVICE void start_scores(float (&s)[kScores]) {
    const uint32_t phase = tiles_seen++ & 1;
    const uint64_t q = tile::along_rows(shared.queries());
    const uint64_t k = tile::along_rows(shared.slot(kGroup));
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      tile::barrier_wait(shared.filled(kGroup, part), phase);
      tile::publish_shared();
      tile::wgmma_begin();
      constexpr int kSteps = 8;
#pragma unroll
      for (int step = 0; step < kSteps + (part == L::kParts - 1 ? 4 : 0); ++step) {
        const int block = L::block(kGroup, 2 * part + step / 4);
        const int offset = (block * L::kBlockBytes + (step & 3) * 32) >> 4;
        tile::wgmma_64x64(s, q + offset, k + offset, part > 0 || step > 0);
      }
    }
    tile::wgmma_commit();
  }

  // How a change of origins moves what has been summed so far.
  struct Shift {
    float factor[2];
    bool moved;  // in any row of the warp
  };
  MLA_DEVICE static float finite_origin(float x) { return x == negative_infinity() ? 0.0f : x; }
  // A row's new origin; the sums follow it here, the outputs in move_outputs.
  MLA_DEVICE static bool set_origin(int slot, float origin, State& state, Shift& shift) {
    const bool moved = origin != state.origin[slot];
    shift.factor[slot] = exp2_fast(state.origin[slot] - finite_origin(origin));
    if (moved) {
      state.sum[slot] *= shift.factor[slot];
      state.rounded_sum[slot] *= shift.factor[slot];
    }
    state.origin[slot] = origin;
    return moved;
  }
  // Takes over the origins that the other group has published.
  MLA_DEVICE Shift adopt(State& state) const {
    Shift shift;
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      moved |= set_origin(slot, tile::load_float(shared.origin(kOther, row(slot))), state, shift);
    }
    shift.moved = tile::any(moved);
    return shift;
  }
  MLA_DEVICE static void move_outputs(const Shift& shift, State& state) {
    if (!shift.moved) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) state.o[i] *= shift.factor[(i >> 1) & 1];
  }

  // From scores to rounded probabilities, in the order of a wgmma operand in registers.
  MLA_DEVICE Shift make_probabilities(float (&s)[kScores], uint32_t (&p)[kScores / 2],
                                      const Masks& masks, int first, State& state) const {
    const bool masked = first + C::kTileKv > masks.unmasked_end;
    const int col0 = first + 2 * (lane & 3);
    float top[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= masks.scale;
    if (masked) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int position = col0 + 8 * (i >> 2) + (i & 1);
        s[i] = position < state.limit[(i >> 1) & 1] ? s[i] : negative_infinity();
      }
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) top[(i >> 1) & 1] = max_f(top[(i >> 1) & 1], s[i]);
    Shift shift;
    float origin[2];
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      top[slot] = tile::Wave<16>::row_max(top[slot]);
      const float old = state.origin[slot];
      moved |= set_origin(slot, top[slot] > old + kSlack ? top[slot] : old, state, shift);
      origin[slot] = finite_origin(state.origin[slot]);
    }
    shift.moved = tile::any(moved);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int slot = (i >> 1) & 1;
      const float a = exp2_fast(s[i] - origin[slot]), b = exp2_fast(s[i + 1] - origin[slot]);
      const uint32_t packed = pack_bf16(a, b);
      state.sum[slot] += a + b;
      state.rounded_sum[slot] += bits_to_float(packed << 16) + bits_to_float(packed & 0xffff0000u);
      p[i >> 1] = packed;
    }
    return shift;
  }

  // Hands the own tile's probabilities and origins to the other group, and the tile's values, made
  // harmless where some rows do not see them.
  MLA_DEVICE void publish(const uint32_t (&p)[kScores / 2], const Masks& masks, int first,
                          const State& state) const {
    group_barrier();  // all warps' scores have been read out of the rope columns
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      tile::store_word(tile::chunk_at<L::kRows>(shared.probabilities(kGroup), row(i & 1), i >> 1) +
                           (lane & 3) * 4,
                       p[i]);
    }
    if ((lane & 3) == 0) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        tile::store_float(shared.origin(kGroup, row(slot)), state.origin[slot]);
      }
    }
    const bool hide = masks.ragged && first + C::kTileKv > masks.unmasked_end;
    if (hide) {
      hide_unseen_values<C, L::kGroupThreads>(shared.slot(kGroup), masks.unmasked_end - first,
                                              thread_index() & (L::kGroupThreads - 1));
    }
    tile::publish_shared();
    if (hide) group_barrier();
    tile::named_arrive<kPublished + kGroup, 2 * L::kGroupThreads>();
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

  // Sums over the lanes of a row and both groups, whose origins agree by now.
  MLA_DEVICE void add_sums(State& state) const {
    const int set = (items - 1) & 1;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      state.sum[slot] = tile::Wave<16>::row_sum(state.sum[slot]);
      state.rounded_sum[slot] = tile::Wave<16>::row_sum(state.rounded_sum[slot]);
      if ((lane & 3) == 0) {
        tile::store_float(shared.sums(set, kGroup, row(slot)), state.sum[slot]);
        tile::store_float(shared.sums(set, kGroup, row(slot)) + 4, state.rounded_sum[slot]);
      }
    }
    tile::named_sync<kBoth, 2 * L::kGroupThreads>();
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      state.sum[slot] += tile::load_float(shared.sums(set, kOther, row(slot)));
      state.rounded_sum[slot] += tile::load_float(shared.sums(set, kOther, row(slot)) + 4);
    }
  }

  MLA_DEVICE void write(const Item& item, State& state) const {
    const bool wide = aligned_results(args, item, args.o_is_f32 ? 4 : 8);
    const bool aligned = aligned_results(args, item, 2);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int p = row(slot);
      const bool mine = p < item.rows;
      const RowTarget target(args, item, mine ? p : 0, C::kLora);
      const RowScale scale(state.origin[slot], state.sum[slot]);
      // The outputs were summed with rounded probabilities, so they are divided by the sum of
      // those.
      const float inverse = scale.empty ? 0.0f : 1.0f / state.rounded_sum[slot];
#pragma unroll
      for (int i = 2 * slot; i < kOutputs; i += 4) {
        state.o[i] = scale.empty ? 0.0f : state.o[i] * inverse;
        state.o[i + 1] = scale.empty ? 0.0f : state.o[i + 1] * inverse;
      }
      if (kGroup == 0 && mine && (lane & 3) == 0 && target.lse != nullptr) *target.lse = scale.lse;
      const int64_t index = target.index + kGroup * kColumns;
      if (!wide) {
        write_pairs(target, index, slot, mine, aligned, state);
      } else if (target.f32) {
        write_f32(target, index, slot, mine, state);
      } else {
        write_bf16(target, index, slot, mine, state);
      }
    }
  }
  MLA_DEVICE void write_pairs(const RowTarget& target, int64_t index, int slot, bool mine,
                              bool aligned, const State& state) const {
    if (!mine) return;
#pragma unroll
    for (int i = 2 * slot; i < kOutputs; i += 4) {
      const float run[2] = {state.o[i], state.o[i + 1]};
      store_run(target.base, index + 2 * (i - 2 * slot) + 2 * (lane & 3), run, target.f32, aligned);
    }
  }
  // Lanes of a row exchange pairs, so that each stores 16 bytes at once. fp32: neighbours swap the
  // pairs of two column blocks of 8.
  MLA_DEVICE void write_f32(const RowTarget& target, int64_t index, int slot, bool mine,
                            const State& state) const {
    const bool odd = (lane & 1) != 0;
    const int column = odd ? 8 + 2 * (lane & 3) - 2 : 2 * (lane & 3);
#pragma unroll
    for (int i = 2 * slot; i < kOutputs; i += 8) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float a = state.o[i + e], b = state.o[i + 4 + e];
        const float got = tile::exchange<1>(odd ? a : b);
        words[e] = float_to_bits(odd ? got : a);
        words[2 + e] = float_to_bits(odd ? b : got);
      }
      if (mine) {
        store_words(static_cast<float*>(target.base) + index + 2 * (i - 2 * slot) + column, words);
      }
    }
  }
  // bf16: the four lanes transpose 4 x 4 words, after which each holds one column block of 8.
  MLA_DEVICE void write_bf16(const RowTarget& target, int64_t index, int slot, bool mine,
                             const State& state) const {
    const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
#pragma unroll
    for (int i = 2 * slot; i < kOutputs; i += 16) {
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) w[k] = pack_bf16(state.o[i + 4 * k], state.o[i + 4 * k + 1]);
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const uint32_t got = exchange_words<1>(odd ? w[k] : w[k + 1]);
        w[k] = odd ? got : w[k];
        w[k + 1] = odd ? w[k + 1] : got;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t got = exchange_words<2>(high ? w[k] : w[k + 2]);
        w[k] = high ? got : w[k];
        w[k + 2] = high ? w[k + 2] : got;
      }
      if (mine) {
        store_words(
            static_cast<uint16_t*>(target.base) + index + 2 * (i - 2 * slot) + 8 * (lane & 3), w);
      }
    }
  }
  template <int kStep>
  MLA_DEVICE static uint32_t exchange_words(uint32_t x) {
    return float_to_bits(tile::exchange<kStep>(bits_to_float(x)));
  }

  const AttendArgs& args;
  const L shared;
  const int lane, warp;
  uint32_t tiles_seen = 0;  // of the own slot
  uint32_t items = 0;       // with queries
};

template <class C>
class AttendWgmma {
 public:
  using L = WgmmaLayout<C>;
  static constexpr int kThreads = 3 * L::kGroupThreads;
  static constexpr int kSharedBytes = L::kSharedBytes;

  MLA_DEVICE static void run(const AttendArgs& args) {
    const L shared{tile::shared_base<kSharedBytes>()};
    shared.init_barriers();
    let_next_kernel_start();
    const int group = tile::wave_index() >> 2;
    if (group == 2) {
      tile::give_registers<40>();
      WgmmaProducer<C> producer(args, shared);
      for_each_item<L::kRows>(args, [&producer](const Item& item) { producer.produce(item); });
    } else if (group == 0) {
      tile::take_registers<232>();
      WgmmaConsumer<C, 0> consumer(args, shared);
      for_each_item<L::kRows>(args, [&consumer](const Item& item) { consumer.attend(item); });
    } else {
      tile::take_registers<232>();
      WgmmaConsumer<C, 1> consumer(args, shared);
      for_each_item<L::kRows>(args, [&consumer](const Item& item) { consumer.attend(item); });
    }
  }
};

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_SM90_ATTEND_WGMMA_H_
