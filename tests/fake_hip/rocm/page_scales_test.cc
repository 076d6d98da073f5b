// Tests the smallest scale of a page's rows with the kernels of AMD. Hardware and its emulation
// could interpret this scale as different numbers.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "kernels/formats/kv_format.h"
#include "kernels/types/window.h"
#include "tests/conformance/sparse/window_workload.h"
#include "tests/conformance/suite/plan_builder.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

constexpr int32_t kLatent = 448, kRope = 64, kWidth = kLatent + kRope;
constexpr int32_t kPageRows = 16;
constexpr KvRowLayout kAt = MakeKvRowLayout(KvFormat::kFp8Page, kLatent, kRope);

class PageScalesTest : public BackendOnFakeTest,
                       public ::testing::WithParamInterface<const ArchTraits*> {
 protected:
  // Returns one row of equal values, as this architecture's pool stores it with all exponents 0.
  std::vector<float> Expected() const {
    const std::vector<float> sent(kWidth, 1.0f);
    std::vector<std::byte> page(static_cast<size_t>(kAt.row_bytes + kAt.page_scales_bytes));
    EncodeKvRow(kAt, GetParam()->fp8, sent.data(), DType::kF32, 1.0f,
                KvRowIn(kAt, page.data(), kAt.row_bytes, 1, 0));
    std::fill(page.begin() + kAt.row_bytes, page.end(), std::byte{0});
    std::vector<float> values(kWidth);
    const std::byte* const first = page.data();
    DecodeKvRow(kAt, GetParam()->fp8, 1.0f, KvRowIn(kAt, first, kAt.row_bytes, 1, 0),
                values.data());
    return values;
  }

  absl::Status Store(HipBackend& backend) {
    const std::vector<float> row(kWidth, 1.0f);
    LaunchLayout layout(backend, 0);
    auto kv = layout.Input(row.data(), kWidth * 4);
    if (!kv.ok()) return kv.status();
    AppendRecord record{};
    record.kv = *kv;
    record.dtype = DType::kF32;
    record.kv_row_stride = record.row_dim = kWidth;
    record.rope_dim = kRope;
    record.kv_scale = 1.0f;
    record.row_stride = kAt.row_bytes;
    record.page_size = kPageRows;
    record.rows = 1;
    record.format = KvFormat::kFp8Page;
    const TableRange all{0, 1};
    Launch launch;
    launch.inputs = layout.inputs();
    launch.page_tables = {&page_, 1};
    launch.table_changes = {&all, 1};
    launch.appends = {&record, 1};
    absl::Status s = backend.Submit(0, launch);
    if (s.ok()) s = backend.Wait(0).status();
    if (!s.ok()) return s;
    const PageRange exponents{int64_t{kPageRows} * kAt.row_bytes, kAt.page_scales_bytes};
    Launch zeros;
    zeros.pages = {&exponents, 1};
    s = backend.Submit(0, zeros);
    return s.ok() ? backend.Wait(0).status() : s;
  }

  // Runs a query row that attends to that row alone, so the output is its values.
  absl::Status Attend(HipBackend& backend, std::vector<float>* out) {
    const std::vector<Bf16> q(kWidth, 0);
    LaunchLayout layout(backend, 0);
    auto from = layout.Input(q.data(), kWidth * 2);
    auto to = layout.Output(out->data(), kWidth * 4);
    if (!from.ok() || !to.ok()) return from.ok() ? to.status() : from.status();
    SegmentRecord segment{};
    segment.q = *from;
    segment.o = *to;
    segment.q_head_stride = segment.o_head_stride = kWidth;
    segment.q_row_stride = segment.o_row_stride = kWidth;
    segment.row_stride = kAt.row_bytes;
    segment.page_size = kPageRows;
    segment.q_rows = segment.kv_rows = segment.num_heads = 1;
    segment.weights_slot = -1;
    segment.softmax_scale = 0.05f;
    segment.causal = 1;
    segment.kv_scale = 1.0f;
    const WindowRecord window{1, 0, 0, 0, kAt.row_bytes, kPageRows, nullptr};
    AttentionDesc desc;
    desc.geometry = {1, kLatent, kRope, 0, 0};
    desc.attention = AttentionKind::kWindow;
    desc.kv_format = desc.entry_format = KvFormat::kFp8Page;
    desc.o_dtype = DType::kF32;
    conformance::EvenPlanBuilder even;
    const conformance::PlanShape shape{1, 1, 1, false};
    auto plan = even.Build({&shape, 1}, backend.Traits(desc));
    if (!plan.ok()) return plan.status();
    const TableRange all{0, 1};
    Launch launch;
    launch.inputs = layout.inputs();
    launch.outputs = layout.outputs();
    launch.page_tables = {&page_, 1};
    launch.table_changes = {&all, 1};
    launch.absorbed.desc = desc;
    launch.absorbed.segments = {&segment, 1};
    launch.absorbed.windows = {&window, 1};
    launch.absorbed.plan = *plan;
    absl::Status s = backend.Submit(0, launch);
    return s.ok() ? backend.Wait(0).status() : s;
  }

 private:
  const uint32_t page_ = 0;
};

TEST_P(PageScalesTest, ExponentZeroIsAScaleAndNotZero) {
  control_->arch = GetParam()->arch.data();
  HipBackendOptions options = Options();
  options.watchdog_ms = 600000;
  const auto backend = HipBackend::Create(options).value();
  ASSERT_TRUE(backend->Configure(conformance::WindowLimits()).ok());
  ASSERT_TRUE(Store(*backend).ok());
  std::vector<float> out(kWidth, 7.0f);
  const absl::Status attended = Attend(*backend, &out);
  ASSERT_TRUE(attended.ok()) << attended;
  const std::vector<float> expected = Expected();
  ASSERT_GT(expected[0], 0.0f);
  EXPECT_EQ(out, expected);
}

INSTANTIATE_TEST_SUITE_P(Architectures, PageScalesTest,
                         ::testing::Values(&kGfx950Traits, &kGfx942Traits),
                         [](const auto& arch) { return std::string(arch.param->arch); });

}  // namespace
}  // namespace mla::kernels::hip
