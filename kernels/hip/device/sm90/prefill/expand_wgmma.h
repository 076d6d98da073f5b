// Up-projection on sm_90a, with warpgroup products: keys [128 x nope] and values [128 x value] of
// one head from 128 cached rows, depth 512.
//
//   warp 0           W_UK, then W_UV of a head, depth 64 at a time, to stages [64 x 128]
//   warps 1 to 3     rows, once a tile of them, to [128 x 512], where they stay
//   warpgroup 1      keys of a head           |  rounds, stores     |  keys of the next head ..
//   warpgroup 2      .. rounds, stores        |  values of a head   |  rounds, stores
//
// The two warpgroups take turns of up to 128 columns. One has the matrix unit while the other
// rounds its results into shared memory, from where bulk copies move them to the workspace. A group
// gives the turn away once its last stage has arrived. The other group then waits for the next
// phase of each barrier, and no earlier phase is still open. Keys of 192 columns take two turns,
// the second one of 64 columns with depth 128 a stage; values of 256 columns take two.
//
// A block keeps its rows in shared memory over all its heads, so it reads only weights in between.
//
// kResults: bf16, in the layout of expanded_args.h, or e4m3 (code_results.h). The product of e4m3
// values is transposed, with W_UV as the first operand, so that the matrix unit's results have the
// layout of the second operand in attention.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPAND_WGMMA_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPAND_WGMMA_H_

#include "kernels/hip/device/primitives/expanded_pairs.h"
#include "kernels/hip/device/sm90/fp8_instructions.h"
#include "kernels/hip/device/sm90/prefill/code_results.h"

namespace mla::kernels::hip {

template <ExpandedDims kDims, KvFormat kFormat, DType kResults = DType::kBf16>
class ExpandWgmma {
 public:
  static constexpr int kThreads = 384;
  static constexpr int kStages = 4;
  static constexpr int kPanels = kExpandedLora / 64;
  static constexpr int kPanelBytes = kExpandedRows * 128;
  static constexpr int kRowsBytes = kPanels * kPanelBytes;
  static constexpr int kStageBytes = 128 * 128;
  static constexpr int kGroups = 2;  // groups that multiply
  static constexpr int kBarriers = 2 * kStages + 2 * kPanels;
  static constexpr int kSharedBytes = kRowsBytes + kStages * kStageBytes + kGroups * kPanelBytes +
                                      kBarriers * 8 +
                                      (kResults == DType::kBf16 ? 0 : kGroups * kCodeScratchBytes);
  static_assert(kResults == DType::kBf16 || kDims == kDims128);

  MLA_DEVICE static void run(const ExpandArgs& args) {
    const ExpandWgmma self(args);
    if (thread_index() == 0) self.init_barriers();
    block_barrier();
    if (self.group == 0) {
      tile::give_registers<kCopyRegisters>();
      if (tile::wave_index() == 0) {
        if (thread_index() == 0) self.copy_weights();
      } else {
        self.copy_rows();
      }
    } else {
      tile::take_registers<kMultiplyRegisters>();
      if (self.group == 1) {
        self.template multiply<0>();
      } else {
        self.template multiply<1>();
      }
    }
  }

 private:
  using Pairs = ExpandPairs<kDims>;
  // Registers a thread. Groups of several turns take a few more. A block starts with 168 for each
  // thread; a group that asks for more waits until others have released theirs.
  static constexpr int kCopyRegisters = kDims == kDims128 ? 88 : 72;
  static constexpr int kMultiplyRegisters = kDims == kDims128 ? 208 : 216;
  static_assert(kCopyRegisters + kGroups * kMultiplyRegisters <= 3 * 168);
  // Named barriers.
  static constexpr int kTurn = 1;     // warpgroup 1's; kTurn + 1 is warpgroup 2's
  static constexpr int kOfGroup = 3;  // all threads of warpgroup 1; kOfGroup + 1 for warpgroup 2
  static constexpr int kHalves = 2;   // of the tile's rows, 64 each
  static constexpr bool kCodes = kResults != DType::kBf16;
  static constexpr bool kWidens = kFormat != KvFormat::kBf16;
  // Threads that copy rows, threads a row, rows at once, and copies a tile.
  static constexpr int kCopiers = 96;
  static constexpr int kRowThreads = kWidens ? 4 : 8;  // 16 bytes each of a panel
  static constexpr int kRowsAtOnce = kCopiers / kRowThreads;
  static constexpr int kCopies = (kExpandedRows + kRowsAtOnce - 1) / kRowsAtOnce;
  static constexpr int kUnderWay = 4;        // panels of rows in flight
  static constexpr float kLargeSum = 1e38f;  // a smaller sum of magnitudes has no value that is
                                             // infinite in bf16

