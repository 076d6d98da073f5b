// A small fuzzer for functions whose input comes from outside: inputs are mutated from seeds,
// those that reach new code are kept and mutated further.
//
// A target is a function that returns an empty text, or says which promise the input broke; it may
// also crash, under sanitizers or by itself: the input is then written to a file whose name is
// printed. Targets must be deterministic. Coverage is only seen under --config=fuzz, which compiles
// calls of __sanitizer_cov_trace_pc into everything but the fuzzer; without it mutation is blind.
//
// What is run follows the environment: MLA_FUZZ_FILE, one input from a file and nothing else;
// MLA_FUZZ_SECONDS, until so much time has passed; MLA_TEST_LONG, a hundred times the usual number
// of executions; MLA_TEST_SEED, another sequence of mutations. Not thread-safe: one fuzzer at a
// time.
#ifndef MLA_TESTS_FUZZ_FUZZER_H_
#define MLA_TESTS_FUZZ_FUZZER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace mla::fuzz {

using Target = std::function<std::string(const std::string& input)>;

struct FuzzOptions {
  std::string name;                // of the target, for file names
  std::vector<std::string> seeds;  // well-formed inputs; at least one
  int64_t executions = 20000;      // of a usual run
  size_t input_bytes_max = 4096;
};

struct FuzzResult {
  int64_t executions = 0;
  int64_t kept = 0;       // inputs that reached new code
  std::string violation;  // what was broken first, with the input as a C literal; empty: nothing
};

FuzzResult Fuzz(const FuzzOptions& options, const Target& target);

}  // namespace mla::fuzz

#endif  // MLA_TESTS_FUZZ_FUZZER_H_
