// mlactl bench --scene against a real server: how many rows turns find, traces that are written and
// run again, and the absence of leftovers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/integration/processes.h"

namespace mla::integration {
namespace {

using nlohmann::json;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A model small enough for the test servers.
constexpr char kSmall[] = " --heads=4 --lora=32 --rope=8 --nope=16 --v=16 --layers=2 --page-size=4";

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class MlactlAgentsTest : public testing::Test {
 protected:
  std::string Command(const std::string& options) const {
    return server_.Mlactl(absl::StrCat("bench --quiet", kSmall, " ", options));
  }
  Result Run(const std::string& options) const { return Shell(Command(options)); }
  // Runs the scene, which must succeed, and returns the parsed document.
  json Measure(const std::string& options) const {
    const Result result = Run(options + " --output=json");
    EXPECT_EQ(result.code, 0) << result.output;
    json document = json::parse(result.output, nullptr, false);
    EXPECT_FALSE(document.is_discarded()) << result.output;
    return document;
  }
  std::string Write(const std::string& text) const {
    const std::string path = server_.File("trace.jsonl");
    std::ofstream(path) << text;
    return path;
  }
  static std::vector<int> Found(const json& document) {
    std::vector<int> found;
    for (const json& turn : document["turns"]) found.push_back(turn["found_rows"]);
    return found;
  }
  void ExpectNothingLeft() const {
    const json stats = json::parse(Shell(server_.Mlactl("status --json")).output);
    EXPECT_EQ(stats["sequences"], 0);
    EXPECT_EQ(stats["models"], 0);
    EXPECT_EQ(stats["open_steps"], 0);
    EXPECT_EQ(stats["page_groups_used"], "0");
  }

  ServerProcess server_{{}};
};

TEST_F(MlactlAgentsTest, ConversationsFindWhatTheirTurnsBeforeHaveLeft) {
  const std::string trace = server_.File("saved.jsonl"), svg = server_.File("agents.svg");
  const std::string file = server_.File("agents.json");
  const Result result = Run(absl::StrCat(
      "--scene=agents --conversations=3 --turns=6 --context=400 --system=128 --outputs=3 "
      "--branching=1 --branches=2 --concurrency=2 --prefill-rows=64 --save-trace=",
      trace, " --plot=", svg, " --json ", file));
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, ContainsRegex("agents: 24 turns, 6 of them branches"));
  EXPECT_THAT(result.output, ContainsRegex("first output, all +24 "));
  const json document = json::parse(ReadAll(file));
  EXPECT_EQ(document["format"], "mlactl-agents");
  EXPECT_EQ(document["turns_done"], 24);
  EXPECT_EQ(document["branches"], 6);
  EXPECT_EQ(document["rows"]["output"], 72);
  EXPECT_EQ(document["next_ms"]["count"], 48);
  EXPECT_EQ(document["rows"]["input"],
            document["rows"]["found"].get<int>() + document["rows"]["computed"].get<int>());
  EXPECT_GT(document["hit_rate"], 0.6);
  EXPECT_GT(document["tiers"]["pool"]["stored"], 400);
  EXPECT_EQ(document["tiers_complete"], true);
  int turns_of[3] = {}, last_found[3] = {};
  for (const json& turn : document["turns"]) {
    if (turn["branch"]) continue;
    const int conversation = turn["conversation"];
    const int found_rows = turn["found_rows"];
    if (++turns_of[conversation] > 1) {
      EXPECT_GE(found_rows, last_found[conversation]);
    }
    last_found[conversation] = found_rows;
    EXPECT_LT(found_rows, turn["input_rows"]);
    EXPECT_GT(turn["first_ms"], 0);
  }
  EXPECT_THAT(turns_of, ElementsAre(6, 6, 6));
  EXPECT_THAT(ReadAll(svg), HasSubstr("Time to the first output by percentile"));
  // Runs the written trace again.
  const json again = Measure(absl::StrCat("--scene=agents --trace=", trace));
  EXPECT_EQ(again["turns_done"], 24);
  EXPECT_EQ(again["rows"]["input"], document["rows"]["input"]);
  ExpectNothingLeft();
}

TEST_F(MlactlAgentsTest, AnAgentTurnIsMeasuredWithAndWithoutTheCache) {
  const json document = Measure("--scene=agent-turn --context=1000 --repeats=2");
  EXPECT_THAT(Found(document), ElementsAre(0, 0, 960, 0, 960));
  EXPECT_EQ(document["first_ms"]["96 % or more"]["count"], 2);
  EXPECT_EQ(document["first_ms"]["none"]["count"], 3);
  EXPECT_GT(document["speedup"], 1.5);
  EXPECT_THAT(Run("--scene=agent-turn --context=500 --repeats=1").output,
              ContainsRegex("first output without the cache over that with it: [0-9.]+\n"));
  ExpectNothingLeft();
}

// A branch takes all rows of its conversation, outputs included. The next turn finds the rows of
// both.
TEST_F(MlactlAgentsTest, TracesSayWhatIsShared) {
  const std::string trace = Write(absl::StrCat(
      R"({"format": "mla-agents-trace", "version": 1, "block_rows": 4})", "\n",
      R"({"timestamp": 0, "conversation": 7, "input_length": 16, "output_length": 4, )",
      R"("hash_ids": [1, 2, 3, 4, 5]})", "\n",
      R"({"timestamp": 0, "conversation": 7, "input_length": 24, "output_length": 1, )",
      R"("branch": true, "hash_ids": [1, 2, 3, 4, 5, 9]})", "\n",
      R"({"timestamp": 50, "conversation": 7, "input_length": 28, "output_length": 1, )",
      R"("hash_ids": [1, 2, 3, 4, 5, 6, 7]})", "\n",
      R"({"timestamp": 60, "conversation": 8, "input_length": 8, "output_length": 2, )",
      R"("hash_ids": [2, 1]})", "\n"));
  const json document = Measure(absl::StrCat("--scene=agents --speed=1 --trace=", trace));
  EXPECT_THAT(Found(document), ElementsAre(0, 19, 20, 0));
  EXPECT_GE(document["turns"][2]["start_s"], 0.05);
  EXPECT_EQ(document["turns"][0]["end"], "absent");
  ExpectNothingLeft();
}

TEST_F(MlactlAgentsTest, AnInterruptPrintsWhatThereIsAndLeavesNothing) {
  const std::string file = server_.File("cut.json");
  BackgroundCommand command(Command(
      absl::StrCat("--scene=agents --context=1500 --outputs=8 --concurrency=2 --json=", file)));
  std::this_thread::sleep_for(std::chrono::seconds(2));
  command.Signal(SIGINT);
  const Result result = command.Finish();
  EXPECT_EQ(result.code, 130) << result.output;
  EXPECT_THAT(result.output, HasSubstr("interrupted; what it had created is gone from the server"));
  EXPECT_EQ(json::parse(ReadAll(file))["interrupted"], true);
  ExpectNothingLeft();
}

TEST_F(MlactlAgentsTest, ErrorsSayWhatIsWrong) {
  const auto wrong = [this](const std::string& options, const std::string& says) {
    const Result result = Run(options);
    EXPECT_EQ(result.code, 1) << options;
    EXPECT_THAT(result.output, HasSubstr(says)) << options;
  };
  wrong("--scene=agents --rate=5", "--rate");
  wrong("--turns=5", "--scene");
  wrong("--scene=agents --transport=inline,shm", "--scene is one run");
  wrong("--scene=agents --profile=append-only", "--profile expanded or absorbed");
  wrong("--scene=agents --context=500", "--context: got 500, must be at least 727");
  wrong("--scene=agent-turn --concurrency=2", "--concurrency 1");
  wrong("--scene=agents --trace=/nonexistent", "/nonexistent: cannot be read");
  wrong(absl::StrCat("--scene=agents --trace=", Write("{\"timestamp\": 1}\n")),
        "line 1: input_length: must be a number");
  ExpectNothingLeft();
}

}  // namespace
}  // namespace mla::integration
