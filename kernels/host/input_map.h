// Addresses that stand for inputs in pieces (kernels/input_fragments.h), so that launch records
// name them like any other tensor: strides and offsets apply, only reading goes through RowAt.
//
// Such an address has its top bit set, which no address of a process has; nothing may be loaded
// from it. One map belongs to a launch slot and keeps its addresses until Clear.
//
// Threading: Add and Clear from one thread, while no thread reads; RowAt from any number of
// threads. Nothing allocates after Reserve.
#ifndef MLA_KERNELS_HOST_INPUT_MAP_H_
#define MLA_KERNELS_HOST_INPUT_MAP_H_

#include <cstdint>
#include <vector>

#include "kernels/input_fragments.h"

namespace mla::kernels {

class InputMap final {
 public:
  // Room for that many inputs a launch.
  void Reserve(int32_t inputs) { inputs_.reserve(static_cast<size_t>(inputs)); }
  void Clear() { inputs_.clear(); }

  // Null when there is no more room. The tensor's first byte is where the result points to.
  const void* Add(const FragmentedInput& input);

  // True if `address` stands for a place in such an input.
  static bool IsInPieces(const void* address) {
    return (reinterpret_cast<uintptr_t>(address) & kMark) != 0;
  }

  // `bytes` of an input from `address` on: where they lie, if in one piece and aligned to four
  // bytes, else their copy in `spare`, which must have the room and is aligned likewise.
  // REQUIRES: IsInPieces(address), within one input of this map.
  const void* Read(const void* address, int64_t bytes, void* spare) const;

 private:
  static constexpr uintptr_t kMark = uintptr_t{1} << 63;
  struct Input {
    int64_t begin;  // its first byte, counted over all inputs of the launch
    FragmentedInput pieces;
  };
  std::vector<Input> inputs_;
};

// The same for an address that may as well be of a tensor in one piece, which is returned as it is.
// `map` may be null where no input is in pieces.
inline const void* RowAt(const InputMap* map, const void* address, int64_t bytes, void* spare) {
  return InputMap::IsInPieces(address) ? map->Read(address, bytes, spare) : address;
}

}  // namespace mla::kernels

#endif  // MLA_KERNELS_HOST_INPUT_MAP_H_
