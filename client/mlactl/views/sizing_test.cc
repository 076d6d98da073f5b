#include "client/mlactl/views/sizing.h"

#include <gtest/gtest.h>

namespace mla::mlactl {
namespace {

constexpr uint64_t kMemory = 256'000'000'000;

Sizing Of(const char* format, uint64_t sessions = 100) {
  Load load;
  load.memory_bytes = kMemory;
  load.sessions = sessions;
  load.tokens = 142'000;
  load.format = format;
  return SizeUp(*FindModel("deepseek-v3"), load);
}

// The figures of the manual: 61 layers, 256 GB.
TEST(SizingTest, DeepSeekV3) {
  EXPECT_EQ(Of("bf16").token_bytes, 70'272u);
  EXPECT_EQ(Of("fp8_row").token_bytes, 40'016u);
  EXPECT_EQ(Of("fp8_tensor").token_bytes, 35'136u);
  EXPECT_EQ(Of("bf16").server_tokens, 3'642'987u);
  EXPECT_EQ(Of("bf16").server_sessions, 25u);
  EXPECT_EQ(Of("fp8_row").server_sessions, 45u);
  EXPECT_EQ(Of("fp8_tensor").server_sessions, 51u);
  EXPECT_EQ(Of("bf16").servers_for_memory, 4u);
  EXPECT_EQ(Of("bf16", 101).servers_for_memory, 5u);
  EXPECT_EQ(Of("bf16").weight_bytes, 61u * 33'554'432u);
  EXPECT_EQ(Of("bf16").step_bytes, 61u * (128 * (192 + 128) + 576) * 2);
}

TEST(SizingTest, ALinkMayNeedMoreServersThanMemory) {
  Load load;
  load.memory_bytes = kMemory;
  load.sessions = 10;
  load.tokens = 1000;
  load.tokens_per_second = 2000;
  const ModelSize& model = *FindModel("deepseek-v3");
  EXPECT_EQ(SizeUp(model, load).servers, 1u);
  load.link_bytes_per_second = 4e9;
  EXPECT_EQ(SizeUp(model, load).servers_for_link, 3u);
  EXPECT_EQ(SizeUp(model, load).servers, 3u);
}

TEST(SizingTest, ASessionThatDoesNotFitSaysSo) {
  Load load;
  load.memory_bytes = 1'000'000;
  load.sessions = 1;
  load.tokens = 142'000;
  EXPECT_EQ(SizeUp(*FindModel("kimi-k2"), load).server_sessions, 0u);
  EXPECT_EQ(SizeUp(*FindModel("kimi-k2"), load).servers_for_memory, 0u);
  EXPECT_EQ(FindModel("gpt"), nullptr);
}

}  // namespace
}  // namespace mla::mlactl
