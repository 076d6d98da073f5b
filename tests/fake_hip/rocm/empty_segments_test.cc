// Tests launches with segments that see no KV rows. What such a segment says of its pages decides
// nothing about the other segments.
#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

class EmptySegmentsTest : public BackendOnFakeTest {};

std::set<std::string> launched;  // kernels

// Runs two query rows: the first one sees `seen` rows of ones, and the second sees none. The second
// one's segment names pages of another size.
absl::Status AttendToOneOfTwo(HipBackend& backend, int32_t seen, std::vector<float>* out) {
  constexpr int32_t kHeads = 128;
  const std::vector<Bf16> rows(size_t{64} * 576, ToBf16(1.0f)), q(size_t{2} * kHeads * 576, 0);
  LaunchLayout layout(backend, 0);
  const auto kv = layout.Input(rows.data(), std::ssize(rows) * 2);
  const auto from = layout.Input(q.data(), std::ssize(q) * 2);
  const auto to = layout.Output(out->data(), std::ssize(*out) * 4);
  if (!kv.ok() || !from.ok() || !to.ok()) return absl::InternalError("no room");
  const AppendRecord append{*kv, DType::kBf16, 576, 0, 0, 1152, 64, 0, 64, 576};
  SegmentRecord segments[2] = {};
  WorkInfo work[2] = {};
  for (int32_t i = 0; i < 2; ++i) {
    SegmentRecord& s = segments[i];
    s.q = static_cast<const Bf16*>(*from) + i * kHeads * 576;
    s.o = static_cast<float*>(*to) + i * kHeads * 512;
    s.q_row_stride = kHeads * 576;
    s.q_head_stride = 576;
    s.o_row_stride = kHeads * 512;
    s.o_head_stride = 512;
    s.row_stride = 1152;
    s.page_size = i == 0 ? 64 : 3;
    s.q_rows = 1;
    s.kv_rows = i == 0 ? seen : 0;
    s.num_heads = kHeads;
    s.weights_slot = -1;
    s.softmax_scale = s.kv_scale = 1.0f;
    s.causal = 1;
    work[i] = {i, kUnsplit, 0, 1, 0, s.kv_rows, 0, PackHeads(0, kHeads)};
  }
  const uint32_t page = 0;
  const TableRange table{0, 1};
  const int32_t indptr[] = {0, 1, 2}, reduce[] = {0};
  Launch launch;
  launch.inputs = layout.inputs();
  launch.outputs = layout.outputs();
  launch.page_tables = {&page, 1};
  launch.table_changes = {&table, 1};
  launch.appends = {&append, 1};
  launch.absorbed.desc.geometry = {kHeads, 512, 64, 128, 128};
  launch.absorbed.desc.o_dtype = DType::kF32;
  launch.absorbed.segments = segments;
  launch.absorbed.plan = {indptr, work, reduce, {}, {}, 0, NextPlanGeneration(), {}};
  absl::Status s = backend.Submit(0, launch);
  return s.ok() ? backend.Wait(0).status() : s;
}

TEST_F(EmptySegmentsTest, DoNotKeepOthersRowsFromComingInBoxes) {
  control_->arch = "sm_90";
  HipBackendOptions options = Options();
  options.vendor = Vendor::kNvidia;
  options.images = {Image("sm_90", kImage90)};
  options.watchdog_ms = 600000;
  control_->on_launch = [](const char* kernel) { launched.insert(kernel); };
  auto backend = HipBackend::Create(options);
  ASSERT_TRUE(backend.ok()) << backend.status();
  BackendLimits limits = Limits();
  limits.launch_packed_rows = 256;
  limits.staging_in_bytes = limits.staging_out_bytes = 1 << 20;
  ASSERT_TRUE((*backend)->Configure(limits).ok());
  for (const int32_t seen : {64, 0}) {
    std::vector<float> want(size_t{256} * 512, 0.0f), got(want.size(), 7.0f);
    std::fill_n(want.begin(), 128 * 512, seen > 0 ? 1.0f : 0.0f);
    launched.clear();
    EXPECT_EQ(AttendToOneOfTwo(**backend, seen, &got), absl::OkStatus());
    EXPECT_TRUE(got == want) << seen;
    EXPECT_EQ(launched.count("mla_attend_64_boxes"), seen > 0 ? 1u : 0u);
  }
  control_->on_launch = nullptr;
}

}  // namespace
}  // namespace mla::kernels::hip
