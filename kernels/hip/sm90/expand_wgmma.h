// Up-projection on sm_90a, with warpgroup products: keys [128 x 128] and values [128 x 128] of one
// head from 128 cached rows, depth 512.
//
//   warpgroup 0 copies:   rows panel k (once a tile of rows)  --> rows    [128 x 512], stays
//                         W_UK, W_UV, depth 64 k ..           --> weights [64 x 256], kStages deep
//   warpgroups 1, 2:      64 rows each, keys and values in registers, 64 + 64 a thread
//
// A block keeps its rows in shared memory over all its heads, so that weights are all it reads.
// The rows' panel k is written together with the weights of depth k of the first head; that the
// previous tile's panel is no longer read follows from the stage being free again, because a panel
// is eight stages old by then and there are three.
#ifndef MLA_KERNELS_HIP_SM90_EXPAND_WGMMA_H_
#define MLA_KERNELS_HIP_SM90_EXPAND_WGMMA_H_

#include "kernels/hip/common/expanded_pairs.h"
#include "kernels/hip/sm90/fp8/instructions.h"
#include "kernels/hip/sm90/tile.h"
#include "kernels/hip/sm90/warpgroup.h"

namespace mla::kernels::hip {

template <KvFormat kFormat>
class ExpandWgmma {
 public:
  static constexpr int kThreads = 384;
  static constexpr int kStages = 3;
  static constexpr int kPanels = kExpandedLora / 64;
  static constexpr int kPanelBytes = kExpandedRows * 128;
  static constexpr int kRowsBytes = kPanels * kPanelBytes;
  static constexpr int kStageBytes = (kExpandedNope + kExpandedValue) * 128;
  static constexpr int kSharedBytes = kRowsBytes + kStages * kStageBytes + kStages * 16;
  static_assert(kPanels > kStages);

  MLA_DEVICE static void run(const ExpandArgs& args) {
    ExpandWgmma self(args);
    if (thread_index() == 0) {
      for (int s = 0; s < kStages; ++s) {
        tile::barrier_init(self.full(s), 128);
        tile::barrier_init(self.empty(s), 2);
      }
      tile::barrier_init_visible();
    }
    block_barrier();
    if (self.group == 0) {
      self.copy();
    } else {
      self.multiply();
    }
  }

 private:
  static constexpr int kOutputs = 64;  // of one product, a thread
  static constexpr bool kWidens = kFormat != KvFormat::kBf16;

  MLA_DEVICE explicit ExpandWgmma(const ExpandArgs& a)
      : args(a), group(tile::wave_index() >> 2), thread(thread_index() & 127) {
    rows = tile::shared_base<kSharedBytes>();
    stages = rows + kRowsBytes;
    barriers = stages + kStages * kStageBytes;
  }
  MLA_DEVICE uint32_t full(int stage) const { return barriers + stage * 16; }
  MLA_DEVICE uint32_t empty(int stage) const { return barriers + stage * 16 + 8; }

  // A stage and the parity of its current use.
  struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    MLA_DEVICE void next() {
      if (++stage < kStages) return;
      stage = 0;
      parity ^= 1;
    }
  };

