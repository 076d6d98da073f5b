// Ctrl-C at any moment of an mlactl command: exit code 130, immediately if nothing was created, and
// no leftovers on the server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/integration/processes.h"

namespace mla::integration {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr char kBench[] =
    "bench --heads=4 --lora=32 --rope=8 --nope=16 --v=16 --layers=2 --page-size=4 --context=8 "
    "--profile=expanded --duration=60 ";

Result InterruptedAfter(const std::string& command, milliseconds time, int signal = SIGINT) {
  BackgroundCommand running(command);
  std::this_thread::sleep_for(time);
  running.Signal(signal);
  return running.Finish();
}

void ExpectNothingLeft(const ServerProcess& server, const std::string& why) {
  const json stats = json::parse(Shell(server.Mlactl("status --json")).output);
  EXPECT_EQ(stats["sequences"], 0) << why;
  EXPECT_EQ(stats["models"], 0) << why;
  EXPECT_EQ(stats["open_steps"], 0) << why;
}

TEST(MlactlInterruptTest, WatchEndsAtOnceHoweverRareItsLines) {
  ServerProcess server({});
  for (const int signal : {SIGINT, SIGTERM}) {
    BackgroundCommand watch(server.Mlactl("watch --interval-ms=60000"));
    std::this_thread::sleep_for(milliseconds(500));
    const auto begin = Clock::now();
    watch.Signal(signal);
    const Result result = watch.Finish();
    EXPECT_EQ(result.code, 130);
    EXPECT_LT(Clock::now() - begin, milliseconds(2000));
    EXPECT_THAT(result.output, HasSubstr("SERVING"));  // the updates before the interrupt
  }
}

TEST(MlactlInterruptTest, AnInterruptEndsAnUnansweredCall) {
  ServerProcess server({});
  server.Signal(SIGSTOP);
  for (const char* words : {"status", "attend", "bench --quiet", "drain"}) {
    const auto begin = Clock::now();
    const Result result = InterruptedAfter(
        server.Mlactl(absl::StrCat("--timeout-ms=60000 ", words)), milliseconds(300));
    EXPECT_EQ(result.code, 130) << words << ": " << result.output;
    EXPECT_LT(Clock::now() - begin, milliseconds(5000)) << words;
  }
  server.Signal(SIGCONT);
  ExpectNothingLeft(server, "after commands that had not begun");
}

// Covers connecting, registering, uploading, filling the context, measuring and releasing.
TEST(MlactlInterruptTest, NoMomentLeavesAnythingBehind) {
  ServerProcess server({});
  int interrupted = 0;  // interrupted after something had been created; how often depends on the
                        // machine
  for (int ms = 2; interrupted < 4 && ms < 10'000; ms += 9 + ms / 4) {
    for (const std::string& words : {std::string("attend"), std::string(kBench)}) {
      const Result result = InterruptedAfter(server.Mlactl(words), milliseconds(ms));
      // attend may have finished first.
      EXPECT_THAT(result.code, AnyOf(130, words == "attend" ? 0 : 130)) << result.output;
      interrupted += result.output.find("interrupted; ") != std::string::npos;
      EXPECT_THAT(result.output, testing::Not(HasSubstr("still on the server")));
      ExpectNothingLeft(server, absl::StrCat(words, " after ", ms, " ms: ", result.output));
    }
  }
  EXPECT_GE(interrupted, 4);
}

TEST(MlactlInterruptTest, AServerThatIsGoneIsNotSaidToBeClean) {
  ServerProcess server({});
  BackgroundCommand bench(server.Mlactl(absl::StrCat("--timeout-ms=500 ", kBench)));
  for (int i = 0; i < 200; ++i) {
    const json stats = json::parse(Shell(server.Mlactl("status --json")).output);
    if (stats["open_steps"] != 0) break;
  }
  // Nothing fails before the interrupt, and nothing can be released after it.
  server.Signal(SIGSTOP);
  bench.Signal(SIGINT);
  std::this_thread::sleep_for(milliseconds(300));
  server.Signal(SIGKILL);
  const Result result = bench.Finish();
  EXPECT_EQ(result.code, 130);
  EXPECT_THAT(result.output, HasSubstr("may still be on the server"));
  EXPECT_THAT(result.output, testing::Not(HasSubstr("is gone from the server")));
}

}  // namespace
}  // namespace mla::integration
