// Absorbed attention for tiles of 17 to 64 packed rows on sm_90a, with warpgroup products: where
// the matrix unit is the limit, or near it.
//
// Two warpgroups share 64 packed rows. For each KV tile of 64 rows, group g computes the scores of
// KV rows [32 g, 32 g + 32), the groups exchange row maxima through shared memory, both write their
// probabilities, and group g accumulates output columns [256 g, 256 g + 256):
//
//     S [64 x 32] per group: 36 products of depth 16, Q and K from shared memory
//     O [64 x 256] per group: 4 products of depth 16, P and V from shared memory
//
// Everything around the products (items, copies, masks, results) is that of common/attend.h.
#ifndef MLA_KERNELS_HIP_SM90_ATTEND_WGMMA_H_
#define MLA_KERNELS_HIP_SM90_ATTEND_WGMMA_H_

#include "kernels/hip/common/item.h"
#include "kernels/hip/common/kv_stream.h"
#include "kernels/hip/sm90/tile.h"
#include "kernels/hip/sm90/wgmma.h"

namespace mla::gpu {

template <class C>
class AttendWgmma {
 public:
  static constexpr int kRows = 64;
  static constexpr int kThreads = 256;
  static constexpr int kWaves = 8;
  using Stream = KvStream<C, kWaves>;
  static constexpr int kDim = Stream::kDim;
  static constexpr int kStageBytes = Stream::kStageBytes;
  static constexpr int kQBytes = kRows * kDim * 2;
  static constexpr int kPBytes = kRows * C::kTileKv * 2;
  static constexpr int kStatsBytes = kRows * 2 * 4;
  static constexpr int kSharedBytes = C::kStages * kStageBytes + kQBytes + kPBytes + kStatsBytes;
  static_assert(C::kTileKv == 64 && C::kLora == 512 && C::kStages == 2);

  MLA_DEVICE static void run(const AttendArgs& args) {
    AttendWgmma self(args);
    let_next_kernel_start();
    for_each_item<kRows>(args, [&self](const Item& item) { self.attend(item); });
  }

 private:
  static constexpr int kHalf = C::kTileKv / 2;   // kv rows a group scores
  static constexpr int kScores = kHalf / 2;      // scores a thread holds
  static constexpr int kColumns = C::kLora / 2;  // output columns of a group
  static constexpr int kOutputs = kColumns / 2;  // of a thread

  struct State {
    float o[kOutputs];
    float max[2], sum[2], rounded_sum[2];
    int limit[2];
  };

  MLA_DEVICE explicit AttendWgmma(const AttendArgs& a)
      : args(a), lane(tile::lane_index()), wave(tile::wave_index()) {
    group = wave >> 2;
    stages = tile::shared_base<kSharedBytes>();
    q_tile = stages + C::kStages * kStageBytes;
    p_tile = q_tile + kQBytes;
    stats = p_tile + kPBytes;
  }

  // Packed row of this thread's slot (0 or 1).
  MLA_DEVICE int row(int slot) const { return (wave & 3) * 16 + slot * 8 + (lane >> 2); }
  MLA_DEVICE uint32_t stat(int slot) const { return stats + row(slot) * 8; }

  MLA_DEVICE void attend(const Item& item) {
    const RequestRecord& r = *item.request;
    const PagedRows pages(args.page_tables, r.page_table, args.pool, r.layer_offset, r.row_stride,
                          r.page_size, args.granule_bytes);
    const int kv_begin = item.work.kv_begin, kv_end = item.work.kv_end;
    const int tiles = (kv_end - kv_begin + C::kTileKv - 1) / C::kTileKv;
    const int unmasked_end = item.limit(0);
    const bool ragged = item.limit(item.rows - 1) != unmasked_end;
    const float scale = r.softmax_scale * kLog2e;

    block_barrier();  // the previous item's readers are done with shared memory
    Stream kv(stages, wave, lane);
    copy_queries<kRows, kDim, kWaves>(item, q_tile, wave, lane);
    kv.find(pages, kv_begin, kv_end);
    if (tiles > 0) kv.issue(0);
    kv.close_stage();
    kv.find(pages, kv_begin + C::kTileKv, kv_end);
    State state;
    clear(item, state);
    for (int t = 0; t < tiles; ++t) {
      kv.template wait<0>();
      tile::publish_shared();
      block_barrier();
      const uint32_t tile_base = stages + (t & 1) * kStageBytes;
      float s[kScores];
      start_scores(tile_base, s);
      // The matrix unit works while the next tile's copies are issued.
      if (t + 1 < tiles) kv.issue((t + 1) & 1);
      kv.close_stage();
      kv.find(pages, kv_begin + (t + 2) * C::kTileKv, kv_end);
      tile::wgmma_wait<0>();
      tile::pin(s);
      const int first = kv_begin + t * C::kTileKv;
      step(tile_base, s, state, first, unmasked_end, ragged, scale);
    }
    kv.template wait<0>();
    finish(item, state);
  }

