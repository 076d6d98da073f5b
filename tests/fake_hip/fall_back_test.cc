// What the registry does, and says, when a GPU can not serve: every fault with both vendors'
// runtimes, on a machine that has none of them and on one that does.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/reference/reference_backend.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;

struct Machine {
  const char* row;   // in the registry
  const char* arch;  // of its device, for which there is an image
  Vendor vendor;
};

class FallBackTest : public ::testing::TestWithParam<Machine> {
 protected:
  void SetUp() override {
    control_ = FakeControl();
    ASSERT_NE(control_, nullptr);
    control_->arch = GetParam().arch;
    options_.libraries = {kLibrary};
    options_.images = {Image("gfx950", kImage950), Image("sm_90", kImage90)};
    options_.vendor = GetParam().vendor;
  }
  void TearDown() override { EXPECT_EQ(control_->live_bytes, 0); }

  BackendRegistry Registry() const {
    BackendRegistry registry;
    EXPECT_TRUE(RegisterReference(registry).ok());
    EXPECT_TRUE(RegisterGpuBackends(registry, options_).ok());
    return registry;
  }

  // "auto" takes the reference and tells why; the row's own name is refused with the same words.
  void ExpectFallBack(const std::string& reason) const {
    const BackendRegistry registry = Registry();
    auto choice = registry.Select("auto", {});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->backend->Info().name, "reference");
    bool found = false;
    for (const BackendCandidate& candidate : choice->candidates) {
      if (candidate.name != GetParam().row) continue;
      found = true;
      EXPECT_FALSE(candidate.chosen);
      EXPECT_THAT(candidate.reason, HasSubstr(reason));
    }
    EXPECT_TRUE(found);
    const absl::Status forced = registry.Select(GetParam().row, {}).status();
    EXPECT_EQ(forced.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(forced.message(), HasSubstr(reason));
  }

  fake_hip::Control* control_ = nullptr;
  HipBackendOptions options_;
};

TEST_P(FallBackTest, AWorkingDeviceIsChosen) {
  auto choice = Registry().Select("auto", {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->backend->Info().name, std::string(GetParam().row) + "-" + GetParam().arch);
  EXPECT_EQ(choice->backend->Info().units, 8);
}

TEST_P(FallBackTest, NoRuntime) {
  options_.libraries = {"libnot_there.so.1"};
  ExpectFallBack("no GPU runtime: libnot_there.so.1");
}

TEST_P(FallBackTest, NoDevice) {
  control_->devices = 0;
  ExpectFallBack("no GPU device (tests/fake_hip/libfake_hip.so)");
}

TEST_P(FallBackTest, WrongArchitecture) {
  control_->arch = GetParam().vendor == Vendor::kAmd ? "gfx90a" : "sm_80";
  ExpectFallBack(std::string("no code object for ") + control_->arch);
  ExpectFallBack("built in: gfx950, sm_90; kernels exist for gfx950, gfx942, sm_90");
}

TEST_P(FallBackTest, FailedSelfTest) {
  control_->wrong_results = true;
  ExpectFallBack("failed self-test on Fake Instinct: ");
}

TEST_P(FallBackTest, UnsupportedShape) {
  auto choice = Registry().Select(GetParam().row, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  AttentionDesc desc;
  desc.geometry = {16, 512, 32, 128, 128};
  const absl::Status status = choice->backend->CanRun(desc);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  for (const std::string& part : {std::string("wanted: absorbed heads=16 lora=512 rope=32"),
                                  std::string("supported: "), std::string("missing: this rope_dim"),
                                  std::string("device: Fake Instinct (") + GetParam().arch + ")"}) {
    EXPECT_THAT(status.message(), HasSubstr(part));
  }
}

// A call that fails while the backend is made is reported with the API's own text.
TEST_P(FallBackTest, AFailingCallIsNamed) {
  control_->fail_call = "hipModuleLoadData";
  control_->fail_after = 0;
  control_->fail_code = 200;
  ExpectFallBack("GPU module load: device kernel image is invalid (200)");
}

INSTANTIATE_TEST_SUITE_P(Vendors, FallBackTest,
                         ::testing::Values(Machine{"hip", "gfx950", Vendor::kAmd},
                                           Machine{"cuda", "sm_90", Vendor::kNvidia}),
                         [](const auto& machine) { return std::string(machine.param.row); });

}  // namespace
}  // namespace mla::kernels::hip
