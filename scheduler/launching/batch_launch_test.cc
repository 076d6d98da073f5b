// When the records of a launch may be taken for another layer.
#include "scheduler/launching/batch_launch.h"

#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/types/input_fragments.h"
#include "scheduler/model.h"
#include "scheduler/tables/model_table.h"

namespace mla::scheduler {
namespace {

constexpr uint64_t kVersion = 7;

class TestRequest final : public StreamRequest {
 public:
  void Done(const absl::Status&) override {}
};

class RecordsOriginTest : public ::testing::Test {
 protected:
  RecordsOriginTest() {
    model_.spec = std::make_shared<ModelSpec>();
    model_.expanded_min_rows = model_.expanded_min_rows_f32 = 100;
    for (Step* step : {&step_, &other_step_}) {
      step->model = &model_;
      step->total_rows = 8;
    }
    request_.engine.step = &step_;
    request_.engine.rows_launched = 8;
    AttendArgs& args = request_.attend;
    args.row_count = 8;
    args.num_heads = 16;
    args.profile = Profile::kExpanded;
    args.has_kv = true;
    batch_.requests = {&request_};
  }
  // Returns true if the noted records match the present batch.
  bool Matches() const { return origin_.Matches(batch_, kVersion); }
  ModelSpec* spec() { return const_cast<ModelSpec*>(model_.spec.get()); }

  Model model_;
  Step step_, other_step_;
  TestRequest request_, other_;
  Batch batch_;
  RecordsOrigin origin_;
};

TEST_F(RecordsOriginTest, TheSameRowsMatchAtAnyLayer) {
  EXPECT_FALSE(Matches());
  origin_.Note(batch_, kVersion);
  EXPECT_TRUE(Matches());
  request_.attend.layer = 3;
  EXPECT_TRUE(Matches());
  other_.engine = request_.engine;
  other_.attend = request_.attend;
  batch_.requests = {&other_};  // another message of the same rows
  EXPECT_TRUE(Matches());
  EXPECT_FALSE(origin_.Matches(batch_, kVersion + 1));
  origin_.Forget();
  EXPECT_FALSE(Matches());
}

TEST_F(RecordsOriginTest, OtherRowsDoNotMatch) {
  origin_.Note(batch_, kVersion);
  const StreamRequest::EngineFields engine = request_.engine;
  const AttendArgs attend = request_.attend;
  const auto differs = [&](auto&& change) {
    change();
    const bool matches = Matches();
    request_.engine = engine;
    request_.attend = attend;
    return !matches && Matches();
  };
  EXPECT_TRUE(differs([&] { request_.engine.step = &other_step_; }));
  EXPECT_TRUE(differs([&] { request_.engine.rows_done = 1; }));
  EXPECT_TRUE(differs([&] { request_.engine.rows_launched = 7; }));
  EXPECT_TRUE(differs([&] { request_.attend.row_begin = 1; }));
  EXPECT_TRUE(differs([&] { request_.attend.head_offset = 16; }));
  EXPECT_TRUE(differs([&] { request_.attend.num_heads = 8; }));
  EXPECT_TRUE(differs([&] { request_.attend.profile = Profile::kAbsorbed; }));
  EXPECT_TRUE(differs([&] { request_.attend.q_dtype = kernels::DType::kF32; }));
  EXPECT_TRUE(differs([&] { request_.attend.has_kv = false; }));
  batch_.key.o_dtype = kernels::DType::kF32;
  EXPECT_FALSE(Matches());
  batch_.key = BatchKey();
  model_.expanded_min_rows = 4;  // its segments would take the other form
  EXPECT_FALSE(Matches());
}

// Their records depend on more than the rows.
TEST_F(RecordsOriginTest, SomeBatchesAreNeverNoted) {
  const auto noted = [&] {
    origin_.Note(batch_, kVersion);
    return Matches();
  };
  EXPECT_TRUE(noted());
  request_.engine.repeat = true;
  EXPECT_FALSE(noted());
  request_.engine.repeat = false;
  const kernels::InputFragment fragment{};
  request_.attend.q_fragments = {&fragment, 1};
  EXPECT_FALSE(noted());
  request_.attend.q_fragments = {};
  const int32_t begins[9] = {};
  request_.attend.list_begin = begins;
  EXPECT_FALSE(noted());
  request_.attend.list_begin = nullptr;
  spec()->indexer.heads = 64;
  EXPECT_FALSE(noted());
  spec()->indexer.heads = 0;
  batch_.runs.resize(1);
  EXPECT_FALSE(noted());
  batch_.runs.clear();
  batch_.slices.resize(1);
  EXPECT_FALSE(noted());
  batch_.slices.clear();
  batch_.requests.push_back(&other_);
  EXPECT_FALSE(noted());
  batch_.requests.pop_back();
  EXPECT_TRUE(noted());
}

}  // namespace
}  // namespace mla::scheduler
