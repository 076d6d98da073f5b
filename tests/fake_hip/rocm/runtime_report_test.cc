// Tests what --check-config says about GPU runtimes, with the fake runtime in several versions.
#include "kernels/hip/runtime/runtime_report.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class RuntimeReportTest : public BackendOnFakeTest {
 protected:
  static std::vector<std::string> Amd(const std::vector<KernelImage>& images = Options().images) {
    return DescribeRuntime(Vendor::kAmd, Options().libraries, images);
  }
  static std::string Library() { return std::string("AMD GPUs: ") + kLibrary; }
};

TEST_F(RuntimeReportTest, AVersionDrivesTheArchitecturesThatItKnows) {
  control_->arch = "gfx942";
  control_->version = 60443484;
  EXPECT_THAT(Amd(), ElementsAre(Library() + ", ROCm 6.4, can drive gfx942; cannot drive gfx950 "
                                             "(runtimes know it from ROCm 7.0 on)",
                                 AllOf(StartsWith("AMD GPUs: device 0: gfx942 ("),
                                       HasSubstr("), can be used"))));
  control_->version = 70051831;
  EXPECT_EQ(Amd().front(), Library() + ", ROCm 7.0, can drive gfx942, gfx950");
  control_->version = 60140091;
  EXPECT_THAT(Amd(), ElementsAre(StartsWith(Library() +
                                            ", ROCm 6.1, can drive nothing: ROCm 6.1 is too old")));
}

// A runtime of an older number may have been given the architecture.
TEST_F(RuntimeReportTest, ADeviceThatIsListedCanBeDriven) {
  control_->arch = "gfx950";
  control_->version = 60443484;
  EXPECT_EQ(Amd().front(), Library() + ", ROCm 6.4, can drive gfx942, gfx950");
}

TEST_F(RuntimeReportTest, ArchitecturesWithoutCodeAreNamed) {
  control_->arch = "gfx950";
  EXPECT_EQ(Amd({Image("gfx950", kImage950)}).front(),
            Library() +
                ", ROCm 7.2, can drive gfx950; cannot drive gfx942 (no code for it was "
                "built in)");
  EXPECT_THAT(Amd({}),
              ElementsAre(HasSubstr("can drive nothing; cannot drive gfx942 (no code for it was "
                                    "built in), gfx950 (no code for it was built in)"),
                          HasSubstr("cannot be used: no code for it was built in")));
  control_->arch = "gfx1100";
  control_->devices = 2;
  EXPECT_THAT(
      Amd(),
      ElementsAre(HasSubstr("can drive gfx942, gfx950"), HasSubstr("device 0: gfx1100 ("),
                  AllOf(HasSubstr("device 1: gfx1100 ("), HasSubstr("cannot be used: no code"))));
}

TEST_F(RuntimeReportTest, AMachineWithoutDevicesOrWithoutARuntimeSaysSo) {
  control_->devices = 0;
  EXPECT_THAT(Amd(), ElementsAre(AllOf(HasSubstr("can drive gfx942, gfx950; no GPU device"))));
  control_->devices = 1;
  control_->FailOnce("hipInit");
  EXPECT_THAT(Amd(), ElementsAre(AllOf(
                         HasSubstr("ROCm 7.2, can drive gfx942, gfx950"),
                         HasSubstr("; no GPU device (tests/fake_hip/libfake_hip.so): GPU init"))));
  control_->FailOnce("hipRuntimeGetVersion");
  EXPECT_THAT(Amd(), ElementsAre(HasSubstr("(the runtime does not say which version it is)")));
  const std::vector<std::string> nowhere = {"/nonexistent/libamdhip64.so.7"};
  EXPECT_THAT(DescribeRuntime(Vendor::kAmd, nowhere, Options().images),
              ElementsAre(AllOf(
                  StartsWith("AMD GPUs: none of gfx942, gfx950 can be driven: no GPU runtime"),
                  HasSubstr(nowhere[0]))));
}

TEST_F(RuntimeReportTest, NvidiasAreListedWithoutAContext) {
  control_->arch = "sm_90";
  control_->FailOnce("cuDevicePrimaryCtxRetain");
  EXPECT_THAT(DescribeRuntime(Vendor::kNvidia, Options().libraries, {{Image("sm_90", kImage90)}}),
              ElementsAre(std::string("NVIDIA GPUs: ") + kLibrary + ", can drive sm_90",
                          AllOf(StartsWith("NVIDIA GPUs: device 0: sm_90 ("),
                                HasSubstr("), can be used"))));
}

}  // namespace
}  // namespace mla::kernels::hip
