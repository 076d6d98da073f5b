// Tests the products of rows with W_UQ and W_O against sums in fp64, on the reference backend and
// on every CPU level.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/emulation/emulated_levels.h"
#include "kernels/reference/reference_backend.h"
#include "tests/conformance/projected/projected_workload.h"
#include "tests/conformance/projected/weights_round_trip.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;
using kernels::Bf16;
using kernels::DType;
using kernels::ProjectedPart;
using kernels::RopeLayout;
using kernels::RowProjectionRecord;

// No dim is a multiple of a panel, of a level's k_align, or of the depth of converted operands.
constexpr kernels::Geometry kGeometry{3, 16, 10, 23, 20};
constexpr kernels::ProjectedShape kShape{701, 151};
constexpr int32_t kQueryDim = 33;  // nope_dim + rope_dim
constexpr int32_t kSlots = 2;

struct Subject {
  std::string name;
  std::unique_ptr<AttentionBackend> backend;
};

kernels::BackendLimits Limits() {
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = 1 << 20;
  limits.page_table_entries = 16;
  limits.weights_bytes = 1 << 20;
  limits.weights_slots = kSlots;
  limits.launch_slots = 1;
  limits.launch_requests = 8;
  limits.launch_rows = 256;
  limits.launch_packed_rows = 1024;
  limits.partial_rows = 64;
  limits.max_o_dim = 64;
  limits.slot_workspace_bytes = 1 << 20;
  limits.work_items = 64;
  limits.reduce_tiles = 16;
  limits.reduce_partials = 64;
  limits.max_top_k = 1;
  limits.max_geometry = kGeometry;
  return limits;
}

void AddLevel(const kernels::cpu::KernelSet& level, int32_t threads,
              std::vector<Subject>* subjects) {
  kernels::BackendOptions options;
  options.threads = threads;
  options.pin_threads = false;
  options.spin_us = 0;
  auto made = kernels::CpuBackend::CreateWith(level, options);
  ASSERT_TRUE(made.ok());
  subjects->push_back({level.name, *std::move(made)});
}

std::vector<Subject> Subjects(const kernels::BackendLimits& limits) {
  std::vector<Subject> subjects;
  subjects.push_back({"reference", std::make_unique<kernels::ReferenceBackend>()});
  int32_t threads = 1;
  for (const kernels::cpu::KernelSet* level : kernels::cpu::UsableLevels()) {
    AddLevel(*level, threads = threads % 3 + 1, &subjects);
  }
  AddLevel(kernels::cpu::kEmulatedAmxKernels, 2, &subjects);
  AddLevel(kernels::cpu::kEmulatedAvx512Bf16Kernels, 1, &subjects);
  for (Subject& subject : subjects) EXPECT_TRUE(subject.backend->Configure(limits).ok());
  return subjects;
}

TEST(ProjectedTest, AgreesWithSumsInFp64) {
  const std::vector<ProjectedCase> cases = ProjectedCases();
  std::vector<Subject> subjects = Subjects(ProjectedLimits(cases));
  ASSERT_GT(subjects.size(), 3u);
  for (Subject& subject : subjects) {
    ASSERT_TRUE(subject.backend->Info().projects) << subject.name;
    for (const ProjectedCase& c : cases) {
      ProjectedWorkload workload(c);
      absl::Status s = workload.LoadWeights(*subject.backend);
      if (s.ok()) s = workload.Check(*subject.backend);
      EXPECT_TRUE(s.ok()) << subject.name << ": " << ToString(c) << ": " << s;
    }
  }
}

// The reference holds codes. CPUs hold panels, and refuse codes. The first cases have the odd
// shapes.
TEST(ProjectedTest, WeightsOfE4m3AgreeWithSumsInFp64) {
  std::vector<ProjectedCase> cases = ProjectedCodeCases();
  cases.resize(6);
  for (Subject& subject : Subjects(ProjectedLimits(cases))) {
    const bool holds = subject.name == "reference";
    EXPECT_EQ(subject.backend->Info().projects_codes, holds) << subject.name;
    for (const ProjectedCase& c : cases) {
      ProjectedWorkload workload(c);
      absl::Status s = workload.LoadWeights(*subject.backend);
      if (holds && s.ok()) s = workload.Check(*subject.backend);
      EXPECT_EQ(s.code(), holds ? absl::StatusCode::kOk : absl::StatusCode::kUnimplemented)
          << subject.name << ": " << ToString(c) << ": " << s;
    }
  }
}

