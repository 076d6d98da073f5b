// Steps of a model with sparse attention: rows attend to what their index lists name, whatever else
// shares their launches.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

using testing::EngineHarness;
using testing::kTolerance;
using testing::Pointers;
using testing::Row;
using testing::Rows;
using testing::TestRequest;

using Lists = std::vector<std::vector<int32_t>>;  // by row

class EngineSparseTest : public ::testing::Test {
 protected:
  static testing::HarnessOptions Options() {
    testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr, nullptr};
    options.model.attention = kernels::AttentionKind::kSparse;
    options.model.top_k = 8;
    return options;
  }

  // An Attend of all heads with these lists, handed over.
  std::unique_ptr<TestRequest> Attend(StepId step, int layer, int row_begin,
                                      const std::vector<Row>& kv, const Lists& lists,
                                      uint64_t q_key, const StepPositions& listed_for = nullptr,
                                      int32_t listed_top_k = 8) {
    const auto rows = static_cast<int>(lists.size());
    auto request = h_.Unsent(stream_, step, layer, row_begin, rows, kv, 0, 2, q_key);
    std::vector<int32_t>& memory = memory_.emplace_back();
    memory.push_back(0);
    for (const auto& list : lists) {
      memory.push_back(memory.back() + static_cast<int32_t>(list.size()));
    }
    for (const auto& list : lists) memory.insert(memory.end(), list.begin(), list.end());
    request->attend.list_begin = memory.data();
    request->attend.list = memory.data() + rows + 1;
    request->attend.listed_for = listed_for;
    request->attend.listed_top_k = listed_top_k;
    h_.Submit(request.get());
    return request;
  }

  // Worst difference from attention over the rows that the lists name, of `all`.
  double Error(const TestRequest& request, const std::vector<const Row*>& all, const Lists& lists,
               uint64_t q_key) const {
    const AttendArgs& args = request.attend;
    const int lora = h_.model().geometry.kv_lora_rank;
    double worst = 0;
    for (int row = 0; row < args.row_count; ++row) {
      std::vector<const Row*> seen;
      for (const int32_t position : lists[row]) seen.push_back(all[position]);
      for (int head = 0; head < args.num_heads; ++head) {
        Row want;
        double lse = 0;
        const uint64_t key = q_key + uint64_t(args.row_begin + row) * 64 + head;
        testing::DenseAttention(h_.model(), seen, testing::MakeRow(key, 12), &want, &lse);
        const size_t packed = size_t(row) * args.num_heads + head;
        for (int i = 0; i < lora; ++i) {
          worst = Worse(worst, request.output[packed * lora + i], want[i]);
        }
        worst = Worse(worst, request.lse[packed], lse);
      }
    }
    return worst;
  }
  static double Worse(double worst, double got, double want) {
    if (got == want) return worst;  // infinities, too
    const double off = std::abs(got - want);
    return std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max(worst, off);
  }

  void End(StepId step) {
    const auto end = h_.End(stream_, step);
    ASSERT_TRUE(end->status.ok()) << end->status;
  }

  EngineHarness h_{Options()};
  StreamId stream_ = h_.core().steps().OpenStream(h_.tenant());
  std::vector<std::vector<int32_t>> memory_;
};

TEST_F(EngineSparseTest, RowsAttendToTheirLists) {
  const SequenceInfo a = h_.Open(), b = h_.Open();
  // A prompt of more rows than a launch has: 7 and 4 of two sequences, in pieces of 5.
  ASSERT_TRUE(h_.Begin(stream_, 1, {{a.id, 1, 0, 7}, {b.id, 1, 0, 4}})->status.ok());
  const Lists lists = {{0},          {1, 0}, {2}, {0, 3},    {4, 1}, {},
                       {6, 2, 0, 5}, {0},    {1}, {2, 1, 0}, {3}};
  for (int layer = 0; layer < 2; ++layer) {
    const std::vector<Row> rows = Rows(11, 10 + layer);
    const auto attend = Attend(1, layer, 0, rows, lists, 5);
    h_.Run();
    ASSERT_TRUE(attend->status.ok()) << attend->status;
    Lists in_all = lists;  // b's positions among all rows
    for (size_t row = 7; row < 11; ++row) {
      for (int32_t& position : in_all[row]) position += 7;
    }
    EXPECT_LT(Error(*attend, Pointers(rows), in_all, 5), kTolerance);
    EXPECT_EQ(attend->output[5 * 2 * 8], 0.0f) << "an empty list";
    EXPECT_EQ(attend->lse[5 * 2], -std::numeric_limits<float>::infinity());
  }
  End(1);
  // Decode of both at the same time: over cached rows and the new row itself.
  ASSERT_TRUE(h_.Begin(stream_, 2, {{a.id, 1, 7, 1}, {b.id, 1, 4, 2}})->status.ok());
  for (int layer = 0; layer < 2; ++layer) {
    const std::vector<Row> cached = Rows(11, 10 + layer), fresh = Rows(3, 20 + layer);
    const auto attend = Attend(2, layer, 0, fresh, {{7, 3}, {4, 0, 1}, {2, 5}}, 9);
    h_.Run();
    ASSERT_TRUE(attend->status.ok()) << attend->status;
    EXPECT_LT(Error(*attend, Pointers(cached, fresh), {{11, 3}, {12, 7, 8}, {9, 13}}, 9),
              kTolerance);
  }
  End(2);
}