  // Turns of a head; the two groups alternate.
  static constexpr int kMostColumns = 128;
  static constexpr int kKeyTurns = (kDims.nope + kMostColumns - 1) / kMostColumns;
  static constexpr int kTurns = kKeyTurns + kDims.value / kMostColumns;
  static_assert(kTurns % kGroups == 0 && kDims.value % kMostColumns == 0);
  template <int kIndex>
  struct Turn {
    static constexpr bool kKeys = kIndex < kKeyTurns;
    static constexpr int kFirst = kMostColumns * (kKeys ? kIndex : kIndex - kKeyTurns);
    static constexpr int kColumns =
        kKeys && kDims.nope - kFirst < kMostColumns ? kDims.nope - kFirst : kMostColumns;
    static_assert(kColumns == 64 || kColumns == 128);
    static constexpr int kOutputs = kColumns / 2;                 // outputs of one half, a thread
    static constexpr int kStagePanels = kMostColumns / kColumns;  // panels of the depth in a stage
    static constexpr int kUses = kPanels / kStagePanels;          // stages used
    static_assert(kUses % kStages == 0);
    static constexpr int kResultPanel = (kKeys ? 0 : kDims.key_panels()) + kFirst / 64;
  };

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
    MLA_DEVICE void skip(int uses) { parity ^= uses / kStages & 1; }  // whole rounds of stages
  };

