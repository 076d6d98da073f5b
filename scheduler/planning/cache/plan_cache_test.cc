#include "scheduler/planning/cache/plan_cache.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/testing/allocation_counter.h"
#include "scheduler/testing/heap_buffers.h"

namespace mla::scheduler {
namespace {

using kernels::PlanTraits;

std::unique_ptr<PlanCache> MakeCache(int32_t plans, int32_t slots = 2,
                                     const Clock* clock = nullptr) {
  PlanCacheOptions options;
  options.capacity = {4, 1000, 1000, 1000, 100'000};
  options.plans = plans;
  options.launch_slots = slots;
  options.plan_segments = 8;
  options.clock = clock;
  std::vector<std::unique_ptr<MetadataBuffers>> buffers;
  for (int32_t i = 0; i < plans; ++i) buffers.push_back(testing::MakeBuffers(options.capacity));
  return PlanCache::Create(options, std::move(buffers)).value();
}

std::vector<PlanSegment> Batch(int32_t kv_rows) { return {{1, kv_rows, 16}, {2, 300, 16}}; }

const PlanTraits kTraits{.units = 4};

TEST(PlanCacheTest, SameContentIsPlannedOnce) {
  auto cache = MakeCache(2);
  const auto first = cache->Pin(Batch(100), kTraits, 0);
  ASSERT_TRUE(first.ok()) << first.status();
  const uint64_t generation = (*first)->view().generation;
  const auto second = cache->Pin(Batch(100), kTraits, 1);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(*first, *second);
  EXPECT_EQ((*second)->view().generation, generation);
  EXPECT_EQ(cache->stats().hits, 1u);
  EXPECT_EQ(cache->stats().misses, 1u);
  EXPECT_EQ((*first)->segments().size(), 2u);
  EXPECT_GE((*first)->imbalance(), 1.0);
}

TEST(PlanCacheTest, AnyDifferenceIsAnotherPlan) {
  auto cache = MakeCache(8);
  ASSERT_TRUE(cache->Pin(Batch(100), kTraits, 0).ok());
  auto batch = Batch(100);
  batch[1].causal = false;
  ASSERT_TRUE(cache->Pin(batch, kTraits, 0).ok());
  batch = Batch(100);
  batch.pop_back();
  ASSERT_TRUE(cache->Pin(batch, kTraits, 0).ok());
  PlanTraits traits = kTraits;
  traits.item_overhead_rows += 1;
  ASSERT_TRUE(cache->Pin(Batch(100), traits, 0).ok());
  EXPECT_EQ(cache->stats().hits, 0u);
  EXPECT_EQ(cache->stats().misses, 4u);
}

TEST(PlanCacheTest, PinnedPlansAreNeverRefilled) {
  auto cache = MakeCache(2);
  const auto first = cache->Pin(Batch(1), kTraits, 0);
  const auto second = cache->Pin(Batch(2), kTraits, 1);
  ASSERT_TRUE(first.ok() && second.ok());
  const auto third = cache->Pin(Batch(3), kTraits, 0);
  EXPECT_EQ(third.status().code(), absl::StatusCode::kResourceExhausted);
  cache->Unpin(1);
  const auto again = cache->Pin(Batch(3), kTraits, 1);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*again, *second) << "only the unpinned plan may make room";
  EXPECT_EQ((*first)->segments()[0].kv_rows, 1);
}

TEST(PlanCacheTest, PlanSharedByTwoSlotsNeedsBothUnpinned) {
  auto cache = MakeCache(1);
  ASSERT_TRUE(cache->Pin(Batch(1), kTraits, 0).ok());
  ASSERT_TRUE(cache->Pin(Batch(1), kTraits, 1).ok());
  cache->Unpin(0);
  EXPECT_FALSE(cache->Pin(Batch(2), kTraits, 0).ok());
  cache->Unpin(1);
  EXPECT_TRUE(cache->Pin(Batch(2), kTraits, 0).ok());
}

TEST(PlanCacheTest, TheOldestUnpinnedPlanGoesFirst) {
  auto cache = MakeCache(2);
  ASSERT_TRUE(cache->Pin(Batch(1), kTraits, 0).ok());
  ASSERT_TRUE(cache->Pin(Batch(2), kTraits, 0).ok());
  ASSERT_TRUE(cache->Pin(Batch(1), kTraits, 0).ok());  // 2 is now the older
  cache->Unpin(0);
  ASSERT_TRUE(cache->Pin(Batch(3), kTraits, 0).ok());
  ASSERT_TRUE(cache->Pin(Batch(1), kTraits, 0).ok());
  EXPECT_EQ(cache->stats().hits, 2u);
  EXPECT_EQ(cache->stats().misses, 3u);
}

// Each reading is a nanosecond after the one before.
class TickingClock final : public Clock {
 public:
  MonotonicNanos Now() const override { return ++now_; }

