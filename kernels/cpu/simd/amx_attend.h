// A tile of the level `amx` as a whole: its logits, softmax and outputs. Needs what amx_tiles.h
// needs. Everything is in an unnamed namespace; fp32_kernels.h says why.
#ifndef MLA_KERNELS_CPU_SIMD_AMX_ATTEND_H_
#define MLA_KERNELS_CPU_SIMD_AMX_ATTEND_H_

#include "kernels/cpu/simd/amx_accumulate.h"
#include "kernels/cpu/simd/amx_softmax.h"

namespace mla::kernels::cpu {
namespace {

constexpr int32_t kMostFetchedLines = 8;  // of the next tile, at most, in a step

// Packs values as PackPaddedValues does, next to the first products that read the rows. A turn
// packs the values of the 32 x 32 elements that its step reads, and fetches up to
// kMostFetchedLines lines of the next tile.
class PackWork {
 public:
  PackWork(const GemmArgs& g, FetchWork& fetch)
      : fetch_(fetch),
        rows_(reinterpret_cast<const uint16_t* const*>(g.a_rows)),
        out_(reinterpret_cast<uint8_t*>(g.value_panels)),
        panel_bytes_(g.value_panel_bytes),
        value_dim_(g.value_dim),
        k_(g.k) {}

  inline void Step() {
    fetch_.Step();
    if (done_ < value_dim_) PackBlock();
    done_ += kDepth;
    if (done_ < k_) return;
    done_ = 0;
    rows_ += kTwoBlocks;
    out_ += kTwoBlocks / 2 * 64;
  }

 private:
  inline void PackBlock() {
    uint8_t* out = out_ + done_ / kPanel * panel_bytes_;
    for (int32_t r = 0; r < kTwoBlocks; r += 2, out += 64) {
      const ValuePairs pairs = PairValues(_mm512_loadu_si512(rows_[r] + done_),
                                          _mm512_loadu_si512(rows_[r + 1] + done_));
      _mm512_storeu_si512(out, pairs.first);
      _mm512_storeu_si512(out + panel_bytes_, pairs.second);
    }
  }

  FetchWork& fetch_;
  const uint16_t* const* rows_;  // the 32 rows at work
  uint8_t* out_;                 // their pairs in the first panel
  const int64_t panel_bytes_;
  const int32_t value_dim_, k_;
  int32_t done_ = 0;  // elements of these rows that have had their turn
};

// Computes the logits of kB panels of queries, from `panel` on, for all rows. These do not stay in
// the first-level cache, so the panels (36 KB at 576 of k) do.
template <int kB, typename Work>
void PanelLogits(const GemmArgs& g, int32_t panel, Work& work) {
  for (int32_t row = 0; row < g.rows; row += kTwoBlocks) {
    const auto* const first = static_cast<const uint8_t*>(g.a_rows[row]);
    TileOperands of;
    of.a[0] = first;
    of.a[1] = static_cast<const uint8_t*>(g.a_rows[row + kRows]);
    of.stride_a = static_cast<const uint8_t*>(g.a_rows[row + 1]) - first;
    of.b = static_cast<const uint8_t*>(g.b) + panel * g.panel_bytes;
    of.panel_bytes = g.panel_bytes;
    ZeroTiles<2, kB>();
    Multiply<2, kB, /*kStreamsA=*/true>(of, g.k / kDepth, work);
    StoreTiles<2, kB>(g.c + row * g.ldc + panel * kPanel, g.ldc);
  }
}

// Computes the logits of two panels, or of the last one.
template <typename Work>
void Logits(const GemmArgs& g, int32_t panel, Work& work) {
  if (g.panels - panel > 1) {
    PanelLogits<2>(g, panel, work);
  } else {
    PanelLogits<1>(g, panel, work);
  }
}

// Returns true if all blocks of the product are whole and lie evenly.
bool WholeBlocks(const GemmArgs& g) {
  if (g.rows % kTwoBlocks != 0 || g.k % kDepth != 0 || g.value_dim % kDepth != 0) return false;
  for (int32_t row = 0; row < g.rows; row += kTwoBlocks) {
    if (!Even(g.a_rows + row, kTwoBlocks)) return false;
  }
  return true;
}

// Returns how many lines of the next tile a step fetches, up to 8 lines. A tile's steps then fetch
// all of it; with 33 to 64 packed rows they would need more, and leave out its last 6 %.
int LinesPerStep(const TileArgs& args) {
  const GemmArgs& g = args.gemm;
  const int32_t panel_pairs = (g.panels + 1) / 2, values = (args.accumulate.panels + 1) / 2;
  const int32_t steps = panel_pairs * g.rows / kTwoBlocks * (g.k / kDepth + values);
  const int32_t lines = g.next_count * ((g.next_bytes + 63) / 64);
  const int32_t wanted = (lines + steps - 1) / steps;
  return wanted < kMostFetchedLines ? wanted : kMostFetchedLines;
}

// Attends to a tile of whole blocks. REQUIRES: rows.
void AttendWholeBlocks(const TileArgs& args) {
  const GemmArgs& g = args.gemm;
  Prefetcher next(g);
  FetchWork fetch{next, LinesPerStep(args)};
  int32_t panel = 0;
  if (g.value_panels != nullptr) {
    PackWork pack(g, fetch);
    Logits(g, 0, pack);
    panel = 2;
  }
  for (; panel < g.panels; panel += 2) Logits(g, panel, fetch);
  FinishStores();  // softmax reads what tiles stored
  Softmax(args.softmax);
  Accumulate(args.accumulate, fetch);
}

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_AMX_ATTEND_H_
