// Places the weights of each slot in one piece of memory that is taken at start. Nothing is
// allocated when weights arrive, so an upload that fits the limit cannot fail.
//
// Bookkeeping only: offsets and bytes, no memory. Free space may be fragmented; Compact joins it.
// Not thread-safe.
#ifndef MLA_KERNELS_HIP_DEVICE_STATE_WEIGHT_ARENA_H_
#define MLA_KERNELS_HIP_DEVICE_STATE_WEIGHT_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mla::kernels::hip {

class WeightArena {
 public:
  static constexpr int64_t kNowhere = -1;
  // Bytes [from, from + bytes) move to `to`, which is lower; the two may overlap.
  struct Move {
    int64_t from, to, bytes;
  };

  // `bytes` of memory for `slots` slots, all of them empty.
  explicit WeightArena(int64_t bytes = 0, int32_t slots = 0);

  int64_t bytes() const { return bytes_; }
  int64_t used() const { return used_; }
  // Returns the offset of the slot's extent, or kNowhere if it is empty.
  int64_t at(int32_t slot) const { return extents_[static_cast<size_t>(slot)].at; }

  // Gives an empty slot `bytes` >= 1 bytes in one piece, at the lowest offset where they fit.
  // Returns false if no piece is large enough; if used() + bytes <= bytes(), one exists after
  // Compact.
  bool Take(int32_t slot, int64_t bytes);
  // Empties the slot, whatever it contains.
  void Free(int32_t slot);
  // Moves all extents to the front. The caller must copy the moves in the order given.
  std::vector<Move> Compact();

 private:
  struct Extent {
    int64_t at = kNowhere;
    int64_t bytes = 0;
  };
  std::vector<int32_t> Ordered() const;  // slots that are not empty, by offset

  int64_t bytes_;
  int64_t used_ = 0;
  std::vector<Extent> extents_;  // by slot
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_STATE_WEIGHT_ARENA_H_
