// Tests the GPU backend's host code (argument packing, streams, events, buffers, refusals, faults)
// with a fake HIP runtime that executes kernels by name.
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/testing/long_runs.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/reference/reference_backend.h"
#include "tests/conformance/suite/scheduler_plan.h"
#include "tests/conformance/suite/suite.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;

class HipBackendTest : public BackendOnFakeTest {};

TEST_F(HipBackendTest, MissingRuntimeNamesTheLibrariesTried) {
  HipBackendOptions options = Options();
  options.libraries = {"libnot_there.so.7", "libnot_there.so.6"};
  const absl::Status status = HipBackend::Create(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("no GPU runtime: libnot_there.so.7"));
  EXPECT_THAT(status.message(), HasSubstr("libnot_there.so.6"));
}

TEST_F(HipBackendTest, NoDeviceIsUnavailable) {
  control_->devices = 0;
  const absl::Status status = HipBackend::Create(Options()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("no GPU device"));
}

TEST_F(HipBackendTest, OrdinalBeyondTheCountIsNamed) {
  HipBackendOptions options = Options();
  options.device = 3;
  EXPECT_THAT(HipBackend::Create(options).status().message(), HasSubstr("GPU device 3 of 1"));
}

TEST_F(HipBackendTest, WrongArchitectureNamesWhatWasBuiltIn) {
  control_->arch = "gfx90a";
  const absl::Status status = HipBackend::Create(Options()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("no code object for gfx90a"));
  EXPECT_THAT(status.message(), HasSubstr("built in: gfx950, gfx942"));
}

TEST_F(HipBackendTest, UnsupportedShapeSaysWantedSupportedMissingDevice) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  AttentionDesc desc;
  desc.geometry = {16, 256, 64, 128, 128};
  const absl::Status status = (*backend)->CanRun(desc);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  for (const char* part : {"wanted: absorbed heads=16 lora=256", "supported: absorbed form",
                           "missing: this kv_lora_rank", "device: Fake Instinct (gfx950)"}) {
    EXPECT_THAT(status.message(), HasSubstr(part));
  }
  desc.geometry.kv_lora_rank = 512;
  EXPECT_TRUE((*backend)->CanRun(desc).ok());
}

