// Compares the kernels for indexers and for windows, compiled for the host, with the oracles of the
// conformance tests.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "tests/conformance/sparse/indexer_cases.h"
#include "tests/conformance/sparse/indexer_workload.h"
#include "tests/conformance/sparse/window_workload.h"
#include "tests/conformance/suite/plan_builder.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using conformance::IndexerCase;
using conformance::IndexerWorkload;
using conformance::WindowCase;
using conformance::WindowWorkload;

class SparseKernelsTest : public BackendOnFakeTest,
                          public ::testing::WithParamInterface<const ArchTraits*> {
 protected:
  std::unique_ptr<HipBackend> Backend() {
    control_->arch = GetParam()->arch.data();
    HipBackendOptions options = Options();
    options.vendor = GetParam() == &kSm90Traits ? Vendor::kNvidia : Vendor::kAmd;
    options.images.push_back(Image("sm_90", kImage90));
    options.watchdog_ms = 600000;
    return HipBackend::Create(options).value();
  }
};

TEST_P(SparseKernelsTest, TheIndexerChoosesTheBestOfWhatARowSees) {
  const auto backend = Backend();
  ASSERT_TRUE(backend->Info().selects);
  EXPECT_EQ(backend->Info().index_dim, kIndexDim);
  ASSERT_TRUE(backend->Configure(conformance::IndexerLimits()).ok());
  ReferenceBackend reference;
  ASSERT_TRUE(reference.Configure(conformance::IndexerLimits()).ok());
  std::vector<IndexerCase> cases = conformance::IndexerCases(10, {kIndexDim});
  for (const IndexerCase& c : conformance::LongIndexerCases()) cases.push_back(c);
  for (const IndexerCase& c : cases) {
    const absl::Status checked = conformance::CheckIndexer(reference, *backend, c);
    ASSERT_TRUE(checked.ok()) << ToString(c) << ": " << checked;
  }
}

TEST_P(SparseKernelsTest, TheIndexerHoldsAtBoundsOfItsKernelsAndForRequestsThatDiffer) {
  const auto failures = conformance::RunDirectedIndexers(*Backend());
  ASSERT_TRUE(failures.ok()) << failures.status();
  EXPECT_EQ(*failures, 0);
}

TEST_P(SparseKernelsTest, OtherIndexersAreRefused) {
  const auto backend = Backend();
  ASSERT_TRUE(backend->Configure(conformance::IndexerLimits()).ok());
  IndexerCase c;
  c.dim = 64;
  EXPECT_EQ(IndexerWorkload(c).Run(*backend, 0, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(SparseKernelsTest, RowsAttendToTheWindowAndToEntries) {
  const auto backend = Backend();
  ASSERT_TRUE(backend->Info().windows);
  ASSERT_TRUE(backend->Configure(conformance::WindowLimits()).ok());
  conformance::EvenPlanBuilder even;
  const conformance::PlanBuilder plan = [&even](std::span<const conformance::PlanShape> shapes,
                                                const PlanTraits& traits) {
    return even.Build(shapes, traits);
  };
  for (const WindowCase& c : conformance::WideWindowCases(18)) {
    WindowWorkload workload(c);
    absl::Status checked = workload.Run(*backend, plan, c.units);
    if (checked.ok()) checked = workload.Check();
    ASSERT_TRUE(checked.ok()) << ToString(c) << ": " << checked;
  }
}

TEST_P(SparseKernelsTest, WindowsHoldAtBordersOfTilesAndPagesAndWithEntriesThatStandTwice) {
  const auto backend = Backend();
  ASSERT_TRUE(backend->Configure(conformance::WindowLimits()).ok());
  conformance::EvenPlanBuilder even;
  const conformance::PlanBuilder plan = [&even](std::span<const conformance::PlanShape> shapes,
                                                const PlanTraits& traits) {
    return even.Build(shapes, traits);
  };
  for (const WindowCase& c : conformance::DirectedWindowCases()) {
    WindowWorkload workload(c);
    absl::Status checked = workload.Run(*backend, plan, c.units);
    if (checked.ok()) checked = workload.Check();
    EXPECT_TRUE(checked.ok()) << ToString(c) << ": " << checked;
  }
}

TEST_P(SparseKernelsTest, OtherWindowsAreRefused) {
  const auto backend = Backend();
  AttentionDesc desc;
  desc.geometry = {64, 448, 64, 0, 0};
  desc.attention = AttentionKind::kWindow;
  desc.kv_format = desc.entry_format = KvFormat::kFp8Page;
  EXPECT_TRUE(backend->CanRun(desc).ok());
  desc.entry_format = KvFormat::kBf16;
  EXPECT_FALSE(backend->CanRun(desc).ok());
  desc.kv_format = KvFormat::kBf16;
  EXPECT_TRUE(backend->CanRun(desc).ok());
  desc.geometry.kv_lora_rank = 512;
  EXPECT_FALSE(backend->CanRun(desc).ok());
  desc.attention = AttentionKind::kDense;
  EXPECT_TRUE(backend->CanRun(desc).ok());
}

TEST_P(SparseKernelsTest, AllHeadsOfARowAreOneTile) {
  // So rows and entries come from the memory once, whether one block takes the tile or two do.
  const auto backend = Backend();
  for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp8Page}) {
    AttentionDesc desc;
    desc.geometry = {128, 448, 64, 0, 0};
    desc.attention = AttentionKind::kWindow;
    desc.kv_format = desc.entry_format = format;
    ASSERT_TRUE(backend->CanRun(desc).ok());
    EXPECT_EQ(backend->Traits(desc).tile_rows, 128) << Name(format);
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, SparseKernelsTest,
                         ::testing::Values(&kGfx950Traits, &kGfx942Traits, &kSm90Traits),
                         [](const auto& arch) { return std::string(arch.param->arch); });

}  // namespace
}  // namespace mla::kernels::hip
