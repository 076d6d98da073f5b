// Steps over rows of every format: results are attention over the rows as the format stores them.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/formats/kv_format.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

using testing::EngineHarness;
using testing::kTolerance;
using testing::Pointers;
using testing::Row;
using testing::Rows;

constexpr float kScales[] = {0.0625f, 0.01f};

class EngineFormatsTest : public ::testing::TestWithParam<kernels::KvFormat> {
 protected:
  static testing::HarnessOptions Options() {
    testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr, nullptr};
    options.model.kv_format = GetParam();
    return options;
  }
  absl::Status SetScales() {
    ModelTable& models = h_.core().models();
    return models.SetScales(
        **models.Find(h_.core().FindTenant(h_.tenant()), h_.model().id, "model_id"), kScales,
        "scales");
  }
  static bool NeedsScales() { return GetParam() == kernels::KvFormat::kFp8Tensor; }

  // The rows of a layer as the pool stores them.
  std::vector<Row> Kept(std::vector<Row> rows, int layer) const {
    constexpr auto kKind = kernels::Fp8Kind::kE4m3Fn;
    const kernels::Geometry& g = h_.model().geometry;
    const kernels::KvRowLayout layout =
        kernels::MakeKvRowLayout(GetParam(), g.kv_lora_rank, g.rope_dim);
    std::vector<std::byte> bytes(static_cast<size_t>(layout.row_bytes + layout.page_scales_bytes));
    const std::byte* const first = bytes.data();
    for (Row& row : rows) {
      kernels::EncodeKvRow(layout, kKind, row.data(), kernels::DType::kF32, kScales[layer],
                           KvRowIn(layout, bytes.data(), layout.row_bytes, 1, 0));
      kernels::DecodeKvRow(layout, kKind, kScales[layer],
                           KvRowIn(layout, first, layout.row_bytes, 1, 0), row.data());
    }
    return rows;
  }

  EngineHarness h_{Options()};
};

TEST_P(EngineFormatsTest, AStepComputesOnWhatRowsStandFor) {
  if (NeedsScales()) {
    ASSERT_TRUE(SetScales().ok());
  }
  const SequenceInfo seq = h_.Open();
  const StreamId stream = h_.core().steps().OpenStream(h_.tenant());
  for (StepId step = 1; step <= 2; ++step) {
    const int before = step == 1 ? 0 : 5;
    ASSERT_TRUE(h_.Begin(stream, step, {{seq.id, 1, before, 5}})->status.ok());
    for (int layer = 0; layer < 2; ++layer) {
      auto attend = h_.Attend(stream, step, layer, 0, Rows(5, 10 * step + layer), 5);
      h_.Run();
      ASSERT_TRUE(attend->status.ok()) << attend->status;
      const std::vector<Row> first = Kept(Rows(5, 10 + layer), layer);
      const std::vector<Row> second = Kept(Rows(5, 20 + layer), layer);
      const bool both = step == 2;
      EXPECT_LT(h_.Error(*attend, both ? Pointers(first, second) : Pointers(first),
                         {before + 1, before + 2, before + 3, before + 4, before + 5}, 5),
                kTolerance);
    }
    ASSERT_TRUE(h_.End(stream, step)->status.ok());
  }
}

TEST_P(EngineFormatsTest, RowsWaitForTheScalesThatTheyNeed) {
  const SequenceInfo seq = h_.Open();
  const StreamId stream = h_.core().steps().OpenStream(h_.tenant());
  ASSERT_TRUE(h_.Begin(stream, 1, {{seq.id, 1, 0, 1}})->status.ok());
  auto early = h_.Attend(stream, 1, 0, 0, Rows(1, 10), 5);
  h_.Run();
  if (!NeedsScales()) {
    EXPECT_TRUE(early->status.ok()) << early->status;
    return;
  }
  EXPECT_EQ(early->status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(early->detail.reason, "scales_missing");
  ASSERT_TRUE(SetScales().ok()) << "an open sequence without rows does not hinder";
  auto attend = h_.Attend(stream, 1, 0, 0, Rows(1, 10), 5);
  h_.Run();
  EXPECT_TRUE(attend->status.ok()) << attend->status;
}

INSTANTIATE_TEST_SUITE_P(Formats, EngineFormatsTest, ::testing::ValuesIn(kernels::kKvFormats),
                         [](const auto& info) { return std::string(kernels::Name(info.param)); });

}  // namespace
}  // namespace mla::scheduler
