// Counts the work of a launch by the way that its tensors take, and by who waits for it. The fake
// runtime takes the same calls as HIP. docs/kernels/rocm.md has the figures.
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"
#include "tests/fake_hip/rocm/row_launch.h"

namespace mla::kernels::hip {
namespace {

// Work of one launch. Its kernels and copies are nodes of its graph, which is one driver call.
struct Counts {
  int64_t copies = 0, kernels = 0, graphs = 0, bytes_by_kernel = 0;
  bool operator==(const Counts&) const = default;
};
void PrintTo(const Counts& c, std::ostream* to) {
  *to << c.copies << " copies, " << c.kernels << " kernels, " << c.graphs << " graphs, "
      << c.bytes_by_kernel << " bytes by kernels";
}

class WorkCountsTest : public PinnedMemoryTest {
 protected:
  Bf16* PinnedRow() const { return reinterpret_cast<Bf16*>(memory_.data()); }
  int32_t* PinnedResult() const { return reinterpret_cast<int32_t*>(memory_.data() + 4096); }
  uint32_t* Word(size_t index) const {
    return reinterpret_cast<uint32_t*>(memory_.data() + 8192) + 16 * index;
  }

  // Counts the last of several equal launches, each of which reads a row and writes a result:
  // metadata has travelled by then, and a graph exists.
  Counts OfLaunch(const Bf16* row, int32_t* differs, bool alone, bool words) {
    Counts before, after;
    for (uint32_t i = 1; i <= 8; ++i) {
      RowLaunch other, launch;
      if (!alone) {
        EXPECT_TRUE(other.Submit(*backend_, 1, PinnedRow(), 1).ok());
      }
      *Word(0) = i;
      if (words) launch.set_words({Word(0), i}, 2'000'000'000, {Word(1), i});
      before = Now();
      EXPECT_TRUE(launch.Submit(*backend_, 0, row, 0, differs).ok());
      after = Now();
      EXPECT_TRUE(backend_->Wait(0).ok());
      if (!alone) {
        EXPECT_TRUE(backend_->Wait(1).ok());
      }
      if (words) {
        EXPECT_EQ(*Word(1), i);
      }
    }
    return {after.copies - before.copies, after.kernels - before.kernels,
            after.graphs - before.graphs, after.bytes_by_kernel - before.bytes_by_kernel};
  }
  Counts Now() const {
    return {control_->copies_in + control_->copies_out, control_->launches,
            control_->graph_launches, control_->bytes_by_kernel};
  }

  std::vector<Bf16> loose_row_ = std::vector<Bf16>(kRowElements);
  int32_t loose_result_ = 0;
};

// The store or the comparison, and what it needs on the device, are two kernels of one graph.
TEST_P(WorkCountsTest, OtherLaunchesInFlightMeanCopies) {
  EXPECT_EQ(OfLaunch(loose_row_.data(), &loose_result_, false, false), (Counts{2, 2, 1, 0}));
}

TEST_P(WorkCountsTest, KernelsCopyTheTensorsOfALoneLaunch) {
  const auto bytes = static_cast<int64_t>(kRowBytes + sizeof(int32_t));
  EXPECT_EQ(OfLaunch(loose_row_.data(), &loose_result_, true, false), (Counts{0, 4, 1, bytes}));
}

TEST_P(WorkCountsTest, TensorsThatKernelsReachAreNotCopied) {
  EXPECT_EQ(OfLaunch(PinnedRow(), PinnedResult(), true, false), (Counts{0, 2, 1, 0}));
}

TEST_P(WorkCountsTest, AGateAndASignalAreAKernelEach) {
  EXPECT_EQ(OfLaunch(PinnedRow(), PinnedResult(), true, true), (Counts{0, 4, 1, 0}));
}

INSTANTIATE_TEST_SUITE_P(Architectures, WorkCountsTest, ::testing::Values("gfx950", "gfx942"),
                         [](const auto& arch) { return std::string(arch.param); });

}  // namespace
}  // namespace mla::kernels::hip
