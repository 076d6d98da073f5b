// Tests graphs that replay stale arguments or inputs, as some versions of ROCm sometimes do. The
// probe at start detects this, and graphs are not used.
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class ReplaysTest : public BackendOnFakeTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(BackendOnFakeTest::SetUp());
    control_->arch = GetParam();
  }
  void TearDown() override {
    backend_.reset();
    EXPECT_EQ(control_->graphs, 0);
    BackendOnFakeTest::TearDown();
  }
  // Creates a backend and returns its note about graphs.
  std::string Make() {
    backend_.reset();
    HipBackendOptions options = Options();
    options.images.push_back(Image("sm_90", kImage90));
    if (std::string(GetParam()) == "sm_90") options.vendor = Vendor::kNvidia;
    options.graphs = GraphUse::kOn;
    options.self_test = true;
    options.self_test_options.parts = {"replays"};
    auto made = HipBackend::Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    if (!made.ok()) return "";
    backend_ = *std::move(made);
    EXPECT_TRUE(backend_->Configure(Limits()).ok());
    for (const BackendNote& note : backend_->Info().notes) {
      if (note.name == "graphs") return note.text;
    }
    return "no note";
  }
  // Returns true if repeated launches run as graphs. They must store the right rows in any case.
  bool UsesGraphs() {
    const int64_t before = control_->graph_launches;
    for (int i = 0; i < 6; ++i) {
      const std::vector<Bf16> row(576, static_cast<Bf16>(0x3f80 + i));
      EXPECT_TRUE(AppendOnce(*backend_, row.data()).ok());
      EXPECT_EQ(ReadRows(*backend_, 1), row);
    }
    return control_->graph_launches > before;
  }

  std::unique_ptr<HipBackend> backend_;
};

TEST_P(ReplaysTest, GraphsThatAreRightAreUsed) {
  EXPECT_EQ(Make(), "on");
  EXPECT_GE(control_->graph_launches, kLeastReplays);
  EXPECT_TRUE(UsesGraphs());
}

TEST_P(ReplaysTest, OldArgumentsTurnThemOff) {
  control_->stale_replay = fake_hip::StaleReplay::kArguments;
  EXPECT_THAT(Make(), HasSubstr("(part replays)"));
  EXPECT_FALSE(UsesGraphs());
  EXPECT_TRUE(backend_->Healthy().ok());
}

TEST_P(ReplaysTest, OldInputsTurnThemOff) {
  control_->stale_replay = fake_hip::StaleReplay::kInputs;
  EXPECT_THAT(Make(), StartsWith("off: absorbed form, 150 keys, row "));
  EXPECT_FALSE(UsesGraphs());
}

TEST_P(ReplaysTest, GraphsThatTheRuntimeRefusesAreOff) {
  control_->fail_call = "hipGraphLaunch";
  control_->fail_after = 0;
  EXPECT_EQ(Make(),
            "off: the runtime launched 0 of 10 sequences of kernels as graphs (part replays)");
  control_->fail_call = "";
  EXPECT_FALSE(UsesGraphs());
}

INSTANTIATE_TEST_SUITE_P(Architectures, ReplaysTest, ::testing::Values("gfx950", "gfx942", "sm_90"),
                         [](const auto& arch) { return std::string(arch.param); });

}  // namespace
}  // namespace mla::kernels::hip
