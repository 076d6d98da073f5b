// Small deterministic random source of the conformance tests (SplitMix64), equal on every platform.
#ifndef MLA_TESTS_CONFORMANCE_CASES_RANDOM_H_
#define MLA_TESTS_CONFORMANCE_CASES_RANDOM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/splitmix.h"

namespace mla::conformance {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() { return NextSplitMix(&state_); }
  // Uniform in [0, bound), bound >= 1.
  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(Next() % static_cast<uint64_t>(bound));
  }
  bool OneIn(int64_t n) { return Below(n) == 0; }
  template <typename T>
  const T& Pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(Below(static_cast<int64_t>(from.size())))];
  }

 private:
  uint64_t state_;
};

// Fills out[0..count) with N(0,1) x `deviation`: slices of a fixed table of normals, taken from
// random places, which is fast and random enough for test data.
void FillNormal(Random& random, float deviation, float* out, int64_t count);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_CASES_RANDOM_H_
