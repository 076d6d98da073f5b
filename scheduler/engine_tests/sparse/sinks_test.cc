// Sinks of models with a window: which may be set, when, and which rows wait for them.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/testing/engine_harness.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::scheduler {
namespace {

using ::testing::ElementsAre;
using testing::EngineHarness;
using ::testing::IsEmpty;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class SinksTest : public ::testing::Test {
 protected:
  static ModelSpec Spec(const std::string& id, bool needs_sinks) {
    ModelSpec spec = testing::TinyModel();  // two layers and two heads
    spec.id = id;
    spec.attention = kernels::AttentionKind::kWindow;
    spec.geometry.nope_dim = spec.geometry.v_dim = 0;
    spec.page_size = 4;
    spec.window = 4;
    spec.ratios = {0, 2};
    spec.needs_sinks = needs_sinks;
    return spec;
  }
  Model* Register(const ModelSpec& spec) {
    return *table_.Register(h_.core().FindTenant(h_.tenant()), spec);
  }
  absl::Status Set(std::vector<float> sinks, SinkSlice at = {}) {
    return table_.SetSinks(*model_, at, sinks, "sinks");
  }

  // A device that waits for its tensors itself.
  static testing::HarnessOptions Options() {
    auto backend =
        std::make_unique<testing::FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
    backend->SetWaitsForWords();
    testing::HarnessOptions options{testing::TinyLimits(), Spec("first", true), std::move(backend)};
    options.limits.ahead_us = 200;
    return options;
  }

  EngineHarness h_{Options()};
  ModelTable& table_ = h_.core().models();
  Model* model_ = Register(Spec("first", true));
};

TEST_F(SinksTest, SlicesAndNumbersAreChecked) {
  const auto field = [&](std::vector<float> sinks, SinkSlice at = {}) {
    EXPECT_EQ(Set(sinks, at).code(), absl::StatusCode::kInvalidArgument);
    return DetailOf(Set(std::move(sinks), at)).field;
  };
  EXPECT_EQ(field({}), "sinks");
  EXPECT_EQ(field({1, 2, 3}), "sinks");
  EXPECT_EQ(field({1, 2, 3, 4, 5}), "sinks");
  EXPECT_EQ(field({1, 2, 3, std::nanf("")}), "sinks[3]");
  EXPECT_EQ(field({1, kInfinity, 3, 4}), "sinks[1]");
  EXPECT_EQ(field({1}, {2, 1, 0, 1}), "layer_begin");
  EXPECT_EQ(field({1}, {-1, 1, 0, 1}), "layer_begin");
  EXPECT_EQ(field({1, 2}, {1, 2, 0, 1}), "layer_count");
  EXPECT_EQ(field({1}, {0, 1, 2, 1}), "head_begin");
  EXPECT_EQ(field({1, 2}, {0, 1, 1, 2}), "head_count");
  EXPECT_EQ(field({1}, {0, 1, 0, 0}), "sinks");
  EXPECT_THAT(table_.LayersWithoutSinks(*model_), ElementsAre(0, 1));
  ModelSpec dense = testing::TinyModel();
  dense.id = "dense";
  const float one = 1;
  EXPECT_EQ(DetailOf(table_.SetSinks(*Register(dense), {}, {&one, 1}, "sinks")).reason,
            "wrong_count");
  dense.id = "other";
  dense.needs_sinks = true;
  EXPECT_EQ(DetailOf(table_.Register(model_->tenant, dense).status()).field, "model.needs_sinks");
}

TEST_F(SinksTest, EveryLayerAndHeadMustCome) {
  EXPECT_FALSE(table_.Info(*model_).sinks_complete);
  ASSERT_EQ(Set({3, 4}, {1, 1, 0, 0}), absl::OkStatus());
  EXPECT_THAT(table_.LayersWithoutSinks(*model_), ElementsAre(0));
  model_->sequences = 1;  // rows of open sequences wait for missing sinks
  ASSERT_EQ(Set({1}, {0, 1, 0, 1}), absl::OkStatus());
  EXPECT_EQ(DetailOf(Set({7, 3}, {0, 0, 0, 1})).reason, "sinks_differ");
  EXPECT_THAT(table_.LayersWithoutSinks(*model_), ElementsAre(0));
  ASSERT_EQ(Set({-kInfinity}, {0, 1, 1, 1}), absl::OkStatus());
  EXPECT_THAT(table_.LayersWithoutSinks(*model_), IsEmpty());
  EXPECT_TRUE(table_.Info(*model_).sinks_complete);
  EXPECT_THAT(model_->sinks, ElementsAre(1, -kInfinity, 3, 4));
}

TEST_F(SinksTest, ARepeatLeavesThemWhereLaunchesReadThem) {
  ASSERT_EQ(Set({1, 2, 3, 4}), absl::OkStatus());
  model_->sequences = 1;
  const float* const before = model_->sinks.data();
  EXPECT_EQ(Set({1, 2, 3, 4}), absl::OkStatus());
  EXPECT_EQ(Set({2, 4}, {0, 0, 1, 0}), absl::OkStatus());
  EXPECT_EQ(model_->sinks.data(), before);
  const absl::Status other = Set({1, 2, 3, 5});
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(DetailOf(other).reason, "sinks_differ");
  EXPECT_THAT(model_->sinks, ElementsAre(1, 2, 3, 4));
  model_->sequences = 0;
  EXPECT_EQ(Set({1, 2, 3, 5}), absl::OkStatus());
  EXPECT_EQ(model_->sinks[3], 5);
}

TEST_F(SinksTest, AModelThatNeedsNoneHasNoneUntilSomeCome) {
  model_ = Register(Spec("second", false));
  EXPECT_TRUE(table_.Info(*model_).sinks_complete);
  ASSERT_EQ(Set({2}, {1, 1, 1, 1}), absl::OkStatus());
  EXPECT_THAT(model_->sinks, ElementsAre(-kInfinity, -kInfinity, -kInfinity, 2));
  ASSERT_EQ(Set(std::vector<float>(4, -kInfinity)), absl::OkStatus());
  EXPECT_THAT(model_->sinks, IsEmpty());
  model_->sequences = 1;
  EXPECT_EQ(Set(std::vector<float>(4, -kInfinity)), absl::OkStatus());
  EXPECT_EQ(DetailOf(Set({2}, {1, 1, 1, 1})).reason, "sinks_differ");
  model_->sequences = 0;
}

TEST_F(SinksTest, ModelsThatShareContentsHaveTheirOwn) {
  ModelSpec spec = Spec("second", true);
  spec.weights_digest = std::string(kWeightsDigestBytes, 'd');
  model_ = Register(spec);
  ASSERT_EQ(Set({1, 2, 3, 4}), absl::OkStatus());
  ASSERT_EQ(table_.Unregister(model_->tenant, "first"), absl::OkStatus());
  spec.id = "third";
  const Model* const third = Register(spec);
  EXPECT_EQ(third->contents, model_->contents);
  EXPECT_FALSE(third->sinks_complete);
  model_->sequences = 1;
  ASSERT_EQ(table_.SetSinks(*Register(spec), {}, std::vector<float>{5, 6, 7, 8}, "sinks"),
            absl::OkStatus());
  EXPECT_THAT(model_->sinks, ElementsAre(1, 2, 3, 4));
  model_->sequences = 0;
}

// Rows with and without queries, and such as go ahead of their data.
TEST_F(SinksTest, RowsWaitForWhatIsMissing) {
  const StreamId stream = h_.core().steps().OpenStream(h_.tenant());
  const SequenceInfo info = h_.Open();
  ASSERT_TRUE(h_.Begin(stream, 1, {{info.id, info.epoch, 0, 1}})->status.ok());
  const std::vector<testing::Row> rows = {testing::MakeRow(1, h_.model().geometry.kv_row_dim())};
  const auto attend = [&](Profile profile, uint32_t* ready) {
    const int heads = profile == Profile::kAppendOnly ? 0 : 2;
    auto request = h_.Unsent(stream, 1, 0, 0, 1, rows, 0, heads, 1);
    request->attend.profile = profile;
    if (ready != nullptr) request->attend.ready = {ready, 1};
    h_.Submit(request.get());
    h_.Run();
    EXPECT_EQ(request->answers, 1);
    return std::pair(request->status.code(), request->detail.reason);
  };
  uint32_t not_yet = 0;
  const std::pair refused(absl::StatusCode::kFailedPrecondition, std::string("sinks_missing"));
  EXPECT_EQ(attend(Profile::kAbsorbed, nullptr), refused);
  EXPECT_EQ(attend(Profile::kAppendOnly, nullptr), refused);
  EXPECT_EQ(attend(Profile::kAbsorbed, &not_yet), refused);
  ASSERT_EQ(Set({3, 4}, {1, 1, 0, 0}), absl::OkStatus());
  EXPECT_EQ(attend(Profile::kAbsorbed, nullptr), refused) << "layer 0 has none";
  ASSERT_EQ(Set({1, 2}, {0, 1, 0, 0}), absl::OkStatus());
  EXPECT_EQ(attend(Profile::kAbsorbed, nullptr).first, absl::StatusCode::kOk);
  EXPECT_TRUE(h_.Abort(stream, 1)->status.ok());
}

}  // namespace
}  // namespace mla::scheduler
