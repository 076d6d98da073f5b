// The small parts of the life cycle and of operations: state, watchdog, memory check, log lines,
// conversion of statuses.
#include <gmock/gmock.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "mla/v1/sequence.pb.h"
#include "server/grpc/grpc_status.h"
#include "server/lifecycle/server_state.h"
#include "server/lifecycle/watchdog.h"
#include "server/logging/library_logs.h"
#include "server/logging/logging.h"
#include "server/metrics/metrics.h"
#include "server/process/memory_check.h"
#include "server/process/process_usage.h"

namespace mla::server {
namespace {

using scheduler::Resource;
using scheduler::TenantQuota;
using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ServerStateTest, MovesForwardOnly) {
  ServerState state;
  EXPECT_FALSE(state.Get().serving());
  const Phase order[] = {Phase::kWarming, Phase::kServing, Phase::kDraining, Phase::kStopped};
  for (const Phase phase : order) {
    state.Move(phase, 1, "x");
    EXPECT_EQ(state.Get().phase, phase);
    EXPECT_EQ(state.Get().serving(), phase == Phase::kServing);
    for (const Phase earlier : order) {
      if (earlier >= phase) break;
      state.Move(earlier, 2, "back");
      EXPECT_EQ(state.Get().phase, phase);
    }
  }
}

TEST(ServerStateTest, HealthGatesServing) {
  ServerState state;
  state.Move(Phase::kServing, 100, "");
  const uint64_t version = state.Get().version;
  std::thread failing([&] {
    std::this_thread::sleep_for(milliseconds(20));
    state.SetHealth(false, "broken");
  });
  const auto changed = state.WaitForChange(version, milliseconds(5000));
  failing.join();
  EXPECT_FALSE(changed.serving());
  EXPECT_EQ(changed.message, "broken");
  state.SetHealth(true, "");
  EXPECT_TRUE(state.Get().serving());
  EXPECT_EQ(state.WaitForChange(state.Get().version, milliseconds(1)).version, state.Get().version);
}

TEST(ServerStateTest, WhyAndSinceWhenOutliveWhatADrainSays) {
  ServerState state;
  const auto begun = std::chrono::steady_clock::now();
  state.SetHealth(false, "silent");
  const auto since = state.Get().unhealthy_since;
  EXPECT_GE(since, begun);
  std::this_thread::sleep_for(milliseconds(2));
  state.SetHealth(false, "silent");
  state.Move(Phase::kDraining, 0, "waiting for 1 open steps");
  EXPECT_EQ(state.Get().why_unhealthy, "silent");
  state.SetLost("the device is gone");
  state.Move(Phase::kDraining, 50, "waiting for no open steps");
  EXPECT_EQ(state.Get().message, "waiting for no open steps");
  EXPECT_EQ(state.Get().why_unhealthy, "the device is gone");
  EXPECT_EQ(state.Get().unhealthy_since, since);
  ServerState other;
  other.SetHealth(false, "silent");
  other.SetHealth(true, "");
  EXPECT_EQ(other.Get().why_unhealthy, "");
}

// Returns true once the state becomes like this.
bool Becomes(const ServerState& state, bool healthy, const std::string& message) {
  for (int i = 0; i < 1000; ++i) {
    const auto now = state.Get();
    if (now.healthy == healthy && now.message.find(message) != std::string::npos) return true;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return false;
}

TEST(WatchdogTest, ReportsTimeoutRecoveryAndLoss) {
  ServerState state;
  state.Move(Phase::kServing, 100, "");
  std::atomic<int> mode{0};  // 0 well, 1 lost, 2 silent
  const Watchdog watchdog(
      [&] {
        while (mode == 2) std::this_thread::sleep_for(milliseconds(1));
        return Heartbeat{mode == 1 ? absl::InternalError("device lost") : absl::OkStatus(), {}};
      },
      &state, milliseconds(100), milliseconds(5));
  mode = 2;
  EXPECT_TRUE(Becomes(state, false, "no heartbeat"));
  EXPECT_FALSE(state.Get().lost);
  mode = 0;
  EXPECT_TRUE(Becomes(state, true, ""));
  mode = 1;
  EXPECT_TRUE(Becomes(state, false, "device lost"));
  EXPECT_TRUE(state.Get().lost);
  // No later answer of the engine makes the device come back.
  mode = 2;
  std::this_thread::sleep_for(milliseconds(150));
  mode = 0;
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(state.Get().healthy);
  EXPECT_EQ(state.Get().message, "device lost");
}

TEST(WatchdogTest, EndsTheProcessWhereACallNeverReturns) {
  ServerState state;
  std::atomic<bool> stuck{false}, silent{true};
  std::atomic<int> looks{0};
  std::promise<std::string> ended;
  const Watchdog watchdog(
      [&] {
        silent.wait(true);  // the stuck call holds what a probe needs
        return Heartbeat{};
      },
      &state, milliseconds(60000), milliseconds(5),
      {[&] {
         ++looks;
         return std::string(stuck.exchange(false) ? "a call has not returned" : "");
       },
       [&](const std::string& why) { ended.set_value(why); }});
  while (looks < 3) std::this_thread::yield();  // without an end, because nothing is stuck
  stuck = true;
  EXPECT_EQ(ended.get_future().get(), "a call has not returned");
  silent = false;
  silent.notify_all();
}

TEST(WatchdogTest, StatsAreOfNowOrTheLastThatWereTold) {
  ServerState state;
  std::atomic<uint64_t> launches{1};
  std::atomic<bool> silent{false};
  Watchdog watchdog(
      [&] {
        Heartbeat heartbeat;
        heartbeat.stats.launches = launches;
        silent.wait(true);
        return heartbeat;
      },
      &state, milliseconds(60000), milliseconds(60000));
  for (uint64_t i = 1; i < 20; ++i) {
    launches = i;
    EXPECT_EQ(watchdog.Stats().launches, i);
  }
  silent = true;
  launches = 50;
  const auto begun = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(watchdog.Stats().launches, 19u);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 20 * Watchdog::kAnswerWait);
  silent = false;
  silent.notify_all();
  for (int i = 0; i < 1000 && watchdog.Stats().launches != 50; ++i) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_EQ(watchdog.Stats().launches, 50u);
}

class FakeRoot {
 public:
  FakeRoot() {
    char name[] = "/tmp/mla-root-XXXXXX";
    path = mkdtemp(name);
  }
  ~FakeRoot() { std::filesystem::remove_all(path); }
  void Write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path + file).parent_path());
    std::ofstream(path + file) << text;
  }
  std::string path;
};

