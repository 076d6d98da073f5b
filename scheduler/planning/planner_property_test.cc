// Plans random batches, and judges each plan as a whole. The seed is fixed unless MLA_TEST_SEED is
// set; a failure prints the seed that repeats it. MLA_TEST_LONG runs twenty times as many batches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "base/testing/long_runs.h"
#include "scheduler/planning/planner.h"
#include "scheduler/testing/heap_buffers.h"
#include "scheduler/testing/plan_checker.h"

namespace mla::scheduler {
namespace {

using kernels::PlanTraits;

#ifdef MLA_SANITIZED
constexpr int kBatches = 30'000;  // sanitizers slow the judge about tenfold
#else
constexpr int kBatches = 200'000;
#endif

uint32_t Seed() {
  const char* seed = std::getenv("MLA_TEST_SEED");
  return seed != nullptr && *seed != '\0' ? static_cast<uint32_t>(std::atoll(seed)) : 20'260'101u;
}

class BatchMaker {
 public:
  explicit BatchMaker(uint32_t seed) : random_(seed) {}

  void Next(std::vector<PlanSegment>& segments, PlanTraits& traits) {
    traits.units = Pick({1, 2, 3, 7, 16, 64, 256, 304});
    traits.tile_rows = Pick({1, 3, 16, 64, 128, 128, 256});
    traits.max_heads_per_tile = Pick({0, 0, 0, 1, 5, 64, 1000});
    traits.max_q_rows_per_tile = Pick({0, 0, 0, 1, 1, 3});
    traits.kv_granularity = Pick({1, 3, 16, 16, 64, 128});
    traits.item_overhead_rows = Pick({0, 1, 64, 256, 5000});
    traits.fixed_split_rows = 0;
    traits.min_charged_rows = OneIn(3) ? 1 + Below(traits.tile_rows) : 0;
    traits.small = {};
    if (OneIn(4)) {
      traits.small = {Pick({1, 8, 132}), Pick({1, 16, 64}), Pick({0, 64, 384, 5000})};
    }
    segments.clear();
    const int count = OneIn(16) ? Below(120) : Below(9);
    const int64_t most_tiles = OneIn(16) ? 1000 : 60;  // bounds the time of a batch
    const bool decode = OneIn(3);
    const int32_t heads = Heads();
    int64_t tiles = 0;
    int32_t longest = 1;
    for (int i = 0; i < count; ++i) {
      PlanSegment segment;
      segment.num_heads = OneIn(4) ? Heads() : heads;
      segment.q_rows = decode ? 1 : QueryRows();
      segment.kv_rows = KvRows(segment.q_rows);
      segment.causal = !OneIn(4);
      tiles += TilesOf(segment, traits);
      if (tiles > most_tiles) break;
      longest = std::max(longest, segment.kv_rows);
      segments.push_back(segment);
    }
    traits.dealt_pieces = 0;
    if (OneIn(4)) {
      traits.fixed_split_rows = 1 + longest / (2 + Below(12)) + Below(50);
    } else if (OneIn(4)) {
      traits.dealt_pieces = 1 + Below(5);
    }
  }

