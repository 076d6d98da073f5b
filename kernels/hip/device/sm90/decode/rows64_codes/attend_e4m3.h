// Absorbed attention over rows of fp8_tensor on sm_90a from 17 packed rows on, with both products
// in e4m3. Queries and probabilities are rounded to it.
//
//   group 3      copies KV rows, tiles of 64 keys, four deep
//   group 0      S [64 x 64] = Q K^T, softmax, P to shared memory
//   groups 1, 2  O^T [256 columns each x 64] += V^T P^T
//
// Products read keys straight from shared memory. Values are the operand in registers. A transposed
// read and a permutation of bytes make that operand, so no transposed copy of a tile is written.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ATTEND_E4M3_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ATTEND_E4M3_H_

#include "kernels/hip/device/primitives/item.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/copier.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/scorer.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/values.h"

namespace mla::kernels::hip {

// Args is AttendArgs, or BoxArgs with CodeBoxCopier. Copier is the group that copies KV rows.
template <class C, class Args = AttendArgs, class Copier = E4m3Copier<C, E4m3Layout<C>>>
class AttendE4m3 {
 public:
  using L = E4m3Layout<C>;
  static constexpr int kThreads = L::kThreads;
  static constexpr int kSharedBytes = L::kSharedBytes;

  MLA_DEVICE static void run(const Args& args) {
    const L shared{tile::shared_base<kSharedBytes>()};
    shared.init_barriers(Copier::kArrivals);
    let_next_kernel_start();
    const int group = tile::wave_index() / L::kGroupWarps;
    if (group == 3) {
      tile::give_registers<C::kCopyRegisters>();
      Copier copier(args, shared);
      for_each_item_found_again<L::kRows>(args, [&copier](const Item& item) { copier.copy(item); });
    } else if (group == 0) {
      tile::give_registers<C::kScoreRegisters>();
      E4m3Scorer<C, Args> scorer(args, shared);
      for_each_indexed_item<L::kRows>(args, [&scorer](const Item& item, int index, int share) {
        scorer.attend(item, index, share);
      });
    } else {
      tile::take_registers<C::kValueRegisters>();
      prefetch_records<L::kGroupThreads>(args);
      E4m3Values<C, Args> values(args, shared);
      for_each_indexed_item<L::kRows>(args, [&values](const Item& item, int index, int share) {
        values.attend(item, index, share);
      });
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ATTEND_E4M3_H_
