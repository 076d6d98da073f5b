// The GPU backend's host path (argument packing, streams, events, buffers, refusals, faults)
// against a fake HIP runtime that executes the kernels by name.
#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/reference/reference_backend.h"
#include "tests/conformance/scheduler_plan.h"
#include "tests/conformance/suite.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::gpu {
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

TEST_F(HipBackendTest, FailedSelfTestIsNotOffered) {
  control_->wrong_results = true;
  const absl::Status status = HipBackend::Create(Options()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("failed self-test on Fake Instinct"));
}

TEST_F(HipBackendTest, UnsupportedShapeSaysWantedSupportedMissingDevice) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  kernels::AttentionDesc desc;
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
  kernels::BackendRegistry registry;
  ASSERT_TRUE(kernels::RegisterReference(registry).ok());
  ASSERT_TRUE(RegisterGpuBackends(registry).ok());
  auto choice = registry.Select("auto", {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  ASSERT_GE(choice->ladder.size(), 3u);
  EXPECT_EQ(choice->ladder[0].name, "hip");
  EXPECT_EQ(choice->ladder[1].name, "cuda");
  for (int i : {0, 1}) {
    EXPECT_EQ(choice->ladder[i].chosen, false);
    EXPECT_NE(choice->ladder[i].reason, "");
  }
}

// Cases through the whole host path of a fake device, against the oracle.
conformance::SuiteReport RunCases(const HipBackendOptions& options,
                                  std::vector<conformance::CaseSpec> cases) {
  conformance::SuiteOptions suite;
  suite.cases = std::move(cases);
  suite.subjects = {{"fake",
                     [options]() -> absl::StatusOr<std::unique_ptr<kernels::AttentionBackend>> {
                       auto backend = HipBackend::Create(options);
                       if (!backend.ok()) return backend.status();
                       return std::unique_ptr<kernels::AttentionBackend>(*std::move(backend));
                     },
                     false}};
  suite.oracle = []() -> absl::StatusOr<std::unique_ptr<kernels::AttentionBackend>> {
    return std::make_unique<kernels::ReferenceBackend>();
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

// The whole host path, by the entry points of either vendor, against the oracle.
TEST_F(HipBackendTest, ConformsThroughTheFakeDevice) {
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
        RunCases(options, Sample(SmallCases(5), 60, **probe, false));
    for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
    EXPECT_EQ(report.comparisons, 60) << arch;
  }
}

// With a workspace that holds all heads, a few, and less than the context of one.
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
  kernels::AttentionDesc desc;
  desc.geometry = {16, 512, 64, 128, 64};
  desc.form = kernels::AttentionForm::kExpanded;
  const absl::Status status = (*backend)->CanRun(desc);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("missing: this v_dim in the expanded form"));
  desc.form = kernels::AttentionForm::kAbsorbed;
  EXPECT_TRUE((*backend)->CanRun(desc).ok());
}

TEST_F(HipBackendTest, ExpandedFormIsAskedForWhereItWins) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  kernels::BackendLimits limits = Limits();
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

TEST_F(HipBackendTest, ConfigureBeyondTheMemoryFractionNamesBothFigures) {
  control_->memory_bytes = 64 << 20;
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  kernels::BackendLimits limits = Limits();
  limits.kv_pool_bytes = 100 << 20;
  const absl::Status status = (*backend)->Configure(limits);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("gpu.memory_fraction 0.9 of 67108864"));
}

TEST_F(HipBackendTest, OutOfMemoryCarriesTheApisText) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  control_->fail_call = "hipMalloc";
  control_->fail_after = 0;
  control_->fail_code = 2;
  const absl::Status status = (*backend)->Configure(Limits());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("kv pool: GPU malloc: out of memory (2)"));
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

}  // namespace
}  // namespace mla::gpu
