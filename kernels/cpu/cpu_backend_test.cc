// Tests what conformance does not cover of the CPU backend: life cycle, refusals, slots, memory and
// costs.
#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/launch_layout.h"
#include "kernels/read_rows.h"
#include "kernels/testing/allocation_counter.h"

namespace mla::kernels {
namespace {

constexpr Geometry kGeometry = {4, 32, 16, 16, 16};
constexpr int32_t kPage = 16;

BackendLimits SmallLimits() {
  BackendLimits limits;
  limits.kv_pool_bytes = 1 << 20;
  limits.page_table_entries = 64;
  limits.weights_bytes = 4 * 32 * 32 * 2;
  limits.weights_slots = 2;
  limits.launch_slots = 2;
  limits.launch_requests = 4;
  limits.launch_rows = 64;
  limits.launch_packed_rows = 256;
  limits.partial_rows = 280;
  limits.max_o_dim = 32;
  limits.slot_workspace_bytes = 4096;
  limits.reduce_tiles = 16;
  limits.max_geometry = kGeometry;
  return limits;
}

std::unique_ptr<CpuBackend> Make(int32_t threads) {
  BackendOptions options;
  options.threads = threads;
  options.pin_threads = false;
  auto backend = CpuBackend::Create(options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  EXPECT_TRUE((*backend)->Configure(SmallLimits()).ok());
  return *std::move(backend);
}

// 64 pages, one after the other.
std::vector<uint32_t> Pages() {
  std::vector<uint32_t> pages(64);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<uint32_t>(i * 8);
  return pages;
}

// One decode step of one segment: an appended row is the only key, so the output is that row.
struct Step {
  explicit Step(float value) : kv(48, ToBf16(value)), q(4 * 48, ToBf16(0.5f)), o(4 * 32) {
    append.kv = kv.data();
    append.dtype = DType::kBf16;
    append.kv_row_stride = 48;
    append.row_stride = 96;
    append.page_size = kPage;
    append.rows = 1;
    append.row_dim = 48;
    segment.q = q.data();
    segment.o = o.data();
    segment.lse = lse;
    segment.q_row_stride = segment.q_head_stride = 48;
    segment.o_row_stride = segment.o_head_stride = 32;
    segment.lse_row_stride = segment.lse_head_stride = 1;
    segment.row_stride = 96;
    segment.page_size = kPage;
    segment.q_rows = segment.kv_rows = 1;
    segment.num_heads = 4;
    segment.weights_slot = -1;
    segment.softmax_scale = 0.25f;
    segment.causal = 1;
    work.partial_row = kUnsplit;
    work.q_end = work.kv_end = 1;
    work.heads = PackHeads(0, 4);
    params.desc.geometry = kGeometry;
    params.desc.page_size = kPage;
    params.segments = {&segment, 1};
    params.plan.work_indptr = indptr;
    params.plan.work_info = {&work, 1};
  }

  absl::Status Submit(CpuBackend& backend, int32_t slot) {
    launch.page_tables = pages;
    launch.appends = {&append, 1};
    launch.absorbed = params;
    return backend.Submit(slot, launch);
  }

  std::vector<Bf16> kv, q, o;
  float lse[4] = {};
  AppendRecord append{};
  SegmentRecord segment{};
  WorkInfo work{};
  int32_t indptr[2] = {0, 1};
  AttentionParams params;
  std::vector<uint32_t> pages = Pages();
  Launch launch;
};

// Submits a launch that has only these page ranges.
absl::Status SubmitPages(CpuBackend& backend, std::span<const PageRange> ranges) {
  Launch launch;
  launch.pages = ranges;
  absl::Status s = backend.Submit(0, launch);
  return s.ok() ? backend.Wait(0).status() : s;
}

std::vector<Bf16> ReadRow(CpuBackend& backend, const Step& step) {
  std::vector<Bf16> row(48, 7);
  EXPECT_TRUE(ReadRows(backend, 0, step.pages, step.append, row.data()).ok());
  return row;
}

TEST(CpuBackendTest, AnswersAStepThroughWaitAndThroughDone) {
  for (const int32_t threads : {1, 2, 4}) {
    const auto backend = Make(threads);
    for (const bool poll : {false, true, true, false}) {
      Step step(0.75f);
      ASSERT_TRUE(step.Submit(*backend, 0).ok());
      while (poll && !backend->Done(0)) {
      }
      const auto nanoseconds = backend->Wait(0);
      ASSERT_TRUE(nanoseconds.ok());
      EXPECT_GT(*nanoseconds, 0);
      for (const Bf16 value : step.o) EXPECT_EQ(ToFloat(value), 0.75f);
      EXPECT_NEAR(step.lse[0], 0.25 * 48 * 0.5 * 0.75, 1e-4);
    }
  }
}

// 70 pieces of one KV row each, more than are merged at a time. No query sees the last one.
TEST(CpuBackendTest, PiecesOfOneTileAreMergedByWhoeverIsFree) {
  constexpr int32_t kPieces = 70, kHeads = 4;
  for (const int32_t threads : {1, 4}) {
    const auto backend = Make(threads);
    Step step(0.0f);
    std::vector<Bf16> kv(kPieces * 48, ToBf16(0.0f));
    for (int32_t r = 0; r < kPieces; ++r) kv[static_cast<size_t>(r) * 48] = ToBf16(r % 8);
    step.append.kv = kv.data();
    step.append.rows = kPieces;
    step.segment.kv_rows = kPieces - 1;
    std::vector<WorkInfo> work;
    std::vector<int32_t> partials;
    for (int32_t i = 0; i < kPieces; ++i) {
      work.push_back(step.work);
      work.back().partial_row = i * kHeads;
      work.back().kv_begin = i;
      work.back().kv_end = i + 1;
      partials.push_back(i * kHeads);
    }
    const int32_t work_indptr[] = {0, kPieces}, reduce_indptr[] = {0, kPieces};
    ReduceTile tile{};
    tile.q_end = 1;
    tile.heads = PackHeads(0, kHeads);
    std::fill(step.q.begin(), step.q.end(), ToBf16(0.0f));
    step.params.plan.work_indptr = work_indptr;
    step.params.plan.work_info = work;
    step.params.plan.reduce_indptr = reduce_indptr;
    step.params.plan.reduce_final_map = {&tile, 1};
    step.params.plan.reduce_partial_map = partials;
    step.params.plan.partial_rows = kPieces * kHeads;
    ASSERT_TRUE(step.Submit(*backend, 0).ok());
    ASSERT_TRUE(backend->Wait(0).ok());
    double sum = 0.0;
    for (int32_t r = 0; r < kPieces - 1; ++r) sum += r % 8;
    for (int32_t head = 0; head < kHeads; ++head) {
      EXPECT_NEAR(ToFloat(step.o[static_cast<size_t>(head) * 32]), sum / (kPieces - 1), 0.01);
      EXPECT_EQ(ToFloat(step.o[static_cast<size_t>(head) * 32 + 1]), 0.0f);
      EXPECT_NEAR(step.lse[head], std::log(kPieces - 1.0), 1e-4);
    }
  }
}

TEST(CpuBackendTest, TwoLaunchesInFlightRunInOrder) {
  const auto backend = Make(2);
  for (int32_t repeat = 0; repeat < 50; ++repeat) {
    Step first(1.0f), second(2.0f);  // the second one overwrites the row that the first one reads
    ASSERT_TRUE(first.Submit(*backend, 0).ok());
    ASSERT_TRUE(second.Submit(*backend, 1).ok());
    ASSERT_TRUE(backend->Wait(1).ok());
    ASSERT_TRUE(backend->Wait(0).ok());
    EXPECT_EQ(ToFloat(first.o[5]), 1.0f);
    EXPECT_EQ(ToFloat(second.o[5]), 2.0f);
  }
}

TEST(CpuBackendTest, RangesOfPagesAreWrittenInOrder) {
  const auto backend = Make(2);
  Step step(3.0f);
  ASSERT_TRUE(step.Submit(*backend, 0).ok());
  ASSERT_TRUE(backend->Wait(0).ok());
  const PageRange ranges[] = {
      {8192, 96},        // zeros, which the fourth range copies over
      {4096, 96, 0},     // the row just appended, to where table entry 2 points
      {0, 96},           // then zeros the row itself
      {8192, 96, 4096},  // a copy of the copy
      {8192 + 94, 2},    // zeros the copy's last element
  };
  ASSERT_TRUE(SubmitPages(*backend, ranges).ok());
  EXPECT_EQ(ReadRow(*backend, step), std::vector<Bf16>(48, 0));
  step.append.page_table = 2;
  EXPECT_EQ(ToFloat(ReadRow(*backend, step)[47]), 3.0f);
  step.pages[2] = 8192 / kPageGranuleBytes;
  EXPECT_EQ(ToFloat(ReadRow(*backend, step)[46]), 3.0f);
  EXPECT_EQ(ReadRow(*backend, step)[47], 0);
}

// Pages are written before rows are appended.
TEST(CpuBackendTest, PageWorkComesFirst) {
  const auto backend = Make(2);
  Step step(3.0f);
  const PageRange zeroed{0, 96};
  step.launch.pages = {&zeroed, 1};
  ASSERT_TRUE(step.Submit(*backend, 0).ok());
  ASSERT_TRUE(backend->Wait(0).ok());
  EXPECT_EQ(ToFloat(ReadRow(*backend, step)[5]), 3.0f);
}

// A list is one part of the launch, however long it is and however its ranges depend on each other.
TEST(CpuBackendTest, AListOfRangesIsOnePart) {
  const auto backend = Make(2);
  Step step(3.0f);
  ASSERT_TRUE(step.Submit(*backend, 0).ok());
  ASSERT_TRUE(backend->Wait(0).ok());
  // Moves a row and zeroes each place that it left: 2 x 1600 ranges, none of them independent.
  std::vector<PageRange> ranges;
  for (int64_t i = 0; i < 1600; ++i) {
    ranges.push_back({(i + 1) % 2 * 4096, 96, i % 2 * 4096});
    ranges.push_back({i % 2 * 4096, 96});
  }
  ASSERT_TRUE(SubmitPages(*backend, ranges).ok());
  EXPECT_EQ(ToFloat(ReadRow(*backend, step)[47]), 3.0f);
  step.append.page_table = 2;
  EXPECT_EQ(ReadRow(*backend, step), std::vector<Bf16>(48, 0));
  const std::vector<PageRange> more(BackendLimits().page_ranges + 1);
  EXPECT_TRUE(SubmitPages(*backend, std::span(more).subspan(1)).ok());
  EXPECT_EQ(SubmitPages(*backend, more).code(), absl::StatusCode::kResourceExhausted);
  const PageRange outside{1 << 30, 1};
  EXPECT_EQ(SubmitPages(*backend, {&outside, 1}).code(), absl::StatusCode::kInvalidArgument);
}

// Submit gathers tensors in parts, and Wait scatters them.
TEST(CpuBackendTest, TensorsInPartsPassThroughTheWorkspace) {
  const auto backend = Make(2);
  Step step(0.75f);
  LaunchLayout layout(*backend, 0);
  std::vector<Bf16> halves[2] = {std::vector<Bf16>(2 * 48, ToBf16(0.5f)),
                                 std::vector<Bf16>(2 * 48, ToBf16(0.25f))};
  std::vector<Bf16> outputs[2] = {std::vector<Bf16>(2 * 32), std::vector<Bf16>(2 * 32)};
  const InputPart in[] = {{halves[0].data(), 192}, {halves[1].data(), 192}};
  const OutputPart out[] = {{outputs[0].data(), 128}, {nullptr, 128}};
  const auto q = layout.InputParts(1, in);
  const auto o = layout.OutputParts(1, out);
  ASSERT_TRUE(q.ok() && o.ok());
  step.segment.q = *q;
  step.segment.o = *o;
  step.launch.inputs = layout.inputs();
  step.launch.outputs = layout.outputs();
  ASSERT_TRUE(step.Submit(*backend, 0).ok());
  std::fill(halves[0].begin(), halves[0].end(), ToBf16(NAN));
  ASSERT_TRUE(backend->Wait(0).ok());
  for (const Bf16 value : outputs[0]) EXPECT_EQ(ToFloat(value), 0.75f);
  for (const Bf16 value : outputs[1]) EXPECT_EQ(value, 0);  // not requested
  EXPECT_NEAR(step.lse[0], 0.25 * 48 * 0.5 * 0.75, 1e-4);
  EXPECT_NEAR(step.lse[3], 0.25 * 48 * 0.25 * 0.75, 1e-4);
}

TEST(CpuBackendTest, SteadyStateAllocatesNothing) {
  const auto backend = Make(2);
  Step step(1.0f);
  for (int32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(step.Submit(*backend, 0).ok());
    ASSERT_TRUE(backend->Wait(0).ok());
  }
  const int64_t allocations = testing::Allocations();
  bool ok = true;
  for (int32_t i = 0; i < 100; ++i) {
    ok = ok && step.Submit(*backend, 0).ok() && backend->Wait(0).ok();
  }
  EXPECT_EQ(testing::Allocations(), allocations);
  EXPECT_TRUE(ok);
}

TEST(CpuBackendTest, RefusesWhatItWasNotConfiguredFor) {
  const auto backend = Make(1);
  EXPECT_EQ(backend->Configure(SmallLimits()).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(backend->Wait(0).status().code(), absl::StatusCode::kFailedPrecondition);
  Step step(1.0f);
  EXPECT_EQ(step.Submit(*backend, 2).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(step.Submit(*backend, 0).ok());
  EXPECT_EQ(step.Submit(*backend, 0).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(backend->Wait(0).ok());
  LaunchLayout layout(*backend, 0);
  EXPECT_TRUE(layout.Workspace(4096).ok());
  EXPECT_EQ(layout.Workspace(1).status().code(), absl::StatusCode::kResourceExhausted);
  step.params.desc.geometry.kv_lora_rank = 4096;
  EXPECT_EQ(step.Submit(*backend, 0).code(), absl::StatusCode::kResourceExhausted);
  step.params.desc.geometry = kGeometry;
  step.params.plan.partial_rows = 281;
  EXPECT_EQ(step.Submit(*backend, 0).code(), absl::StatusCode::kResourceExhausted);
  step.params.plan.partial_rows = 0;
  step.params.desc.form = AttentionForm::kExpanded;
  EXPECT_EQ(step.Submit(*backend, 0).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(CpuBackendTest, CapabilityMissesSayWhatIsMissing) {
  const auto backend = Make(1);
  AttentionDesc desc;
  desc.geometry = kGeometry;
  EXPECT_TRUE(backend->CanRun(desc).ok());
  desc.page_size = 0;
  EXPECT_EQ(backend->CanRun(desc).code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(std::string(backend->CanRun(desc).message()).find("missing: this page size"),
            std::string::npos);
  desc.page_size = 1;
  desc.geometry.num_heads = 65536;
  EXPECT_EQ(backend->CanRun(desc).code(), absl::StatusCode::kUnimplemented);
}

TEST(CpuBackendTest, WeightsAreChargedAndFreed) {
  const auto backend = Make(1);
  const std::vector<Bf16> w(4 * 32 * 16, ToBf16(0.1f));
  const auto load = [&](int32_t slot, int32_t begin, int32_t end) {
    return backend->LoadWeights(slot, kGeometry, begin, end, w.data(), w.data()).code();
  };
  EXPECT_EQ(load(0, 0, 4), absl::StatusCode::kOk);
  EXPECT_EQ(load(1, 0, 1), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(load(0, 2, 4), absl::StatusCode::kOk);  // heads that are loaded already cost nothing
  EXPECT_TRUE(backend->FreeWeights(0).ok());
  EXPECT_EQ(load(0, 2, 4), absl::StatusCode::kOk);
  EXPECT_EQ(load(1, 0, 2), absl::StatusCode::kOk);
  EXPECT_EQ(load(2, 0, 1), absl::StatusCode::kInvalidArgument);
  ProjectionRecord record{};
  record.num_heads = 2;
  record.head_offset = 1;  // slot 0 holds heads 2 and 3
  Launch launch;
  launch.absorb = {kGeometry, DType::kBf16, DType::kBf16, {&record, 1}, {}};
  EXPECT_EQ(backend->Submit(0, launch).code(), absl::StatusCode::kFailedPrecondition);
  record.head_offset = 2;
  ASSERT_TRUE(backend->Submit(0, launch).ok());
  EXPECT_TRUE(backend->Wait(0).ok());
  EXPECT_TRUE(backend->FreeWeights(0).ok());
}

TEST(CpuBackendTest, OptionsAreChecked) {
  BackendOptions options;
  options.threads = -1;
  EXPECT_EQ(CpuBackend::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.threads = 3;
  options.cpu_isa = "mmx";
  EXPECT_EQ(CpuBackend::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.cpu_isa = "portable";
  const auto backend = CpuBackend::Create(options);
  ASSERT_TRUE(backend.ok());
  EXPECT_EQ((*backend)->Info().arch, "portable");
  EXPECT_EQ((*backend)->Info().units, 3);
  // About where 2176 FLOP a row and head equal 640 plus the up-projection's 262144 a KV row.
  EXPECT_EQ((*backend)->ExpandedFormMinRows({128, 512, 64, 128, 128}), 171);
}

}  // namespace
}  // namespace mla::kernels
