// Tells tests how much to run. Threading: any thread, as long as no thread sets the environment.
#ifndef MLA_BASE_TESTING_LONG_RUNS_H_
#define MLA_BASE_TESTING_LONG_RUNS_H_

#include <cstdlib>

namespace mla {

// Returns true in the longer runs of `./dev test --all`, which set MLA_TEST_LONG. An empty value is
// not set, as in Python's tests.
inline bool IsLongRun() {
  const char* const value = std::getenv("MLA_TEST_LONG");
  return value != nullptr && *value != '\0';
}

}  // namespace mla

#endif  // MLA_BASE_TESTING_LONG_RUNS_H_
