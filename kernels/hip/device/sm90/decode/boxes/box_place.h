// Where the boxes of a tensor map lie that hold a tile's KV rows (BoxArgs).
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_BOXES_BOX_PLACE_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_BOXES_BOX_PLACE_H_

#include "kernels/hip/device/kv/row_source.h"

namespace mla::kernels::hip {

// The first granule of a box's page, and the box's first row in that page.
struct BoxPlace {
  uint32_t granule;
  int row;
};

// Returns the place of this lane's box of the tile from row `first` on. A box past the item's end
// repeats the last one. Rows of a page past the item's end come with their box and may hold
// anything, so consumers hide them. REQUIRES source.begin < source.end.
template <class Source>
MLA_DEVICE BoxPlace find_box(const Source& source, int box_rows, int first, int lane) {
  const int wanted = first + lane * box_rows, last = source.end - 1;
  const PagedRows::Place at = source.pages.place((wanted < last ? wanted : last) & ~(box_rows - 1));
  return {source.pages.granule(at.page), at.inside};
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_BOXES_BOX_PLACE_H_