TEST_F(HipBackendTest, RegistryFallsBackWithTheReason) {
  BackendRegistry registry;
  ASSERT_TRUE(RegisterReference(registry).ok());
  ASSERT_TRUE(RegisterGpuBackends(registry).ok());
  auto choice = registry.Select("auto", {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  ASSERT_GE(choice->candidates.size(), 3u);
  EXPECT_EQ(choice->candidates[0].name, "hip");
  EXPECT_EQ(choice->candidates[1].name, "cuda");
  for (int i : {0, 1}) {
    EXPECT_EQ(choice->candidates[i].chosen, false);
    EXPECT_NE(choice->candidates[i].reason, "");
  }
}

TEST_F(HipBackendTest, RefusesAPromiseOfEqualBitsInAnyBatch) {
  BackendRegistry registry;
  ASSERT_TRUE(RegisterGpuBackends(registry, Options()).ok());
  ASSERT_TRUE(RegisterReference(registry).ok());
  BackendOptions options;
  options.gpu_memory_fraction = 0.25;
  EXPECT_TRUE(registry.Select("hip", options).ok());
  options.deterministic = true;
  const auto forced = registry.Select("hip", options);
  EXPECT_EQ(forced.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(forced.status().message(), HasSubstr("backend.deterministic: got true"));
  const auto any = registry.Select("auto", options);
  ASSERT_TRUE(any.ok()) << any.status();
  EXPECT_THAT(any->candidates[0].reason, HasSubstr("the CPU backend has it"));
}

// Runs cases through the whole host code of a fake device and compares with the oracle.
conformance::SuiteReport RunCases(const HipBackendOptions& options,
                                  std::vector<conformance::CaseSpec> cases) {
  conformance::SuiteOptions suite;
  suite.cases = std::move(cases);
  suite.subjects = {{"fake",
                     [options]() -> absl::StatusOr<std::unique_ptr<AttentionBackend>> {
                       auto backend = HipBackend::Create(options);
                       if (!backend.ok()) return backend.status();
                       return std::unique_ptr<AttentionBackend>(*std::move(backend));
                     },
                     false}};
  suite.oracle = []() -> absl::StatusOr<std::unique_ptr<AttentionBackend>> {
    return std::make_unique<ReferenceBackend>();
  };
  suite.plan = conformance::SchedulerPlanBuilder;
  suite.threads = 1;
  suite.runner.kv_pool_bytes = int64_t{64} << 20;
  suite.runner.staging_bytes = int64_t{16} << 20;
  suite.runner.slot_workspace_bytes = int64_t{16} << 20;
  suite.runner.partial_rows = 40000;
  suite.runner.weights_bytes = int64_t{256} << 20;
  return conformance::RunSuite(suite);
}

conformance::SamplerOptions SmallCases(uint64_t seed) {
  conformance::SamplerOptions sampler;
  sampler.seed = seed;
  sampler.geometries = {{1, 512, 64, 128, 128}};
  sampler.typical_flop = 1e6;
  sampler.max_flop = 3e6;
  return sampler;
}

std::vector<conformance::CaseSpec> Sample(const conformance::SamplerOptions& sampler, size_t count,
                                          const HipBackend& backend, bool expanded_only) {
  std::vector<conformance::CaseSpec> cases;
  for (uint64_t i = 0; cases.size() < count; ++i) {
    conformance::CaseSpec spec = conformance::SampleCase(sampler, i);
    if (expanded_only && spec.route != conformance::Route::kExpanded) continue;
    if (backend.CanRun(spec.Desc()).ok()) cases.push_back(spec);
  }
  return cases;
}

// Runs the whole host code through the entry points of either vendor and compares with the oracle.
// The quick run has few of these cases: host_conformance has others of the same kernels.
TEST_F(HipBackendTest, ConformsThroughTheFakeDevice) {
  const int64_t cases = IsLongRun() ? 60 : 20;
  for (const char* arch : {"gfx950", "gfx942", "sm_90"}) {
    control_->arch = arch;
    HipBackendOptions options = Options();
    if (std::string(arch) == "sm_90") {
      options.vendor = Vendor::kNvidia;
      options.images = {Image("sm_90", kImage90)};
    }
    auto probe = HipBackend::Create(options);
    ASSERT_TRUE(probe.ok()) << probe.status();
    const conformance::SuiteReport report =
        RunCases(options, Sample(SmallCases(5), static_cast<size_t>(cases), **probe, false));
    for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
    EXPECT_EQ(report.comparisons, cases) << arch;
  }
}

std::set<std::string> launched;  // kernels

// The copy engine brings rows if pages allow it and the driver can describe them.
TEST_F(HipBackendTest, RowsComeInBoxesWhereTheyCan) {
  const HipBackendOptions options = Sm90Options();
  control_->on_launch = [](const char* kernel) { launched.insert(kernel); };
  struct Case {
    int32_t page_size, other_page_size, layer;
    bool encodes, boxes;
    KvFormat format = KvFormat::kBf16;
  };
  for (const Case& c :
       {Case{64, 64, 0, true, true}, Case{128, 128, 1, true, true}, Case{16, 16, 1, true, true},
        Case{24, 24, 0, true, true}, Case{4, 4, 0, true, false}, Case{3, 3, 0, true, false},
        Case{64, 16, 0, true, false}, Case{64, 64, 1, false, false},
        Case{64, 64, 1, true, true, KvFormat::kFp8Tensor},
        Case{24, 24, 0, true, true, KvFormat::kFp8Tensor},
        Case{3, 3, 0, true, false, KvFormat::kFp8Tensor},
        Case{64, 64, 1, true, true, KvFormat::kFp8Row},
        Case{24, 24, 0, true, true, KvFormat::kFp8Row},
        Case{3, 3, 0, true, false, KvFormat::kFp8Row}}) {
    const bool codes = c.format != KvFormat::kBf16;
    const std::string kernel =
        codes ? absl::StrCat("mla_attend_64_", Name(c.format), "_products") : "mla_attend_64";
    conformance::CaseSpec spec;
    spec.geometry = {64, 512, 64, 128, 128};
    spec.inputs = conformance::InputKind::kHostile;
    spec.units = 7;
    spec.kv_format = c.format;
    if (codes) spec.products = DType::kFp8E4m3;
    spec.requests = {{2, 203, 64, 0, c.page_size, c.layer, true},
                     {0, 8, 64, 0, 1, 0, true},
                     {1, 150, 64, 0, c.other_page_size, c.layer, true}};
    control_->encodes_maps = c.encodes;
    launched.clear();
    const conformance::SuiteReport report = RunCases(options, {spec});
    for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
    EXPECT_EQ(report.comparisons, 1);
    EXPECT_EQ(launched.count(kernel + "_boxes"), c.boxes ? 1u : 0u) << kernel << c.page_size;
    EXPECT_EQ(launched.count(kernel), c.boxes ? 0u : 1u) << kernel << c.page_size;
  }
  control_->on_launch = nullptr;
  control_->encodes_maps = true;
}

// The workspaces hold all heads, a few heads, and less than one head's context.
TEST_F(HipBackendTest, ExpandedFormConformsInRounds) {
  for (const int64_t workspace : {int64_t{64} << 20, int64_t{1} << 20, int64_t{200000}}) {
    HipBackendOptions options = Options();
    options.expanded_workspace_bytes = workspace;
    auto probe = HipBackend::Create(options);
    ASSERT_TRUE(probe.ok()) << probe.status();
    conformance::SamplerOptions sampler = SmallCases(6);
    sampler.heads = {1, 3, 8};
    std::vector<conformance::CaseSpec> cases = Sample(sampler, 16, **probe, true);
    for (const auto& [heads, q_rows, cached] :
         {std::tuple(2, 140, 0), std::tuple(1, 130, 300), std::tuple(3, 5, 1000)}) {
      conformance::CaseSpec spec = cases[0];
      spec.geometry.num_heads = heads;
      spec.inputs = conformance::InputKind::kHostile;
      spec.requests.resize(1);
      spec.requests[0] = {q_rows, cached, heads, 0, 16, 1, true};
      cases.push_back(spec);
    }
    const conformance::SuiteReport report = RunCases(options, cases);
    for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
    EXPECT_EQ(report.comparisons, 19) << workspace;
  }
}

TEST_F(HipBackendTest, ExpandedFormOfOtherDimsIsRefused) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  AttentionDesc desc;
  desc.geometry = {16, 512, 64, 128, 64};
  desc.form = AttentionForm::kExpanded;
  const absl::Status status = (*backend)->CanRun(desc);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(),
              HasSubstr("missing: this nope_dim with this v_dim in the expanded form"));
  desc.form = AttentionForm::kAbsorbed;
  EXPECT_TRUE((*backend)->CanRun(desc).ok());
}

TEST_F(HipBackendTest, ExpandedFormIsAskedForWhereItWins) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  BackendLimits limits = Limits();
  limits.launch_rows = 4096;
  ASSERT_TRUE((*backend)->Configure(limits).ok());
  EXPECT_EQ((*backend)->ExpandedFormMinRows({128, 512, 64, 128, 128}), 129);
}

