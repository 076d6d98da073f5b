// Reads the items of the expanded form for the attention kernels.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_EXPANDED_ITEM_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_EXPANDED_ITEM_H_

#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/device/primitives/item.h"

namespace mla::kernels::hip {

// Returns the fields that the helpers of item.h read in any attention launch.
MLA_DEVICE AttendArgs results_of(const ExpandedArgs& args) {
  AttendArgs a = {};
  a.segments = args.segments;
  a.partial_o = args.partial_o;
  a.partial_lse = args.partial_lse;
  a.o_is_f32 = args.o_is_f32;
  return a;
}

MLA_DEVICE Item as_item(const ExpandedArgs& args, const ExpandedItem& e) {
  Item item;
  item.work = e.work;
  item.segment = as_record(args.segments + e.work.segment);
  item.heads = 1;
  item.first = 0;
  item.rows = e.work.q_end - e.work.q_begin;
  return item;
}

// Returns true if some query row of the item sees so few keys that values and probabilities are
// multiplied with their rests. All of those keys are in the item's first tile of kExpandedRows.
MLA_DEVICE bool sees_few(const Item& item) {
  return item.work.kv_begin == 0 && item.limit(0) <= kFewKeys;
}

// Calls `body(const ExpandedItem&, const Item&)` for the items of this block.
template <class Body>
MLA_DEVICE void for_each_expanded(const ExpandedArgs& args, const Body& body) {
  const int end = args.unit_indptr[block_index() + 1];
  for (int i = args.unit_indptr[block_index()]; i < end; ++i) {
    const ExpandedItem& item = read_record(args.items + i);
    body(item, as_item(args, item));
  }
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_EXPANDED_ITEM_H_