  // --- Copies.
  // Both matrices are panels of 64 columns (device_state/weight_panels.h). A stage is 128 rows of
  // one panel of W_UK, 64 rows of two panels of W_UK, or 64 rows of two panels of W_UV.
  MLA_DEVICE void copy_weights() const {
    Ring ring;
    for (Pairs pairs(args, block_index()); !pairs.done(); pairs.next()) {
      copy_turns<0>(pairs, ring);
    }
  }
  template <int kIndex>
  MLA_DEVICE void copy_turns(const Pairs& pairs, Ring& ring) const {
    if constexpr (kIndex < kTurns) {
      using T = Turn<kIndex>;
      constexpr int kKeyPanel = kDims.nope * 128, kValuePanel = kExpandedLora * 128;
      // Bytes of a part of a stage, between parts in memory, and between stages in memory.
      constexpr int kParts = T::kKeys ? T::kStagePanels : 2, kPart = kStageBytes / kParts;
      constexpr int kBetween = T::kKeys ? kKeyPanel : kValuePanel;
      constexpr int kStep = T::kKeys ? T::kStagePanels * kKeyPanel : kPart;
      const auto* from =
          T::kKeys ? reinterpret_cast<const uint8_t*>(pairs.w_uk()) + T::kFirst * 128
                   : reinterpret_cast<const uint8_t*>(pairs.w_uv()) + T::kFirst / 64 * kValuePanel;
      for (int use = 0; use < T::kUses; ++use, from += kStep) {
        const uint32_t stage = next_stage(ring);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          tile::bulk_copy(stage + part * kPart, from + part * kBetween, kPart, full(ring.stage));
        }
        ring.next();
      }
      copy_turns<kIndex + 1>(pairs, ring);
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
    for (Pairs pairs(args, block_index()); !pairs.done(); pairs.next()) {
      if (pairs.fresh_tile()) {
        copy_tile(pairs, copier, parity);
        parity ^= 1;
      }
      if (kCodes || pairs.head > 0) continue;
      if constexpr (kDims == kDims128) {
        copy_rotated<kFormat>(pairs, copier, kCopiers);
      } else {  // one at a time, to save registers
        const PagedRows pages = pairs.pages();
#pragma unroll 1
        for (int i = copier; i < kRotatedChunks; i += kCopiers) {
          copy_rotated_chunk<kFormat>(pairs, pages, i);
        }
      }
    }
  }
  MLA_DEVICE void copy_tile(const Pairs& pairs, int copier, uint32_t parity) const {
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
  // Widens sixteen of a panel's columns of this thread's rows from the kBegin-th row on, several
  // rows at a time, without the layer's scale.
  template <int kBegin>
  MLA_DEVICE void widen_rows(const uint8_t* const (&row)[kCopies], int panel, int first,
                             int own) const {
    constexpr int kAtOnce = kDims == kDims128 ? 3 : 2;  // as many as registers allow
    static_assert(kCopies % kAtOnce == 0);
    uint32_t codes[kAtOnce][4];
    float scale[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      load_words(codes[i], row[kBegin + i] + panel * 64);
      scale[i] = 1.0f;
      if constexpr (kFormat == KvFormat::kFp8Row) {
        const auto* scales =
            reinterpret_cast<const float*>(row[kBegin + i] - own * 16 + kExpandedLora);
        scale[i] = kernels::KvScale(scales[panel / 2], kernels::Fp8Kind::kE4m3Fn);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int panel_row = first + kRowsAtOnce * (kBegin + i);
      if (panel_row >= kExpandedRows) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t eight[2] = {codes[i][2 * half], codes[i][2 * half + 1]};
        tile::store_chunk(place(panel, panel_row, 2 * own + half), fp8_chunk(eight, scale[i]));
      }
    }
    if constexpr (kBegin + kAtOnce < kCopies) widen_rows<kBegin + kAtOnce>(row, panel, first, own);
  }

  // --- Products.
  MLA_DEVICE void await_turn() const { tile::named_wait(kTurn + group - 1, 256); }
  MLA_DEVICE void give_turn() const { tile::named_arrive(kTurn + 2 - group, 256); }
  MLA_DEVICE void release(uint32_t barrier) const {
    if (thread == 0) tile::barrier_arrive(barrier);
  }

  // `kFirst` is the group's first turn.
  template <int kFirst>
  MLA_DEVICE void multiply() const {
    CodeResults<kFormat, kOfGroup + kFirst> codes(
        results(), barriers + kBarriers * 8 + (group - 1) * kCodeScratchBytes, thread);
    Ring ring;
    uint32_t tile_parity = 1;
    if (kFirst == 1) {
      ring.skip(Turn<0>::kUses);
      give_turn();  // warpgroup 1 has the first turn
    }
    for (Pairs pairs(args, block_index()); !pairs.done(); pairs.next()) {
      tile_parity ^= pairs.fresh_tile() ? 1 : 0;
      serve<kFirst>(pairs, tile_parity, codes, ring);
    }
    if (kFirst == 0) await_turn();  // takes the turn that was given away last
    if (thread == 0) tile::wait_for_stores_to_read();
  }
  // Serves the group's turns of a pair from kIndex on.
  template <int kIndex, class Codes>
  MLA_DEVICE void serve(const Pairs& pairs, uint32_t tile_parity, Codes& codes, Ring& ring) const {
    using T = Turn<kIndex>;
    {
      float c[kHalves][T::kOutputs];
      take_turn<kIndex>(pairs, tile_parity, c, ring);
      ring.skip(Turn<(kIndex + 1) % kTurns>::kUses);
      const int existing = pairs.existing_rows();
      if constexpr (kCodes && T::kKeys) {
        if (pairs.fresh_tile()) codes.take_rotated(pairs);
        codes.store_keys(pairs, c);
      } else if constexpr (kCodes) {
        codes.store_values(pairs, c);
      } else if constexpr (T::kKeys) {
        store_part<kIndex, kKeysPart>(pairs, existing, existing < kExpandedRows, c);
      } else {
        const bool careful = existing < kExpandedRows || tile::any(!surely_finite(c));
        store_part<kIndex, kValuesPart>(pairs, existing, careful, c);
        if (pairs.rest_panel(0) != nullptr) {
          store_part<kIndex, kRestsPart>(pairs, existing, careful, c);
        }
      }
    }
    if constexpr (kIndex + kGroups < kTurns) {
      serve<kIndex + kGroups>(pairs, tile_parity, codes, ring);
    }
  }
  template <int kIndex, int kOutputs>
  MLA_DEVICE void take_turn(const Pairs& pairs, uint32_t tile_parity, float (&c)[kHalves][kOutputs],
                            Ring& ring) const {
    using T = Turn<kIndex>;
    constexpr bool kLast = kIndex == kTurns - 1;
    static_assert(!kLast || T::kStagePanels == 1);
    const bool fresh = kIndex < kGroups && pairs.fresh_tile();
    const bool frees_rows = kLast && pairs.last_of_tile();  // the last turn is the last to read the
                                                            // rows
    int previous = -1;
    if constexpr (kTurns > kGroups) clear(c);
    await_turn();
    for (int use = 0; use < T::kUses; ++use) {
#pragma unroll
      for (int i = 0; i < T::kStagePanels; ++i) {
        if (fresh) tile::barrier_wait(rows_full(use * T::kStagePanels + i), tile_parity);
      }
      tile::barrier_wait(full(ring.stage), ring.parity);
      start_stage<kIndex>(use, stages + ring.stage * kStageBytes, c);
      if (use == T::kUses - 1) give_turn();
      if (use > 0) {
        tile::wgmma_wait<1>();
        release(empty(previous));
        if (frees_rows) release(rows_empty(use - 1));
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
  // The first product initialises the sums. Setting them to zero anyway ends their lifetime: in a
  // group of several turns the compiler would otherwise keep each turn's registers through all
  // turns.
  template <int kOutputs>
  MLA_DEVICE static void clear(float (&c)[kHalves][kOutputs]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) c[half][i] = 0.0f;
      tile::pin(c[half]);
    }
  }
  template <int kIndex, int kOutputs>
  MLA_DEVICE void start_stage(int use, uint32_t stage, float (&c)[kHalves][kOutputs]) const {
    using T = Turn<kIndex>;
    tile::wgmma_begin();
#pragma unroll
    for (int part = 0; part < T::kStagePanels; ++part) {
      const uint32_t panel = rows + (use * T::kStagePanels + part) * kPanelBytes;
      const uint32_t weights = stage + part * (kStageBytes / T::kStagePanels);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int more = use > 0 || part > 0 || step > 0;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint64_t own = tile::along_rows(panel + half * (64 * 128) + step * 32);
          if constexpr (T::kKeys) {
            tile::multiply_rows(c[half], own, tile::along_rows(weights + step * 32), more);
          } else if constexpr (kCodes) {
            tile::multiply_turned(c[half],
                                  tile::down_rows(weights + half * (64 * 128) + step * 2048, 0),
                                  tile::along_rows(panel + step * 32), more);
          } else {
            tile::multiply_columns(c[half], own, tile::down_rows(weights + step * 2048, 64 * 128),
                                   more);
          }
        }
      }
    }
    tile::wgmma_commit();
  }

