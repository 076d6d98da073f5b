#include "client/mlactl/load/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::mlactl {
namespace {

using ::testing::HasSubstr;

constexpr char kFirst[] = R"({"format": "mla-agents-trace", "version": 1, "block_rows": 4})";

std::string Why(const std::string& line, const std::string& first = kFirst) {
  const auto trace = ParseTrace(absl::StrCat(first, "\n", line, "\n"));
  return trace.ok() ? "" : std::string(trace.status().message());
}

TEST(TraceTest, WhatIsWrittenIsRead) {
  const Trace trace = GenerateAgents({.conversations = 3, .turns = 5, .context = 700}, 7);
  const std::string text = TraceText(trace);
  const auto read = ParseTrace(text);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->turns.size(), trace.turns.size());
  EXPECT_EQ(read->block_rows, trace.block_rows);
  EXPECT_EQ(TraceText(*read), text);
}

TEST(TraceTest, TheSameSeedGivesTheSameTrace) {
  const AgentsShape shape = {.conversations = 2, .turns = 4, .context = 600};
  EXPECT_EQ(TraceText(GenerateAgents(shape, 1)), TraceText(GenerateAgents(shape, 1)));
  EXPECT_NE(TraceText(GenerateAgents(shape, 1)), TraceText(GenerateAgents(shape, 2)));
}

TEST(TraceTest, ConversationsGrowAndShareTheirBeginnings) {
  const AgentsShape shape = {.conversations = 6,
                             .turns = 10,
                             .context = 2048,
                             .system = 256,
                             .output = 4,
                             .branching = 0.5,
                             .branches = 2};
  const Trace trace = GenerateAgents(shape, 3);
  std::map<uint32_t, const Turn*> last;
  std::map<uint32_t, uint32_t> turns;
  std::set<uint32_t> branching;
  double at_ms = 0;
  for (const Turn& turn : trace.turns) {
    EXPECT_GE(turn.at_ms, at_ms);
    at_ms = turn.at_ms;
    EXPECT_EQ(turn.blocks.size(),
              (turn.input_rows + turn.output_rows + trace.block_rows - 1) / trace.block_rows);
    const Turn* const before = last[turn.conversation];
    if (before != nullptr) {  // all that was there is a beginning of what follows
      const uint32_t rows = before->input_rows + before->output_rows;
      EXPECT_GE(trace.Shared(*before, turn), rows / trace.block_rows * trace.block_rows);
      EXPECT_GT(turn.input_rows, rows / trace.block_rows * trace.block_rows);
    }
    if (turn.branch) {
      ASSERT_NE(before, nullptr);
      branching.insert(turn.conversation);
      continue;
    }
    ++turns[turn.conversation];
    last[turn.conversation] = &turn;
  }
  ASSERT_EQ(turns.size(), shape.conversations);
  for (const auto& [conversation, count] : turns) {
    EXPECT_EQ(count, shape.turns);
    EXPECT_EQ(last[conversation]->input_rows, shape.context);
    EXPECT_GE(trace.Shared(*last[0], *last[conversation]), shape.system);
  }
  EXPECT_NE(last[0]->blocks, last[1]->blocks);
  EXPECT_FALSE(branching.empty());
  EXPECT_LT(branching.size(), shape.conversations);
}

TEST(TraceTest, AnAgentTurnIsRepeatedWithAndWithoutItsRows) {
  const Trace trace = GenerateTurn(1000, 0.96, 2, 1);
  ASSERT_EQ(trace.turns.size(), 5u);
  EXPECT_EQ(trace.turns[0].input_rows, 960u);
  for (size_t i = 1; i < 5; ++i) {
    EXPECT_EQ(trace.turns[i].input_rows, 1000u);
    EXPECT_EQ(trace.Shared(trace.turns[0], trace.turns[i]), i % 2 == 0 ? 960u : 0u);
    for (size_t other = 1; other < i; ++other) {
      EXPECT_NE(trace.turns[i].blocks.back(), trace.turns[other].blocks.back());
    }
  }
}

