// First seed of tests with random operations.
#ifndef MLA_TESTS_SIMULATION_FIRST_SEED_H_
#define MLA_TESTS_SIMULATION_FIRST_SEED_H_

#include <cstdint>
#include <cstdlib>

namespace mla::simulation {

// MLA_TEST_SEED of the environment, or 1.
inline uint64_t FirstSeed() {
  const char* const given = std::getenv("MLA_TEST_SEED");
  return given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
}

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_FIRST_SEED_H_
