// Finds a lane's row of each tile of an item before it is needed, so that no load is waited for:
// the entry of the row is loaded two tiles ahead, and the page-table word of that entry one.
#ifndef MLA_KERNELS_HIP_DEVICE_KV_ROW_FINDER_H_
#define MLA_KERNELS_HIP_DEVICE_KV_ROW_FINDER_H_

#include "kernels/hip/device/kv/row_source.h"

namespace mla::kernels::hip {

// Source is a RowSource. Consecutive tiles of this lane are kStep places apart.
template <class Source, int kStep>
class RowFinder {
 public:
  // `first` is the place of the first tile's row. REQUIRES source.begin < source.end.
  MLA_DEVICE RowFinder(const Source& source, int first)
      : next_place(first), entry(source.entry(first)) {
    look_up(source);
  }

  // Returns the row of the present tile. Tiles after the item's end repeat its last row.
  MLA_DEVICE const uint8_t* row(const Source& source) const {
    return source.address(granule, inside);
  }
  // Returns the exponents of that row, if pages keep them after their rows (KvFormat::kFp8Page).
  MLA_DEVICE const uint8_t* exponents(const Source& source) const {
    return source.exponents(granule, inside);
  }
  // Returns true if the item's query row sees that row.
  MLA_DEVICE bool sees() const { return seen; }
  // Moves to the next tile.
  MLA_DEVICE void next(const Source& source) { look_up(source); }

 private:
  MLA_DEVICE void look_up(const Source& source) {
    const RowSpot spot = source.spot(source.position_of(entry));
    granule = *as_global<const uint32_t>(spot.entry);
    inside = spot.inside;
    seen = next_place < source.end && source.sees_entry(entry);
    next_place += kStep;
    entry = source.entry(next_place);
  }

  int next_place;    // place of the next tile's row
  int entry;         // entry of that row
  uint32_t granule;  // page of this tile's row
  int inside;        // its row in that page, see RowSpot
  bool seen;
};

// Returns the pointer of lane `from`.
MLA_DEVICE const uint8_t* row_from_lane(const uint8_t* row, int from) {
  const auto bits = reinterpret_cast<uintptr_t>(row);
  const uint64_t low = tile::from_lane(static_cast<uint32_t>(bits), from);
  const uint64_t high = tile::from_lane(static_cast<uint32_t>(bits >> 32), from);
  return reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(high << 32 | low));
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KV_ROW_FINDER_H_
