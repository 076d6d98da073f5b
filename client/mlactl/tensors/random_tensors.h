// Deterministic tensor contents: normal values with deviation 0.1, the magnitude that attention
// inputs have after their projections.
#ifndef MLA_CLIENT_MLACTL_TENSORS_RANDOM_TENSORS_H_
#define MLA_CLIENT_MLACTL_TENSORS_RANDOM_TENSORS_H_

#include <cstdint>
#include <span>

namespace mla::mlactl {

// bf16; the same seed gives the same values.
void FillRandomBf16(uint64_t seed, double deviation, std::span<uint16_t> values);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_TENSORS_RANDOM_TENSORS_H_
