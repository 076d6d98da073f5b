// Random contents of tensors that mlactl sends: `attend`, `bench` and the scenes of agents fill
// queries, KV rows and weights with them.
#ifndef MLA_CLIENT_MLACTL_TENSORS_RANDOM_TENSORS_H_
#define MLA_CLIENT_MLACTL_TENSORS_RANDOM_TENSORS_H_

#include <cstdint>
#include <span>

namespace mla::mlactl {

// Fills `values`, the bits of bf16 numbers, with a normal distribution around 0. `deviation` is its
// standard deviation. The same seed and number of values give the same bits. Any thread.
void FillRandomBf16(uint64_t seed, double deviation, std::span<uint16_t> values);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_TENSORS_RANDOM_TENSORS_H_