TEST(ProjectedTest, WeightsAreChargedAndNeededWhole) {
  std::vector<Subject> subjects;
  AddLevel(*kernels::cpu::UsableLevels().front(), 1, &subjects);
  AttentionBackend& backend = *subjects[0].backend;
  kernels::BackendLimits limits = Limits();
  limits.weights_bytes = kGeometry.num_heads * kQueryDim * kShape.q_lora_rank * 2;
  ASSERT_TRUE(backend.Configure(limits).ok());
  const std::vector<Bf16> head(static_cast<size_t>(kQueryDim) * kShape.q_lora_rank);
  const auto load = [&](ProjectedPart part, int32_t h) {
    return backend.LoadProjected(0, kGeometry, kShape, part, h, head.data()).code();
  };
  std::vector<float> rows(static_cast<size_t>(kShape.q_lora_rank));
  std::vector<float> out(static_cast<size_t>(kGeometry.num_heads) * kQueryDim);
  const std::vector<float> rotations(kGeometry.rope_dim);
  const RowProjectionRecord record{rows.data(), out.data(), 0, 0, 1, 0, rotations.data()};
  kernels::Launch launch;
  launch.queries = {kGeometry, RopeLayout::kHalves, DType::kF32, DType::kF32, {&record, 1}};
  for (int32_t h = 0; h < kGeometry.num_heads; ++h) {
    EXPECT_EQ(backend.Submit(0, launch).code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(load(ProjectedPart::kQueries, h), absl::StatusCode::kOk);
    EXPECT_EQ(load(ProjectedPart::kQueries, h), absl::StatusCode::kOk);  // again, at no charge
  }
  ASSERT_TRUE(backend.Submit(0, launch).ok());
  EXPECT_TRUE(backend.Wait(0).ok());
  EXPECT_EQ(load(ProjectedPart::kOutputs, 0), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(load(ProjectedPart::kQueries, kGeometry.num_heads), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(backend.FreeWeights(0).ok());
  EXPECT_EQ(load(ProjectedPart::kOutputs, 0), absl::StatusCode::kOk);
  EXPECT_EQ(backend.Submit(0, launch).code(), absl::StatusCode::kFailedPrecondition);
}

// Weights of another geometry would lie outside a slot's memory, even if its shape is the same.
TEST(ProjectedTest, ASlotHoldsWeightsOfOneGeometry) {
  constexpr auto wider = [](int32_t nope, int32_t v) {
    kernels::Geometry geometry = kGeometry;
    geometry.nope_dim += nope;
    geometry.v_dim += v;
    return geometry;
  };
  kernels::BackendLimits limits = Limits();
  limits.max_geometry = wider(8, 8);
  for (Subject& subject : Subjects(limits)) {
    AttentionBackend& backend = *subject.backend;
    std::vector<Bf16> head(size_t{64} * kShape.q_lora_rank);
    const auto load = [&](const kernels::Geometry& geometry, ProjectedPart part, int32_t h) {
      return backend.LoadProjected(0, geometry, kShape, part, h, head.data()).code();
    };
    for (int32_t h = 0; h < kGeometry.num_heads; ++h) {
      ASSERT_EQ(load(kGeometry, ProjectedPart::kQueries, h), absl::StatusCode::kOk);
      ASSERT_EQ(load(kGeometry, ProjectedPart::kOutputs, h), absl::StatusCode::kOk);
    }
    const std::vector<float> rows(1024), rotations(kGeometry.rope_dim);
    std::vector<float> out(1024);
    const RowProjectionRecord record{rows.data(), out.data(), 0, 0, 1, 0, rotations.data()};
    const auto submit = [&](const kernels::Geometry& geometry) {
      kernels::Launch launch;
      launch.queries = {geometry, RopeLayout::kHalves, DType::kF32, DType::kF32, {&record, 1}};
      absl::Status s = backend.Submit(0, launch);
      return s.ok() ? backend.Wait(0).status().code() : s.code();
    };
    EXPECT_EQ(submit(kGeometry), absl::StatusCode::kOk) << subject.name;
    for (const kernels::Geometry& other : {wider(8, 0), wider(0, 8)}) {
      for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
        EXPECT_EQ(load(other, part, 1), absl::StatusCode::kFailedPrecondition) << subject.name;
        EXPECT_EQ(backend.ReadProjected(0, other, kShape, part, 1, head.data()).code(),
                  absl::StatusCode::kFailedPrecondition)
            << subject.name;
      }
      EXPECT_EQ(submit(other), absl::StatusCode::kFailedPrecondition) << subject.name;
    }
    EXPECT_TRUE(backend.FreeWeights(0).ok());
    EXPECT_EQ(load(wider(8, 0), ProjectedPart::kQueries, 1), absl::StatusCode::kOk);
  }
}

TEST(ProjectedTest, CodesAreChargedAndComeBackAsTheyWere) {
  kernels::ReferenceBackend backend;
  const kernels::Geometry geometry{5, 64, 64, 128, 64};
  const kernels::ProjectedShape shape{200, 150, DType::kFp8E4m3};
  kernels::BackendLimits limits = Limits();
  limits.max_geometry = geometry;
  // Heads of 192 rows touch two blocks of them, and have 64 of 320 columns of W_O.
  limits.weights_bytes = int64_t{5} * 64 * (128 + 64) * 2  // W_UK and W_UV
                         + 5 * (192 * 200 + 2 * 2 * 4) + 5 * (150 * 64 + 2 * 4);
  ASSERT_TRUE(backend.Configure(limits).ok());
  const absl::Status s = CheckWeightsComeBack(backend, 1, geometry, shape);
  EXPECT_TRUE(s.ok()) << s;
  ASSERT_TRUE(backend.FreeWeights(1).ok());
  kernels::ReferenceBackend smaller;
  --limits.weights_bytes;
  ASSERT_TRUE(smaller.Configure(limits).ok());
  EXPECT_EQ(CheckWeightsComeBack(smaller, 1, geometry, shape).code(),
            absl::StatusCode::kResourceExhausted);
}

// No dim of the first shapes fits a panel or a group of elements; the second have whole ones.
TEST(ProjectedTest, WeightsComeBackAsTheyWere) {
  const std::pair<kernels::Geometry, kernels::ProjectedShape> models[] = {
      {kGeometry, kShape}, {{2, 64, 16, 32, 48}, {96, 80}}, {{2, 8, 4, 6, 5}, {}}};
  for (Subject& subject : Subjects(Limits())) {
    for (const auto& [geometry, shape] : models) {
      const absl::Status s = CheckWeightsComeBack(*subject.backend, 1, geometry, shape);
      EXPECT_TRUE(s.ok()) << subject.name << ": " << s;
      ASSERT_TRUE(subject.backend->FreeWeights(1).ok());
      std::vector<Bf16> head(size_t{64} * 64);
      EXPECT_FALSE(subject.backend->ReadWeights(1, geometry, 0, head.data(), head.data()).ok());
    }
  }
}

}  // namespace
}  // namespace mla::conformance
