// The canary: mutations that find no fault here would find none anywhere.
#include "tests/fuzz/harness/mutator.h"

#include <gtest/gtest.h>

#include <string>

namespace mla::fuzz {
namespace {

// A parser with a fault: a length that goes past the end.
bool ReadsPastTheEnd(const std::string& input) {
  const size_t at = input.find(": ");
  if (at == std::string::npos || at + 2 >= input.size()) return false;
  const int length = input[at + 2] - '0';
  const size_t body = input.find('\n');
  if (body == std::string::npos || length < 0 || length > 9) return false;
  return body + 1 + static_cast<size_t>(length) > input.size();
}

TEST(MutatorTest, FindsAPlantedFault) {
  const std::string seed = "header: 4\nbody";
  ASSERT_FALSE(ReadsPastTheEnd(seed));
  Mutator mutator(1, {seed}, 4096);
  int executions = 0;
  while (executions < 100'000 && !ReadsPastTheEnd(mutator.Next())) ++executions;
  EXPECT_LT(executions, 100'000);
}

TEST(MutatorTest, RunsTheSameInputsFromTheSameSeed) {
  Mutator one(7, {"abc", "12345678"}, 4096), same(7, {"abc", "12345678"}, 4096);
  Mutator other(8, {"abc", "12345678"}, 4096);
  int equal = 0;
  for (int i = 0; i < 500; ++i) {
    const std::string input = one.Next();
    EXPECT_EQ(same.Next(), input);
    equal += other.Next() == input;
  }
  EXPECT_LT(equal, 100);
}

TEST(MutatorTest, InputsStayWithinTheirBound) {
  Mutator mutator(1, {std::string(100, 'a'), "bc"}, 64);
  size_t longest = 0;
  for (int i = 0; i < 1000; ++i) longest = std::max(longest, mutator.Next().size());
  EXPECT_EQ(longest, 64u);
}

}  // namespace
}  // namespace mla::fuzz