TEST(MemoryCheckTest, TheTightestLimitCounts) {
  const FakeRoot root;
  EXPECT_EQ(AvailableMemory(root.path), std::numeric_limits<int64_t>::max());
  root.Write("/proc/meminfo", "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n");
  EXPECT_EQ(AvailableMemory(root.path), 800 * 1024);
  root.Write("/proc/self/cgroup", "0::/outer/inner\n");
  root.Write("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
  root.Write("/sys/fs/cgroup/outer/memory.max", "500000\n");
  root.Write("/sys/fs/cgroup/outer/memory.current", "100000\n");
  EXPECT_EQ(AvailableMemory(root.path), 400000);
  // The kernel gives cached files back.
  root.Write("/sys/fs/cgroup/outer/memory.stat",
             "anon 20000\ninactive_file 50000\nactive_file 7000\nslab 9\n");
  EXPECT_EQ(AvailableMemory(root.path), 457000);
  root.Write("/sys/fs/cgroup/outer/inner/memory.max", "1000\n");
  root.Write("/sys/fs/cgroup/outer/inner/memory.current", "2000\n");
  EXPECT_EQ(AvailableMemory(root.path), 0);
  EXPECT_GT(AvailableMemory(), 0);
}

TEST(MemoryCheckTest, GroupsOfVersionOneCount) {
  const FakeRoot root;
  root.Write("/proc/meminfo", "MemAvailable: 800 kB\n");
  root.Write("/proc/self/cgroup", "4:memory:/docker/7\n3:cpuset:/\n0::/\n");
  const std::string group = "/sys/fs/cgroup/memory/docker/7/";
  root.Write(group + "memory.limit_in_bytes", "9223372036854771712\n");
  root.Write(group + "memory.usage_in_bytes", "100000\n");
  EXPECT_EQ(AvailableMemory(root.path), 800 * 1024);
  root.Write(group + "memory.limit_in_bytes", "500000\n");
  EXPECT_EQ(AvailableMemory(root.path), 400000);
  root.Write(group + "memory.stat", "inactive_file 1\ntotal_inactive_file 50000\n");
  EXPECT_EQ(AvailableMemory(root.path), 450000);
  root.Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "200000\n");
  root.Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "150000\n");
  EXPECT_EQ(AvailableMemory(root.path), 50000);
}

TEST(MemoryCheckTest, NamesEveryUse) {
  EXPECT_TRUE(CheckMemory({{"a", 40}, {"b", 60}}, 100).ok());
  const absl::Status refused =
      CheckMemory({{"pool", int64_t{3} << 20}, {"staging", int64_t{2} << 20}}, int64_t{4} << 20);
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("pool 3 MiB, staging 2 MiB"));
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(CheckMemory({{"a", most}, {"b", most}}, most - 1).ok());
}