  // --- Results.
  // Also returns false if the sum is too large to tell.
  template <int kOutputs>
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
  // Few tiles have missing rows or values that are not finite. The checks for them are kept out of
  // the other tiles' code.
  template <int kIndex, Part kPart, int kOutputs>
  MLA_DEVICE void store_part(const Pairs& pairs, int existing, bool careful,
                             const float (&c)[kHalves][kOutputs]) const {
    if (careful) {
      store<kIndex, kPart, true>(pairs, existing, c);
    } else {
      store<kIndex, kPart, false>(pairs, existing, c);
    }
  }
  // Stores to the turn's panels, one after the other, through the group's shared memory.
  template <int kIndex, Part kPart, bool kCareful, int kOutputs>
  MLA_DEVICE void store(const Pairs& pairs, int existing,
                        const float (&c)[kHalves][kOutputs]) const {
    // Chunk lane / 8 of row lane % 8 of the warp's first eight.
    const int lane = thread & 31;
    const uint32_t address =
        tile::chunk_at<kExpandedRows>(results(), (thread >> 5) * 16 + (lane & 7), lane >> 3);
#pragma unroll
    for (int panel = 0; panel < kOutputs / 32; ++panel) {
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
          tile::store_matrices((address ^ j << 4) + first * 128, words[0], words[1], words[2],
                               words[3]);
        }
      }
      tile::publish_shared();
      tile::named_wait(kOfGroup + group - 1, 128);
      if (thread != 0) continue;
      using T = Turn<kIndex>;
      uint8_t* const to = kPart == kRestsPart ? pairs.rest_panel(T::kFirst / 64 + panel)
                                              : pairs.panel(T::kResultPanel + panel);
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

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_EXPAND_WGMMA_H_
