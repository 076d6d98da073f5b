#include "client/mlactl/bench/plotter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace mla::mlactl {
namespace {

using ::testing::HasSubstr;

std::string ReadAll(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// PATH is a folder of its own, because no mlactl-plot lies next to this test.
class PlotterTest : public ::testing::Test {
 protected:
  PlotterTest()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::create_directories(folder_);
    setenv("PATH", folder_.c_str(), 1);
  }

  void Install(const std::string& script) const {
    const std::filesystem::path program = folder_ / "mlactl-plot";
    std::ofstream(program) << "#!/bin/sh\n" << script;
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  }

  const std::filesystem::path folder_;
};

TEST_F(PlotterTest, TheProgramGetsTheFileAndTheWholeReport) {
  Install(
      "echo \"$@\" >> \"${0%/*}/calls\"\n"
      "[ \"$1\" = --check ] || while read -r line; do echo \"$line\"; done > \"$3\"\n");
  const std::string picture = folder_ / "a picture.svg";
  const auto plotter = Plotter::Find(picture);
  ASSERT_TRUE(plotter.ok()) << plotter.status();
  EXPECT_FALSE(std::filesystem::exists(picture));
  std::string report;
  for (int i = 0; i < 20000; ++i) report += "0123456789\n";  // more than a pipe holds
  const absl::Status drawn = plotter->Draw(report);
  ASSERT_TRUE(drawn.ok()) << drawn;
  EXPECT_EQ(ReadAll(picture), report);
  EXPECT_EQ(ReadAll(folder_ / "calls"), "--check -- " + picture + "\n-- - " + picture + "\n");
}

TEST_F(PlotterTest, FailuresHaveTheProgramsMessage) {
  Install("echo 'mlactl-plot: x.gif: must end in .svg' >&2; exit 1");
  const auto refused = Plotter::Find("x.gif");
  EXPECT_EQ(refused.status().message(), "mlactl-plot: x.gif: must end in .svg");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  Install("exit 7");
  EXPECT_THAT(std::string(Plotter::Find("x.svg").status().message()),
              HasSubstr("mlactl-plot ended with status 7"));
  Install("kill -9 $$");
  EXPECT_THAT(std::string(Plotter::Find("x.svg").status().message()),
              HasSubstr("mlactl-plot was ended by signal 9"));
}

TEST_F(PlotterTest, AMissingProgramIsNamed) {
  EXPECT_THAT(std::string(Plotter::Find("x.svg").status().message()),
              HasSubstr("mlactl-plot does not start (No such file or directory): it comes with "
                        "mlactl and needs Python with matplotlib"));
}

}  // namespace
}  // namespace mla::mlactl
