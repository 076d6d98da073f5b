// Reading tensors that lie in fragments (kernels/types/input_fragments.h).
#ifndef MLA_KERNELS_HOST_MEMORY_FRAGMENTS_H_
#define MLA_KERNELS_HOST_MEMORY_FRAGMENTS_H_

#include <cstdint>

#include "kernels/types/input_fragments.h"

namespace mla::kernels {

// `bytes` of the tensor from its byte `begin` on: where they lie, if in one piece and aligned to
// four bytes, else their copy in `spare`, which must have the room and is aligned likewise. Any
// thread. REQUIRES: 0 <= begin, begin + bytes <= input.bytes.
const void* ReadFragments(const FragmentedInput& input, int64_t begin, int64_t bytes, void* spare);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_HOST_MEMORY_FRAGMENTS_H_
