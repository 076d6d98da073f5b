// The small parts behind the operations port and the life cycle: metrics, state, watchdog, memory
// check, log lines, status conversion.
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

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// On failure: the text to put into the manual.
TEST(MetricsTest, TheManualListsWhatIsDeclared) {
  std::string table = "| name | type | meaning |\n|---|---|---|\n";
  for (const MetricRow& row : Metrics::Declared()) {
    absl::StrAppend(&table, "| `", row.name, "` | ", row.type, " | ", row.help, " |\n");
  }
  const std::string manual = ReadFile("docs/metrics.md");
  const size_t begin = manual.find("| name | type |");
  const size_t end = manual.find("\n\n", begin);
  EXPECT_EQ(manual.substr(begin, end + 1 - begin), table);
}

TEST(MetricsTest, EveryDeclaredMetricIsExposed) {
  Metrics metrics;
  metrics.ForTenant("t")->Count(absl::StatusCode::kOk);
  metrics.CountRejected("queue_full");
  const auto tenants = std::make_shared<scheduler::TenantTable>(scheduler::TenantTableOptions());
  TenantQuota quota;
  quota.bounds[Resource::kModels] = 2;
  ASSERT_TRUE(tenants->SetQuota("t", quota, false).ok());
  const auto tenant = *tenants->Enter("t");
  ASSERT_TRUE(tenants->TryTake(*tenant, Resource::kModels, 1));
  metrics.SetTenants(tenants, 1);
  metrics.SetBackend({}, 1, 2);
  const kernels::BackendCandidate candidate{.name = "hip"};
  metrics.SetCandidates({&candidate, 1});
  metrics.SetTls({1, 2, true, 1000, 2000, 0});
  scheduler::LaunchReport report;
  report.rows_decode = report.rows_prefill = 1;
  metrics.OnLaunch(report);
  const std::string text = metrics.Expose({});
  for (const MetricRow& row : Metrics::Declared()) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("# TYPE ", row.name, " ", row.type, "\n")));
    EXPECT_THAT(text, HasSubstr(absl::StrCat("# HELP ", row.name, " ", row.help, "\n")));
  }
  EXPECT_THAT(text, HasSubstr("mla_launches_total{kind=\"mixed\"} 1"));
}

// However many tenants there are, so many are named: those of the configuration, then those that
// use most. Tenants that use nothing any more are not shown.
TEST(MetricsTest, TenantsShownAreBounded) {
  scheduler::TenantTableOptions options;
  options.default_bounds[Resource::kModels] = 100;
  options.quotas["configured"].weight = 2;
  const auto tenants = std::make_shared<scheduler::TenantTable>(options);
  Metrics metrics;
  metrics.SetTenants(tenants, 3);
  std::vector<scheduler::TenantRef> rows;
  for (int i = 1; i <= 20; ++i) {
    rows.push_back(*tenants->Enter(absl::StrCat("t", i)));
    ASSERT_TRUE(tenants->TryTake(*rows.back(), Resource::kModels, i));
  }
  const auto shown = [](const std::string& tenant, int used) {
    return absl::StrCat("mla_tenant_used{resource=\"models\",tenant=\"", tenant, "\"} ", used,
                        "\n");
  };
  std::string text = metrics.Expose({});
  EXPECT_THAT(text, HasSubstr(shown("configured", 0)));
  EXPECT_THAT(text, HasSubstr(shown("t20", 20)));
  EXPECT_THAT(text, HasSubstr(shown("t19", 19)));
  EXPECT_THAT(text, HasSubstr(shown("other", 18 * 19 / 2)));
  EXPECT_THAT(text, Not(HasSubstr("tenant=\"t18\"")));
  EXPECT_THAT(text, HasSubstr("mla_tenants 20\n"));
  tenants->Return(*rows[19], Resource::kModels, 20);
  text = metrics.Expose({});
  EXPECT_THAT(text, Not(HasSubstr("tenant=\"t20\"")));
  EXPECT_THAT(text, HasSubstr(shown("t18", 18)));
}

TEST(MetricsTest, NamesFollowTheRules) {
  for (const auto& [name, type, help] : Metrics::Declared()) {
    // Names of the process's own metrics are those that every exporter uses.
    EXPECT_THAT(name,
                ::testing::AnyOf(::testing::StartsWith("mla_"), ::testing::StartsWith("process_")));
    EXPECT_EQ(type == "counter", name.ends_with("_total")) << name;
    EXPECT_THAT(name, Not(::testing::ContainsRegex("_(us|ms|perc|percent|kb)(_|$)")));
  }
}

TEST(MetricsTest, TenantsAreBounded) {
  Metrics metrics;
  std::set<TenantCounters*> counters;
  for (int i = 0; i < 200; ++i) {
    counters.insert(metrics.ForTenant("tenant-" + std::to_string(i)));
    metrics.ForTenant("tenant-" + std::to_string(i))->Count(absl::StatusCode::kNotFound);
  }
  EXPECT_LE(counters.size(), 65u);
  EXPECT_THAT(metrics.Expose({}),
              HasSubstr("mla_requests_total{code=\"NOT_FOUND\",tenant=\"other\"} 136"));
}

