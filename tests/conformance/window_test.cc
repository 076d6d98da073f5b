// Tests attention to a window and to entries against an oracle in fp64 (sparse/window_workload.h),
// on the reference backend and on every CPU level.
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/emulation/emulated_levels.h"
#include "kernels/reference/reference_backend.h"
#include "kernels/types/window.h"
#include "tests/conformance/sparse/window_workload.h"
#include "tests/conformance/suite/plan_builder.h"
#include "tests/conformance/suite/scheduler_plan.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Subject {
  std::string name;
  std::unique_ptr<AttentionBackend> backend;
};

void AddLevel(const kernels::cpu::KernelSet& level, int32_t threads, bool deterministic,
              std::vector<Subject>* subjects) {
  kernels::BackendOptions options;
  options.threads = threads;
  options.pin_threads = false;
  options.spin_us = 0;
  options.deterministic = deterministic;
  auto made = kernels::CpuBackend::CreateWith(level, options);
  ASSERT_TRUE(made.ok());
  subjects->push_back({level.name, *std::move(made)});
}

void Configure(std::vector<Subject>* subjects) {
  for (Subject& subject : *subjects) {
    ASSERT_TRUE(subject.backend->Configure(WindowLimits()).ok());
  }
}

std::vector<Subject> Subjects() {
  std::vector<Subject> subjects;
  subjects.push_back({"reference", std::make_unique<kernels::ReferenceBackend>()});
  int32_t threads = 1;
  for (const kernels::cpu::KernelSet* level : kernels::cpu::UsableLevels()) {
    AddLevel(*level, threads = threads % 3 + 1, false, &subjects);
  }
  AddLevel(kernels::cpu::kEmulatedAmxKernels, 2, false, &subjects);
  AddLevel(kernels::cpu::kEmulatedAvx512Bf16Kernels, 1, false, &subjects);
  Configure(&subjects);
  return subjects;
}

TEST(WindowTest, AgreesWithTheOracle) {
  std::vector<Subject> subjects = Subjects();
  ASSERT_GT(subjects.size(), 3u);
  EvenPlanBuilder even;
  const auto evenly = [&even](std::span<const PlanShape> shapes,
                              const kernels::PlanTraits& traits) {
    return even.Build(shapes, traits);
  };
  for (Subject& subject : subjects) {
    const PlanBuilder plans[] = {SchedulerPlanBuilder(*subject.backend), evenly};
    for (const WindowCase& c : WindowCases()) {
      WindowWorkload workload(c);
      for (const PlanBuilder& plan : plans) {
        absl::Status s = workload.Run(*subject.backend, plan, c.units);
        if (s.ok()) s = workload.Check();
        ASSERT_TRUE(s.ok()) << subject.name << " " << ToString(c) << ": " << s;
      }
    }
  }
}

// With a deterministic backend.
TEST(WindowTest, ARowAloneIsWhatItIsInCompany) {
  std::vector<Subject> subjects;
  for (const kernels::cpu::KernelSet* level : kernels::cpu::UsableLevels()) {
    AddLevel(*level, 2, true, &subjects);
  }
  Configure(&subjects);
  for (Subject& subject : subjects) {
    const PlanBuilder plan = SchedulerPlanBuilder(*subject.backend);
    for (const WindowCase& c : WindowCases()) {
      if (c.requests.size() < 2 || c.seed % 3 != 0) continue;
      SCOPED_TRACE(subject.name + " seed " + std::to_string(c.seed));
      WindowWorkload together(c), alone(c);
      ASSERT_TRUE(together.Run(*subject.backend, plan, c.units).ok());
      ASSERT_TRUE(alone.Run(*subject.backend, plan, 1, 0).ok());
      const WindowWorkload::Tensors &a = together.first(), &b = alone.first();
      ASSERT_EQ(a.o.size(), b.o.size());
      EXPECT_EQ(std::memcmp(a.o.data(), b.o.data(), a.o.size() * sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)), 0);
    }
  }
}

TEST(SinkFactorTest, TakesWhatTheSinkTakes) {
  EXPECT_DOUBLE_EQ(kernels::SinkFactor(1.5f, 1.5), 0.5);
  EXPECT_EQ(kernels::SinkFactor(-kInf, 0.0), 1.0);
  EXPECT_EQ(kernels::SinkFactor(kInf, 0.0), 0.0);
  EXPECT_EQ(kernels::SinkFactor(kInf, -double{kInf}), 1.0);  // the output is 0
}

}  // namespace
}  // namespace mla::conformance
