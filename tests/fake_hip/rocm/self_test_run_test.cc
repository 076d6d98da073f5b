// Tests what a caller sees of the self-test: parts with names, progress, and a time limit.
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SelfTestRunTest : public BackendOnFakeTest {
 protected:
  static HipBackendOptions Of(const std::vector<std::string>& parts) {
    HipBackendOptions options = Options();
    options.self_test = true;
    options.self_test_options.parts = parts;
    return options;
  }
};

TEST_F(SelfTestRunTest, PartsRunInTheirOrderAndTheNamedOnesAlone) {
  std::vector<std::string> begun;
  HipBackendOptions options = Of({"words", "one_row", "pages"});
  options.self_test_options.on_part = [&](std::string_view part, milliseconds so_far) {
    begun.emplace_back(part);
    EXPECT_GE(so_far.count(), 0);
  };
  ASSERT_TRUE(HipBackend::Create(options).ok());
  EXPECT_THAT(begun, ElementsAre("pages", "words", "one_row"));
}

TEST_F(SelfTestRunTest, AFailureNamesItsPart) {
  control_->wrong_results = true;
  control_->wrong_kernel = kMoveKernel;
  EXPECT_THAT(HipBackend::Create(Of({"digests", "pages"})).status().message(),
              HasSubstr("(part pages)"));
  EXPECT_TRUE(HipBackend::Create(Of({"digests"})).ok());
}

// The self-test gives up a slow device between two launches.
TEST_F(SelfTestRunTest, TheTimeIsBounded) {
  std::chrono::steady_clock::time_point now;
  HipBackendOptions options = Of({"pages", "digests", "one_row"});
  options.self_test_options.most = milliseconds(50);
  options.self_test_options.now = [&now] { return now; };
  options.self_test_options.on_part = [&now](std::string_view part, milliseconds so_far) {
    EXPECT_EQ(so_far, milliseconds(0)) << part;
    if (part == "digests") now += milliseconds(50);
  };
  EXPECT_THAT(HipBackend::Create(options).status().message(),
              HasSubstr("failed self-test on Fake Instinct: not done within 50 ms "
                        "(gpu.self_test_ms), after pages (part digests)"));
  options.self_test_options.most = milliseconds(0);
  EXPECT_THAT(HipBackend::Create(options).status().message(),
              HasSubstr("not done within 0 ms (gpu.self_test_ms), after no part (part pages)"));
}

// The limit also applies within a part. Here one second passes with each attention launch.
TEST_F(SelfTestRunTest, ALongPartEndsBetweenItsLaunches) {
  static int launches;
  launches = 0;
  control_->on_launch = [](const char* kernel) {
    launches += std::string_view(kernel).starts_with(kAttendPrefix) ? 1 : 0;
  };
  HipBackendOptions options = Of({"bf16"});
  options.self_test_options.most = std::chrono::seconds(3);
  options.self_test_options.now = [] {
    return std::chrono::steady_clock::time_point(std::chrono::seconds(launches));
  };
  EXPECT_THAT(HipBackend::Create(options).status().message(),
              HasSubstr("not done within 3000 ms (gpu.self_test_ms), after no part (part bf16)"));
  control_->on_launch = nullptr;
  EXPECT_GE(launches, 3);
  EXPECT_LE(launches, 5);  // the last launches include the other form's
}

}  // namespace
}  // namespace mla::kernels::hip
