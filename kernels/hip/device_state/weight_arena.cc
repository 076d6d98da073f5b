#include "kernels/hip/device_state/weight_arena.h"

#include <algorithm>

namespace mla::kernels::hip {

WeightArena::WeightArena(int64_t bytes, int32_t slots)
    : bytes_(bytes), extents_(static_cast<size_t>(slots)) {}

std::vector<int32_t> WeightArena::Ordered() const {
  std::vector<int32_t> slots;
  for (size_t i = 0; i < extents_.size(); ++i) {
    if (extents_[i].at != kNowhere) slots.push_back(static_cast<int32_t>(i));
  }
  std::sort(slots.begin(), slots.end(), [this](int32_t a, int32_t b) { return at(a) < at(b); });
  return slots;
}

bool WeightArena::Take(int32_t slot, int64_t bytes) {
  int64_t offset = 0;
  for (const int32_t other : Ordered()) {
    const Extent& extent = extents_[static_cast<size_t>(other)];
    if (extent.at - offset >= bytes) break;
    offset = extent.at + extent.bytes;
  }
  if (bytes > bytes_ - offset) return false;
  extents_[static_cast<size_t>(slot)] = {offset, bytes};
  used_ += bytes;
  return true;
}

void WeightArena::Free(int32_t slot) {
  Extent& extent = extents_[static_cast<size_t>(slot)];
  used_ -= extent.bytes;
  extent = Extent();
}

std::vector<WeightArena::Move> WeightArena::Compact() {
  std::vector<Move> moves;
  int64_t end = 0;
  for (const int32_t slot : Ordered()) {
    Extent& extent = extents_[static_cast<size_t>(slot)];
    if (extent.at != end) moves.push_back({extent.at, end, extent.bytes});
    extent.at = end;
    end += extent.bytes;
  }
  return moves;
}

}  // namespace mla::kernels::hip
