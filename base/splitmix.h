// SplitMix64 of Steele, Lea and Flood: random numbers that a seed determines, equal on every
// platform. Not for secrets; base/random_bytes.h has those.
#ifndef MLA_BASE_SPLITMIX_H_
#define MLA_BASE_SPLITMIX_H_

#include <cstdint>

namespace mla {

inline constexpr uint64_t kSplitMixStep = 0x9e3779b97f4a7c15u;

// Mixes the bits of `x`. Distinct arguments give distinct results, and 0 gives 0.
constexpr uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Returns the first number of the sequence that begins with the state `x`: a hash of `x`.
constexpr uint64_t SplitMix(uint64_t x) { return MixBits(x + kSplitMixStep); }

// Returns the next number of the sequence.
constexpr uint64_t NextSplitMix(uint64_t* state) { return MixBits(*state += kSplitMixStep); }

}  // namespace mla

#endif  // MLA_BASE_SPLITMIX_H_
