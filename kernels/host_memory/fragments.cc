#include "kernels/host_memory/fragments.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

namespace mla::kernels {

const void* ReadFragments(const FragmentedInput& input, int64_t begin, int64_t bytes, void* spare) {
  constexpr uintptr_t kAlignment = 4;
  int64_t from = input.offset + begin;
  const std::span<const InputFragment> fragments = input.fragments;
  auto piece =
      std::upper_bound(fragments.begin(), fragments.end(), from,
                       [](int64_t place, const InputFragment& f) { return place < f.begin; }) -
      1;
  const std::byte* const start = piece->data + (from - piece->begin);
  const bool whole = piece + 1 == fragments.end() || from + bytes <= (piece + 1)->begin;
  if (whole && reinterpret_cast<uintptr_t>(start) % kAlignment == 0) return start;
  auto* target = static_cast<std::byte*>(spare);
  for (int64_t bytes_left = bytes; bytes_left > 0; ++piece) {
    const bool last = piece + 1 == fragments.end();
    const int64_t here = last ? bytes_left : std::min(bytes_left, (piece + 1)->begin - from);
    std::memcpy(target, piece->data + (from - piece->begin), static_cast<size_t>(here));
    target += here;
    from += here;
    bytes_left -= here;
  }
  return spare;
}

}  // namespace mla::kernels
