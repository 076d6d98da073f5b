// Absorbed attention for tiles of 17 to 64 packed rows on sm_90a, with warpgroup products. The
// matrix unit is the limit there, or nearly so.
//
// A block has two groups of four warps that compute and one that copies. The KV tiles of an item,
// 64 rows each, alternate between two slots of shared memory. Group g computes the scores and
// probabilities of the tiles in slot g, and accumulates output columns [256 g, 256 g + 256) of all
// tiles, so each tile's probabilities are also passed to the other group:
//
//     group 0:  S0 = Q K0^T, softmax | O left  += P0 V0 |                        | O left  += P1 V1
//     group 1:                       | O right += P0 V0 | S1 = Q K1^T, softmax   | O right += P1 V1
//
// A group releases its half of a tile's columns as soon as its product is done. The copying group
// then refills that half from the slot's next tile, which may belong to the next item. Group g
// stores its P over its tile's rope columns, which only the scores need.
//
// Probabilities are 2^(x - origin), with one origin a row, which the groups exchange together with
// the probabilities. Any origin gives the same quotient. It follows the row's maximum only when
// that has grown by more than kSlack, so accumulators are rarely rescaled.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_ATTEND_WGMMA_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_ATTEND_WGMMA_H_

#include "kernels/hip/device/primitives/item.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_consumer.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_layout.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_producer.h"

namespace mla::kernels::hip {

// Args is AttendArgs, BoxArgs with BoxProducer, or SplitArgs or StreamArgs if the kernel merges the
// parts as well. Producer is the group that copies queries and KV rows.
template <class C, class Args = AttendArgs, class Producer = WgmmaProducer<C, Args>>
class AttendWgmma {
 public:
  using L = WgmmaLayout<C>;
  static constexpr int kThreads = 3 * L::kGroupThreads;
  static constexpr int kSharedBytes = L::kSharedBytes + (Args::kStreams ? L::kStreamBytes : 0);

  // Registers of a thread that computes: the three groups share 504 a lane.
  static constexpr int kRegisters = (504 - Producer::kRegisters) / 2;

  MLA_DEVICE static void run(const Args& args) {
    const L shared{tile::shared_base<kSharedBytes>()};
    if constexpr (Args::kStreams) {
      if (thread_index() == 0) {
        tile::store_word(shared.begun(), static_cast<uint32_t>(realtime_ns()));
      }
    }
    shared.init_barriers(Producer::kTileArrivals, Producer::kQueryArrivals);
    let_next_kernel_start();
    const int group = tile::wave_index() >> 2;
    if (group == 2) {
      tile::give_registers<Producer::kRegisters>();
      Producer producer(args, shared);
      for_each_item<L::kRows>(args, [&producer](const Item& item) { producer.produce(item); });
    } else if (group == 0) {
      tile::take_registers<kRegisters>();
      if constexpr (!Args::kSplit && !Args::kStreams) prefetch_records<L::kGroupThreads>(args);
      WgmmaConsumer<C, 0, Args> consumer(args, shared);
      for_each_indexed_item<L::kRows>(args, [&consumer](const Item& item, int index, int share) {
        consumer.attend(item, index, share);
      });
    } else {
      tile::take_registers<kRegisters>();
      WgmmaConsumer<C, 1, Args> consumer(args, shared);
      for_each_indexed_item<L::kRows>(args, [&consumer](const Item& item, int index, int share) {
        consumer.attend(item, index, share);
      });
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_ATTEND_WGMMA_H_