 private:
  mutable MonotonicNanos now_ = 0;
};

TEST(PlanCacheTest, OnlyBuildsAreTimed) {
  const TickingClock clock;
  auto cache = MakeCache(1, /*slots=*/2, &clock);
  ASSERT_TRUE(cache->Pin(Batch(1), kTraits, 0).ok());
  EXPECT_EQ(cache->stats().build_ns, 1);
  ASSERT_TRUE(cache->Pin(Batch(1), kTraits, 0).ok());
  EXPECT_EQ(cache->stats().build_ns, 1);
  EXPECT_EQ(clock.Now(), 3) << "a hit read the clock";
}

TEST(PlanCacheTest, AFailedPlanIsAbsent) {
  auto cache = MakeCache(1);
  ASSERT_TRUE(cache->Pin(Batch(1), kTraits, 0).ok());
  cache->Unpin(0);
  EXPECT_EQ(cache->Pin(Batch(-1), kTraits, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cache->Pin(Batch(-1), kTraits, 0).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(cache->Pin(Batch(1), kTraits, 0).ok());
  EXPECT_EQ(cache->stats().misses, 2u);
}

TEST(PlanCacheTest, NothingAllocatesAfterCreate) {
  auto cache = MakeCache(3);
  std::vector<std::vector<PlanSegment>> batches;
  for (int32_t i = 0; i < 6; ++i) batches.push_back(Batch(1 + i));
  const int64_t before = kernels::testing::Allocations();
  for (int i = 0; i < 100; ++i) {
    for (const auto& batch : batches) {
      ASSERT_TRUE(cache->Pin(batch, kTraits, 1).ok());
      ASSERT_TRUE(cache->Pin(batch, kTraits, 1).ok());
      cache->Unpin(1);
    }
  }
  EXPECT_EQ(kernels::testing::Allocations(), before);
  EXPECT_EQ(cache->stats().misses, 600u);
}

TEST(PlanCacheTest, BoundsAreChecked) {
  auto cache = MakeCache(1);
  EXPECT_EQ(cache->Pin(Batch(1), kTraits, 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cache->Pin(Batch(1), kTraits, -1).status().code(), absl::StatusCode::kInvalidArgument);
  const std::vector<PlanSegment> many(9, PlanSegment{1, 1, 1});
  EXPECT_EQ(cache->Pin(many, kTraits, 0).status().code(), absl::StatusCode::kResourceExhausted);
  PlanCacheOptions options;
  options.plans = 0;
  EXPECT_FALSE(PlanCache::Create(options, std::vector<std::unique_ptr<MetadataBuffers>>()).ok());
  options.plans = 1;
  EXPECT_FALSE(PlanCache::Create(options, std::vector<std::unique_ptr<MetadataBuffers>>()).ok());
  options.launch_slots = 65;
  EXPECT_FALSE(PlanCache::Create(options, std::vector<std::unique_ptr<MetadataBuffers>>()).ok());
}

// Plans with rounds have places of their own, which absorbed plans do not take.
TEST(PlanCacheTest, PlansWithRoundsAreFoundWithTheirRounds) {
  PlanCacheOptions options;
  options.capacity = {4, 256, 64, 256, 100000};
  options.launch_slots = 1;
  options.plans = 3;
  options.round_plans = 1;
  options.plan_segments = 8;
  options.rounds = {.units = 4, .items = 256, .expansions = 64, .segments = 8};
  std::vector<std::unique_ptr<MetadataBuffers>> buffers;
  for (int i = 0; i < 3; ++i) buffers.push_back(testing::MakeBuffers(options.capacity));
  auto cache = PlanCache::Create(options, std::move(buffers));
  ASSERT_TRUE(cache.ok()) << cache.status();
  kernels::PlanTraits absorbed, expanded;
  absorbed.units = expanded.units = 4;
  expanded.max_heads_per_tile = 1;
  expanded.kv_granularity = kernels::kExpandedRows;
  expanded.rounds.workspace_bytes = 64 << 20;
  const std::vector<PlanSegment> prompt = {{200, 200, 2, true}};
  const auto first = (*cache)->Pin(prompt, expanded, 0);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_NE((*first)->view().rounds, nullptr);
  const kernels::RoundView rounds = *(*first)->view().rounds;
  EXPECT_EQ(rounds.rounds.size(), 1u);
  EXPECT_EQ(rounds.items.size(), 4u);  // two tiles of rows, two heads
  (*cache)->Unpin(0);
  for (int32_t length = 1; length < 9; ++length) {
    const std::vector<PlanSegment> decode = {{1, length, 2, true}};
    const auto plan = (*cache)->Pin(decode, absorbed, 0);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ((*plan)->view().rounds, nullptr);
    (*cache)->Unpin(0);
  }
  const uint64_t misses = (*cache)->stats().misses;
  const auto again = (*cache)->Pin(prompt, expanded, 0);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ((*cache)->stats().misses, misses);
  ASSERT_NE((*again)->view().rounds, nullptr);
  EXPECT_EQ((*again)->view().rounds->items.data(), rounds.items.data());
  // The only place of such plans is in use.
  EXPECT_EQ(
      (*cache)->Pin(std::vector<PlanSegment>{{130, 130, 2, true}}, expanded, 0).status().code(),
      absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace mla::scheduler
