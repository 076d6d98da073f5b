// Reads tensors that lie in fragments (kernels/types/input_fragments.h).
#ifndef MLA_KERNELS_HOST_MEMORY_FRAGMENTS_H_
#define MLA_KERNELS_HOST_MEMORY_FRAGMENTS_H_

#include <cstdint>

#include "kernels/types/input_fragments.h"

namespace mla::kernels {

// Returns where `bytes` bytes of the tensor lie, from its byte `begin` on. If they lie in one piece
// at a multiple of four bytes, returns their own address; otherwise copies them to `spare`, which
// must have the room and the same alignment. Any thread. REQUIRES: 0 <= begin, begin + bytes <=
// input.bytes.
const void* ReadFragments(const FragmentedInput& input, int64_t begin, int64_t bytes, void* spare);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_HOST_MEMORY_FRAGMENTS_H_
