// Absorbed attention over rows of e4m3 on sm_90a, with bf16 queries. Both products are transposed,
// so that keys and values, the large operands, are the operands in registers. Each value is read
// from shared memory once as a key and once as a value, and is widened after that read.
//
//   group 4         copies KV rows, tiles of 64 keys, kStages deep
//   group t mod 2   S^T [64 keys x rows] = K Q^T of tile t, softmax, P^T to shared memory
//   groups 2, 3     O^T [256 columns each, rows] += V^T P^T, for every tile
//
// The packed rows are columns here, so a few rows need few accumulators, which leaves registers for
// four computing groups. A group then waits for other groups' results, not for its own.
//
// Codes become binary16, which is exact. A power of two a row brings queries into its range. If
// keys have scales, a common power of two of a key's scales goes into its logit and its
// probability; the remaining factor, at most 2, goes into its codes. Keys alone carry NaN: if a key
// may be hidden, values that are NaN become zero.
//
// Probabilities are 2^(x - origin + kShift), with one origin a row for all tiles. The origin
// follows the row's maximum only when that has grown by more than kSlack. So accumulators are
// rarely rescaled, and the warps of a group exchange only whether a maximum has grown, not the
// maxima.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_ATTEND_FP8_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_ATTEND_FP8_H_

#include "kernels/hip/device/primitives/item.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/accumulator.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/copier.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/scorer.h"
#include "kernels/hip/device/sm90/merge/merge_parts.h"

namespace mla::kernels::hip {

// Args is SplitArgs if the kernel merges the parts as well.
template <class C, class Args = AttendArgs>
class AttendFp8 {
 public:
  using L = Fp8Layout<C>;
  static constexpr int kThreads = 5 * L::kGroupThreads;
  static constexpr int kSharedBytes = L::kSharedBytes;

  MLA_DEVICE static void run(const Args& args) {
    const L shared{tile::shared_base<kSharedBytes>()};
    shared.init_barriers();
    let_next_kernel_start();
    const int group = tile::wave_index() / L::kGroupWarps;
    if (group < 2) {
      tile::take_registers<C::kScoreRegisters>();
      Fp8Scorer<C, Args> scorer(args, shared);
      for_each_indexed_item<C::kRows>(args, [&](const Item& item, int index, int share) {
        scorer.attend(item, index, share);
        if constexpr (Args::kSplit) merge(args, shared, index, share);
      });
    } else if (group < 4) {
      tile::take_registers<C::kValueRegisters>();
      if constexpr (!Args::kSplit) prefetch_records<L::kGroupThreads>(args);
      Fp8Accumulator<C, Args> accumulator(args, shared);
      for_each_item<C::kRows>(args, [&accumulator](const Item& item) { accumulator.attend(item); });
      if constexpr (Args::kSplit) {
        tile::release_writes();
        tile::named_arrive<kWritten, 4 * L::kGroupThreads>();
      }
    } else {
      tile::give_registers<C::kCopyRegisters>();
      Fp8Copier<C, Args> copier(args, shared);
      const auto copy = [&copier](const Item& item) { copier.copy(item); };
      if constexpr (L::kLists) {
        for_each_item_found_again<C::kRows>(args, copy);
      } else {
        for_each_item<C::kRows>(args, copy);
      }
    }
  }

 private:
  // Named barriers. The scorers have the numbers before them.
  static constexpr int kWritten = 4, kMerging = 5;

  // Run by the scorers after the block's only item. They wait until the groups that sum values have
  // written the part, and then merge with the other blocks of these rows.
  MLA_DEVICE static void merge(const Args& args, const L& shared, int index, int share) {
    static_assert(L::kScoreWarps == MergeParts<C::kRows, PartOrder::kPaired>::kWarps);
    tile::named_sync<kWritten, 4 * L::kGroupThreads>();
    merge_parts<C::kRows, PartOrder::kPaired>(args, {index, share}, shared.slot(0), [] {
      tile::named_sync<kMerging, 2 * L::kGroupThreads>();
    });
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_ATTEND_FP8_H_
