#include "scheduler/kvcache/lease_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "kernels/testing/allocation_counter.h"
#include "scheduler/clock.h"

namespace mla::kvcache {
namespace {

TEST(LeaseTableTest, ExpiresAtItsDeadlineAndNotBefore) {
  LeaseTable leases(4);
  leases.Grant(2, 100);
  EXPECT_EQ(leases.left_ns(2, 40), 60);
  EXPECT_EQ(leases.PopExpired(99), LeaseTable::kNone);
  EXPECT_EQ(leases.PopExpired(100), 2);
  EXPECT_FALSE(leases.Has(2));
  EXPECT_EQ(leases.next_deadline_ns(), LeaseTable::kNever);
}

TEST(LeaseTableTest, OrderIsDeadlineThenId) {
  LeaseTable leases(5);
  leases.Grant(4, 10);
  leases.Grant(1, 10);
  leases.Grant(3, 5);
  leases.Grant(0, 20);
  EXPECT_EQ(leases.PopExpired(20), 3);
  EXPECT_EQ(leases.PopExpired(20), 1);
  EXPECT_EQ(leases.PopExpired(20), 4);
  EXPECT_EQ(leases.PopExpired(20), 0);
  EXPECT_EQ(leases.PopExpired(20), LeaseTable::kNone);
}

TEST(LeaseTableTest, RenewalNeverShortensAndNeverRevives) {
  LeaseTable leases(2);
  leases.Grant(0, 100);
  EXPECT_TRUE(leases.Renew(0, 50, 10));
  EXPECT_EQ(leases.left_ns(0, 50), 50);
  EXPECT_TRUE(leases.Renew(0, 50, 80));
  EXPECT_EQ(leases.left_ns(0, 50), 80);
  EXPECT_FALSE(leases.Renew(0, 130, 80)) << "expired, though not collected yet";
  EXPECT_EQ(leases.PopExpired(130), 0);
  EXPECT_FALSE(leases.Renew(0, 130, 80));
  EXPECT_FALSE(leases.Renew(1, 0, 80)) << "was never granted";
  EXPECT_FALSE(leases.Renew(7, 0, 80)) << "no such id";
}

TEST(LeaseTableTest, HugeDurationsSaturate) {
  LeaseTable leases(1);
  leases.Grant(0, 10);
  EXPECT_TRUE(leases.Renew(0, 5, LeaseTable::kNever));
  EXPECT_EQ(leases.next_deadline_ns(), LeaseTable::kNever);
}

TEST(LeaseTableTest, NothingAllocates) {
  LeaseTable leases(100);
  const int64_t before = kernels::testing::Allocations();
  for (int32_t id = 0; id < 100; ++id) leases.Grant(id, 1000 - id);
  for (int32_t id = 0; id < 100; ++id) EXPECT_TRUE(leases.Renew(id, 0, 2000 + id));
  while (leases.PopExpired(LeaseTable::kNever) != LeaseTable::kNone) {
  }
  EXPECT_EQ(kernels::testing::Allocations(), before);
}

// As the engine uses it: the instants come from the clock seam.
TEST(LeaseTableTest, FollowsASimulatedClock) {
  scheduler::SimulatedClock clock(1'000);
  LeaseTable leases(2);
  leases.Grant(0, clock.Now() + 10);
  leases.Grant(1, clock.Now() + 10);
  clock.Advance(9);
  EXPECT_TRUE(leases.Renew(1, clock.Now(), 10));
  clock.Advance(1);
  EXPECT_EQ(leases.PopExpired(clock.Now()), 0);
  EXPECT_EQ(leases.PopExpired(clock.Now()), LeaseTable::kNone);
  clock.Advance(9);
  EXPECT_EQ(leases.PopExpired(clock.Now()), 1);
}

// Against an ordered map, over random operations.
TEST(LeaseTableTest, AgreesWithAnOrderedMap) {
  std::mt19937 random(7);
  constexpr int kLeases = 40;
  LeaseTable leases(kLeases);
  std::map<int32_t, int64_t> model;
  int64_t now = 0;
  for (int op = 0; op < 200'000; ++op) {
    const auto id = static_cast<int32_t>(random() % kLeases);
    const int64_t duration = 1 + random() % 50;
    switch (random() % 4) {
      case 0:
        leases.Grant(id, now + duration);
        model[id] = now + duration;
        break;
      case 1: {
        const auto entry = model.find(id);
        const bool runs = entry != model.end() && entry->second > now;
        ASSERT_EQ(leases.Renew(id, now, duration), runs);
        if (runs) entry->second = std::max(entry->second, now + duration);
        break;
      }
      case 2:
        leases.Drop(id);
        model.erase(id);
        break;
      default:
        now += random() % 20;
        for (;;) {
          std::pair<int64_t, int32_t> first{LeaseTable::kNever, LeaseTable::kNone};
          for (const auto& [key, deadline] : model) first = std::min(first, {deadline, key});
          ASSERT_EQ(leases.next_deadline_ns(), first.first);
          const int32_t want = first.first <= now ? first.second : LeaseTable::kNone;
          ASSERT_EQ(leases.PopExpired(now), want);
          if (want == LeaseTable::kNone) break;
          model.erase(want);
        }
    }
    if (op % 64 == 0) {
      ASSERT_EQ(leases.CheckInvariants(), "");
    }
    ASSERT_EQ(leases.size(), static_cast<int32_t>(model.size()));
  }
}

}  // namespace
}  // namespace mla::kvcache
