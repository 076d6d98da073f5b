// An input tensor that lies in pieces of host memory, as a network delivered them.
//
// A backend with BackendInfo::reads_fragments reads the pieces in place; for others the server
// copies them together first. Plain data, any thread; the memory and the fragments belong to the
// request and stay as they are until the launch has completed.
#ifndef MLA_KERNELS_TYPES_INPUT_FRAGMENTS_H_
#define MLA_KERNELS_TYPES_INPUT_FRAGMENTS_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace mla::kernels {

// One piece of a tensor. It may begin at any address: elements need not be aligned, and may even be
// cut in two.
struct InputFragment {
  const std::byte* data;
  int64_t begin;  // offset of the piece in the whole, in bytes
};

struct FragmentedInput {
  // The fragments in the order of the tensor, without gaps. The last fragment ends at or after the
  // tensor's end.
  std::span<const InputFragment> fragments;
  int64_t offset = 0;  // offset of the tensor's first byte in the whole
  int64_t bytes = 0;   // 0 if the tensor does not come in fragments
};

// Returns the element of record `index` in a list that is empty or has one element a record.
// Returns null if that record is not in fragments.
inline const FragmentedInput* FragmentsOf(std::span<const FragmentedInput> all, int64_t index) {
  if (all.empty()) return nullptr;
  const FragmentedInput& input = all[static_cast<size_t>(index)];
  return input.bytes == 0 ? nullptr : &input;
}

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_INPUT_FRAGMENTS_H_
