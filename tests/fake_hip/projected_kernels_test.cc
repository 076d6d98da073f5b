// Tests the products of whole rows on a GPU: its kernels, compiled for the host, against sums in
// fp64, and its weights of PROJECTED.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/hip/args/row_args.h"
#include "kernels/projected_weights.h"
#include "tests/conformance/projected/projected_workload.h"
#include "tests/conformance/projected/weights_round_trip.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using conformance::ProjectedCase;
using conformance::ProjectedWorkload;
using ::testing::HasSubstr;

class ProjectedKernelsTest : public BackendOnFakeTest,
                             public ::testing::WithParamInterface<const ArchTraits*> {
 protected:
  std::unique_ptr<HipBackend> Backend(const BackendLimits& limits) {
    control_->arch = GetParam()->arch.data();
    HipBackendOptions options = Options();
    options.vendor = GetParam() == &kSm90Traits ? Vendor::kNvidia : Vendor::kAmd;
    options.images.push_back(Image("sm_90", kImage90));
    options.watchdog_ms = 600000;
    auto backend = HipBackend::Create(options).value();
    EXPECT_TRUE(backend->Configure(limits).ok());
    return backend;
  }
};

TEST_P(ProjectedKernelsTest, AgreeWithSumsInFp64) {
  const std::vector<ProjectedCase> cases = conformance::ProjectedCases();
  const auto backend = Backend(conformance::ProjectedLimits(cases));
  ASSERT_TRUE(backend->Info().projects);
  for (const ProjectedCase& c : cases) {
    ProjectedWorkload workload(c);
    absl::Status s = workload.LoadWeights(*backend);
    if (s.ok()) s = workload.Check(*backend);
    EXPECT_TRUE(s.ok()) << ToString(c) << ": " << s;
  }
}

// Codes and scales give the same bits as the weights that they stand for, held as bf16.
TEST_P(ProjectedKernelsTest, WeightsOfE4m3AgreeWithSumsAndWithThoseOfBf16) {
  const std::vector<ProjectedCase> cases = conformance::ProjectedCodeCases();
  const auto backend = Backend(conformance::ProjectedLimits(cases));
  ASSERT_TRUE(backend->Info().projects_codes);
  for (const ProjectedCase& c : cases) {
    ProjectedWorkload workload(c);
    absl::Status s = workload.LoadWeights(*backend);
    if (s.ok()) s = workload.Check(*backend);
    ASSERT_TRUE(s.ok()) << ToString(c) << ": " << s;
    const std::vector<std::byte> of_codes(workload.out().begin(), workload.out().end());
    s = workload.LoadWeights(*backend, true);
    if (s.ok()) s = workload.Run(*backend);
    ASSERT_TRUE(s.ok()) << ToString(c) << ", widened: " << s;
    EXPECT_TRUE(std::equal(of_codes.begin(), of_codes.end(), workload.out().begin()))
        << ToString(c);
  }
}

// A row's sums do not depend on how many rows are computed with it, as long as the kernel is the
// same.
TEST_P(ProjectedKernelsTest, SplitsDoNotDependOnRows) {
  constexpr int32_t kUnits = 132;
  constexpr RowProductShape kFew = kSm90Traits.few_rows, kMany = kSm90Traits.many_rows;
  EXPECT_EQ(RowSplits(kFew, 24576, 24, kUnits), 1);  // W_UQ of DeepSeek-V3
  EXPECT_EQ(RowSplits(kMany, 24576, 24, kUnits), 1);
  EXPECT_EQ(RowSplits(kFew, 7168, 256, kUnits), 3);  // its W_O
  EXPECT_EQ(RowSplits(kMany, 7168, 256, kUnits), 3);
  EXPECT_EQ(RowSplits(kFew, 1, 1000, kUnits), kMostRowSplits);
  EXPECT_EQ(RowSplits(kFew, 128, 13, kUnits), 1);
  EXPECT_EQ(RowSplits(kFew, 1 << 20, 256, kUnits), 1);
}

