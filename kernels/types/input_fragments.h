// An input tensor that lies in pieces of host memory, as a network delivered them.
//
// A backend whose BackendInfo::reads_fragments is set reads such a tensor where it lies; for others
// the server brings the pieces together first. Plain data, any thread; the memory and the fragments
// belong to the request and stay as they are until the launch has completed.
#ifndef MLA_KERNELS_TYPES_INPUT_FRAGMENTS_H_
#define MLA_KERNELS_TYPES_INPUT_FRAGMENTS_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace mla::kernels {

// One piece of a whole, which may begin at any address: elements need not be aligned, and may even
// be cut in two.
struct InputFragment {
  const std::byte* data;
  int64_t begin;  // bytes of the whole that lie before it
};

struct FragmentedInput {
  // In the order of the whole, without gaps; the last one reaches to the tensor's end at least.
  std::span<const InputFragment> fragments;
  int64_t offset = 0;  // of the tensor's first byte in the whole
  int64_t bytes = 0;   // 0: there is none
};

// Of a list by record, as launches have them: the one of record `index`, or null.
inline const FragmentedInput* FragmentsOf(std::span<const FragmentedInput> all, int64_t index) {
  if (all.empty()) return nullptr;
  const FragmentedInput& input = all[static_cast<size_t>(index)];
  return input.bytes == 0 ? nullptr : &input;
}

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_INPUT_FRAGMENTS_H_
