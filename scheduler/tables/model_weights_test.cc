// Weights that are given back, read, and withdrawn with the model that was made for them.
#include <algorithm>
#include <span>
#include <vector>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/testing/tiny_model_fixture.h"

namespace mla::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using ModelWeightsTest = TinyModelTest;

// An upload that broke off leaves nothing: no charge, no memory of the backend.
TEST_F(ModelWeightsTest, DiscardingTheOnlyUploadGivesTheMemoryBack) {
  const auto used = [&] {
    return h_.core().tenants().Usage(h_.tenant()).used[Resource::kWeightBytes];
  };
  ASSERT_TRUE(Load(1, 0, 0, 2).ok());
  EXPECT_EQ(used(), model_->spec->layers * model_->spec->layer_weight_bytes());
  table_.weights().Discard(*model_, 1);
  EXPECT_EQ(used(), 0);
  // Heads of another upload keep it.
  ASSERT_TRUE(Load(2, 0, 0, 1).ok());
  ASSERT_TRUE(Load(3, 1, 0, 2).ok());
  table_.weights().Discard(*model_, 3);
  EXPECT_GT(used(), 0);
  EXPECT_THAT(table_.weights().Commit(*model_, 2), ElementsAre(0, 1));
  table_.weights().Discard(*model_, 4);
  EXPECT_GT(used(), 0);
  ASSERT_TRUE(Load(5, 0, 1, 1).ok());
  ASSERT_TRUE(Load(5, 1, 0, 2).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 5), IsEmpty());
}

TEST_F(ModelWeightsTest, CompleteWeightsCanBeRead) {
  std::vector<kernels::Bf16> head(8 * 11);
  ASSERT_TRUE(Load(1, 0, 0, 2).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 1), ElementsAre(1));
  EXPECT_THAT(table_.AllWeights(), IsEmpty());
  EXPECT_EQ(DetailOf(table_.weights().Read(*model_, 0, 0, head)).reason, "weights_missing");
  ASSERT_TRUE(Load(2, 1, 0, 2).ok());
  EXPECT_THAT(table_.weights().Commit(*model_, 2), IsEmpty());
  ASSERT_EQ(table_.AllWeights().size(), 1u);
  EXPECT_EQ(table_.AllWeights()[0].tenant, h_.tenant());
  EXPECT_EQ(table_.AllWeights()[0].spec, model_->spec);
  // Two heads were sent together: W_UK of both, then W_UV of both.
  const std::span<const std::byte> sent(weights_);
  for (int layer = 0; layer < 2; ++layer) {
    for (size_t h = 0; h < 2; ++h) {
      ASSERT_TRUE(table_.weights().Read(*model_, layer, static_cast<int>(h), head).ok());
      const auto got = std::as_bytes(std::span(head));
      const size_t uk = 6 * 8 * 2, uv = 8 * 5 * 2;
      EXPECT_TRUE(std::ranges::equal(got.first(uk), sent.subspan(h * uk, uk)));
      EXPECT_TRUE(std::ranges::equal(got.subspan(uk), sent.subspan(2 * uk + h * uv, uv)));
    }
  }
  EXPECT_EQ(DetailOf(table_.weights().Read(*model_, 2, 0, head)).field, "chunk.layer");
  EXPECT_EQ(DetailOf(table_.weights().Read(*model_, 0, 2, head)).field, "chunk.head_begin");
  EXPECT_EQ(DetailOf(table_.weights().Read(*model_, 0, 0, std::span(head).first(87))).field,
            "weights");
  EXPECT_EQ(DetailOf(table_.weights().ReadProjected(*model_, kernels::ProjectedPart::kQueries, 0, 0,
                                                    std::as_writable_bytes(std::span(head))))
                .reason,
            "no_projected_profile");
}

TEST_F(ModelWeightsTest, WithdrawingUndoesALoneRegistration) {
  ModelSpec spec = h_.model();
  spec.id = "brought";
  ASSERT_TRUE(table_.Register(tenant_, spec).ok());
  table_.Withdraw(tenant_, "brought");
  EXPECT_EQ(table_.Find(tenant_, "brought", "model_id").status().code(),
            absl::StatusCode::kNotFound);
  table_.Withdraw(tenant_, "brought");  // nothing is there
  // Another caller counts on it by now.
  ASSERT_TRUE(table_.Register(tenant_, spec).ok());
  ASSERT_TRUE(table_.Register(tenant_, spec).ok());
  table_.Withdraw(tenant_, "brought");
  EXPECT_TRUE(table_.Find(tenant_, "brought", "model_id").ok());
}

}  // namespace
}  // namespace mla::scheduler
