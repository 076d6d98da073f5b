// Tests the exponent bytes of imported pages (KvFormat::kFp8Page) with the kernels of each GPU:
// every byte may come from another server or from an engine. A byte that stands for a scale must
// give that scale, and one above the largest scale must give NaN, which the client sees in its
// results. Hardware and its emulation could interpret the smallest scale as different numbers.
#include <algorithm>
#include <array>
#include <cmath>
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
  using Exponents = std::array<int, kLatent / 64>;  // of a row's groups

  // Returns the page that holds a row of equal values, with these exponents in place of its own.
  std::vector<std::byte> PageWith(const Exponents& exponents) const {
    const std::vector<float> sent(kWidth, 1.0f);
    std::vector<std::byte> page(static_cast<size_t>(KvPageBytes(kAt, kAt.row_bytes, kPageRows)));
    EncodeKvRow(kAt, GetParam()->fp8, sent.data(), DType::kF32, 1.0f,
                KvRowIn(kAt, page.data(), kAt.row_bytes, kPageRows, 0));
    for (size_t group = 0; group < exponents.size(); ++group) {
      page[size_t{kPageRows} * kAt.row_bytes + group] = static_cast<std::byte>(exponents[group]);
    }
    return page;
  }

  // Returns the row's values as the format defines them.
  std::vector<float> Expected(const std::vector<std::byte>& page) const {
    std::vector<float> values(kWidth);
    const std::byte* const first = page.data();
    DecodeKvRow(kAt, GetParam()->fp8, 1.0f, KvRowIn(kAt, first, kAt.row_bytes, kPageRows, 0),
                values.data());
    return values;
  }

  static absl::Status Import(HipBackend& backend, const std::vector<std::byte>& page) {
    auto host = backend.AllocateHost(page.size());
    if (!host.ok()) return host.status();
    std::copy(page.begin(), page.end(), (*host)->bytes().begin());
    const PageTransfer transfer{0, static_cast<int64_t>(page.size()), (*host)->bytes().data()};
    Launch launch;
    launch.page_writes = {&transfer, 1};
    absl::Status s = backend.Submit(0, launch);
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

TEST_P(PageScalesTest, EveryExponentIsItsScaleOrNaN) {
  control_->arch = GetParam()->arch.data();
  HipBackendOptions options = Options();
  options.watchdog_ms = 600000;
  if (GetParam() == &kSm90Traits) {
    options.images.push_back(Image("sm_90", kImage90));
    options.vendor = Vendor::kNvidia;
  }
  const auto backend = HipBackend::Create(options).value();
  ASSERT_TRUE(backend->Configure(conformance::WindowLimits()).ok());
  constexpr Exponents kImported[] = {
      {0, 0, 0, 0, 0, 0, 0},
      {0, 1, 27, 120, 127, 198, 199},
      {1, 1, 1, 1, 1, 1, 1},
      {199, 199, 199, 199, 199, 199, 199},
      {127, 127, 127, 201, 127, 127, 127},
      {254, 127, 127, 127, 127, 127, 127},
      {127, 127, 127, 127, 127, 127, 255},
      {255, 255, 255, 255, 255, 255, 255},
  };
  int32_t finite = 0, nan = 0;
  for (const Exponents& exponents : kImported) {
    const std::vector<std::byte> page = PageWith(exponents);
    ASSERT_EQ(Import(*backend, page), absl::OkStatus());
    std::vector<float> out(kWidth, 7.0f);
    ASSERT_EQ(Attend(*backend, &out), absl::OkStatus());
    const std::vector<float> expected = Expected(page);
    const auto is_nan = [](float x) { return std::isnan(x); };
    if (std::none_of(expected.begin(), expected.end(), is_nan)) {
      EXPECT_EQ(out, expected) << exponents[0] << ", " << exponents[3];
      ++finite;
    } else {  // the row's logit is NaN, and so are all outputs
      EXPECT_TRUE(std::all_of(out.begin(), out.end(), is_nan)) << exponents[0];
      ++nan;
    }
  }
  EXPECT_EQ(finite, 4);
  EXPECT_EQ(nan, 4);
}

INSTANTIATE_TEST_SUITE_P(Architectures, PageScalesTest,
                         ::testing::Values(&kGfx950Traits, &kGfx942Traits, &kSm90Traits),
                         [](const auto& arch) { return std::string(arch.param->arch); });

}  // namespace
}  // namespace mla::kernels::hip
