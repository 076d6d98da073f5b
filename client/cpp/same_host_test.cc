#include "client/cpp/same_host.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_format.h"

namespace mla::client {
namespace {

class SameHostTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/mla-same-host-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string PathOf(const std::string& name) const { return folder_ + "/" + name + ".sock"; }
  void Serve(const std::string& name, uint64_t boot_id) {
    std::filesystem::remove(PathOf(name));
    std::ofstream file(PathOf(name));
    servers_[PathOf(name)] = boot_id;
  }
  SameHost Here() {
    return SameHost(PathOf("*"), [this](const std::string& path) -> absl::StatusOr<uint64_t> {
      asked_.push_back(path);
      if (servers_[path] == 0) return absl::UnavailableError("nothing listens there");
      return servers_[path];
    });
  }

  std::string folder_;
  std::map<std::string, uint64_t> servers_;
  std::vector<std::string> asked_;
};

TEST_F(SameHostTest, TheSocketThatAnswersWithTheBootId) {
  SameHost here = Here();
  EXPECT_EQ(here.PathOf(1), "");
  Serve("a", 1);
  Serve("b", 2);
  Serve("broken", 0);
  Serve("c", 3);
  EXPECT_EQ(here.PathOf(3), PathOf("c"));
  EXPECT_EQ(here.PathOf(1), PathOf("a"));
  EXPECT_EQ(here.PathOf(4), "");
  asked_.clear();
  EXPECT_EQ(here.PathOf(3), PathOf("c"));
  EXPECT_EQ(asked_, std::vector<std::string>{PathOf("c")}) << "a known one is asked alone";
}

TEST_F(SameHostTest, AServerThatRestartsIsFoundAgain) {
  SameHost here = Here();
  Serve("a", 1);
  Serve("b", 2);
  EXPECT_EQ(here.PathOf(2), PathOf("b"));
  servers_[PathOf("b")] = 5;  // at the same file
  EXPECT_EQ(here.PathOf(2), "");
  EXPECT_EQ(here.PathOf(5), PathOf("b"));
  Serve("a", 7);  // with a file of its own
  EXPECT_EQ(here.PathOf(7), PathOf("a"));
}

TEST_F(SameHostTest, SoManyAreLookedAtAndNoMore) {
  SameHost here = Here();
  for (size_t i = 0; i <= kMostSockets; ++i) Serve(absl::StrFormat("%04d", i), i + 1);
  EXPECT_NE(here.PathOf(kMostSockets), "");
  EXPECT_EQ(here.PathOf(kMostSockets + 1), "");
}

TEST_F(SameHostTest, WithoutAPatternNothingIsAsked) {
  SameHost here("", [](const std::string&) -> absl::StatusOr<uint64_t> { return 1; });
  EXPECT_FALSE(here.looks());
  EXPECT_EQ(here.PathOf(1), "");
}

}  // namespace
}  // namespace mla::client
