// Absorbed attention over rows of fp8_row on sm_90a from 17 packed rows on, with 8-bit products.
// Queries are rounded to e4m3 and multiplied with the keys' codes. Values are widened to binary16,
// and probabilities are rounded to it.
//
// A row has a scale for each 128 values, and usually all are the same power of two (EncodeKvRow). A
// tile that has only such rows is scored in one sum, and its values need no scaling.
//
// Two groups compute and one copies KV rows, tiles of 64 keys, four deep. The groups score tiles in
// turn, and each sums 256 columns of all tiles:
//
//   group 0      S(t) = Q K^T, softmax | O^T += V(t-1)^T P(t-1)^T, V(t)^T P(t)^T |  S(t+2) ...
//   group 1      .. V(t-2), V(t-1)     | S(t+1), softmax                         |  V(t), V(t+1) ..
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ATTEND_ROWS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ATTEND_ROWS_H_

#include "kernels/hip/device/primitives/item.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/copier.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/rows_scorer.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/rows_values.h"
#include "kernels/hip/device/sm90/merge/merge_parts.h"

namespace mla::kernels::hip {

// One of the two groups that compute. Args is SplitArgs if the kernel merges the parts as well.
template <class C, class Args = AttendArgs>
class E4m3RowsGroup {
 public:
  using L = E4m3RowsLayout<C>;

  MLA_DEVICE E4m3RowsGroup(const Args& a, const L& layout)
      : args(a), shared(layout), scorer(a, layout), values(a, layout) {}

  // The item is loaded again for its results, because keeping it would take registers.
  MLA_DEVICE void attend(const Item& item, int index, int share) {
    typename Scorer::State state;
    const RowSource<C::kAttention> source(args, item);
    scorer.begin(item, state);
    // Sums come after the queries, which take their registers while they are loaded.
    float o[Values::kBlocks][Values::kProduct];
    Values::clear(o);
    const int tiles = (source.end - source.begin + C::kTileKv - 1) / C::kTileKv;
    const typename Scorer::Tiles places(source, item, index, share);
    // Tiles whose keys are all seen. Other tiles may have values that are NaN; with lists, any tile
    // may. Boxes bring rows past the item's end.
    const int plain = places.unmasked_end >= source.end && !L::kLists && !Args::kBoxes
                          ? tiles
                          : (L::kLists ? 0 : (places.unmasked_end - source.begin) / C::kTileKv);
    int t = (tiles_before ^ scorer.group) & 1;
    int added = 0;
    for (; t < tiles; t += 2) {
      scorer.score(places, tiles_before + t, t, state);
#pragma unroll 1
      for (; added <= t; ++added) values.add(tiles_before + added, added >= plain, o);
    }
    if (added < tiles) values.add(tiles_before + added, added >= plain, o);
    tiles_before += static_cast<uint32_t>(tiles);
    const Item results = load_item<L::kRows>(args, index, share);
    scorer.finish(results, tiles, tiles_before - 1, state);
    values.finish(results, o);
    if constexpr (Args::kSplit) {
      merge_parts<L::kRows, PartOrder::kPaired>(args, part_of_block(args), shared.slot(0), [] {
        tile::named_sync<kMerging, 2 * L::kGroupThreads>();
      });
    }
  }

 private:
  using Scorer = E4m3RowsScorer<C, Args>;
  using Values = E4m3RowsValues<C, Args>;
  static constexpr int kMerging = 2;  // a named barrier, after that of the scorers
  const Args& args;
  const L shared;
  Scorer scorer;
  Values values;
  uint32_t tiles_before = 0;  // tiles before this item
};

// Copier is the group that copies KV rows.
template <class C, class Args = AttendArgs, class Copier = E4m3Copier<C, E4m3RowsLayout<C>, Args>>
class AttendE4m3Rows {
 public:
  using L = E4m3RowsLayout<C>;
  static constexpr int kThreads = L::kThreads;
  static constexpr int kSharedBytes = L::kSharedBytes;
  // A thread of a block of three groups gets at most 168 registers; the groups share them out.
  static_assert(2 * C::kComputeRegisters + C::kCopyRegisters <= 3 * 168);

  MLA_DEVICE static void run(const Args& args) {
    const L shared{tile::shared_base<kSharedBytes>()};
    shared.init_barriers(Copier::kArrivals);
    let_next_kernel_start();
    const int group = tile::wave_index() / L::kGroupWarps;
    if (group == 2) {
      tile::give_registers<C::kCopyRegisters>();
      Copier copier(args, shared);
      const auto copy = [&copier](const Item& item) { copier.copy(item); };
      if constexpr (Args::kSplit) {
        for_each_item<L::kRows>(args, copy);
      } else {
        for_each_item_found_again<L::kRows>(args, copy);
      }
    } else {
      tile::take_registers<C::kComputeRegisters>();
      if constexpr (!Args::kSplit) prefetch_records<L::kGroupThreads>(args);
      E4m3RowsGroup<C, Args> computing(args, shared);
      for_each_indexed_item<L::kRows>(args, [&computing](const Item& item, int index, int share) {
        computing.attend(item, index, share);
      });
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ATTEND_ROWS_H_
