// A container's quota, as the kernel writes it.
#include "base/usable_cpus.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace mla::base {
namespace {

TEST(UsableCpusTest, CountsWholeCpus) {
  const std::string path = testing::TempDir() + "/cpu.max";
  const auto of_sixteen = [&path](const char* text) {
    std::ofstream(path) << text;
    return WithinQuota(16, path);
  };
  EXPECT_EQ(of_sixteen("200000 100000\n"), 2);
  EXPECT_EQ(of_sixteen("350000 100000\n"), 3);
  EXPECT_EQ(of_sixteen("50000 100000\n"), 1);
  EXPECT_EQ(of_sixteen("6400000 100000\n"), 16);
  EXPECT_EQ(of_sixteen("max 100000\n"), 16);
  EXPECT_EQ(of_sixteen("100000 0\n"), 16);
  EXPECT_EQ(of_sixteen(""), 16);
  EXPECT_EQ(WithinQuota(16, path + ".absent"), 16);
  EXPECT_EQ(WithinQuota(0, path + ".absent"), 1);
}

TEST(UsableCpusTest, IsOneAtLeast) { EXPECT_GE(UsableCpuCount(), 1); }

}  // namespace
}  // namespace mla::base