TEST_F(HipBackendTest, AllocatesNothingAfterConfigure) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  ASSERT_TRUE((*backend)->Configure(Limits()).ok());
  const int64_t allocations = control_->allocations;
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(AppendOnce(**backend).ok());
  EXPECT_EQ(control_->allocations, allocations);
}

// Workspace of PROJECTED's products of whole rows, where there may be weights.
constexpr int64_t kRowProductBytes = int64_t{48} << 20;

// Configure takes exactly as much memory as WorkspaceSize returns.
TEST_F(HipBackendTest, WorkspaceSizeIsWhatIsTaken) {
  for (const int64_t expanded : {int64_t{1} << 20, int64_t{8} << 20}) {
    HipBackendOptions options = Options();
    options.expanded_workspace_bytes = expanded;
    auto backend = HipBackend::Create(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    BackendLimits limits = Limits();
    limits.kv_pool_bytes = 32 << 20;  // so large that all of the workspace can be used
    limits.max_geometry = {16, 512, 64, 128, 128};
    const int64_t before = control_->live_bytes;
    ASSERT_TRUE((*backend)->Configure(limits).ok());
    const int64_t taken = control_->live_bytes - before;
    EXPECT_EQ(taken, (*backend)->WorkspaceSize(limits));
    const int64_t large = limits.kv_pool_bytes + expanded + kRowProductBytes;
    EXPECT_GT(taken, large);
    EXPECT_LT(taken, large + (4 << 20));
    limits.weights_slots = 0;
    EXPECT_LT((*backend)->WorkspaceSize(limits), taken - kRowProductBytes);
  }
}

TEST_F(HipBackendTest, TheWorkspaceOfTheExpandedFormCountsInTheMemoryFraction) {
  control_->memory_bytes = (64 << 20) + 2 * kRowProductBytes;
  HipBackendOptions options = Options();
  options.memory_fraction = 0.5;
  BackendLimits limits = Limits();
  limits.kv_pool_bytes = 20 << 20;
  limits.max_geometry = {16, 512, 64, 128, 128};
  for (const auto& [expanded, fits] : {std::pair(4 << 20, true), std::pair(12 << 20, false)}) {
    options.expanded_workspace_bytes = expanded;
    auto backend = HipBackend::Create(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    EXPECT_EQ((*backend)->Info().memory_bytes, (32 << 20) + kRowProductBytes);
    const absl::Status status = (*backend)->Configure(limits);
    EXPECT_EQ(status.ok(), fits) << status;
    if (fits) continue;
    EXPECT_THAT(status.message(), HasSubstr("expanded keys and values 12582912"));
  }
}

// The registry passes the configured values on.
TEST_F(HipBackendTest, BackendOptionsReachTheDevice) {
  control_->memory_bytes = (64 << 20) + 4 * kRowProductBytes;
  HipBackendOptions base = Options();
  BackendRegistry registry;
  ASSERT_TRUE(RegisterGpuBackends(registry, base).ok());
  BackendOptions options;
  options.gpu_memory_fraction = 0.25;
  options.gpu_watchdog_ms = 150;
  BackendLimits limits = Limits();
  limits.kv_pool_bytes = 4 << 20;
  limits.max_geometry = {16, 512, 64, 128, 128};
  int64_t sizes[2] = {};
  for (const int i : {0, 1}) {
    options.gpu_expanded_workspace_bytes = (i + 1) << 20;
    auto choice = registry.Select("hip", options);
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->backend->Info().memory_bytes, (16 << 20) + kRowProductBytes);
    sizes[i] = choice->backend->WorkspaceSize(limits);
    if (i == 0) continue;
    ASSERT_TRUE(choice->backend->Configure(limits).ok());
    const Launch nothing;
    ASSERT_TRUE(choice->backend->Submit(0, nothing).ok());
    control_->hang = true;
    EXPECT_THAT(choice->backend->Wait(0).status().message(), HasSubstr("within 150 ms"));
    control_->hang = false;
  }
  EXPECT_GE(sizes[1] - sizes[0], 1 << 20);
}

// The tiles of projections have room for one record of every request and one of every slice. A
// launch with more is refused, so it cannot overrun them.
TEST_F(HipBackendTest, ProjectionsAreBounded) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  HipBackend& b = **backend;
  BackendLimits limits = Limits();
  limits.launch_packed_rows = 16 * 4;
  limits.weights_bytes = 4 << 20;
  ASSERT_TRUE(b.Configure(limits).ok());
  const Geometry geometry{4, 512, 64, 128, 128};
  const std::vector<Bf16> weights(size_t{4} * 128 * 512);
  ASSERT_TRUE(b.LoadWeights(0, geometry, 0, 4, weights.data(), weights.data()).ok());
  const int32_t limit = 2 * limits.launch_requests + limits.launch_packed_rows / kProjectRows + 1;
  for (const int32_t records : {2 * limits.launch_requests, limit, limit + 1}) {
    LaunchLayout layout(b, 0);
    auto in = layout.Workspace(16384);
    auto out = layout.Workspace(16384);
    ASSERT_TRUE(in.ok() && out.ok());
    std::vector<ProjectionRecord> all(records);
    for (int32_t i = 0; i < records; ++i) {
      // Consecutive records have different heads, so they share no tile.
      all[i] = {*in, *out, 192, 192, 576, 576, 1, 1, i % 2, 0};
    }
    Launch launch;
    launch.absorb = {geometry, DType::kBf16, DType::kBf16, all, {}};
    const absl::Status status = b.Submit(0, launch);
    if (records > limit) {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      EXPECT_THAT(status.message(), HasSubstr("projection tiles: limit "));
    } else {
      EXPECT_TRUE(status.ok()) << records << ": " << status;
      EXPECT_TRUE(b.Wait(0).ok());
    }
  }
}

