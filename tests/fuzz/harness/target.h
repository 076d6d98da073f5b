// A fuzz target consists of LLVMFuzzerTestOneInput, which libFuzzer calls, and of the inputs to
// start from.
//
// Under ./dev fuzz a target is linked with libFuzzer, and its seeds are written to the corpus. As a
// test it is linked with driver.cc, which runs the seeds and a fixed number of mutations of them.
// Targets must be deterministic.
#ifndef MLA_TESTS_FUZZ_HARNESS_TARGET_H_
#define MLA_TESTS_FUZZ_HARNESS_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mla::fuzz {

struct FuzzTarget {
  std::vector<std::string> seeds;  // well-formed inputs and regressions; at least one
  int64_t executions = 20000;      // mutated inputs when run as a test
  size_t input_bytes_max = 4096;
};

// Defined by each target.
FuzzTarget TargetUnderTest();

// Prints `violation` and aborts, unless it is empty.
void Require(const std::string& violation);

}  // namespace mla::fuzz

// Defined by each target; returns 0.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // MLA_TESTS_FUZZ_HARNESS_TARGET_H_
