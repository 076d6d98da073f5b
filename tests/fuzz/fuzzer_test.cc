// The canary: a fuzzer that finds nothing here would find nothing anywhere.
#include "tests/fuzz/fuzzer.h"

#include <gtest/gtest.h>

namespace mla::fuzz {
namespace {

TEST(FuzzerTest, FindsAPlantedFault) {
  FuzzOptions options;
  options.name = "canary";
  options.seeds = {"header: 4\nbody"};
  options.executions = 1'000'000;
  const FuzzResult result = Fuzz(options, [](const std::string& input) -> std::string {
    // A length that goes past the end.
    const size_t at = input.find(": ");
    if (at == std::string::npos || at + 2 >= input.size()) return "";
    const int length = input[at + 2] - '0';
    const size_t body = input.find('\n');
    if (body == std::string::npos || length < 0 || length > 9) return "";
    return body + 1 + static_cast<size_t>(length) > input.size() ? "reads past the end" : "";
  });
  EXPECT_NE(result.violation.find("reads past the end"), std::string::npos);
  EXPECT_NE(result.violation.find("; input \""), std::string::npos) << result.violation;
  EXPECT_LT(result.executions, 100'000);
}

TEST(FuzzerTest, RunsTheSameInputsFromTheSameSeed) {
  std::vector<std::string> runs[2];
  for (std::vector<std::string>& inputs : runs) {
    FuzzOptions options;
    options.name = "replay";
    options.seeds = {"abc", "12345678"};
    options.executions = 500;
    const FuzzResult result = Fuzz(options, [&inputs](const std::string& input) {
      inputs.push_back(input);
      return std::string();
    });
    EXPECT_EQ(result.violation, "");
    EXPECT_GE(result.executions, 500);
  }
  EXPECT_EQ(runs[0], runs[1]);
}

}  // namespace
}  // namespace mla::fuzz