TEST(LoggingTest, OneEventIsOneLine) {
  const LogFields fields = {{"plain", "a.b-c"}, {"odd", "two words\nforged level=error \"x\""}};
  const std::string text = FormatLine(false, LogLevel::kInfo, "thing", fields);
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_THAT(text, HasSubstr("info thing plain=a.b-c odd=\"two words\\nforged"));
  const std::string json = FormatLine(true, LogLevel::kError, "thing", fields);
  const auto parsed = nlohmann::json::parse("{" + json);
  EXPECT_EQ(parsed["event"], "thing");
  EXPECT_EQ(parsed["level"], "error");
  EXPECT_EQ(parsed["odd"], fields[1].second.text());
  EXPECT_FALSE(FormatLine(true, LogLevel::kInfo, "x", {{"bad", "\xff\xfe"}}).empty());
}

TEST(LoggingTest, NumbersAreNumbersAndTimesHaveAZone) {
  const LogFields fields = {{"bytes", int64_t{9007199254740993}},
                            {"port", 7},
                            {"share", 0.5},
                            {"lost", false},
                            {"text", "7"},
                            {"odd", NAN}};
  EXPECT_EQ(FormatLine(false, LogLevel::kInfo, "x", fields),
            "info x bytes=9007199254740993 port=7 share=0.500000 lost=false text=7 odd=nan");
  const auto parsed = nlohmann::json::parse("{" + FormatLine(true, LogLevel::kInfo, "x", fields));
  EXPECT_EQ(parsed["bytes"], int64_t{9007199254740993});
  EXPECT_TRUE(parsed["port"].is_number_integer());
  EXPECT_EQ(parsed["share"], 0.5);
  EXPECT_EQ(parsed["lost"], false);
  EXPECT_EQ(parsed["text"], "7");
  EXPECT_EQ(parsed["odd"], "nan");
  for (const char* format : {"json", "text"}) {
    ConfigureLogging(format, "info");
    ::testing::internal::CaptureStderr();
    Log(LogLevel::kInfo, "x");
    FlushLog(std::chrono::seconds(10));
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                ::testing::ContainsRegex("T[0-9:]{8}\\.[0-9]{3}[+-][0-9]{2}:[0-9]{2}[\" ]"));
  }
  ConfigureLogging("text", "info");
}

// A client decides how often the libraries complain, but not how much is written, nor in what form.
TEST(LibraryLogsTest, LinesBecomeFewEvents) {
  ConfigureLogging("json", "info");
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);  // otherwise set when gRPC starts
  CaptureLibraryLogs();
  const auto start = std::chrono::steady_clock::now();
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 1000; ++i) gpr_log(GPR_ERROR, "handshake\nfailed: %d", i);
  std::this_thread::sleep_for(std::chrono::milliseconds(1050));
  EXPECT_FALSE(v1::OpenRequest().ParseFromString("\x0a\x01\xff"));  // a name that is not UTF-8
  std::istringstream written(::testing::internal::GetCapturedStderr());
  ConfigureLogging("text", "info");
  const auto seconds = std::chrono::steady_clock::now() - start;
  std::vector<nlohmann::json> events;
  for (std::string line; std::getline(written, line);) {
    events.push_back(nlohmann::json::parse(line));
    EXPECT_EQ(events.back()["event"], "library");
  }
  ASSERT_GE(events.size(), 2u);
  EXPECT_LE(events.size(), 2u + static_cast<size_t>(seconds / std::chrono::seconds(1)));
  EXPECT_EQ(events.front()["library"], "grpc");
  EXPECT_EQ(events.front()["message"], "handshake\nfailed: 0");
  EXPECT_EQ(events.back()["library"], "protobuf");
  EXPECT_TRUE(events.back().contains("suppressed"));
}

TEST(GrpcStatusTest, EveryCodeKeepsItsNumber) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why");
    const grpc::Status converted = ToGrpcStatus(status, nullptr);
    EXPECT_EQ(static_cast<int>(converted.error_code()), code);
    EXPECT_EQ(converted.error_message(), "why");
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus(), nullptr).ok());
}

TEST(GrpcStatusTest, TheDetailIsSent) {
  const absl::Status status = RefuseField("a.b", "9", "1..4");
  EXPECT_EQ(status.message(), "a.b: got 9, must be 1..4");
  EXPECT_FALSE(ToErrorDetail(status).has_next_row());
  const v1::ErrorDetail detail = ToErrorDetail(AmendDetail(status, [](ErrorDetail& more) {
    more.retry_after_ms = int64_t{1} << 40;
    more.last_good_position = 12;
    more.next_row = 0;
  }));
  EXPECT_EQ(detail.field(), "a.b");
  EXPECT_EQ(detail.limit(), "1..4");
  EXPECT_EQ(detail.got(), "9");
  EXPECT_EQ(detail.reason(), "out_of_range");
  EXPECT_EQ(detail.retry_after_ms(), std::numeric_limits<uint32_t>::max());
  EXPECT_EQ(detail.last_good_position(), 12u);
  EXPECT_TRUE(detail.has_next_row());
}

}  // namespace
}  // namespace mla::server
