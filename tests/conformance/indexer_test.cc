// Tests the choice of rows by an indexer against an oracle in fp64 (sparse/indexer_workload.h), on
// the reference backend and on every CPU level.
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/emulation/emulated_levels.h"
#include "kernels/reference/reference_backend.h"
#include "kernels/types/select.h"
#include "tests/conformance/sparse/indexer_cases.h"
#include "tests/conformance/sparse/indexer_workload.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;

struct Subject {
  std::string name;
  std::unique_ptr<AttentionBackend> backend;
};

std::vector<Subject> Subjects() {
  std::vector<Subject> subjects;
  subjects.push_back({"reference", std::make_unique<kernels::ReferenceBackend>()});
  int32_t threads = 2;  // fewer than the rows of some launches, and more than those of others
  const auto add = [&](const kernels::cpu::KernelSet& level) {
    kernels::BackendOptions options;
    options.threads = threads;
    options.pin_threads = false;
    options.spin_us = 0;
    threads = threads % 5 + 2;
    auto made = kernels::CpuBackend::CreateWith(level, options);
    ASSERT_TRUE(made.ok());
    subjects.push_back({level.name, *std::move(made)});
  };
  for (const kernels::cpu::KernelSet* level : kernels::cpu::UsableLevels()) add(*level);
  add(kernels::cpu::kEmulatedAmxKernels);
  add(kernels::cpu::kEmulatedAvx512Bf16Kernels);
  for (Subject& subject : subjects) {
    EXPECT_TRUE(subject.backend->Configure(IndexerLimits()).ok());
  }
  return subjects;
}

TEST(IndexerTest, ChoosesTheBestOfWhatARowSees) {
  std::vector<Subject> subjects = Subjects();
  ASSERT_GT(subjects.size(), 3u);
  std::vector<IndexerCase> cases = IndexerCases(60, {128, 128, 64, 40, 3});
  for (const auto& more : {LongIndexerCases(), DirectedIndexerCases()}) {
    cases.insert(cases.end(), more.begin(), more.end());
  }
  for (const IndexerCase& c : cases) {
    IndexerWorkload workload(c);
    for (Subject& subject : subjects) {
      const absl::Status checked = workload.Check(*subject.backend);
      ASSERT_TRUE(checked.ok()) << subject.name << " " << ToString(c) << ": " << checked;
    }
  }
}

TEST(IndexerTest, RequestsOfALaunchMayDiffer) {
  std::vector<Subject> subjects = Subjects();
  for (const IndexerPair& pair : IndexerPairs()) {
    for (Subject& subject : subjects) {
      const absl::Status checked = CheckIndexer(*subjects[0].backend, *subject.backend, pair);
      ASSERT_TRUE(checked.ok()) << subject.name << " " << ToString(pair.first) << ": " << checked;
    }
  }
}

// Logits that are NaN, and zeros of either sign.
TEST(IndexerTest, NaNIsTheLargestAndZerosAreEqual) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> falling = {nan, inf, 2.0f, 1e-40f, 0.0f, -1e-40f, -2.0f, -inf};
  for (size_t i = 0; i + 1 < falling.size(); ++i) {
    EXPECT_GT(kernels::SelectRank(falling[i], 1 << 30), kernels::SelectRank(falling[i + 1], 0));
  }
  EXPECT_EQ(kernels::SelectRank(-0.0f, 3), kernels::SelectRank(0.0f, 3));
  EXPECT_EQ(kernels::SelectRank(-nan, 3), kernels::SelectRank(nan, 3));
  EXPECT_GT(kernels::SelectRank(1.0f, 3), kernels::SelectRank(1.0f, 4));
  EXPECT_EQ(kernels::SelectPosition(kernels::SelectRank(-7.0f, 123456)), 123456);
}

}  // namespace
}  // namespace mla::conformance
