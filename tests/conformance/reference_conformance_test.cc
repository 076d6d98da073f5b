// Tests the oracle itself: its two forms must agree, its results must not depend on the batch or
// the plan by a single bit, and the suite must notice a wrong backend.
#include <cmath>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/host_memory/transfers.h"
#include "kernels/reference/reference_backend.h"
#include "tests/conformance/suite/plan_builder.h"
#include "tests/conformance/suite/suite.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;
using kernels::ReferenceBackend;

absl::StatusOr<std::unique_ptr<AttentionBackend>> MakeReference() {
  return std::make_unique<ReferenceBackend>();
}

PlanBuilder EvenPlan(AttentionBackend&) {
  auto builder = std::make_shared<EvenPlanBuilder>();
  return [builder](std::span<const PlanShape> shapes, const kernels::PlanTraits& traits) {
    return builder->Build(shapes, traits);
  };
}

SuiteOptions Options(int64_t count) {
  SamplerOptions sampler;
  sampler.seed = 7;
  sampler.kv_formats.assign(std::begin(kernels::kKvFormats), std::end(kernels::kKvFormats));
  sampler.typical_flop = 1e6;
  sampler.max_flop = 4e6;
  SuiteOptions options;
  options.cases = SampleCases(sampler, 0, count);
  options.subjects = {{"reference", MakeReference, /*bit_equal_batches=*/true}};
  options.oracle = MakeReference;
  options.plan = EvenPlan;
  options.invariance_every = 2;
  return options;
}

TEST(ReferenceConformanceTest, AbsorbRunProjectEqualsTheExpandedForm) {
  SuiteOptions options = Options(300);
  options.threads = 1;
  const SuiteReport report = RunSuite(options);
  for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
  EXPECT_EQ(report.cases, 300);
  EXPECT_EQ(report.comparisons, 300);
  EXPECT_GT(report.batch_checks, 50);
}

// Attention over a two-row cache, computed by hand: logits 0 and ln 3 give weights 1/4 and 3/4.
TEST(ReferenceConformanceTest, HandComputedRow) {
  CaseSpec spec;
  spec.geometry = {1, 2, 1, 1, 1};
  spec.q_dtype = spec.o_dtype = spec.kv_source = kernels::DType::kF32;
  spec.softmax_scale = static_cast<float>(std::log(3.0));
  RequestSpec request;
  request.q_rows = 1;
  request.cached_rows = 1;
  request.page_size = 1;
  spec.requests = {request};
  Workload workload = MakeWorkload(spec);
  const std::vector<float> q = {0, 0, 1}, kv = {4, 8, 0, 8, 4, 1};
  auto& data = workload.requests[0];
  std::memcpy(data.q.data(), q.data(), q.size() * 4);
  std::memcpy(data.kv.data(), kv.data(), kv.size() * 4);
  UpdateStored(spec, request, data);
  ReferenceBackend backend;
  auto runner = CaseRunner::Create(backend, EvenPlan(backend));
  ASSERT_TRUE(runner.ok()) << runner.status();
  auto output = (*runner)->Run(workload);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->violation, "");
  ASSERT_EQ(output->o.size(), 2u);
  EXPECT_FLOAT_EQ(output->o[0], 7.0f);
  EXPECT_FLOAT_EQ(output->o[1], 5.0f);
  EXPECT_FLOAT_EQ(output->lse[0], static_cast<float>(std::log(4.0)));
}

TEST(ReferenceConformanceTest, RowWithoutKeysIsZeroWithLseMinusInfinity) {
  CaseSpec spec;
  spec.geometry = {2, 32, 16, 16, 16};
  RequestSpec request;
  request.q_rows = 1;
  request.num_heads = 2;
  spec.requests = {request};
  Workload workload = MakeWorkload(spec);
  // A full (non-causal) request over no rows at all.
  workload.spec.requests[0].causal = false;
  workload.spec.requests[0].cached_rows = -1;
  workload.requests[0].stored.clear();
  ReferenceBackend backend;
  auto runner = CaseRunner::Create(backend, EvenPlan(backend));
  ASSERT_TRUE(runner.ok()) << runner.status();
  RunOptions options;
  options.check_stored_rows = false;
  auto output = (*runner)->Run(workload, options);
  ASSERT_TRUE(output.ok()) << output.status();
  for (const float value : output->o) EXPECT_EQ(value, 0.0f);
  for (const float value : output->lse) EXPECT_EQ(value, -INFINITY);
}

// A suite that cannot fail proves nothing: it must notice a subject with a shifted softmax scale.
class WrongScale final : public kernels::HostBackend {
 public:
  const kernels::BackendInfo& Info() const override { return inner_.Info(); }
  kernels::PlanTraits Traits(const kernels::AttentionDesc& desc) const override {
    return inner_.Traits(desc);
  }
  int32_t ExpandedFormMinRows(const kernels::Geometry& g) const override {
    return inner_.ExpandedFormMinRows(g);
  }

 private:
  int64_t OwnWorkspaceSize(const kernels::BackendLimits&) const override { return 0; }
  absl::Status ConfigureOwn(const kernels::BackendLimits&) override { return absl::OkStatus(); }
  int64_t PackedWeightBytes(const kernels::Geometry&, int32_t) const override { return 0; }
  void PackWeights(const kernels::Geometry&, int32_t, const kernels::Bf16*, const kernels::Bf16*,
                   std::byte*) const override {}
  void UnpackWeights(const kernels::Geometry&, const std::byte*, kernels::Bf16*,
                     kernels::Bf16*) const override {}
  void Start(int32_t, const kernels::Launch& launch) override {
    kernels::ReferenceScratch scratch;
    const kernels::PoolView pool = Pool(launch.page_tables);
    for (const auto& transfer : launch.page_writes) WritePages(pool.base, transfer);
    for (const auto& range : launch.pages) WritePageRange(pool, range);
    for (const auto& record : launch.appends) AppendRows(pool, record, 0, record.rows);
    for (kernels::SegmentRecord request : launch.absorbed.segments) {
      request.softmax_scale *= 1.25f;
      for (int32_t row = 0; row < request.q_rows; ++row) {
        kernels::ReferenceAttendRow(launch.absorbed.desc, request, nullptr, pool, {}, row, scratch);
      }
    }
    for (const auto& transfer : launch.page_reads) ReadPages(pool.base, transfer);
  }
  bool Finished(int32_t) override { return true; }
  absl::StatusOr<int64_t> Finish(int32_t) override { return 0; }

  ReferenceBackend inner_;
};

TEST(ReferenceConformanceTest, SuiteNoticesAWrongScale) {
  SuiteOptions options = Options(0);
  CaseSpec spec;
  spec.geometry = {4, 32, 16, 16, 16};
  spec.inputs = InputKind::kDominantKey;
  RequestSpec request;
  request.q_rows = 2;
  request.cached_rows = 20;
  request.num_heads = 4;
  spec.requests = {request};
  options.cases = {spec};
  options.subjects = {{"wrong scale", [] { return std::make_unique<WrongScale>(); }, false}};
  const SuiteReport report = RunSuite(options);
  EXPECT_EQ(report.failure_count, 1);
}

}  // namespace
}  // namespace mla::conformance
