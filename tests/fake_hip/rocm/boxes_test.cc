// Tests what decides whether KV rows come in boxes, and what comes with the last box of a tile.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

constexpr int32_t kHeads = 128, kRows = 64;
constexpr size_t kOutputs = size_t{kHeads} * 512;  // of a query row

// Runs two query rows, whose segments see the first seen[i] of 64 rows of ones. Rows that neither
// sees hold a NaN next to the ones. A segment that sees no row names pages of another size.
absl::Status Attend(HipBackend& backend, KvFormat format, std::array<int32_t, 2> seen,
                    std::vector<float>* out) {
  std::vector<Bf16> rows(size_t{kRows} * 576, ToBf16(1.0f));
  for (auto row = static_cast<size_t>(std::max(seen[0], seen[1])); row < kRows; ++row) {
    rows[row * 576 + 7] = ToBf16(std::numeric_limits<float>::quiet_NaN());
  }
  const std::vector<Bf16> q(size_t{2} * kHeads * 576, 0);
  LaunchLayout layout(backend, 0);
  const auto kv = layout.Input(rows.data(), std::ssize(rows) * 2);
  const auto from = layout.Input(q.data(), std::ssize(q) * 2);
  const auto to = layout.Output(out->data(), std::ssize(*out) * 4);
  if (!kv.ok() || !from.ok() || !to.ok()) return absl::InternalError("no room");
  const int64_t stride = MakeKvRowLayout(format, 512, 64).row_bytes;
  AppendRecord append{*kv, DType::kBf16, 576, 0, 0, stride, kRows, 0, kRows, 576};
  append.rope_dim = 64;
  append.format = format;
  SegmentRecord segments[2] = {};
  WorkInfo work[2] = {};
  for (int32_t i = 0; i < 2; ++i) {
    SegmentRecord& s = segments[i];
    s.q = static_cast<const Bf16*>(*from) + i * kHeads * 576;
    s.o = static_cast<float*>(*to) + static_cast<size_t>(i) * kOutputs;
    s.q_row_stride = kHeads * 576;
    s.q_head_stride = 576;
    s.o_row_stride = kHeads * 512;
    s.o_head_stride = 512;
    s.row_stride = stride;
    s.kv_rows = seen[static_cast<size_t>(i)];
    s.page_size = s.kv_rows > 0 ? kRows : 3;
    s.q_rows = 1;
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
  launch.absorbed.desc.kv_format = format;
  if (format != KvFormat::kBf16) launch.absorbed.desc.products = DType::kFp8E4m3;
  launch.absorbed.segments = segments;
  launch.absorbed.plan = {indptr, work, reduce, {}, {}, 0, NextPlanGeneration(), {}};
  absl::Status s = backend.Submit(0, launch);
  return s.ok() ? backend.Wait(0).status() : s;
}

std::set<std::string> launched;  // kernels

class BoxesTest : public BackendOnFakeTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(BackendOnFakeTest::SetUp());
    HipBackendOptions options = Sm90Options();
    options.watchdog_ms = 600000;
    control_->on_launch = [](const char* kernel) { launched.insert(kernel); };
    auto backend = HipBackend::Create(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    BackendLimits limits = Limits();
    limits.launch_packed_rows = 256;
    limits.staging_in_bytes = limits.staging_out_bytes = 1 << 20;
    ASSERT_TRUE(backend_->Configure(limits).ok());
  }
  void TearDown() override {
    control_->on_launch = nullptr;
    backend_.reset();
    BackendOnFakeTest::TearDown();
  }

  std::unique_ptr<HipBackend> backend_;
};

// A segment that sees no KV rows decides nothing about the others by what it says of its pages.
TEST_F(BoxesTest, EmptySegmentsDoNotKeepOthersRowsFromComingInBoxes) {
  for (const int32_t seen : {kRows, 0}) {
    std::vector<float> want(2 * kOutputs, 0.0f), got(want.size(), 7.0f);
    std::fill_n(want.begin(), kOutputs, seen > 0 ? 1.0f : 0.0f);
    launched.clear();
    EXPECT_EQ(Attend(*backend_, KvFormat::kBf16, {seen, 0}, &got), absl::OkStatus());
    EXPECT_TRUE(got == want) << seen;
    EXPECT_EQ(launched.count("mla_attend_64_boxes"), seen > 0 ? 1u : 0u);
  }
}

// Rows after the end have the scales of the rows before it, so over fp8_row their values alone are
// wrong.
TEST_F(BoxesTest, RowsAfterTheEndDoNotCountWhateverTheyHold) {
  for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp8Tensor, KvFormat::kFp8Row}) {
    launched.clear();
    std::vector<float> got(2 * kOutputs, 7.0f);
    ASSERT_EQ(Attend(*backend_, format, {40, 40}, &got), absl::OkStatus()) << Name(format);
    for (const float x : got) ASSERT_NEAR(x, 1.0f, 1e-3f) << Name(format);
    const std::string codes = absl::StrCat("_", Name(format), "_products");
    EXPECT_EQ(launched.count(
                  absl::StrCat("mla_attend_64", format == KvFormat::kBf16 ? "" : codes, "_boxes")),
              1u);
  }
}

// An operator sees how rows come, and the driver's error if it refuses a map.
TEST_F(BoxesTest, StatesWhyRowsDoNotCome) {
  const HipBackendOptions options = Sm90Options();
  for (const auto& [wide, narrow] : {std::pair(true, true), {false, true}, {true, false}}) {
    control_->encodes_maps = wide;
    control_->encodes_narrow_maps = narrow;
    auto backend = HipBackend::Create(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    std::string text;
    for (const BackendNote& note : (*backend)->Info().notes) {
      if (note.name == "boxes") text += note.text;
    }
    EXPECT_EQ(text, wide && narrow
                        ? "the copy engine brings KV rows"
                        : "KV rows come by copies of 16 bytes: GPU encode tensor map: invalid "
                          "argument (1)");
  }
  control_->encodes_maps = control_->encodes_narrow_maps = true;
}

}  // namespace
}  // namespace mla::kernels::hip