  // --- Copies. What a stage got is announced one stage later, when it has landed.
  MLA_DEVICE void copy() {
    Ring ring;
    int announced = -1;  // the stage that is on its way
    const int chunk = thread & 7;
    for (ExpandPairs pairs(args, block_index()); !pairs.done(); pairs.next()) {
      const uint8_t* row[8];
      const bool fresh = pairs.fresh_tile();
      if (fresh) {
        const PagedRows pages = pairs.pages();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          row[i] = pages.row(pairs.position((thread >> 3) + 16 * i)) + (kWidens ? 0 : chunk * 16);
        }
      }
      if (pairs.head == 0) copy_rotated<kFormat>(pairs, thread, 128);
      const uint16_t* w_uk = pairs.w_uk() + (thread >> 3) * kExpandedLora + chunk * 8;
      const uint16_t* w_uv = pairs.w_uv() + (thread >> 4) * kExpandedValue + (thread & 15) * 8;
      for (int panel = 0; panel < kPanels; ++panel) {
        tile::barrier_wait(empty(ring.stage), ring.parity ^ 1);
        if (fresh) {
          if constexpr (kWidens) {
            widen_panel(row, panel, chunk);
          } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              tile::copy_chunk(tile::chunk_at<kExpandedRows>(rows + panel * kPanelBytes,
                                                             (thread >> 3) + 16 * i, chunk),
                               row[i] + panel * 128);
            }
          }
        }
        copy_weights(stages + ring.stage * kStageBytes, w_uk + panel * 64,
                     w_uv + panel * (64 * kExpandedValue));
        tile::close_copies();
        if (announced >= 0) {
          tile::wait_for_copies<1>();
          announce(announced);
        }
        announced = ring.stage;
        ring.next();
      }
    }
    tile::wait_for_copies<0>();
    if (announced >= 0) announce(announced);
  }
  // 64 columns of eight of this thread's rows, eight columns each, without the layer's scale.
  MLA_DEVICE void widen_panel(const uint8_t* const (&row)[8], int panel, int chunk) const {
    uint32_t codes[8][2];
    float scale[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      load_words(codes[i], row[i] + panel * 64 + chunk * 8);
      scale[i] = 1.0f;
      if constexpr (kFormat == KvFormat::kFp8Row) {
        const auto* scales = reinterpret_cast<const float*>(row[i] + kExpandedLora);
        scale[i] = kernels::KvScale(scales[panel / 2], kernels::Fp8Kind::kE4m3Fn);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      tile::store_chunk(
          tile::chunk_at<kExpandedRows>(rows + panel * kPanelBytes, (thread >> 3) + 16 * i, chunk),
          fp8_chunk(codes[i], scale[i]));
    }
  }
  MLA_DEVICE void announce(int stage) const {
    tile::publish_shared();
    tile::barrier_arrive(full(stage));
  }
  // Depth 64: W_UK as 128 rows of 128 bytes, W_UV as two column blocks of 64 rows.
  MLA_DEVICE void copy_weights(uint32_t stage, const uint16_t* w_uk, const uint16_t* w_uv) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      tile::copy_chunk(tile::chunk_at<kExpandedNope>(stage, (thread >> 3) + 16 * i, thread & 7),
                       w_uk + i * (16 * kExpandedLora));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      tile::copy_chunk(
          tile::chunk_at<64>(stage + kExpandedNope * 128, (thread >> 4) + 8 * i, thread & 15),
          w_uv + i * (8 * kExpandedValue));
    }
  }

  // --- Products.
  MLA_DEVICE void multiply() {
    Ring ring;
    for (ExpandPairs pairs(args, block_index()); !pairs.done(); pairs.next()) {
      // Few tiles have rests to keep; the others' code is held free of them.
      if (pairs.rest_panel(0) != nullptr) {
        multiply<true>(pairs, ring);
      } else {
        multiply<false>(pairs, ring);
      }
    }
  }
  template <bool kRests>
  MLA_DEVICE void multiply(const ExpandPairs& pairs, Ring& ring) const {
    float keys[kOutputs], values[kOutputs];
    int previous = -1;
    for (int panel = 0; panel < kPanels; ++panel) {
      tile::barrier_wait(full(ring.stage), ring.parity);
      const uint32_t stage = stages + ring.stage * kStageBytes;
      const uint32_t own = rows + panel * kPanelBytes + (group - 1) * (64 * 128);
      tile::wgmma_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int more = panel > 0 || step > 0;
        tile::multiply_rows(keys, tile::along_rows(own + step * 32),
                            tile::along_rows(stage + step * 32), more);
        tile::multiply_columns(values, tile::along_rows(own + step * 32),
                               tile::down_rows(stage + kExpandedNope * 128 + step * 2048, 64 * 128),
                               more);
      }
      tile::wgmma_commit();
      if (previous >= 0) {
        tile::wgmma_wait<1>();
        if (thread == 0) tile::barrier_arrive(empty(previous));
      }
      previous = ring.stage;
      ring.next();
    }
    tile::wgmma_wait<0>();
    tile::pin(keys);
    tile::pin(values);
    if (thread == 0) tile::barrier_arrive(empty(previous));
    store(pairs, keys, pairs.panel(0), pairs.panel(1),
          [](float low, float high) { return pack_bf16(low, high); });
    store(pairs, values, pairs.panel(2), pairs.panel(3),
          [](float low, float high) { return only_finite(pack_bf16(low, high)); });
    if constexpr (kRests) {
      store(pairs, values, pairs.rest_panel(0), pairs.rest_panel(1), rest_of);
    }
  }

  // As `round` makes pairs, to two panels. Four lanes hold a row's chunk in words; each gets one of
  // four chunks.
  template <class Round>
  MLA_DEVICE void store(const ExpandPairs& pairs, const float (&c)[kOutputs], uint8_t* panel0,
                        uint8_t* panel1, const Round& round) const {
    const int lane = thread & 31;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (group - 1) * 64 + (thread >> 5) * 16 + half * 8 + (lane >> 2);
      const bool exists = pairs.exists(row);
#pragma unroll
      for (int j = 0; j < kOutputs / 4; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (j + i) + 2 * half;
          words[i] = exists ? round(c[at], c[at + 1]) : 0;
        }
        tile::gather_chunks(words, lane);
        const int chunk = (j & 7) + (lane & 3);
        store_words(
            (j < 8 ? panel0 : panel1) + row * kPanelRowBytes + ((chunk ^ tile::swizzle(row)) << 4),
            words);
      }
    }
  }

  const ExpandArgs& args;
  const int group, thread;
  uint32_t rows, stages, barriers;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SM90_EXPAND_WGMMA_H_
