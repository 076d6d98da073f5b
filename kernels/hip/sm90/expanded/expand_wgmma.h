// Up-projection on sm_90a, with warpgroup products: keys [128 x 128] and values [128 x 128] of one
// head from 128 cached rows, depth 512.
//
//   warp 0           W_UK, then W_UV of a head, depth 64 at a time, to stages [64 x 128]
//   warps 1 to 3     rows, once a tile of them, to [128 x 512], where they stay
//   warpgroup 1      keys of a head           |  rounds, stores     |  keys of the next head ..
//   warpgroup 2      .. rounds, stores        |  values of a head   |  rounds, stores
//
// The two warpgroups take turns of kPanels stages: one has the matrix unit while the other rounds
// its 128 x 128 results into shared memory, from where they go to the workspace by bulk copies. A
// group gives the turn once its last stage is there, so that the other waits for the next phase of
// barriers that have no phase before it open.
//
// A block keeps its rows in shared memory over all its heads, and weights are all it reads.
//
// kResults: bf16, laid out as expanded_args.h says, or e4m3 (code_results.h). Values of e4m3 are
// multiplied transposed, with W_UV as the first operand, so that they leave the matrix unit as the
// second operand of the attention's product must lie.
#ifndef MLA_KERNELS_HIP_SM90_EXPANDED_EXPAND_WGMMA_H_
#define MLA_KERNELS_HIP_SM90_EXPANDED_EXPAND_WGMMA_H_

#include "kernels/hip/common/expanded_pairs.h"
#include "kernels/hip/sm90/expanded/code_results.h"
#include "kernels/hip/sm90/fp8/instructions.h"

namespace mla::kernels::hip {

template <KvFormat kFormat, DType kResults = DType::kBf16>
class ExpandWgmma {
 public:
  static constexpr int kThreads = 384;
  static constexpr int kStages = 4;
  static constexpr int kPanels = kExpandedLora / 64;
  static constexpr int kPanelBytes = kExpandedRows * 128;
  static constexpr int kRowsBytes = kPanels * kPanelBytes;
  static constexpr int kStageBytes = 128 * 128;
  static constexpr int kGroups = 2;  // that multiply
  static constexpr int kBarriers = 2 * kStages + 2 * kPanels;
  static constexpr int kSharedBytes = kRowsBytes + kStages * kStageBytes + kGroups * kPanelBytes +
                                      kBarriers * 8 +
                                      (kResults == DType::kBf16 ? 0 : kGroups * kCodeScratchBytes);
  static_assert(kExpandedNope == 128 && kExpandedValue == 128);

  MLA_DEVICE static void run(const ExpandArgs& args) {
    const ExpandWgmma self(args);
    if (thread_index() == 0) self.init_barriers();
    block_barrier();
    if (self.group == 0) {
      tile::give_registers<88>();
      if (tile::wave_index() == 0) {
        if (thread_index() == 0) self.copy_weights();
      } else {
        self.copy_rows();
      }
    } else {
      tile::take_registers<208>();
      if (self.group == 1) {
        self.template multiply<true>();
      } else {
        self.template multiply<false>();
      }
    }
  }

 private:
  // Named barriers.
  static constexpr int kTurn = 1;      // of warpgroup 1; kTurn + 1 is warpgroup 2's
  static constexpr int kOfGroup = 3;   // its own threads; kOfGroup + 1 is warpgroup 2's
  static constexpr int kHalves = 2;    // of the tile's rows, 64 each
  static constexpr int kOutputs = 64;  // of one half, a thread
  static constexpr bool kCodes = kResults != DType::kBf16;
  static constexpr bool kWidens = kFormat != KvFormat::kBf16;
  // Threads that copy rows, those of a row, rows at once, and how often that is for a tile.
  static constexpr int kCopiers = 96;
  static constexpr int kRowThreads = kWidens ? 4 : 8;  // 16 bytes each of a panel
  static constexpr int kRowsAtOnce = kCopiers / kRowThreads;
  static constexpr int kCopies = (kExpandedRows + kRowsAtOnce - 1) / kRowsAtOnce;
  static constexpr int kUnderWay = 4;        // panels of rows
  static constexpr float kLargeSum = 1e38f;  // of finite values, none of which is infinite in bf16