TEST_F(HipBackendTest, ConfigureBeyondTheMemoryFractionNamesBothFigures) {
  control_->memory_bytes = 64 << 20;
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  BackendLimits limits = Limits();
  limits.kv_pool_bytes = 100 << 20;
  const absl::Status status = (*backend)->Configure(limits);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("gpu.memory_fraction 0.9 of 67108864 that are free"));
}

TEST_F(HipBackendTest, OutOfMemoryCarriesTheApisText) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  control_->fail_call = "hipMalloc";
  control_->fail_after = 0;
  control_->fail_code = 2;
  const absl::Status status = (*backend)->Configure(Limits());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("limits.weights_bytes: GPU malloc: out of memory (2)"));
}

// Each slot has its own metadata and staging memory and reads the page table during Submit. The
// second launch is submitted before the first has run.
TEST_F(HipBackendTest, TwoLaunchesRunWhileTheHostGoesOn) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  HipBackend& b = **backend;
  ASSERT_TRUE(b.Configure(Limits()).ok());
  constexpr uint32_t kPages[] = {0, 288};  // granules
  const Bf16 values[] = {0x3f80, 0x4000};
  const std::vector<Bf16> rows[] = {std::vector<Bf16>(576, values[0]),
                                    std::vector<Bf16>(576, values[1])};
  AppendLaunch launches[2], third;
  for (int32_t slot : {0, 1}) {
    ASSERT_TRUE(launches[slot].Submit(b, slot, rows[slot].data(), kPages[slot]).ok());
    EXPECT_EQ(third.Submit(b, slot, rows[slot].data()).code(),
              absl::StatusCode::kFailedPrecondition);
    launches[slot].set_page(12345);  // not a page of either launch
  }
  for (int32_t slot : {0, 1}) ASSERT_TRUE(b.Wait(slot).ok());
  for (int32_t slot : {0, 1}) EXPECT_EQ(ReadRows(b, 1, kPages[slot]), rows[slot]) << slot;
}

