// Runs the driver on a target with a planted fault: a crashing input must fail the test and be
// kept.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <string>

namespace mla::fuzz {
namespace {

using ::testing::HasSubstr;

struct Result {
  int code = -1;  // of the shell: 128 + the signal
  std::string output;
};

// Runs the driver on the canary, with crash files under the test's folder.
Result RunCanary(const std::string& arguments) {
  const std::string command = "TEST_UNDECLARED_OUTPUTS_DIR=" + testing::TempDir() +
                              " bash -c 'tests/fuzz/harness/canary " + arguments +
                              "; exit $?' 2>&1";
  Result result;
  FILE* const pipe = popen(command.c_str(), "r");
  std::array<char, 4096> bytes;
  while (const size_t read = fread(bytes.data(), 1, bytes.size(), pipe)) {
    result.output.append(bytes.data(), read);
  }
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

constexpr int kAborted = 128 + 6;

TEST(DriverTest, AFaultFailsTheRunAndItsInputIsKept) {
  const std::string kept = testing::TempDir() + "/crash-input";
  const Result run = RunCanary("");
  EXPECT_EQ(run.code, kAborted);
  EXPECT_THAT(run.output, HasSubstr("fuzz: reads past the end"));
  EXPECT_THAT(run.output, HasSubstr("the input is in "));
  ASSERT_TRUE(std::ifstream(kept).good()) << run.output;

  const Result again = RunCanary(kept);
  EXPECT_EQ(again.code, kAborted);
  EXPECT_THAT(again.output, HasSubstr("fuzz: reads past the end"));
}

TEST(DriverTest, FilesAreRunAlone) {
  const std::string good = testing::TempDir() + "/good";
  std::ofstream(good) << "header: 4\nbody";
  const Result run = RunCanary(good);
  EXPECT_EQ(run.code, 0) << run.output;
  EXPECT_EQ(run.output, "");
  EXPECT_EQ(RunCanary("/nonexistent").code, 1);
}

}  // namespace
}  // namespace mla::fuzz