TEST(MetricsTest, TotalsOfTheEngineOnlyRise) {
  Metrics metrics;
  scheduler::EngineStats stats;
  stats.plan_hits = 5;
  stats.kv_bytes_total = 200;
  stats.kv_bytes_used = 50;
  EXPECT_THAT(metrics.Expose(stats), HasSubstr("mla_plan_reuse_total{result=\"hit\"} 5"));
  stats.plan_hits = 7;
  const std::string text = metrics.Expose(stats);
  EXPECT_THAT(text, HasSubstr("mla_plan_reuse_total{result=\"hit\"} 7"));
  EXPECT_THAT(text, HasSubstr("mla_kv_usage_ratio 0.25"));
}

TEST(MetricsTest, ServingFollowsHealth) {
  Metrics metrics;
  EXPECT_THAT(metrics.Expose({}), HasSubstr("\nmla_serving 0\n"));
  metrics.SetServing(true);
  EXPECT_THAT(metrics.Expose({}), HasSubstr("\nmla_serving 1\n"));
  metrics.SetServing(false);
  EXPECT_THAT(metrics.Expose({}), HasSubstr("\nmla_serving 0\n"));
}

TEST(MetricsTest, PagesAndSequencesLeaveTheirTraces) {
  Metrics metrics;
  metrics.OnSequenceClosed(100, 3'000'000'000);
  metrics.OnPageGroupFreed(2'000'000'000);
  scheduler::EngineStats stats;
  stats.page_groups_taken = 9;
  stats.page_groups_released = 1;
  stats.page_groups_expired = 2;
  stats.page_groups_truncated = 3;
  stats.page_groups_uncommitted = 4;
  stats.kv_bytes_read = 5000;
  stats.slices_fused = 8;
  stats.slice_waits_expired = 6;
  stats.slice_waits_skipped = 5;
  stats.launches_ahead = 13;
  stats.requests_handed_back = 14;
  stats.launches_late = 15;
  stats.host_work = {.copied_bytes = 700, .sleeps = 11, .polling_ns = 1'500'000'000};
  stats.host_work.late_copies = 16;
  const std::string text = metrics.Expose(stats);
  for (const char* line : {
           "mla_kv_page_group_allocations_total 9\n",
           "mla_kv_page_group_releases_total{reason=\"released\"} 1\n",
           "mla_kv_page_group_releases_total{reason=\"lease_expired\"} 2\n",
           "mla_kv_page_group_releases_total{reason=\"truncated\"} 3\n",
           "mla_kv_page_group_releases_total{reason=\"uncommitted\"} 4\n",
           "mla_kv_page_group_lifetime_seconds_sum 2\n",
           "mla_kv_read_bytes_total 5000\n",
           "mla_sequence_rows_bucket{le=\"64\"} 0\n",
           "mla_sequence_rows_bucket{le=\"128\"} 1\n",
           "mla_sequence_lifetime_seconds_sum 3\n",
           "mla_slices_fused_total 8\n",
           "mla_slice_waits_expired_total 6\n",
           "mla_slice_waits_skipped_total 5\n",
           "mla_device_copied_bytes_total 700\n",
           "mla_launches_ahead_total 13\n",
           "mla_ahead_refused_total{why=\"busy\"} 14\n",
           "mla_ahead_refused_total{why=\"late\"} 15\n",
           "mla_device_sleeps_total{with=\"launch\"} 11\n",
           "mla_device_polling_seconds_total{with=\"launch\"} 1.5\n",
           "mla_late_query_copies_total 16\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(ProcessUsageTest, CountsThisProcess) {
  const ProcessUsage before = ReadProcessUsage();
  const double now = static_cast<double>(std::time(nullptr));
  EXPECT_GT(before.resident_bytes, 1 << 20);
  EXPECT_GE(before.virtual_bytes, before.resident_bytes);
  EXPECT_GE(before.threads, 1);
  EXPECT_GE(before.open_fds, 3);
  EXPECT_GE(before.max_fds, before.open_fds);
  EXPECT_LE(before.start_time_seconds, now + 2);
  EXPECT_GT(before.start_time_seconds, now - 3600);
  std::ifstream open_file("/proc/self/stat");
  std::thread([] {
    const std::clock_t end = std::clock() + CLOCKS_PER_SEC / 20;
    while (std::clock() < end) {
    }
  }).join();
  const ProcessUsage after = ReadProcessUsage();
  EXPECT_EQ(after.open_fds, before.open_fds + 1);
  EXPECT_GT(after.cpu_seconds, before.cpu_seconds);
}

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

// Whether the state becomes like this.
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
  // Nothing that the engine says later makes the device come back.
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
        silent.wait(true);  // the call that is stuck holds what a probe needs
        return Heartbeat{};
      },
      &state, milliseconds(60000), milliseconds(5),
      {[&] {
         ++looks;
         return std::string(stuck.exchange(false) ? "a call has not returned" : "");
       },
       [&](const std::string& why) { ended.set_value(why); }});
  while (looks < 3) std::this_thread::yield();  // without an end: nothing is stuck
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
  EXPECT_FALSE(v1::OpenRequest().ParseFromString("\x0a\x01\xff"));  // a name that is no UTF-8
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
