// Defines the kernels that copy: tensors between staging memory and their places, and ranges of the
// pool.
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_COPIES_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_COPIES_H_

#include "kernels/hip/device/primitives/block.h"

namespace mla::kernels::hip {

MLA_DEVICE void copy_tensors(const CopyTensorsArgs& args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int block = block_index();
  int i = 0;
  while (block >= args.copies[i].blocks()) block -= args.copies[i++].blocks();
  const TensorCopy& c = args.copies[i];
  const bool last = i + 1 == args.count && block + 1 == c.blocks() && thread_index() == 0;
  if (last && args.lasted != nullptr) *args.lasted = realtime_ns() - *args.begun;
  const int64_t begin = static_cast<int64_t>(block) * kCopyBlockBytes;
  const int64_t left = c.bytes - begin;
  move_bytes(c.to + begin, c.from + begin,
             left < kCopyBlockBytes ? static_cast<int>(left) : kCopyBlockBytes);
  if (last && args.lasted == nullptr && args.begun != nullptr) *args.begun = realtime_ns();
}

MLA_DEVICE void move_ranges(const MoveArgs& args) {
  let_next_kernel_start();
  const int chunks = args.first_chunk[args.count];
  for (int chunk = block_index(); chunk < chunks; chunk += args.blocks) {
    const int index = find_range(args.first_chunk, args.count, chunk);
    const MoveRange r = args.ranges[index];
    const int64_t begin = static_cast<int64_t>(chunk - args.first_chunk[index]) * kMoveChunkBytes;
    const int64_t left = r.bytes - begin;
    const int bytes = left < kMoveChunkBytes ? static_cast<int>(left) : kMoveChunkBytes;
    move_bytes(r.to + begin, r.from == nullptr ? nullptr : r.from + begin, bytes);
  }
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_COPIES_H_