TEST_F(HipBackendTest, FailedLaunchFailsThatLaunchOnly) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  ASSERT_TRUE((*backend)->Configure(Limits()).ok());
  control_->fail_call = "hipModuleLaunchKernel";
  control_->fail_after = 0;
  const absl::Status status = AppendOnce(**backend);
  EXPECT_THAT(status.message(), HasSubstr("GPU launch: invalid argument (1)"));
  EXPECT_TRUE((*backend)->Healthy().ok());
  control_->fail_after = -1;
  EXPECT_TRUE(AppendOnce(**backend).ok());
}

TEST_F(HipBackendTest, LostDeviceIsUnhealthyForGood) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  ASSERT_TRUE((*backend)->Configure(Limits()).ok());
  control_->lost = true;
  EXPECT_FALSE(AppendOnce(**backend).ok());
  EXPECT_THAT((*backend)->Healthy().message(), HasSubstr("unspecified launch failure (719)"));
  control_->lost = false;
  EXPECT_FALSE(AppendOnce(**backend).ok());
}

TEST_F(HipBackendTest, WatchdogEndsAHungLaunch) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  ASSERT_TRUE((*backend)->Configure(Limits()).ok());
  control_->hang = true;
  const absl::Status status = AppendOnce(**backend);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("not ended a launch within 200 ms"));
  EXPECT_FALSE((*backend)->Healthy().ok());
  control_->hang = false;
}

// The engine's thread only looks at launches. It waits for a launch once that is done.
TEST_F(HipBackendTest, WatchdogEndsAHungLaunchForThoseWhoLook) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  ASSERT_TRUE((*backend)->Configure(Limits()).ok());
  ASSERT_TRUE((*backend)->Submit(0, Launch()).ok());
  control_->hang = true;
  EXPECT_FALSE((*backend)->Done(0));
  while (!(*backend)->Done(0)) std::this_thread::yield();
  EXPECT_TRUE((*backend)->Healthy().ok());
  const absl::Status status = (*backend)->Wait(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("not ended a launch within 200 ms"));
  EXPECT_FALSE((*backend)->Healthy().ok());
  control_->hang = false;
}

}  // namespace
}  // namespace mla::kernels::hip
