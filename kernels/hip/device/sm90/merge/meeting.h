// Lets blocks meet and then share the following work (tile::meet_blocks).
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_MERGE_MEETING_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_MERGE_MEETING_H_

#include "kernels/hip/device/primitives/block.h"

namespace mla::kernels::hip {

// Called by all threads that `sync` is a barrier of, in every block. After it, load_fresh sees what
// all these threads had written. `turn_at` is 8 bytes of shared memory that nothing else uses after
// the first barrier.
template <class Sync>
MLA_DEVICE tile::BlockTurn meet(uint32_t* counter, int index, int count, tile::lds_t turn_at,
                                const Sync& sync) {
  tile::release_writes();
  sync();
  if (thread_index() == 0) {
    const tile::BlockTurn turn = tile::meet_blocks(counter, index, count);
    tile::store_word(turn_at, static_cast<uint32_t>(turn.first));
    tile::store_word(turn_at + 4, static_cast<uint32_t>(turn.step));
  }
  sync();
  const auto word = [](tile::lds_t of) {
    return static_cast<int>(float_to_bits(tile::load_float(of)));
  };
  return {word(turn_at), word(turn_at + 4)};
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_MERGE_MEETING_H_