// Returns true if no pair of the first heads has its elements in two blocks.
bool PairsAreWhole(const RowProductArgs& args, int32_t columns) {
  for (int32_t h = 0; h < 256; ++h) {
    for (int32_t i = 0; i < args.pairs; ++i) {
      const int32_t begin = (h + 1) * args.head - 2 * args.pairs;
      const int32_t first = begin + (args.halves != 0 ? i : 2 * i);
      const int32_t second = first + (args.halves != 0 ? args.pairs : 1);
      if (first / columns != second / columns) return false;
    }
  }
  return true;
}

TEST_P(ProjectedKernelsTest, BlocksFinishWholePairsAlone) {
  int32_t finishing = 0;
  RowProductArgs args = {};
  for (const int32_t columns : {96, 128, 192}) {
    for (int32_t nope = 3; nope <= 133; nope += 13) {
      for (const int32_t pairs : {0, 1, 4, 10, 32}) {
        for (const int32_t halves : {0, 1}) {
          args.head = nope + 2 * pairs;
          args.pairs = pairs;
          args.halves = halves;
          args.splits = 1;
          const bool whole = PairsAreWhole(args, columns);
          const bool finishes = FinishesRows({columns, 1, 0, 0, true}, args);
          // Neighbours in heads of odd length may be whole by chance.
          EXPECT_TRUE(whole || !finishes)
              << columns << " " << nope << " " << pairs << " " << halves;
          EXPECT_TRUE(finishes || !whole || args.head % 2 == 1)
              << columns << " " << nope << " " << pairs << " " << halves;
          finishing += finishes ? 1 : 0;
          EXPECT_FALSE(FinishesRows({columns, 1, 0, 0, false}, args));
          args.splits = 2;
          EXPECT_FALSE(FinishesRows({columns, 1, 0, 0, true}, args));
        }
      }
    }
  }
  EXPECT_GT(finishing, 60);
  args.head = 192;  // of DeepSeek-V3
  args.pairs = 32;
  args.splits = 1;
  EXPECT_TRUE(FinishesRows(kSm90Traits.few_rows, args));
  EXPECT_TRUE(FinishesRows(kSm90Traits.many_rows, args));
  EXPECT_FALSE(FinishesRows(kGfx950Traits.many_rows, args));
}