 private:
  int32_t Below(int32_t bound) { return static_cast<int32_t>(random_() % bound); }
  bool OneIn(int32_t n) { return Below(n) == 0; }
  int32_t Pick(std::initializer_list<int32_t> values) {
    return values.begin()[Below(static_cast<int32_t>(values.size()))];
  }
  static int64_t TilesOf(const PlanSegment& segment, const PlanTraits& traits) {
    const int32_t limit = traits.max_heads_per_tile > 0
                              ? std::min(traits.max_heads_per_tile, traits.tile_rows)
                              : traits.tile_rows;
    const int32_t heads = std::min(limit, segment.num_heads);
    int32_t q_rows = traits.tile_rows / heads;
    if (traits.max_q_rows_per_tile > 0) q_rows = std::min(q_rows, traits.max_q_rows_per_tile);
    return int64_t{(segment.q_rows + q_rows - 1) / q_rows} *
           ((segment.num_heads + heads - 1) / heads);
  }
  int32_t Heads() { return Pick({1, 3, 8, 12, 16, 24, 64, 65, 128, 129, 192, 300}); }
  int32_t QueryRows() { return OneIn(4) ? Pick({17, 33, 64, 127, 128, 129, 300}) : Below(10); }
  int32_t KvRows(int32_t q_rows) {
    switch (Below(8)) {
      case 0:
        return Below(q_rows + 2);  // fewer than causal rows, or just as many
      case 1:
        return q_rows + Below(3);
      case 2:
        return Pick({0, 1, 15, 16, 17, 63, 64, 65, 4096, 4097});
      case 3:
        return OneIn(20) ? INT32_MAX - Below(100) : 1 + Below(2'000'000);
      default:
        return q_rows + Below(65'536);
    }
  }

  std::mt19937 random_;
};

// The tightest limits that admit the batch.
PlanLimits LimitsOf(const std::vector<PlanSegment>& segments) {
  PlanLimits limits;
  limits.segments = static_cast<int32_t>(segments.size());
  limits.min_heads = 65535;
  limits.max_heads = 1;
  for (const PlanSegment& segment : segments) {
    limits.q_rows += segment.q_rows;
    limits.packed_rows += int64_t{segment.q_rows} * segment.num_heads;
    limits.kv_rows = std::max(limits.kv_rows, segment.kv_rows);
    limits.min_heads = std::min(limits.min_heads, segment.num_heads);
    limits.max_heads = std::max(limits.max_heads, segment.num_heads);
  }
  limits.min_heads = std::min(limits.min_heads, limits.max_heads);
  return limits;
}

// Wider limits must not make any array shorter.
PlanLimits Loosened(PlanLimits limits, std::mt19937& random) {
  const auto more = [&](auto& value, uint32_t most) {
    if (random() % 2 == 0) value += random() % most;
  };
  more(limits.segments, 10);
  more(limits.q_rows, 300);
  more(limits.packed_rows, 5000);
  more(limits.kv_rows, limits.kv_rows < 1'000'000 ? 1000 : 1);
  more(limits.max_heads, 100);
  if (random() % 2 == 0) limits.min_heads -= random() % limits.min_heads;
  return limits;
}

std::string Describe(const std::vector<PlanSegment>& segments, const PlanTraits& traits) {
  std::string text =
      "units " + std::to_string(traits.units) + " tile_rows " + std::to_string(traits.tile_rows) +
      " max_heads_per_tile " + std::to_string(traits.max_heads_per_tile) + " max_q_rows_per_tile " +
      std::to_string(traits.max_q_rows_per_tile) + " granularity " +
      std::to_string(traits.kv_granularity) + " overhead " +
      std::to_string(traits.item_overhead_rows) + " min_charged " +
      std::to_string(traits.min_charged_rows) + " fixed_split " +
      std::to_string(traits.fixed_split_rows) + " dealt " + std::to_string(traits.dealt_pieces) +
      " small " + std::to_string(traits.small.blocks) + "/" +
      std::to_string(traits.small.block_rows) + "/" + std::to_string(traits.small.unit_kv_rows) +
      " segments";
  for (const PlanSegment& r : segments) {
    text += " {" + std::to_string(r.q_rows) + ", " + std::to_string(r.kv_rows) + ", " +
            std::to_string(r.num_heads) + (r.causal ? "}" : ", false}");
  }
  return text;
}

TEST(PlannerPropertyTest, EveryPairOnceAndInsideCapacity) {
  const uint32_t seed = Seed();
  BatchMaker maker(seed);
  std::mt19937 loosening(seed);
  Planner planner;
  testing::PlanChecker checker;
  std::vector<PlanSegment> segments;
  PlanTraits traits;
  int64_t split_plans = 0;
  int64_t fixed_plans = 0;
  int64_t dealt_plans = 0;
  const int batches = IsLongRun() ? 20 * kBatches : kBatches;
  for (int batch = 0; batch < batches; ++batch) {
    maker.Next(segments, traits);
    PlanLimits limits = LimitsOf(segments);
    if (batch % 2 == 0) limits = Loosened(limits, loosening);
    const PlanCapacity capacity = Planner::Capacity(limits, traits);
    const auto buffers = testing::MakeBuffers(capacity);
    const auto view = planner.Build(segments, traits, *buffers);
    ASSERT_TRUE(view.ok()) << view.status() << "\nMLA_TEST_SEED=" << seed << " batch " << batch
                           << ": " << Describe(segments, traits);
    const std::string fault =
        checker.Fault(segments, traits, *view, capacity, planner.last_imbalance());
    ASSERT_EQ(fault, "") << "MLA_TEST_SEED=" << seed << " batch " << batch << ": "
                         << Describe(segments, traits);
    split_plans += !view->reduce_final_map.empty();
    fixed_plans += traits.fixed_split_rows > 0;
    dealt_plans += traits.dealt_pieces > 0 && !view->reduce_final_map.empty();
  }
  // The generator must keep reaching the cases it is for.
  EXPECT_GT(split_plans, batches / 4);
  EXPECT_GT(fixed_plans, batches / 8);
  EXPECT_GT(dealt_plans, batches / 30);
}

}  // namespace
}  // namespace mla::scheduler