TEST(TraceTest, TokensFollowFromTheBlocks) {
  Trace trace;
  trace.block_rows = 4;
  Turn one, other;
  one.blocks = {7, 8};
  other.blocks = {7, 9, 8};
  const auto tokens = trace.Tokens(one, 0, 100);
  ASSERT_EQ(tokens.size(), 8u);  // positions without a block have no token
  EXPECT_EQ(std::set<uint32_t>(tokens.begin(), tokens.end()).size(), 8u);
  EXPECT_EQ(trace.Tokens(other, 0, 4), trace.Tokens(one, 0, 4));
  EXPECT_EQ(trace.Tokens(other, 8, 12), trace.Tokens(one, 4, 8));
  EXPECT_EQ(trace.Tokens(one, 2, 6)[0], tokens[2]);
  EXPECT_TRUE(trace.Tokens(one, 8, 9).empty());
  EXPECT_EQ(trace.Shared(one, other), 4u);
}

TEST(TraceTest, TracesOfRequestsWithoutAFirstLineAreReadToo) {
  const auto trace = ParseTrace(
      R"({"timestamp": 27, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]})"
      "\n"
      R"({"timestamp": 30, "input_length": 512, "output_length": 1, "hash_ids": [46]})");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->block_rows, 512u);
  ASSERT_EQ(trace->turns.size(), 2u);
  EXPECT_NE(trace->turns[0].conversation, trace->turns[1].conversation);
  EXPECT_EQ(trace->turns[0].at_ms, 27);
  EXPECT_FALSE(trace->turns[0].branch);
}

TEST(TraceTest, FaultsNameTheLineAndTheKey) {
  constexpr char kGood[] =
      R"({"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": [1, 2], )";
  EXPECT_EQ(Why(absl::StrCat(kGood, R"("branch": true, "conversation": 3})")), "");
  EXPECT_THAT(Why("{"), HasSubstr("line 2: must be a JSON object"));
  EXPECT_THAT(Why("[]"), HasSubstr("line 2: must be a JSON object"));
  EXPECT_THAT(Why("", ""), HasSubstr("no turns"));
  EXPECT_THAT(Why("", R"({"format": "mla-agents-trace", "version": 2, "block_rows": 4})"),
              HasSubstr("line 1: must be format mla-agents-trace, version 1"));
  EXPECT_THAT(Why("", R"({"format": "mla-agents-trace", "version": 1, "block_rows": 0})"),
              HasSubstr("block_rows: got 0"));
  EXPECT_THAT(Why(R"({"timestamp": -1})"), HasSubstr("timestamp: got -1"));
  EXPECT_THAT(Why(R"({"timestamp": "x"})"), HasSubstr("timestamp: must be a number"));
  EXPECT_THAT(Why(R"({"timestamp": 1, "input_length": 0})"), HasSubstr("input_length: got 0"));
  EXPECT_THAT(Why(R"({"timestamp": 1, "input_length": 5, "output_length": 16777217})"),
              HasSubstr("output_length: got"));
  EXPECT_THAT(Why(absl::StrCat(kGood, R"("branch": 1})")), HasSubstr("branch: must be true"));
  EXPECT_THAT(Why(absl::StrCat(kGood, R"("conversation": 1e9})")), HasSubstr("conversation: got"));
  constexpr char kLengths[] = R"({"timestamp": 1, "input_length": 5, "output_length": 2, )";
  EXPECT_THAT(Why(absl::StrCat(kLengths, R"("hash_ids": [1]})")), HasSubstr("got 1, must be 2..2"));
  EXPECT_THAT(Why(absl::StrCat(kLengths, R"("hash_ids": [1, 2, 3]})")), HasSubstr("got 3"));
  EXPECT_THAT(Why(absl::StrCat(kLengths, R"("hash_ids": [1, -2]})")), HasSubstr("whole numbers"));
  EXPECT_THAT(Why(absl::StrCat(kLengths, R"("hash_ids": 1})")), HasSubstr("must be a list"));
}

}  // namespace
}  // namespace mla::mlactl
