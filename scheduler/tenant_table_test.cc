// Bounds and usage by tenant, without an engine around them.
#include "scheduler/tenant_table.h"
#include "base/error.h"

#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace mla::scheduler {
namespace {

using ::testing::HasSubstr;

TenantTableOptions Options(int32_t max_tenants, int64_t own, int64_t server) {
  TenantTableOptions options;
  options.max_tenants = max_tenants;
  options.default_bounds[Resource::kSequences] = own;
  options.server_bounds[Resource::kSequences] = server;
  return options;
}

TEST(TenantTableTest, RowsDescribeEveryResourceOnce) {
  std::set<std::string> names, keys;
  for (size_t i = 0; i < kResourceCount; ++i) {
    const ResourceRow& row = ResourceRows()[i];
    EXPECT_EQ(static_cast<size_t>(row.resource), i + 1);
    EXPECT_EQ(&RowOf(row.resource), &row);
    EXPECT_EQ(FindResource(row.name), &row);
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_TRUE(keys.insert(row.config_key).second) << row.config_key;
    EXPECT_GT(row.share_eighths, 0);
    EXPECT_LE(row.share_eighths, 8);
  }
  EXPECT_EQ(FindResource("pages"), nullptr);
}

TEST(TenantTableTest, ATakeBeyondTheTenantsBoundNamesTheTenant) {
  TenantTable table(Options(8, 3, 10));
  const TenantRef a = *table.Enter("a");
  ASSERT_TRUE(table.Take(*a, Resource::kSequences, 2, "field").ok());
  const absl::Status refused = table.Take(*a, Resource::kSequences, 2, "field");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("wanted 2, 1 free of 3"));
  const ErrorDetail detail = DetailOf(refused);
  EXPECT_EQ(detail.reason, "sequences_exhausted");
  EXPECT_EQ(detail.field, "field");
  EXPECT_EQ(detail.resource, "sequences");
  EXPECT_EQ(detail.wanted, 2);
  EXPECT_EQ(detail.free, 1);
  EXPECT_EQ(detail.bound, 3);
  EXPECT_EQ(detail.bound_of, BoundOwner::kTenant);
  EXPECT_GT(detail.retry_after_ms, 0);
  // The refused take changed nothing: one more still fits.
  EXPECT_TRUE(table.TryTake(*a, Resource::kSequences, 1));
  EXPECT_EQ(a->used(Resource::kSequences), 3);
  EXPECT_EQ(table.server_used(Resource::kSequences), 3);
  EXPECT_EQ(table.Usage("a").refused[Resource::kSequences], 1u);
}

TEST(TenantTableTest, ATakeBeyondTheServersBoundNamesTheServer) {
  TenantTable table(Options(8, 3, 4));
  const TenantRef a = *table.Enter("a");
  const TenantRef b = *table.Enter("b");
  ASSERT_TRUE(table.TryTake(*a, Resource::kSequences, 3));
  ASSERT_TRUE(table.TryTake(*b, Resource::kSequences, 1));
  const ErrorDetail detail = DetailOf(table.Take(*b, Resource::kSequences, 1, ""));
  EXPECT_EQ(detail.bound_of, BoundOwner::kServer);
  EXPECT_EQ(detail.bound, 4);
  EXPECT_EQ(detail.free, 0);
  EXPECT_EQ(b->used(Resource::kSequences), 1) << "a refused take leaves no trace";
  table.Return(*a, Resource::kSequences, 1);
  EXPECT_TRUE(table.TryTake(*b, Resource::kSequences, 1));
}

TEST(TenantTableTest, AReserveIsGrantedBeyondBothBounds) {
  TenantTable table(Options(8, 2, 2));
  const TenantRef a = *table.Enter("a");
  ASSERT_TRUE(table.TryTake(*a, Resource::kSequences, 2));
  EXPECT_FALSE(table.TryTake(*a, Resource::kSequences, 1));
  EXPECT_TRUE(table.TryTake(*a, Resource::kSequences, 1, /*reserve=*/1));
  EXPECT_FALSE(table.TryTake(*a, Resource::kSequences, 1, /*reserve=*/1));
}

