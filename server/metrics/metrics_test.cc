// The server's metrics for Prometheus: the manual's table, the exposed families, and bounds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <fstream>
#include <limits>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "server/config/config.h"
#include "server/metrics/metrics.h"
#include "server/process/process_usage.h"

namespace mla::server {
namespace {

using scheduler::Resource;
using scheduler::TenantQuota;
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
  kernels::BackendCandidate candidate;
  candidate.name = "hip";
  metrics.SetCandidates({&candidate, 1});
  metrics.SetTls({1, 2, "bad"}, {{"cert", 1000}, {"client_ca", 2000}, {"client_crl", 0}});
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

// However many tenants there are, only this number is named: tenants of the configuration first,
// then tenants with the largest use. Tenants that use nothing any more are not shown.
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
  for (const MetricRow& row : Metrics::Declared()) {
    const std::string name(row.name);
    // Metrics of the process use the names that every exporter uses.
    EXPECT_THAT(name,
                ::testing::AnyOf(::testing::StartsWith("mla_"), ::testing::StartsWith("process_")));
    EXPECT_EQ(row.type == "counter", name.ends_with("_total")) << name;
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

}  // namespace
}  // namespace mla::server