  MLA_DEVICE explicit ExpandWgmma(const ExpandArgs& a)
      : args(a), group(tile::wave_index() >> 2), thread(thread_index() & 127) {
    rows = tile::shared_base<kSharedBytes>();
    stages = rows + kRowsBytes;
    barriers = stages + (kStages + kGroups) * kStageBytes;
  }
  MLA_DEVICE uint32_t results() const { return stages + (kStages + group - 1) * kPanelBytes; }
  MLA_DEVICE uint32_t full(int stage) const { return barriers + stage * 16; }
  MLA_DEVICE uint32_t empty(int stage) const { return barriers + stage * 16 + 8; }
  MLA_DEVICE uint32_t rows_full(int panel) const { return full(kStages + panel); }
  MLA_DEVICE uint32_t rows_empty(int panel) const { return empty(kStages + panel); }
  MLA_DEVICE void init_barriers() const {
    for (int s = 0; s < kStages; ++s) {
      tile::barrier_init(full(s), 1);
      tile::barrier_init(empty(s), 1);
    }
    for (int panel = 0; panel < kPanels; ++panel) {
      tile::barrier_init(rows_full(panel), kCopiers);
      tile::barrier_init(rows_empty(panel), 1);
    }
    tile::barrier_init_visible();
  }

  // A stage and the parity of its current use.
  struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    MLA_DEVICE void next() {
      if (++stage < kStages) return;
      stage = 0;
      parity ^= 1;
    }
    MLA_DEVICE void skip_turn() {  // of the other group
      static_assert(kPanels % kStages == 0);
      parity ^= kPanels / kStages & 1;
    }
  };

  // --- Copies.
  // Both matrices are panels of 64 columns (weights/weight_panels.h): a stage
  // is one of W_UK, or 64 rows of both of W_UV.
  MLA_DEVICE void copy_weights() const {
    constexpr int kPart = kStageBytes / 2, kValuePanel = kExpandedLora * 128;
    Ring ring;
    for (ExpandPairs pairs(args, block_index()); !pairs.done(); pairs.next()) {
      const auto* w_uk = reinterpret_cast<const uint8_t*>(pairs.w_uk());
      const auto* w_uv = reinterpret_cast<const uint8_t*>(pairs.w_uv());
      for (int panel = 0; panel < kPanels; ++panel) {
        tile::bulk_copy(next_stage(ring), w_uk + panel * kStageBytes, kStageBytes,
                        full(ring.stage));
        ring.next();
      }
      for (int panel = 0; panel < kPanels; ++panel) {
        const uint32_t stage = next_stage(ring);
        tile::bulk_copy(stage, w_uv + panel * kPart, kPart, full(ring.stage));
        tile::bulk_copy(stage + kPart, w_uv + kValuePanel + panel * kPart, kPart, full(ring.stage));
        ring.next();
      }
    }
  }
  MLA_DEVICE uint32_t next_stage(const Ring& ring) const {
    tile::barrier_wait(empty(ring.stage), ring.parity ^ 1);
    tile::barrier_arrive_expecting(full(ring.stage), kStageBytes);
    return stages + ring.stage * kStageBytes;
  }

