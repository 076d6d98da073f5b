#include "kernels/host/input_map.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace mla::kernels {

const void* InputMap::Add(const FragmentedInput& input) {
  if (inputs_.size() == inputs_.capacity()) return nullptr;
  // Inputs begin at multiples of a line, so that aligned strides stay aligned.
  constexpr int64_t kLine = 64;
  const int64_t end = inputs_.empty() ? 0 : inputs_.back().begin + inputs_.back().pieces.bytes;
  const int64_t begin = (end + kLine - 1) / kLine * kLine;
  inputs_.push_back({begin, input});
  return reinterpret_cast<const void*>(kMark | static_cast<uintptr_t>(begin));
}

const void* InputMap::Read(const void* address, int64_t bytes, void* spare) const {
  constexpr uintptr_t kAlignment = 4;
  const auto at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) & ~kMark);
  const Input& input =
      *(std::upper_bound(inputs_.begin(), inputs_.end(), at,
                         [](int64_t place, const Input& i) { return place < i.begin; }) -
        1);
  int64_t from = input.pieces.offset + at - input.begin;
  const std::span<const InputFragment> fragments = input.pieces.fragments;
  auto piece =
      std::upper_bound(fragments.begin(), fragments.end(), from,
                       [](int64_t place, const InputFragment& f) { return place < f.begin; }) -
      1;
  const std::byte* const start = piece->data + (from - piece->begin);
  const bool whole = piece + 1 == fragments.end() || from + bytes <= (piece + 1)->begin;
  if (whole && reinterpret_cast<uintptr_t>(start) % kAlignment == 0) return start;
  auto* to = static_cast<std::byte*>(spare);
  for (int64_t left = bytes; left > 0; ++piece) {
    const bool last = piece + 1 == fragments.end();
    const int64_t here = last ? left : std::min(left, (piece + 1)->begin - from);
    std::memcpy(to, piece->data + (from - piece->begin), static_cast<size_t>(here));
    to += here;
    from += here;
    left -= here;
  }
  return spare;
}

}  // namespace mla::kernels
