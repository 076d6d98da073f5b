// The work item of a block of a launch with SplitArgs.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_MERGE_SPLIT_ITEM_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_MERGE_SPLIT_ITEM_H_

#include "kernels/hip/device/primitives/item.h"

namespace mla::kernels::hip {

// Unit and share of the part that a block makes.
struct PartOfBlock {
  int unit, share;
};
// The block's index is read again at each call, because keeping the part over a loop would take
// registers.
MLA_DEVICE PartOfBlock part_of_block(const SplitArgs& args) {
  const int block = static_cast<int>(tile::unknown(static_cast<uint32_t>(block_index())));
  const int unit = block / args.blocks_per_unit;
  return {unit, block - unit * args.blocks_per_unit};
}

// As the functions of device/primitives/item.h, without a load from memory. Each block has one
// item, so its index and share need not be kept.
template <int kRows>
MLA_DEVICE Item load_item(const SplitArgs& args, int /*index*/, int /*share*/) {
  const auto [index, share] = part_of_block(args);
  const int begin = index * args.piece_rows;
  const int end = index + 1 < args.pieces ? begin + args.piece_rows : args.kv_end;
  Item item;
  item.work = {0,   index * args.packed_rows,   0,         args.q_rows, begin,
               end, args.segment.kv_rows - end, args.heads};
  item.segment = &args.segment;
  item.heads = static_cast<int>(args.heads >> 16) - static_cast<int>(args.heads & 0xffffu);
  item.first = share * kRows;
  const int rows = args.packed_rows - item.first;
  item.rows = rows < kRows ? rows : kRows;
  return item;
}
template <int kRows, class Body>
MLA_DEVICE void for_each_indexed_item(const SplitArgs& args, const Body& body) {
  const auto [unit, share] = part_of_block(args);
  body(load_item<kRows>(args, unit, share), unit, share);
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_MERGE_SPLIT_ITEM_H_