TEST(TenantTableTest, AmountsThatWouldOverflowAreRefused) {
  TenantTable table{TenantTableOptions()};
  const TenantRef a = *table.Enter("a");
  ASSERT_TRUE(table.TryTake(*a, Resource::kKvBytes, kUnbounded - 1));
  EXPECT_FALSE(table.TryTake(*a, Resource::kKvBytes, kUnbounded));
  EXPECT_FALSE(table.TryTake(*a, Resource::kKvBytes, 2, kUnbounded));
  EXPECT_TRUE(table.TryTake(*a, Resource::kKvBytes, 1));
}

// 4,096 names that hold nothing must not keep a new tenant out.
TEST(TenantTableTest, IdleRowsMakeRoomForNewTenants) {
  TenantTable table(Options(4, 8, 8));
  const TenantRef kept = *table.Enter("kept");
  {
    const TenantRef holder = *table.Enter("holder");
    ASSERT_TRUE(table.TryTake(*holder, Resource::kSequences, 1));
  }
  const TenantKey kept_key = kept->key(), holder_key = table.Find("holder");
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(table.Enter("invented-" + std::to_string(i)).ok()) << i;
  }
  EXPECT_LE(table.size(), 4);
  EXPECT_EQ(table.Find("kept"), kept_key) << "a row in reference stays";
  EXPECT_EQ(table.Find("holder"), holder_key) << "a row in use stays";
  EXPECT_EQ(table.Get(holder_key)->used(Resource::kSequences), 1);
}

TEST(TenantTableTest, RowsInUseAreBounded) {
  TenantTable table(Options(2, 8, 8));
  const TenantRef a = *table.Enter("a");
  TenantRef b = *table.Enter("b");
  const absl::Status refused = table.Enter("c").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  const ErrorDetail detail = DetailOf(refused);
  EXPECT_EQ(detail.reason, "tenants_exhausted");
  EXPECT_GT(detail.retry_after_ms, 0);
  EXPECT_TRUE(table.Enter("a").ok()) << "those who are in stay in";
  b = TenantRef();
  EXPECT_TRUE(table.Enter("c").ok());
}

// The page pool compares keys to decide whether a page must be scrubbed.
TEST(TenantTableTest, KeysAreNeverUsedAgain) {
  TenantTable table(Options(1, 8, 8));
  std::set<TenantKey> seen;
  for (int i = 0; i < 50; ++i) {
    for (const char* name : {"a", "b"}) {
      const TenantRef row = *table.Enter(name);
      EXPECT_NE(row->key(), kNoTenant);
      EXPECT_TRUE(seen.insert(row->key()).second);
    }
  }
  EXPECT_FALSE(table.Get(*seen.begin())) << "a dropped key names no row";
}

TEST(TenantTableTest, RunTimeBoundsGoBeforeConfiguredOnesAndThoseBeforeDefaults) {
  TenantTableOptions options = Options(8, 10, 100);
  options.quotas["a"].bounds[Resource::kSequences] = 20;
  options.quotas["a"].weight = 3;
  TenantTable table(options);
  const TenantRef a = *table.Enter("a");
  EXPECT_EQ(a->bound(Resource::kSequences), 20);
  EXPECT_EQ(table.weight(a->key()), 3);
  TenantQuota quota;
  quota.bounds[Resource::kSequences] = 5;
  ASSERT_TRUE(table.SetQuota("a", quota, false).ok());
  ASSERT_TRUE(table.SetQuota("later", quota, false).ok());
  EXPECT_EQ(a->bound(Resource::kSequences), 5);
  EXPECT_EQ((*table.Enter("later"))->bound(Resource::kSequences), 5);
  EXPECT_EQ((*table.Enter("other"))->bound(Resource::kSequences), 10);
  EXPECT_EQ(table.Usage("a").source[Resource::kSequences], BoundSource::kRuntime);
  ASSERT_TRUE(table.SetQuota("a", TenantQuota(), true).ok());
  EXPECT_EQ(a->bound(Resource::kSequences), 20);
  EXPECT_EQ(table.Usage("a").source[Resource::kSequences], BoundSource::kConfigured);
  EXPECT_EQ(table.Usage("other").source[Resource::kSequences], BoundSource::kDefault);
}