TEST_F(EngineSparseTest, DenseRequestsOfTheModelGoInLaunchesOfTheirOwn) {
  const SequenceInfo a = h_.Open(), b = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{a.id, 1, 0, 2}})->status.ok());
  ASSERT_TRUE(h_.Begin(stream_, 2, {{b.id, 1, 0, 2}})->status.ok());
  const std::vector<Row> rows = Rows(2, 10), others = Rows(2, 30);
  const uint64_t before = h_.core().Stats().launches;
  const auto dense = h_.Attend(stream_, 1, 0, 0, rows, 5);
  const auto sparse = Attend(2, 0, 0, others, {{0}, {1}}, 5);
  h_.Run();
  ASSERT_TRUE(dense->status.ok() && sparse->status.ok());
  EXPECT_EQ(h_.core().Stats().launches - before, 2u);
  EXPECT_LT(h_.Error(*dense, Pointers(rows), {1, 2}, 5), kTolerance);
  EXPECT_LT(Error(*sparse, Pointers(others), {{0}, {1}}, 5), kTolerance);
}

// A NaN is nowhere but in the outputs of rows that name it; and a row that names nothing is fine.
TEST_F(EngineSparseTest, RowsThatNoListNamesMayBeAnything) {
  const SequenceInfo a = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{a.id, 1, 0, 4}})->status.ok());
  std::vector<Row> rows = Rows(4, 10);
  rows[1].assign(rows[1].size(), std::nanf(""));
  const Lists lists = {{0}, {0}, {}, {3, 0, 2}};
  const auto attend = Attend(1, 0, 0, rows, lists, 5);
  h_.Run();
  ASSERT_TRUE(attend->status.ok()) << attend->status;
  EXPECT_LT(Error(*attend, Pointers(rows), lists, 5), kTolerance);
  // The engine knows of it nevertheless: results that name it are NaN, and the kernels are not at
  // fault.
  const auto again = Attend(1, 0, 3, {}, {{1, 0}}, 5);
  h_.Run();
  ASSERT_TRUE(again->status.ok()) << again->status;
  EXPECT_TRUE(std::isnan(again->lse[0]));
}

TEST_F(EngineSparseTest, RefusesListsOfAnotherStep) {
  const SequenceInfo a = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{a.id, 1, 0, 2}})->status.ok());
  const auto positions = [](int64_t start, int32_t rows) {
    return std::make_shared<const std::vector<StepSequenceArgs>>(
        std::vector<StepSequenceArgs>{{0, 1, start, rows}});
  };
  const std::vector<Row> rows = Rows(2, 10);
  for (const auto& other : {positions(5, 2), positions(0, 3)}) {
    const auto attend = Attend(1, 0, 0, rows, {{0}, {1}}, 5, other);
    EXPECT_EQ(attend->status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(DetailOf(attend->status).reason, "step_reused");
  }
  // Lists that were checked, and memory that was sized, for a model of another top_k.
  for (const int32_t top_k : {7, 9}) {
    const auto attend = Attend(1, 0, 0, rows, {{0}, {1}}, 5, positions(0, 2), top_k);
    EXPECT_EQ(attend->status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(DetailOf(attend->status).reason, "step_reused");
  }
  const auto attend = Attend(1, 0, 0, rows, {{0}, {1}}, 5, positions(0, 2));
  h_.Run();
  EXPECT_TRUE(attend->status.ok()) << attend->status;
}

// Its rows do not have index keys after them, so they end before the rows of the step's model
// would.
TEST_F(EngineSparseTest, RefusesMemoryThatWasSizedForAnotherIndexer) {
  const SequenceInfo a = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{a.id, 1, 0, 2}})->status.ok());
  for (const kernels::IndexerShape other : {kernels::IndexerShape{2, 4}, {0, 0}}) {
    auto request = h_.Unsent(stream_, 1, 0, 0, 2, Rows(2, 10), 0, 2, 5);
    request->attend.sized_for = h_.model().geometry;
    request->attend.sized_indexer = other;
    h_.Submit(request.get());
    h_.Run();
    const bool same = other == h_.model().indexer;
    EXPECT_EQ(request->status.ok(), same) << request->status;
    if (!same) {
      EXPECT_EQ(DetailOf(request->status).reason, "step_reused");
    }
  }
}

TEST(EngineDenseModelTest, RefusesLists) {
  EngineHarness h;
  const StreamId stream = h.core().steps().OpenStream(h.tenant());
  const SequenceInfo a = h.Open();
  ASSERT_TRUE(h.Begin(stream, 1, {{a.id, 1, 0, 1}})->status.ok());
  auto request = h.Unsent(stream, 1, 0, 0, 1, Rows(1, 10), 0, 2, 5);
  const int32_t begin[] = {0, 1}, list[] = {0};
  request->attend.list_begin = begin;
  request->attend.list = list;
  h.Submit(request.get());
  EXPECT_EQ(request->status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(request->status).field, "attend.lists");
}

}  // namespace
}  // namespace mla::scheduler
