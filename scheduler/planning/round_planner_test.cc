#include "scheduler/planning/round_planner.h"

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace mla::scheduler {
namespace {

using kernels::ExpandedDims;
using kernels::ExpandedItem;
using kernels::Expansion;
using kernels::kDims128;
using kernels::kDims256;
using kernels::kExpandedRows;
using kernels::kPanelRowBytes;
using kernels::kRotatedPanels;
using kernels::LeastRoundWorkspace;
using ::testing::HasSubstr;

struct Batch {
  std::vector<PlanSegment> segments;
  std::vector<kernels::WorkInfo> work_info;
  std::vector<int32_t> work_indptr;
  std::vector<kernels::ReduceTile> reduce_final_map;
  std::vector<int32_t> reduce_indptr{0}, reduce_partial_map;
  int32_t partial_rows = 0;

  void Add(int32_t q_rows, int32_t kv_rows, int32_t heads, int32_t pieces) {
    const auto index = static_cast<int32_t>(segments.size());
    segments.push_back({q_rows, kv_rows, heads, true});
    for (int32_t q = 0; q < q_rows; q += kExpandedRows) {
      const int32_t end = std::min(q_rows, q + kExpandedRows);
      for (int32_t head = 0; head < heads; ++head) {
        AddTile(index, q, end, head, kv_rows - q_rows + end, pieces);
      }
    }
  }
  void AddTile(int32_t segment, int32_t q, int32_t end, int32_t head, int32_t kv, int32_t pieces) {
    const uint32_t packed = kernels::PackHeads(head, head + 1);
    const int32_t tiles = (kv + kExpandedRows - 1) / kExpandedRows;
    const int32_t step = std::max(1, (tiles + pieces - 1) / pieces) * kExpandedRows;
    if (step >= kv) {
      work_info.push_back({segment, kernels::kUnsplit, q, end, 0, kv, 0, packed});
      return;
    }
    for (int32_t begin = 0; begin < kv; begin += step) {
      work_info.push_back(
          {segment, partial_rows, q, end, begin, std::min(kv, begin + step), 0, packed});
      reduce_partial_map.push_back(partial_rows);
      partial_rows += end - q;
    }
    reduce_final_map.push_back({segment, q, end, packed});
    reduce_indptr.push_back(static_cast<int32_t>(reduce_partial_map.size()));
  }
  kernels::PlanView View() {
    work_indptr = {0, static_cast<int32_t>(work_info.size())};
    return {work_indptr,  work_info, reduce_indptr, reduce_final_map, reduce_partial_map,
            partial_rows, 1};
  }
};

constexpr int32_t kFirstCarry = 1000000;

kernels::PlanTraits Traits(int32_t units, int64_t workspace, ExpandedDims dims = kDims128) {
  kernels::PlanTraits traits;
  traits.units = units;
  traits.rounds.workspace_bytes = workspace;
  traits.rounds.dims = dims;
  traits.rounds.first_carry_row = kFirstCarry;
  traits.rounds.carry_rows = 4096;
  return traits;
}

constexpr RoundCapacity kCapacity{.units = 200, .items = 20000, .expansions = 4096, .segments = 8};

// Rounds of a batch, with the buffers that hold them.
struct Built {
  Built(const kernels::PlanTraits& traits, Batch& batch) {
    auto built = planner.Build(batch.View(), batch.segments, traits, buffers);
    EXPECT_TRUE(built.ok()) << built.status();
    if (built.ok()) view = *built;
  }
  RoundPlanner planner{kCapacity};
  RoundBuffers buffers{kCapacity};
  kernels::RoundView view;
};

// Walks a plan as the device does and checks everything it relies on.
class Checker {
 public:
  Checker(const kernels::RoundView& view, const kernels::PlanTraits& traits, const Batch& batch)
      : view_(view), traits_(traits), batch_(batch) {}

  void Run() {
    int32_t expansions = 0;
    for (const kernels::Round& round : view_.rounds) {
      ASSERT_EQ(round.first_expansion, expansions);
      expansions += round.expansions;
      CheckExpansions(round);
      const auto indptr = view_.unit_indptr.subspan(round.first_indptr, traits_.units + 1);
      for (int32_t unit = 0; unit < traits_.units; ++unit) {
        ASSERT_EQ(indptr[unit], items_);
        for (; items_ < indptr[unit + 1]; ++items_) CheckItem(view_.items[items_]);
      }
      ASSERT_EQ(indptr[traits_.units], items_);
    }
    EXPECT_EQ(static_cast<size_t>(items_), view_.items.size());
    CheckCoverage();
  }

 private:
  using TileKey = std::tuple<int32_t, int32_t, int32_t>;  // segment, q_begin, head

  void CheckExpansions(const kernels::Round& round) {
    int32_t pairs = 0, heads = 0;
    int64_t end = 0;
    of_round_.clear();
    for (const Expansion& s : view_.expansions.subspan(round.first_expansion, round.expansions)) {
      EXPECT_EQ(s.first_pair, pairs);
      EXPECT_EQ(s.first_head, heads);
      heads += s.heads;
      EXPECT_EQ(s.base, end);
      EXPECT_EQ(s.padded_rows % kExpandedRows, 0);
      EXPECT_EQ(s.kv_begin % kExpandedRows, 0);
      EXPECT_GE(s.padded_rows, s.rows);
      EXPECT_LE(s.kv_begin + s.rows, batch_.segments[s.segment].kv_rows);
      pairs += s.padded_rows / kExpandedRows * s.heads;
      end += s.heads * HeadBytes(s) + int64_t{s.padded_rows} * kPanelRowBytes * kRotatedPanels;
      of_round_.push_back(&s);
    }
    EXPECT_EQ(round.pairs, pairs);
    EXPECT_EQ(round.heads, heads);
    EXPECT_LE(end, traits_.rounds.workspace_bytes);
  }

  void CheckItem(const ExpandedItem& item) {
    const kernels::WorkInfo& w = item.work;
    ASSERT_EQ(w.head_end() - w.head_begin(), 1);
    ASSERT_LE(w.q_end - w.q_begin, kExpandedRows);
    const TileKey tile(w.segment, w.q_begin, w.head_begin());
    if (item.carried_row >= 0) {
      ASSERT_TRUE(carried_.contains(item.carried_row));
      EXPECT_EQ(carried_[item.carried_row], tile);
    }
    if (w.partial_row >= 0) carried_[w.partial_row] = tile;
    seen_[tile] += w.kv_end - w.kv_begin;
    if (w.kv_begin == w.kv_end) return;
    const auto entry = std::find_if(of_round_.begin(), of_round_.end(), [&](const auto* each) {
      return each->segment == w.segment && each->kv_begin <= w.kv_begin &&
             w.kv_end <= each->kv_begin + each->rows && each->head_begin <= w.head_begin() &&
             w.head_begin() < each->head_begin + each->heads;
    });
    ASSERT_NE(entry, of_round_.end());
    const Expansion& s = **entry;
    const int64_t offset = int64_t{w.kv_begin - s.kv_begin} * kPanelRowBytes;
    EXPECT_EQ(item.panel_bytes, int64_t{s.padded_rows} * kPanelRowBytes);
    EXPECT_EQ(item.keys, s.base + (w.head_begin() - s.head_begin) * HeadBytes(s) + offset);
    EXPECT_EQ(item.rotated, s.base + s.heads * HeadBytes(s) + offset);
  }

  // Every tile has seen what its last query row sees.
  void CheckCoverage() {
    size_t tiles = 0;
    for (size_t i = 0; i < batch_.segments.size(); ++i) {
      const PlanSegment& r = batch_.segments[i];
      for (int32_t q = 0; q < r.q_rows; q += kExpandedRows) {
        for (int32_t head = 0; head < r.num_heads; ++head, ++tiles) {
          const int32_t end = std::min(r.q_rows, q + kExpandedRows);
          EXPECT_EQ((seen_[{static_cast<int32_t>(i), q, head}]), r.kv_rows - r.q_rows + end)
              << "segment " << i << " row " << q;
        }
      }
    }
    EXPECT_EQ(seen_.size(), tiles);
  }

  // Keys and values of a row, and the values of the first rows a second time.
  int64_t HeadBytes(const Expansion& s) const {
    const ExpandedDims& dims = traits_.rounds.dims;
    return (int64_t{s.padded_rows} * (dims.nope + dims.value) + kExpandedRows * dims.value) * 2;
  }

  const kernels::RoundView& view_;
  const kernels::PlanTraits& traits_;
  const Batch& batch_;
  int32_t items_ = 0;
  std::vector<const Expansion*> of_round_;
  std::map<int32_t, TileKey> carried_;  // contents of a row of the partial buffers
  std::map<TileKey, int32_t> seen_;     // KV rows
};

void Check(const Built& built, const kernels::PlanTraits& traits, const Batch& batch) {
  EXPECT_EQ(built.view.units, traits.units);
  Checker(built.view, traits, batch).Run();
}

TEST(RoundPlannerTest, OneRoundWhereAllFits) {
  Batch batch;
  batch.Add(300, 500, 4, 1);
  batch.Add(0, 900, 4, 1);
  batch.Add(5, 5, 4, 1);
  const kernels::PlanTraits traits = Traits(7, int64_t{64} << 20);
  const Built plan(traits, batch);
  EXPECT_EQ(plan.view.rounds.size(), 1u);
  EXPECT_FALSE(plan.view.merges);
  Check(plan, traits, batch);
}

TEST(RoundPlannerTest, HeadsAreDividedEvenlyOverRounds) {
  Batch batch;
  batch.Add(256, 1024, 10, 1);
  for (const auto& [dims, row_bytes] : {std::pair(kDims128, 512), std::pair(kDims256, 896)}) {
    // Room for seven heads of 1024 rows.
    const kernels::PlanTraits traits =
        Traits(4, 7 * (1024 * row_bytes + 256 * dims.value) + 1024 * kPanelRowBytes, dims);
    const Built plan(traits, batch);
    ASSERT_EQ(plan.view.expansions.size(), 2u);
    EXPECT_EQ(plan.view.expansions[0].heads, 5);
    EXPECT_EQ(plan.view.expansions[1].heads, 5);
    Check(plan, traits, batch);
  }
}

TEST(RoundPlannerTest, ContextBeyondTheWorkspaceIsCarried) {
  Batch batch;
  batch.Add(200, 1000, 2, 1);
  for (const ExpandedDims& dims : {kDims128, kDims256}) {
    const kernels::PlanTraits traits = Traits(3, 4 * LeastRoundWorkspace(dims), dims);
    const Built plan(traits, batch);
    EXPECT_GT(plan.view.rounds.size(), 3u);
    Check(plan, traits, batch);
    EXPECT_TRUE(std::any_of(plan.view.items.begin(), plan.view.items.end(),
                            [](const auto& item) { return item.carried_row >= kFirstCarry; }));
  }
}

TEST(RoundPlannerTest, CutsAreKeptWhereUnitsWouldIdle) {
  Batch few;
  few.Add(128, 65536, 1, 8);
  const kernels::PlanTraits traits = Traits(8, int64_t{256} << 20);
  const Built split(traits, few);
  EXPECT_TRUE(split.view.merges);
  EXPECT_EQ(split.view.items.size(), 8u);
  Check(split, traits, few);

  Batch many;  // as many equal tiles as units: whole tiles leave no unit idle
  many.Add(128, 65536, 8, 8);
  const Built whole(Traits(8, int64_t{512} << 20), many);
  EXPECT_FALSE(whole.view.merges);
  Check(whole, Traits(8, int64_t{512} << 20), many);
}

TEST(RoundPlannerTest, DealtEvenly) {
  Batch batch;
  batch.Add(4096, 4096, 16, 1);
  const kernels::PlanTraits traits = Traits(132, int64_t{256} << 20);
  const Built plan(traits, batch);
  Check(plan, traits, batch);
  int64_t largest = 0, total = 0;
  for (int32_t unit = 0; unit < traits.units; ++unit) {
    int64_t tiles = 0;
    for (int32_t i = plan.view.unit_indptr[unit]; i < plan.view.unit_indptr[unit + 1]; ++i) {
      tiles += (plan.view.items[i].work.kv_end + kExpandedRows - 1) / kExpandedRows;
    }
    largest = std::max(largest, tiles);
    total += tiles;
  }
  EXPECT_LE(static_cast<double>(largest) * traits.units, 1.07 * static_cast<double>(total));
}

TEST(RoundPlannerTest, RandomBatches) {
  std::mt19937 random(11);
  const auto pick = [&](int32_t most) { return static_cast<int32_t>(random() % (most + 1)); };
  for (int i = 0; i < 200; ++i) {
    Batch batch;
    const int32_t pieces = 1 + pick(3);
    for (int32_t n = 1 + pick(3); n > 0; --n) {
      const int32_t q_rows = pick(400);
      batch.Add(q_rows, q_rows + pick(1500), 1 + pick(5), pieces);
    }
    const ExpandedDims dims = i % 2 == 0 ? kDims128 : kDims256;
    const kernels::PlanTraits traits =
        Traits(1 + pick(20), LeastRoundWorkspace(dims) * (1 + pick(40)), dims);
    const Built plan(traits, batch);
    Check(plan, traits, batch);
    if (HasFatalFailure()) return;
  }
}

TEST(RoundPlannerTest, LimitsAreNamed) {
  Batch batch;
  batch.Add(300, 300, 4, 1);
  const auto status = [&batch](const kernels::PlanTraits& traits, const RoundCapacity& capacity) {
    RoundPlanner planner(capacity);
    RoundBuffers buffers(capacity);
    return planner.Build(batch.View(), batch.segments, traits, buffers).status();
  };
  EXPECT_THAT(status(Traits(1, 1000), kCapacity).message(),
              HasSubstr("rounds.workspace_bytes: got 1000, want >= 114688"));
  EXPECT_THAT(status(Traits(1, 196607, kDims256), kCapacity).message(),
              HasSubstr("rounds.workspace_bytes: got 196607, want >= 196608"));
  EXPECT_THAT(status(Traits(0, 1 << 20), kCapacity).message(), HasSubstr("rounds.units: got 0"));
  EXPECT_THAT(status(Traits(201, 1 << 20), kCapacity).message(),
              HasSubstr("rounds.units: got 201, limit 1..200"));
  RoundCapacity few = kCapacity;
  few.items = 5;
  const absl::Status s = status(Traits(2, 1 << 24), few);
  EXPECT_EQ(s.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(s.message(), HasSubstr("more tiles than the limit 5"));
  // A workspace for a head at a time: four rounds.
  kernels::PlanTraits narrow = Traits(2, 300000);
  EXPECT_TRUE(status(narrow, kCapacity).ok());
  narrow.rounds.most = 3;
  EXPECT_EQ(status(narrow, kCapacity).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status(narrow, kCapacity).message(), HasSubstr("more rounds than the limit 3"));
}

}  // namespace
}  // namespace mla::scheduler
