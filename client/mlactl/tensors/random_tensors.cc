#include "client/mlactl/tensors/random_tensors.h"

#include <bit>
#include <random>

namespace mla::mlactl {

void FillRandomBf16(uint64_t seed, double deviation, std::span<uint16_t> values) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0F, static_cast<float>(deviation));
  for (uint16_t& value : values) {
    // Round to nearest: the values are finite, so the carry cannot reach infinity.
    value = static_cast<uint16_t>((std::bit_cast<uint32_t>(normal(random)) + 0x8000) >> 16);
  }
}

}  // namespace mla::mlactl