  MLA_DEVICE void copy_rows() const {
    const int copier = thread - 32;
    uint32_t parity = 0;
    for (ExpandPairs pairs(args, block_index()); !pairs.done(); pairs.next()) {
      if (pairs.fresh_tile()) {
        copy_tile(pairs, copier, parity);
        parity ^= 1;
      }
      if (!kCodes && pairs.head == 0) copy_rotated<kFormat>(pairs, copier, kCopiers);
    }
  }
  MLA_DEVICE void copy_tile(const ExpandPairs& pairs, int copier, uint32_t parity) const {
    const int own = copier % kRowThreads, first = copier / kRowThreads;
    const uint8_t* row[kCopies];
    const PagedRows pages = pairs.pages();
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      row[i] = pages.row(pairs.position(first + kRowsAtOnce * i)) + own * 16;
    }
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      tile::barrier_wait(rows_empty(panel), parity ^ 1);
      if constexpr (kWidens) {
        widen_rows<0>(row, panel, first, own);
        widen_rows<kCopies / 2>(row, panel, first, own);
      } else {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (first + kRowsAtOnce * i >= kExpandedRows) continue;
          tile::copy_chunk(place(panel, first + kRowsAtOnce * i, own), row[i] + panel * 128);
        }
      }
      tile::close_copies();
      if (panel < kUnderWay - 1) continue;
      tile::wait_for_copies<kUnderWay - 1>();
      announce(panel - (kUnderWay - 1));
    }
    tile::wait_for_copies<0>();
    for (int panel = kPanels - (kUnderWay - 1); panel < kPanels; ++panel) announce(panel);
  }
  MLA_DEVICE void announce(int panel) const {
    tile::publish_shared();
    tile::barrier_arrive(rows_full(panel));
  }
  MLA_DEVICE uint32_t place(int panel, int row, int chunk) const {
    return tile::chunk_at<kExpandedRows>(rows + panel * kPanelBytes, row, chunk);
  }
  // Sixteen of a panel's columns of half of this thread's rows, without the layer's scale.
  template <int kBegin>
  MLA_DEVICE void widen_rows(const uint8_t* const (&row)[kCopies], int panel, int first,
                             int own) const {
    constexpr int kHalf = kCopies / 2;
    static_assert(2 * kHalf == kCopies);
    uint32_t codes[kHalf][4];
    float scale[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      load_words(codes[i], row[kBegin + i] + panel * 64);
      scale[i] = 1.0f;
      if constexpr (kFormat == KvFormat::kFp8Row) {
        const auto* scales =
            reinterpret_cast<const float*>(row[kBegin + i] - own * 16 + kExpandedLora);
        scale[i] = kernels::KvScale(scales[panel / 2], kernels::Fp8Kind::kE4m3Fn);
      }
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int at = first + kRowsAtOnce * (kBegin + i);
      if (at >= kExpandedRows) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t eight[2] = {codes[i][2 * half], codes[i][2 * half + 1]};
        tile::store_chunk(place(panel, at, 2 * own + half), fp8_chunk(eight, scale[i]));
      }
    }
  }

  // --- Products.
  MLA_DEVICE void await_turn() const { tile::named_wait(kTurn + group - 1, 256); }
  MLA_DEVICE void give_turn() const { tile::named_arrive(kTurn + 2 - group, 256); }
  MLA_DEVICE void release(uint32_t barrier) const {
    if (thread == 0) tile::barrier_arrive(barrier);
  }

  template <bool kKeys>
  MLA_DEVICE void multiply() const {
    CodeResults<kFormat, kKeys ? kOfGroup : kOfGroup + 1> codes(
        results(), barriers + kBarriers * 8 + (group - 1) * kCodeScratchBytes, thread);
    Ring ring;
    uint32_t tile_parity = 1;
    if (!kKeys) {
      ring.skip_turn();
      give_turn();  // the first turn is warpgroup 1's
    }
    for (ExpandPairs pairs(args, block_index()); !pairs.done(); pairs.next()) {
      float c[kHalves][kOutputs];
      tile_parity ^= pairs.fresh_tile() ? 1 : 0;
      take_turn<kKeys>(pairs, tile_parity, c, ring);
      ring.skip_turn();
      const int existing = pairs.existing_rows();
      if constexpr (kCodes && kKeys) {
        if (pairs.fresh_tile()) codes.take_rotated(pairs);
        codes.store_keys(pairs, c);
      } else if constexpr (kCodes) {
        codes.store_values(pairs, c);
      } else if constexpr (kKeys) {
        store_part<kKeysPart>(pairs, existing, existing < kExpandedRows, c);
      } else {
        const bool careful = existing < kExpandedRows || tile::any(!surely_finite(c));
        store_part<kValuesPart>(pairs, existing, careful, c);
        if (pairs.rest_panel(0) != nullptr) store_part<kRestsPart>(pairs, existing, careful, c);
      }
    }
    if (kKeys) await_turn();  // the turn that was given back last
    if (thread == 0) tile::wait_for_stores_to_read();
  }
  template <bool kKeys>
  MLA_DEVICE void take_turn(const ExpandPairs& pairs, uint32_t tile_parity,
                            float (&c)[kHalves][kOutputs], Ring& ring) const {
    const bool fresh = pairs.fresh_tile();
    const bool frees_rows = !kKeys && pairs.last_of_tile();  // the values are read last
    int previous = -1;
    await_turn();
    for (int panel = 0; panel < kPanels; ++panel) {
      if (fresh) tile::barrier_wait(rows_full(panel), tile_parity);
      tile::barrier_wait(full(ring.stage), ring.parity);
      start_panel<kKeys>(panel, stages + ring.stage * kStageBytes, c);
      if (panel == kPanels - 1) give_turn();
      if (panel > 0) {
        tile::wgmma_wait<1>();
        release(empty(previous));
        if (frees_rows) release(rows_empty(panel - 1));
      }
      previous = ring.stage;
      ring.next();
    }
    tile::wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) tile::pin(c[half]);
    release(empty(previous));
    if (frees_rows) release(rows_empty(kPanels - 1));
  }
  template <bool kKeys>
  MLA_DEVICE void start_panel(int panel, uint32_t stage, float (&c)[kHalves][kOutputs]) const {
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int more = panel > 0 || step > 0;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint64_t own =
            tile::along_rows(rows + panel * kPanelBytes + half * (64 * 128) + step * 32);
        if constexpr (kKeys) {
          tile::multiply_rows(c[half], own, tile::along_rows(stage + step * 32), more);
        } else if constexpr (kCodes) {
          tile::multiply_turned(c[half],
                                tile::down_rows(stage + half * (64 * 128) + step * 2048, 0),
                                tile::along_rows(rows + panel * kPanelBytes + step * 32), more);
        } else {
          tile::multiply_columns(c[half], own, tile::down_rows(stage + step * 2048, 64 * 128),
                                 more);
        }
      }
    }
    tile::wgmma_commit();
  }

  // --- Results.
  // False as well where the sum is too large.
  MLA_DEVICE static bool surely_finite(const float (&c)[kHalves][kOutputs]) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        sums[i & 3] += bits_to_float(float_to_bits(c[half][i]) & 0x7fffffffu);
      }
    }
    return sums[0] + sums[1] + (sums[2] + sums[3]) < kLargeSum;
  }
  enum Part { kKeysPart, kValuesPart, kRestsPart };
  // Few tiles have rows that do not exist, or values that are not finite; the others' code is held
  // free of them.
  template <Part kPart>
  MLA_DEVICE void store_part(const ExpandPairs& pairs, int existing, bool careful,
                             const float (&c)[kHalves][kOutputs]) const {
    if (careful) {
      store<kPart, true>(pairs, existing, c);
    } else {
      store<kPart, false>(pairs, existing, c);
    }
  }
  // To two panels, one after the other through the group's shared memory.
  template <Part kPart, bool kCareful>
  MLA_DEVICE void store(const ExpandPairs& pairs, int existing,
                        const float (&c)[kHalves][kOutputs]) const {
    // Chunk lane / 8 of row lane % 8 of the warp's first eight.
    const int lane = thread & 31;
    const uint32_t at =
        tile::chunk_at<kExpandedRows>(results(), (thread >> 5) * 16 + (lane & 7), lane >> 3);
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      if (thread == 0) tile::wait_for_stores_to_read();
      tile::named_wait(kOfGroup + group - 1, 128);
#pragma unroll
      for (int eight = 0; eight < 2 * kHalves; ++eight) {
        const int first = (eight >> 1) * 64 + (eight & 1) * 8;
        const bool exists = !kCareful || first + (thread >> 5) * 16 + (lane >> 2) < existing;
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int e = 4 * (8 * panel + j + i) + 2 * (eight & 1);
            words[i] = packed<kPart, kCareful>(c[eight >> 1][e], c[eight >> 1][e + 1]);
            if (kCareful && !exists) words[i] = 0;
          }
          tile::store_matrices((at ^ j << 4) + first * 128, words[0], words[1], words[2], words[3]);
        }
      }
      tile::publish_shared();
      tile::named_wait(kOfGroup + group - 1, 128);
      if (thread != 0) continue;
      uint8_t* const to = kPart == kRestsPart ? pairs.rest_panel(panel)
                                              : pairs.panel(panel + (kPart == kKeysPart ? 0 : 2));
      tile::bulk_store(to, results(), kPanelBytes);
    }
  }
  template <Part kPart, bool kCareful>
  MLA_DEVICE static uint32_t packed(float low, float high) {
    const uint32_t rounded = pack_bf16(low, high);
    if constexpr (kPart == kKeysPart) return rounded;
    if constexpr (kPart == kValuesPart) return kCareful ? only_finite(rounded) : rounded;
    if constexpr (kCareful) return rest_of(low, high);
    return pack_bf16(low - bits_to_float(rounded << 16),
                     high - bits_to_float(rounded & 0xffff0000u));
  }

  const ExpandArgs& args;
  const int group, thread;
  uint32_t rows, stages, barriers;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SM90_EXPANDED_EXPAND_WGMMA_H_
