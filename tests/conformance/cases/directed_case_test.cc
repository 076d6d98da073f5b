#include "tests/conformance/cases/directed_case.h"

#include <string>

#include "gtest/gtest.h"

namespace mla::conformance {
namespace {

TEST(DirectedCaseTest, ShapeIsWhatTheTextSays) {
  const auto spec = ParseCase({}, 7, "project:65:1,4097,64/5,0,3,full:9");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->route, Route::kAbsorbProject);
  EXPECT_EQ(spec->geometry.num_heads, 65);
  EXPECT_EQ(spec->geometry.kv_lora_rank, 512);
  EXPECT_EQ(spec->units, 9);
  EXPECT_EQ(spec->q_dtype, kernels::DType::kBf16);
  ASSERT_EQ(spec->requests.size(), 2u);
  EXPECT_EQ(spec->requests[0].kv_rows(), 4098);
  EXPECT_EQ(spec->requests[0].page_size, 64);
  EXPECT_TRUE(spec->requests[0].causal);
  EXPECT_EQ(spec->requests[1].q_rows, 5);
  EXPECT_EQ(spec->requests[1].num_heads, 65);
  EXPECT_FALSE(spec->requests[1].causal);
}

TEST(DirectedCaseTest, SameIndexSameCase) {
  for (const uint64_t index : {1, 2, 3}) {
    const auto a = ParseCase({}, index, "absorbed:3:2,9,16");
    const auto b = ParseCase({}, index, "absorbed:3:2,9,16");
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_EQ(ToString(*a), ToString(*b));
  }
}

TEST(DirectedCaseTest, FaultsNameThePart) {
  constexpr const char* kFaults[][2] = {
      {"absorbed:1", "ROUTE:HEADS:REQUEST"},
      {"latent:1:1,0,1", "route: got 'latent'"},
      {"absorbed:0:1,0,1", "heads: got '0', must be 1 to 1024"},
      {"absorbed:1:1,0", "request: got '1,0'"},
      {"absorbed:1:1,0,1,causal", "request: got '1,0,1,causal'"},
      {"absorbed:1:-1,0,1", "query rows: got '-1'"},
      {"absorbed:1:1,x,1", "cached rows: got 'x'"},
      {"expanded:1:1,0,0", "rows a page: got '0'"},
      {"expanded:1:1,0,1/", "request: got ''"},
      {"project:1:1,0,1:0", "units: got '0'"},
  };
  for (const auto& [text, message] : kFaults) {
    const auto spec = ParseCase({}, 0, text);
    ASSERT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(spec.status().message().find(message), std::string::npos) << spec.status();
  }
}

TEST(DirectedCaseTest, TextOfATableThatDoesNotParseEndsTheProgram) {
  EXPECT_EQ(ParseOrEnd({}, 7, "absorbed:3:2,9,16").geometry.num_heads, 3);
  EXPECT_EXIT(ParseOrEnd({}, 7, "absorbed:1:1,0"), testing::ExitedWithCode(2),
              "request: got '1,0'");
}

}  // namespace
}  // namespace mla::conformance
