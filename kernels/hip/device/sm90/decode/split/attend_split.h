// Absorbed attention to one tile, with up to 16 packed rows a block, that merges its own parts.
// attend_wgmma.h does the same for more rows.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_SPLIT_ATTEND_SPLIT_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_SPLIT_ATTEND_SPLIT_H_

#include "kernels/hip/device/kernels/attend.h"
#include "kernels/hip/device/sm90/merge/merge_parts.h"

namespace mla::kernels::hip {

template <class C>
class AttendSplit {
  using Loop = Attend<C, AttentionKind::kDense, SplitArgs>;

 public:
  static constexpr int kThreads = Loop::kThreads;
  static constexpr int kSharedBytes = Loop::kSharedBytes;

  MLA_DEVICE static void run(const SplitArgs& args) {
    Loop loop(args);
    let_next_kernel_start();
    for_each_indexed_item<Loop::kRows>(args, [&](const Item& item, int unit, int share) {
      loop.attend(item);
      merge_parts<Loop::kRows, PartOrder::kColumns>(
          args, {unit, share}, tile::shared_base<kSharedBytes>(), [] { block_barrier(); });
    });
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_SPLIT_ATTEND_SPLIT_H_