TEST_P(ProjectedKernelsTest, WeightsAreNeededWhole) {
  ProjectedCase c{{3, 512, 8, 8, 8}, {64, 32}, {{2, 1}}};
  const auto backend = Backend(conformance::ProjectedLimits({&c, 1}));
  ProjectedWorkload workload(c);
  const std::vector<Bf16> head(16 * 64);
  for (int32_t h = 0; h < 3; ++h) {
    const absl::Status s = workload.Check(*backend);
    EXPECT_EQ(s.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(s.message(), HasSubstr("queries.records[0]: weights slot 1"));
    ASSERT_TRUE(
        backend->LoadProjected(1, c.geometry, c.shape, ProjectedPart::kQueries, h, head.data())
            .ok());
  }
  ASSERT_TRUE(workload.LoadWeights(*backend).ok());
  EXPECT_TRUE(workload.Check(*backend).ok());
  // The other part is still missing.
  c.part = ProjectedPart::kOutputs;
  EXPECT_THAT(ProjectedWorkload(c).Check(*backend).message(), HasSubstr("hiddens.records[0]"));
  ASSERT_TRUE(backend->FreeWeights(1).ok());
  EXPECT_EQ(workload.Check(*backend).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(ProjectedKernelsTest, RefusesHeadsAndShapesThatDoNotFit) {
  const ProjectedCase c{{3, 512, 8, 8, 8}, {64, 32}, {{2, 1}}};
  BackendLimits limits = conformance::ProjectedLimits({&c, 1});
  limits.weights_bytes = (3 * 16 * 64 + 32 * 64) * 2;  // one slot
  const auto backend = Backend(limits);
  const std::vector<Bf16> head(16 * 64);
  const auto load = [&](int32_t slot, const ProjectedShape& shape, int32_t h) {
    return backend->LoadProjected(slot, c.geometry, shape, ProjectedPart::kQueries, h, head.data())
        .code();
  };
  EXPECT_EQ(load(-1, c.shape, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(load(conformance::kProjectedSlots, c.shape, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(load(0, c.shape, 3), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(load(0, {}, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(load(0, c.shape, 0), absl::StatusCode::kOk);
  EXPECT_EQ(load(0, {64, 31}, 0), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(load(1, c.shape, 0), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(load(0, c.shape, 0), absl::StatusCode::kOk);  // again, at no charge
  EXPECT_TRUE(backend->FreeWeights(0).ok());
  EXPECT_EQ(load(1, c.shape, 0), absl::StatusCode::kOk);
}

// Weights of e4m3 take the bytes of their codes and scales with their padding, and not one more.
TEST_P(ProjectedKernelsTest, CodesTakeHalfOfTheBytes) {
  const Geometry g{4, 512, 64, 128, 128};
  const ProjectedShape bf16{256, 384}, codes{256, 384, DType::kFp8E4m3};
  const ProjectedCase c{g, codes, {{2, 1}}};
  BackendLimits limits = conformance::ProjectedLimits({&c, 1});
  // Codes; scales of 64 rows of W_UQ and of a block of W_O.
  constexpr int64_t kPadding = 32 + 80;  // of W_UQ and of W_O, to multiples of 128 bytes
  limits.weights_bytes = 4 * 192 * 256 + 384 * 512 + (12 * 2 + 3 * 4) * 4 + kPadding;
  EXPECT_EQ(limits.weights_bytes, ProjectedBytes(g, codes));
  const auto load = [&](HipBackend& backend, int32_t slot, const ProjectedShape& shape) {
    const std::vector<std::byte> head(size_t{192} * 256 * 2);
    return backend.LoadProjected(slot, g, shape, ProjectedPart::kQueries, 0, head.data()).code();
  };
  const auto backend = Backend(limits);
  EXPECT_EQ(load(*backend, 0, bf16), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(load(*backend, 0, codes), absl::StatusCode::kOk);
  EXPECT_EQ(load(*backend, 0, bf16), absl::StatusCode::kFailedPrecondition);  // the other type
  EXPECT_EQ(load(*backend, 1, codes), absl::StatusCode::kResourceExhausted);
  --limits.weights_bytes;
  EXPECT_EQ(load(*Backend(limits), 0, codes), absl::StatusCode::kResourceExhausted);
}

TEST_P(ProjectedKernelsTest, RefusesCodesOfHeadsThatScalesCannotFollow) {
  for (const Geometry& g : {Geometry{3, 512, 10, 23, 64}, Geometry{3, 512, 8, 8, 32}}) {
    const ProjectedCase c{g, {64, 32, DType::kFp8E4m3}, {{2, 1}}};
    const auto backend = Backend(conformance::ProjectedLimits({&c, 1}));
    const absl::Status s = ProjectedWorkload(c).LoadWeights(*backend);
    EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(s.message(), HasSubstr("multiples of 16 and 64"));
  }
}

// A copy of scales that fails leaves the head without weights.
TEST_P(ProjectedKernelsTest, AHeadWhoseScalesDidNotArriveIsMissing) {
  const Geometry g{2, 512, 8, 8, 64};
  const ProjectedCase c{g, {64, 32, DType::kFp8E4m3}, {{2, 1}}};
  const auto backend = Backend(conformance::ProjectedLimits({&c, 1}));
  ProjectedWorkload workload(c);
  ASSERT_TRUE(workload.LoadWeights(*backend).ok());
  ASSERT_TRUE(workload.Check(*backend).ok());
  const std::vector<std::byte> head(2048);
  const auto load = [&] {
    return backend->LoadProjected(1, g, c.shape, ProjectedPart::kQueries, 1, head.data());
  };
  control_->FailOnce("hipMemcpy2DAsync", 1);
  EXPECT_FALSE(load().ok());
  EXPECT_EQ(workload.Check(*backend).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(load().ok());
  ASSERT_TRUE(workload.LoadWeights(*backend).ok());
  EXPECT_TRUE(workload.Check(*backend).ok());
}

// Weights of PROJECTED lie in one arena with the weights of EXPANDED, and move with them.
TEST_P(ProjectedKernelsTest, WeightsMoveWithThoseOfOtherModels) {
  const Geometry g{2, 512, 8, 8, 8};
  const int64_t expanded = 2 * 512 * (8 + 8) * 2;
  ProjectedCase c{g, {64, 32}, {{2, 1}}};
  BackendLimits limits = conformance::ProjectedLimits({&c, 1});
  limits.weights_slots = 4;
  limits.weights_bytes = 2 * expanded + (2 * 16 * 64 + 32 * 64) * 2;
  const auto backend = Backend(limits);
  const std::vector<Bf16> zeros(size_t{4} * 512 * 8);
  const auto load = [&](int32_t slot, int32_t heads) {
    const Geometry of_heads{heads, 512, 8, 8, 8};
    return backend->LoadWeights(slot, of_heads, 0, heads, zeros.data(), zeros.data());
  };
  ASSERT_TRUE(load(2, 2).ok());
  ProjectedWorkload workload(c);
  ASSERT_TRUE(workload.LoadWeights(*backend).ok());
  ASSERT_TRUE(load(3, 2).ok());
  ASSERT_TRUE(backend->FreeWeights(2).ok());
  ASSERT_TRUE(backend->FreeWeights(3).ok());
  ASSERT_TRUE(load(2, 4).ok());  // fits only where both were
  const absl::Status s = workload.Check(*backend);
  EXPECT_TRUE(s.ok()) << s;
}

// W_UK and W_UV of the first shapes lie in panels where the architecture has any; rows of the
// second W_UQ and W_O are padded. Heads of the last ones begin inside blocks of scales.
TEST_P(ProjectedKernelsTest, WeightsComeBackAsTheyWere) {
  const std::pair<Geometry, ProjectedShape> models[] = {
      {{2, 512, 64, 128, 128}, {128, 96}},
      {{3, 512, 8, 8, 8}, {72, 40}},
      {{5, 512, 64, 128, 64}, {200, 150, DType::kFp8E4m3}},
      {{3, 512, 16, 32, 192}, {72, 40, DType::kFp8E4m3}}};
  const ProjectedCase c{models[0].first, models[0].second, {{2, 1}}};
  BackendLimits limits = conformance::ProjectedLimits({&c, 1});
  limits.weights_bytes = int64_t{4} << 20;
  const auto backend = Backend(limits);
  for (const auto& [geometry, shape] : models) {
    const absl::Status s = conformance::CheckWeightsComeBack(*backend, 1, geometry, shape);
    EXPECT_TRUE(s.ok()) << s;
    ASSERT_TRUE(backend->FreeWeights(1).ok());
  }
}

// A copy that fails says so, and the weights stay as they are.
TEST_P(ProjectedKernelsTest, ACopyToTheHostThatFailsChangesNothing) {
  const Geometry g{2, 512, 8, 8, 8};
  const ProjectedCase c{g, {64, 32}, {{2, 1}}};
  const auto backend = Backend(conformance::ProjectedLimits({&c, 1}));
  ProjectedWorkload workload(c);
  ASSERT_TRUE(workload.LoadWeights(*backend).ok());
  std::vector<Bf16> head(size_t{16} * 64);
  const auto read = [&] {
    return backend->ReadProjected(1, g, c.shape, ProjectedPart::kQueries, 1, head.data());
  };
  control_->FailOnce("hipMemcpy2DAsync", 0);
  EXPECT_FALSE(read().ok());
  EXPECT_TRUE(read().ok());
  EXPECT_TRUE(workload.Check(*backend).ok());
}

INSTANTIATE_TEST_SUITE_P(Architectures, ProjectedKernelsTest,
                         ::testing::Values(&kGfx950Traits, &kGfx942Traits, &kSm90Traits),
                         [](const auto& arch) { return std::string(arch.param->arch); });

}  // namespace
}  // namespace mla::kernels::hip