TEST(TenantTableTest, ABoundBelowTheUseTakesNothingAway) {
  TenantTable table(Options(8, 10, 100));
  const TenantRef a = *table.Enter("a");
  ASSERT_TRUE(table.TryTake(*a, Resource::kSequences, 8));
  TenantQuota quota;
  quota.bounds[Resource::kSequences] = 2;
  ASSERT_TRUE(table.SetQuota("a", quota, false).ok());
  EXPECT_EQ(a->used(Resource::kSequences), 8);
  const absl::Status refused = table.Take(*a, Resource::kSequences, 1, "");
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(DetailOf(refused).free, 0);
  table.Return(*a, Resource::kSequences, 6);
  EXPECT_FALSE(table.TryTake(*a, Resource::kSequences, 1));
  table.Return(*a, Resource::kSequences, 1);
  EXPECT_TRUE(table.TryTake(*a, Resource::kSequences, 1));
}

TEST(TenantTableTest, RunTimeQuotasAreBounded) {
  TenantTable table(Options(2, 10, 100));
  TenantQuota quota;
  quota.weight = 2;
  EXPECT_TRUE(table.SetQuota("a", quota, false).ok());
  EXPECT_TRUE(table.SetQuota("b", quota, false).ok());
  EXPECT_EQ(table.SetQuota("c", quota, false).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(table.SetQuota("a", TenantQuota(), true).ok());
  EXPECT_TRUE(table.SetQuota("c", quota, false).ok());
}

// Takes of many threads never exceed a bound, and nothing is lost.
TEST(TenantTableTest, TakesOfManyThreadsStayWithinTheBound) {
  TenantTable table(Options(8, 5, 7));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&table, t] {
      for (int i = 0; i < 2000; ++i) {
        const TenantRef row = *table.Enter(t % 2 == 0 ? "a" : "b");
        if (!table.TryTake(*row, Resource::kSequences, 2)) continue;
        EXPECT_LE(row->used(Resource::kSequences), 5);
        EXPECT_LE(table.server_used(Resource::kSequences), 7);
        table.Return(*row, Resource::kSequences, 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table.server_used(Resource::kSequences), 0);
  EXPECT_EQ(table.Usage("a").used[Resource::kSequences], 0);
}

TEST(TenantTableTest, AConfigurationReplacesTheOneBefore) {
  TenantTableOptions options = Options(10, 5, 100);
  options.quotas["configured"].bounds[Resource::kSequences] = 7;
  options.quotas["configured"].weight = 4;
  TenantTable table(options);
  TenantQuota at_run_time;
  at_run_time.bounds[Resource::kSequences] = 9;
  ASSERT_TRUE(table.SetQuota("runtime", at_run_time, false).ok());
  const TenantRef configured = *table.Enter("configured"), runtime = *table.Enter("runtime");
  const TenantRef plain = *table.Enter("plain");
  ASSERT_TRUE(table.TryTake(*configured, Resource::kSequences, 6));
  EXPECT_FALSE(configured->has_default_share(Resource::kSequences));
  TenantTableOptions later = Options(10, 3, 100);
  later.default_shares[Resource::kSequences] = true;
  later.quotas["plain"].bounds[Resource::kSequences] = 11;
  table.Reconfigure(later);
  EXPECT_EQ(configured->bound(Resource::kSequences), 3);
  EXPECT_EQ(configured->weight(), 1);
  EXPECT_TRUE(configured->has_default_share(Resource::kSequences));
  EXPECT_FALSE(runtime->has_default_share(Resource::kSequences));
  EXPECT_FALSE(plain->has_default_share(Resource::kSequences));
  EXPECT_EQ(runtime->bound(Resource::kSequences), 9);  // what an operator has set stays in front
  EXPECT_EQ(plain->bound(Resource::kSequences), 11);
  EXPECT_EQ((*table.Enter("new"))->bound(Resource::kSequences), 3);
  EXPECT_TRUE(table.Configured("plain"));
  EXPECT_FALSE(table.Configured("configured"));
  // Nothing in use is taken away, and no more is granted until enough was returned.
  EXPECT_EQ(configured->used(Resource::kSequences), 6);
  EXPECT_FALSE(table.TryTake(*configured, Resource::kSequences, 1));
  table.Return(*configured, Resource::kSequences, 4);
  EXPECT_TRUE(table.TryTake(*configured, Resource::kSequences, 1));
  table.Return(*configured, Resource::kSequences, 3);
}

}  // namespace
}  // namespace mla::scheduler