  MLA_DEVICE void clear(const Item& item, State& state) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) state.o[i] = 0.0f;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int p = row(slot);
      state.max[slot] = negative_infinity();
      state.sum[slot] = state.rounded_sum[slot] = 0.0f;
      state.limit[slot] = p < item.rows ? item.limit(p) : item.work.kv_end;
    }
  }

  // From a tile's scores to its share of the outputs.
  MLA_DEVICE void step(uint32_t tile_base, float (&s)[kScores], State& state, int first,
                       int unmasked_end, bool ragged, float scale) const {
    const bool masked = first + C::kTileKv > unmasked_end;
    const int col0 = first + group * kHalf + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] *= scale;
      if (masked) {
        const int position = col0 + 8 * (i >> 2) + (i & 1);
        s[i] = position < state.limit[(i >> 1) & 1] ? s[i] : negative_infinity();
      }
    }
    rescale(s, state);
    if (masked && ragged) hide_unseen_values<C, kThreads>(tile_base, unmasked_end - first);
    tile::publish_shared();
    block_barrier();
    accumulate(tile_base, state);
  }

  MLA_DEVICE void start_scores(uint32_t tile_base, float (&s)[kScores]) const {
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const uint32_t inside = (step & 3) * 32;
      const uint32_t block = step >> 2;
      tile::wgmma_scores(
          s, tile::along_rows(q_tile + block * (kRows * 128) + inside),
          tile::along_rows(tile_base + block * (C::kTileKv * 128) + group * (kHalf * 128) + inside),
          step > 0);
    }
    tile::wgmma_commit();
  }

  // Probabilities go to the shared tile, rounded; the accumulators follow the new row maxima.
  MLA_DEVICE void rescale(float (&s)[kScores], State& state) const {
    float top[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
    for (int i = 0; i < kScores; ++i) top[(i >> 1) & 1] = max_f(top[(i >> 1) & 1], s[i]);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      top[slot] = tile::Wave<16>::row_max(top[slot]);
      tile::store_float(stat(slot) + group * 4, top[slot]);
    }
    block_barrier();
    float factor[2], origin[2];
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const float other = tile::load_float(stat(slot) + (group ^ 1) * 4);
      const float now = max_f(state.max[slot], max_f(top[slot], other));
      origin[slot] = now == negative_infinity() ? 0.0f : now;
      factor[slot] = exp2_fast(state.max[slot] - origin[slot]);
      moved |= now != state.max[slot];
      state.max[slot] = now;
      state.sum[slot] *= factor[slot];
      state.rounded_sum[slot] *= factor[slot];
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int slot = (i >> 1) & 1;
      const float a = exp2_fast(s[i] - origin[slot]), b = exp2_fast(s[i + 1] - origin[slot]);
      const uint32_t packed = pack_bf16(a, b);
      state.sum[slot] += a + b;
      state.rounded_sum[slot] += bits_to_float(packed << 16) + bits_to_float(packed & 0xffff0000u);
      tile::store_word(
          tile::chunk_at<kRows>(p_tile, row(slot), group * (kHalf / 8) + (i >> 2)) + (lane & 3) * 4,
          packed);
    }
    if (!tile::any(moved)) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) state.o[i] *= factor[(i >> 1) & 1];
  }

  MLA_DEVICE void accumulate(uint32_t tile_base, State& state) const {
    tile::pin(state.o);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < C::kTileKv / 16; ++step) {
      tile::wgmma_outputs(
          state.o, tile::along_rows(p_tile + step * 32),
          tile::down_rows(tile_base + group * (kColumns / 64) * (C::kTileKv * 128) + step * 2048,
                          C::kTileKv * 128),
          1);
    }
    tile::wgmma_commit();
    tile::wgmma_wait<0>();
    tile::pin(state.o);
  }

  MLA_DEVICE void finish(const Item& item, State& state) const {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      state.sum[slot] = add_groups(state.sum[slot], slot);
      state.rounded_sum[slot] = add_groups(state.rounded_sum[slot], slot);
      const int p = row(slot);
      if (p < item.rows) write_row(item, state, slot, p);
    }
  }

  // Sum over the lanes of a row and both groups.
  MLA_DEVICE float add_groups(float x, int slot) const {
    x = tile::Wave<16>::row_sum(x);
    block_barrier();
    tile::store_float(stat(slot) + group * 4, x);
    block_barrier();
    return tile::load_float(stat(slot)) + tile::load_float(stat(slot) + 4);
  }

  MLA_DEVICE void write_row(const Item& item, const State& state, int slot, int p) const {
    const RowScale scale(state.max[slot], state.sum[slot]);
    const RowTarget target(args, item, p, C::kLora);
    const bool aligned = aligned_results(args, item, 2);
    // The outputs were summed with rounded probabilities, so they are divided by the sum of those.
    const float inverse = scale.empty ? 0.0f : 1.0f / state.rounded_sum[slot];
    if (group == 0 && (lane & 3) == 0 && target.lse != nullptr) *target.lse = scale.lse;
#pragma unroll
    for (int i = 2 * slot; i < kOutputs; i += 4) {
      const float run[2] = {scale.empty ? 0.0f : state.o[i] * inverse,
                            scale.empty ? 0.0f : state.o[i + 1] * inverse};
      store_run(target.base, target.index + group * kColumns + 2 * i - 4 * slot + 2 * (lane & 3),
                run, target.f32, aligned);
    }
  }

  const AttendArgs& args;
  const int lane, wave;
  int group;
  uint32_t stages, q_tile, p_tile, stats;
};

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_SM90_ATTEND_WGMMA_H_
