// A target with a planted fault, for driver_test.
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {

FuzzTarget TargetUnderTest() {
  return {.seeds = {"header: 4\nbody"}, .executions = 100'000, .input_bytes_max = 4096};
}

}  // namespace mla::fuzz

// A parser that does not check its length: "header: N\n", then at least N bytes.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  const size_t at = input.find(": ");
  const size_t body = input.find('\n');
  if (at == std::string::npos || at + 2 >= input.size() || body == std::string::npos) return 0;
  const int length = input[at + 2] - '0';
  if (length < 0 || length > 9) return 0;
  const bool inside = body + 1 + static_cast<size_t>(length) <= input.size();
  mla::fuzz::Require(inside ? "" : "reads past the end");
  return 0;
}
