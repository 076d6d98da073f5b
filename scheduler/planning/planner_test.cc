#include "scheduler/planning/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/testing/allocation_counter.h"
#include "scheduler/testing/heap_buffers.h"
#include "scheduler/testing/plan_checker.h"

namespace mla::scheduler {
namespace {

using kernels::kUnsplit;
using kernels::PlanTraits;
using kernels::PlanView;

PlanCapacity Roomy(int32_t units) { return {units, 100'000, 100'000, 100'000, 100'000'000}; }

// Plans one batch and has it judged.
class PlannerTest : public ::testing::Test {
 protected:
  PlanView Plan(const std::vector<PlanSegment>& segments, const PlanTraits& traits) {
    buffers_ = testing::MakeBuffers(Roomy(traits.units));
    auto view = planner_.Build(segments, traits, *buffers_);
    EXPECT_TRUE(view.ok()) << view.status();
    if (!view.ok()) return {};
    EXPECT_EQ(
        checker_.Fault(segments, traits, *view, buffers_->capacity(), planner_.last_imbalance()),
        "");
    return *view;
  }

  Planner planner_;
  testing::PlanChecker checker_;
  std::unique_ptr<MetadataBuffers> buffers_;
};

TEST_F(PlannerTest, EmptyBatchHasNoWork) {
  const PlanView view = Plan({}, {.units = 3});
  EXPECT_TRUE(view.work_info.empty());
  EXPECT_EQ(view.work_indptr.size(), 4u);
  EXPECT_EQ(planner_.last_imbalance(), 1.0);
}

TEST_F(PlannerTest, OneUnitNeverSplits) {
  const PlanView view = Plan({{1, 100'000, 128}, {1, 7, 128}}, {.units = 1});
  ASSERT_EQ(view.work_info.size(), 2u);
  EXPECT_EQ(view.work_info[0].partial_row, kUnsplit);
  EXPECT_EQ(view.work_info[0].kv_end, 100'000);
  EXPECT_EQ(view.partial_rows, 0);
}

TEST_F(PlannerTest, LongSegmentIsSharedByAllUnits) {
  const PlanView view = Plan({{1, 262'144, 128}}, {.units = 256});
  EXPECT_EQ(view.work_info.size(), 256u);
  EXPECT_EQ(view.reduce_final_map.size(), 1u);
  EXPECT_EQ(view.reduce_partial_map.size(), 256u);
  EXPECT_EQ(view.partial_rows, 256 * 128);
  EXPECT_EQ(planner_.last_imbalance(), 1.0);
}

// KV rows of the busiest unit over the mean, in the shapes that decide how fast a launch is.
TEST_F(PlannerTest, UnitsAreBalanced) {
  std::mt19937 random(1);
  for (const int32_t batch : {1, 2, 3, 16, 61, 100, 128, 200, 300, 777, 1024, 4096}) {
    for (const int32_t longest : {1024, 4096, 65'536, 1'000'000}) {
      for (const bool ragged : {false, true}) {
        std::uniform_int_distribution<int32_t> rows(1, longest);
        std::vector<PlanSegment> segments;
        int64_t total = 0;
        for (int32_t i = 0; i < batch; ++i) {
          segments.push_back({1, ragged ? rows(random) : longest, 128});
          total += segments.back().kv_rows;
        }
        Plan(segments, {.units = 256});
        if (total < 1024 * 256) continue;
        EXPECT_LE(planner_.last_imbalance(), 1.30) << batch << " x " << longest << " " << ragged;
        const bool headline = batch == 128 || batch == 1024;
        if (!headline || longest < 4096) continue;
        EXPECT_LE(planner_.last_imbalance(), 1.15) << batch << " x " << longest << " " << ragged;
      }
    }
  }
}

TEST_F(PlannerTest, EqualSegmentsAreCutAtTheirBorders) {
  for (const int32_t batch : {4, 16, 64, 128, 256, 512, 1024}) {
    const PlanView view =
        Plan(std::vector<PlanSegment>(static_cast<size_t>(batch), {1, 4096, 128}), {.units = 256});
    EXPECT_EQ(planner_.last_imbalance(), 1.0) << batch;
    EXPECT_EQ(view.work_info.size(), static_cast<size_t>(std::max(batch, 256)));
  }
}

// As a launch of 128 heads has them on 132 units of half a tile each.
TEST_F(PlannerTest, TilesStayWholeWhereAMergeTakesLongerThanItSaves) {
  const PlanTraits traits{.units = 66, .tile_rows = 128, .kv_granularity = 64};
  std::vector<PlanSegment> segments(64, {1, 16'384, 128});
  PlanView view = Plan(segments, traits);
  EXPECT_EQ(view.work_info.size(), 64u);
  EXPECT_EQ(view.partial_rows, 0);
  // Lengths that differ by less than an item's overhead.
  for (size_t i = 0; i < segments.size(); ++i) segments[i].kv_rows -= static_cast<int32_t>(i);
  view = Plan(segments, traits);
  EXPECT_EQ(view.work_info.size(), 64u);
  EXPECT_EQ(view.partial_rows, 0);
  // By more: whole tiles are not to be had, so rows are shared evenly.
  segments[0].kv_rows -= 4096;
  EXPECT_GT(Plan(segments, traits).partial_rows, 0);
  // Long enough that two idle units cost more than a merge.
  segments.assign(64, {1, 65'536, 128});
  view = Plan(segments, traits);
  EXPECT_GT(view.partial_rows, 0);
  EXPECT_LE(planner_.last_imbalance(), 1.01);
}

// The example that docs/internals/plan.md draws.
TEST_F(PlannerTest, TheDrawnExample) {
  const PlanView view = Plan({{1, 25, 16}, {1, 4, 16}, {1, 13, 16}},
                             {.units = 3, .kv_granularity = 1, .item_overhead_rows = 1});
  const std::vector<int32_t> begins{0, 15, 0, 0};
  const std::vector<int32_t> ends{15, 25, 4, 13};
  const std::vector<int32_t> partials{0, 16, kUnsplit, kUnsplit};
  ASSERT_EQ(view.work_info.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(view.work_info[i].kv_begin, begins[i]) << i;
    EXPECT_EQ(view.work_info[i].kv_end, ends[i]) << i;
    EXPECT_EQ(view.work_info[i].partial_row, partials[i]) << i;
  }
  EXPECT_EQ(std::vector<int32_t>(view.work_indptr.begin(), view.work_indptr.end()),
            (std::vector<int32_t>{0, 1, 3, 4}));
}

TEST_F(PlannerTest, PiecesAreNotFarBelowTheOverhead) {
  const PlanView view = Plan({{1, 4096, 128}}, {.units = 256, .item_overhead_rows = 1024});
  EXPECT_EQ(view.work_info.size(), 16u);
}

TEST_F(PlannerTest, SmallBatchesAreCutForFewerUnits) {
  PlanTraits traits{.units = 66, .kv_granularity = 64, .item_overhead_rows = 256};
  EXPECT_EQ(Plan({{1, 4096, 128}}, traits).work_info.size(), 64u);
  traits.small = {.blocks = 132, .block_rows = 16, .unit_kv_rows = 384};
  const PlanView view = Plan({{1, 4096, 128}}, traits);
  EXPECT_EQ(view.work_info.size(), 16u);  // of 132 blocks; eight of them share a tile
  EXPECT_EQ(view.work_indptr.size(), 67u);
  EXPECT_EQ(Plan({{1, 6144, 128}}, traits).work_info.size(), 16u);
  EXPECT_EQ(Plan({{1, 6145, 128}}, traits).work_info.size(), 49u);  // as without
  EXPECT_EQ(Plan({{1, 2048, 64}, {1, 2048, 32}}, traits).work_info.size(), 32u);
  EXPECT_EQ(Plan({{2, 2048, 8}}, traits).work_info.size(), 32u);  // each block has a whole tile
  const std::vector<PlanSegment> many(17, PlanSegment{1, 64, 128});
  EXPECT_EQ(Plan(many, traits).work_info.size(), 17u);
}

TEST_F(PlannerTest, PaddedSegmentYieldsNothing) {
  const PlanView view = Plan({{0, 50, 16}, {1, 50, 16}, {0, 0, 16}}, {.units = 2});
  ASSERT_EQ(view.work_info.size(), 1u);
  EXPECT_EQ(view.work_info[0].segment, 1);
}

TEST_F(PlannerTest, RowsWithoutKeysStillHaveAnItem) {
  const PlanView view = Plan({{3, 0, 16}}, {.units = 2});
  ASSERT_EQ(view.work_info.size(), 1u);
  EXPECT_EQ(view.work_info[0].q_end, 3);
  EXPECT_EQ(view.work_info[0].kv_begin, 0);
  EXPECT_EQ(view.work_info[0].kv_end, 0);
  EXPECT_EQ(view.work_info[0].partial_row, kUnsplit);
}

TEST_F(PlannerTest, FewerKeysThanCausalRows) {
  // Rows 0 and 1 of five see nothing; tiles are one row each.
  const PlanView view = Plan({{5, 3, 2}}, {.units = 1, .tile_rows = 2});
  ASSERT_EQ(view.work_info.size(), 5u);
  const int32_t sees[] = {0, 0, 1, 2, 3};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(view.work_info[i].kv_end, sees[i]);
    EXPECT_EQ(view.work_info[i].kv_after, 3 - sees[i]);
  }
}

TEST_F(PlannerTest, EarlierQueryTilesAreTrimmed) {
  const PlanView view = Plan({{7, 1007, 64}}, {.units = 1, .tile_rows = 128});
  ASSERT_EQ(view.work_info.size(), 4u);
  EXPECT_EQ(view.work_info[0].kv_end, 1002);
  EXPECT_EQ(view.work_info[1].kv_end, 1004);
  EXPECT_EQ(view.work_info[3].kv_end, 1007);
  const PlanView full = Plan({{7, 1007, 64, false}}, {.units = 1, .tile_rows = 128});
  EXPECT_EQ(full.work_info[0].kv_end, 1007);
}

TEST_F(PlannerTest, MoreHeadsThanATileAreCut) {
  const PlanView view = Plan({{2, 10, 300}}, {.units = 1, .tile_rows = 128});
  ASSERT_EQ(view.work_info.size(), 6u);
  EXPECT_EQ(view.work_info[2].head_begin(), 256);
  EXPECT_EQ(view.work_info[2].head_end(), 300);
  EXPECT_EQ(view.work_info[3].q_begin, 1);
}

TEST_F(PlannerTest, OneHeadPerTileOfTheExpandedForm) {
  const PlanView view =
      Plan({{200, 200, 3}}, {.units = 1, .tile_rows = 128, .max_heads_per_tile = 1});
  ASSERT_EQ(view.work_info.size(), 6u);
  EXPECT_EQ(view.work_info[1].head_begin(), 1);
  EXPECT_EQ(view.work_info[1].head_end(), 2);
  EXPECT_EQ(view.work_info[0].q_end, 128);
}

// A segment with index lists: each query row has its own, so a tile holds one row.
TEST_F(PlannerTest, OneQueryRowPerTileOfSparseAttention) {
  const PlanView view = Plan({{3, 2048, 16, false}, {1, 5, 16, false}},
                             {.units = 1, .tile_rows = 128, .max_q_rows_per_tile = 1});
  ASSERT_EQ(view.work_info.size(), 4u);
  EXPECT_EQ(view.work_info[1].q_begin, 1);
  EXPECT_EQ(view.work_info[1].q_end, 2);
  EXPECT_EQ(view.work_info[1].head_end(), 16);
  EXPECT_EQ(view.work_info[2].kv_end, 2048);
  // Four units: the long lists are cut, and their pieces merged.
  const PlanView split =
      Plan({{1, 2048, 128, false}}, {.units = 4, .tile_rows = 128, .max_q_rows_per_tile = 1});
  EXPECT_EQ(split.work_info.size(), 4u);
  EXPECT_EQ(split.reduce_final_map.size(), 1u);
}

TEST_F(PlannerTest, CausalTailStaysInOnePiece) {
  // Wherever the cuts of the units would fall, no piece may start past the first row's last key.
  for (int32_t units = 1; units <= 64; ++units) {
    Plan({{128, 300, 1}, {128, 128, 1}, {77, 90, 1}},
         {.units = units, .tile_rows = 128, .kv_granularity = 1, .item_overhead_rows = 0});
  }
}

TEST_F(PlannerTest, FixedSplitIgnoresTheRestOfTheBatch) {
  const PlanTraits traits{.units = 7, .fixed_split_rows = 1024};
  const PlanSegment probe{4, 10'000, 16};
  const PlanView alone = Plan({probe}, traits);
  std::vector<kernels::WorkInfo> pieces(alone.work_info.begin(), alone.work_info.end());
  ASSERT_EQ(pieces.size(), 10u);
  const PlanView mixed = Plan({{1, 5'000, 128}, probe, {9, 9, 3}}, traits);
  size_t next = 0;
  for (const kernels::WorkInfo& item : mixed.work_info) {
    if (item.segment != 1) continue;
    ASSERT_LT(next, pieces.size());
    EXPECT_EQ(item.kv_begin, pieces[next].kv_begin);
    EXPECT_EQ(item.kv_end, pieces[next].kv_end);
    ++next;
  }
  EXPECT_EQ(next, pieces.size());
}

TEST_F(PlannerTest, FixedPiecesAreDealtEvenly) {
  for (const int32_t batch : {61, 100, 128}) {
    const std::vector<PlanSegment> segments(static_cast<size_t>(batch), {1, 65'536, 128});
    Plan(segments, {.units = 256, .fixed_split_rows = 1024});
    EXPECT_LE(planner_.last_imbalance(), 1.06) << batch;
  }
}

// Small tiles together with full ones: charges follow the work, not the rows.
TEST_F(PlannerTest, TilesAreChargedByTheirRows) {
  std::vector<PlanSegment> segments(64, {1, 4096, 16});  // 16 of 128 packed rows
  segments.push_back({512, 4096, 16});                   // 64 full tiles
  PlanTraits traits{.units = 2, .item_overhead_rows = 16, .min_charged_rows = 16};
  const PlanView view = Plan(segments, traits);
  EXPECT_LT(planner_.last_imbalance(), 1.01);
  // All of the small tiles go to the first unit, and nearly half of the full ones.
  EXPECT_GT(view.work_indptr[1], 64 + 24);
  traits.units = 16;
  Plan(segments, traits);
  EXPECT_LT(planner_.last_imbalance(), 1.05);
}

TEST_F(PlannerTest, GenerationsAreUniqueAcrossPlanners) {
  const uint64_t first = Plan({{1, 1, 1}}, {}).generation;
  Planner other;
  const auto view = other.Build({}, {}, *buffers_);
  ASSERT_TRUE(view.ok());
  EXPECT_NE(view->generation, first);
}

TEST_F(PlannerTest, BuildAllocatesNothing) {
  buffers_ = testing::MakeBuffers(Roomy(256));
  const std::vector<PlanSegment> decode(1024, PlanSegment{1, 4096, 128});
  const std::vector<PlanSegment> mixed{{1, 5000, 128}, {700, 900, 128}, {0, 0, 1}};
  const int64_t before = kernels::testing::Allocations();
  for (int i = 0; i < 10; ++i) {
    for (const int32_t split : {0, 512}) {
      const PlanTraits traits{.units = 256, .fixed_split_rows = split};
      ASSERT_TRUE(planner_.Build(decode, traits, *buffers_).ok());
      ASSERT_TRUE(planner_.Build(mixed, traits, *buffers_).ok());
    }
  }
  EXPECT_EQ(kernels::testing::Allocations(), before);
  const auto another = std::make_unique<int>(1);
  EXPECT_EQ(kernels::testing::Allocations(), before + 1) << "the counter counts";
}

TEST_F(PlannerTest, FaultsNameTheField) {
  buffers_ = testing::MakeBuffers(Roomy(1));
  const auto message = [&](const PlanSegment& segment, const PlanTraits& traits) {
    const PlanSegment batch[] = {{1, 1, 1}, segment};
    const auto view = planner_.Build(batch, traits, *buffers_);
    EXPECT_EQ(view.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(view.status().message());
  };
  const PlanSegment good{1, 1, 1};
  EXPECT_EQ(message({-1, 1, 1}, {}), "plan segments[1].q_rows: got -1, limit at least 0");
  EXPECT_EQ(message({1, -7, 1}, {}), "plan segments[1].kv_rows: got -7, limit at least 0");
  EXPECT_EQ(message({1, 1, 0}, {}), "plan segments[1].num_heads: got 0, limit 1..65535");
  EXPECT_EQ(message({1, 1, 65536}, {}), "plan segments[1].num_heads: got 65536, limit 1..65535");
  EXPECT_EQ(message({1, 1, INT32_MIN}, {}).substr(0, 32), "plan segments[1].num_heads: got ");
  EXPECT_EQ(message(good, {.units = 0}), "plan traits.units: got 0, limit 1..2147483646");
  EXPECT_EQ(message(good, {.tile_rows = 0}), "plan traits.tile_rows: got 0, limit 1..65536");
  EXPECT_NE(message(good, {.max_heads_per_tile = -1}).find("max_heads_per_tile"),
            std::string::npos);
  EXPECT_NE(message(good, {.max_q_rows_per_tile = -1}).find("max_q_rows_per_tile"),
            std::string::npos);
  EXPECT_NE(message(good, {.kv_granularity = 0}).find("kv_granularity"), std::string::npos);
  EXPECT_NE(message(good, {.item_overhead_rows = -1}).find("item_overhead"), std::string::npos);
  EXPECT_EQ(message(good, {.tile_rows = 8, .min_charged_rows = 9}),
            "plan traits.min_charged_rows: got 9, limit 0..8");
  EXPECT_NE(message(good, {.fixed_split_rows = -1}).find("fixed_split_rows"), std::string::npos);
  EXPECT_EQ(message(good, {.small = {.blocks = -1}}),
            "plan traits.small.blocks: got -1, limit 0..2147483646");
  EXPECT_EQ(message(good, {.small = {.block_rows = 0}}),
            "plan traits.small.block_rows: got 0, limit 1..65536");
  EXPECT_NE(message(good, {.small = {.unit_kv_rows = -1}}).find("small.unit_kv_rows"),
            std::string::npos);
}

TEST_F(PlannerTest, ShortBuffersAreRefusedByName) {
  const std::vector<PlanSegment> batch(10, PlanSegment{1, 50'000, 16});
  const auto message = [&](const PlanCapacity& capacity) {
    buffers_ = testing::MakeBuffers(capacity);
    const auto view = planner_.Build(batch, {.units = 4}, *buffers_);
    EXPECT_EQ(view.status().code(), absl::StatusCode::kResourceExhausted);
    return std::string(view.status().message());
  };
  EXPECT_EQ(message({3, 100, 100, 100, 100'000}), "plan units: needs 4, limit 3");
  EXPECT_EQ(message({4, 12, 100, 100, 100'000}), "plan work_items: needs 13, limit 12");
  EXPECT_EQ(message({4, 13, 2, 100, 100'000}), "plan reduce_tiles: needs 3, limit 2");
  EXPECT_EQ(message({4, 13, 3, 5, 100'000}), "plan reduce_partials: needs 6, limit 5");
  EXPECT_EQ(message({4, 13, 3, 6, 767}), "plan partial_rows: needs 768, limit 767");
}

constexpr PlanCapacity kCapacity{
    .units = 3, .work_items = 5, .reduce_tiles = 7, .reduce_partials = 9, .partial_rows = 11};

TEST(MetadataBuffersTest, ArraysHaveTheirLengths) {
  const auto buffers = testing::MakeBuffers(kCapacity);
  EXPECT_EQ(buffers->capacity(), kCapacity);
  EXPECT_EQ(buffers->work_indptr().size(), 4u);
  EXPECT_EQ(buffers->work_info().size(), 5u);
  EXPECT_EQ(buffers->reduce_indptr().size(), 8u);
  EXPECT_EQ(buffers->reduce_final_map().size(), 7u);
  EXPECT_EQ(buffers->reduce_partial_map().size(), 9u);
}

// Memory that starts anywhere and ends exactly where it must, as an allocator may hand out.
class OddBuffer final : public kernels::HostBuffer {
 public:
  explicit OddBuffer(size_t size) : size_(size), data_(new std::byte[size + 1]) {}
  std::span<std::byte> bytes() override { return {data_.get() + 1, size_}; }

 private:
  size_t size_;
  std::unique_ptr<std::byte[]> data_;
};

TEST(MetadataBuffersTest, ArraysAreAlignedApartAndInside) {
  auto memory = std::make_unique<OddBuffer>(static_cast<size_t>(kCapacity.bytes()));
  const std::span<std::byte> bytes = memory->bytes();
  const auto buffers = MetadataBuffers::Create(kCapacity, std::move(memory)).value();
  const std::byte* last_end = bytes.data();
  const auto check = [&](auto array) {
    const auto* begin = reinterpret_cast<const std::byte*>(array.data());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(begin) % 64, 0u);
    EXPECT_GE(begin, last_end);
    last_end = begin + array.size_bytes();
    EXPECT_LE(last_end, bytes.data() + bytes.size());
  };
  check(buffers->work_info());
  check(buffers->reduce_final_map());
  check(buffers->work_indptr());
  check(buffers->reduce_indptr());
  check(buffers->reduce_partial_map());
}

TEST(MetadataBuffersTest, FaultsNameTheCapacity) {
  const auto fault = [](PlanCapacity capacity) {
    const auto made = MetadataBuffers::Create(capacity, std::make_unique<testing::HeapBuffer>(0));
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(made.status().message());
  };
  PlanCapacity capacity = kCapacity;
  EXPECT_NE(fault(capacity).find("plan memory: got 0 bytes"), std::string::npos);
  capacity.units = 0;
  EXPECT_EQ(fault(capacity), "plan capacity.units: got 0, limit 1..2147483646");
  capacity = kCapacity;
  capacity.work_items = -1;
  EXPECT_EQ(fault(capacity), "plan capacity.work_items: got -1, limit 0..2147483646");
  capacity = kCapacity;
  capacity.reduce_tiles = INT64_MAX;
  EXPECT_NE(fault(capacity).find("reduce_tiles"), std::string::npos);
  capacity = kCapacity;
  capacity.reduce_partials = int64_t{1} << 31;
  EXPECT_NE(fault(capacity).find("reduce_partials"), std::string::npos);
  capacity = kCapacity;
  capacity.partial_rows = int64_t{1} << 32;
  EXPECT_NE(fault(capacity).find("partial_rows"), std::string::npos);
}

}  // namespace
}  // namespace mla::scheduler
