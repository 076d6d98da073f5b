// Quotas and groups of containers, as the kernel writes them.
#include "base/usable_cpus.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/control_groups.h"

namespace mla::base {
namespace {

// Files below a folder, as below "/".
class FakeRoot {
 public:
  FakeRoot() : path_(testing::TempDir() + "/usable_cpus_root") { Clear(); }
  ~FakeRoot() { Clear(); }
  void Write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path_ + file).parent_path());
    std::ofstream(path_ + file) << text;
  }
  const std::string& path() const { return path_; }
  // The folders that ControlGroupsOf finds, without the root, each before those around it.
  std::vector<std::string> Folders(const char* controller) const {
    std::vector<std::string> folders;
    for (const ControlGroup& group : ControlGroupsOf(controller, path_)) {
      folders.push_back(std::to_string(group.version) + group.folder.substr(path_.size()));
    }
    return folders;
  }

 private:
  void Clear() const { std::filesystem::remove_all(path_); }
  const std::string path_;
};

using Folders = std::vector<std::string>;

constexpr char kMounts1[] =
    "30 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "31 30 0:29 /docker/7 /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "32 30 0:30 /docker/7 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

TEST(UsableCpusTest, CountsWholeCpus) {
  const FakeRoot root;
  root.Write("/proc/self/cgroup", "0::/\n");
  const auto of_sixteen = [&root](const char* text) {
    root.Write("/sys/fs/cgroup/cpu.max", text);
    return WithinQuota(16, root.path());
  };
  EXPECT_EQ(of_sixteen("200000 100000\n"), 2);
  EXPECT_EQ(of_sixteen("350000 100000\n"), 3);
  EXPECT_EQ(of_sixteen("50000 100000\n"), 1);
  EXPECT_EQ(of_sixteen("6400000 100000\n"), 16);
  EXPECT_EQ(of_sixteen("max 100000\n"), 16);
  EXPECT_EQ(of_sixteen("100000 0\n"), 16);
  EXPECT_EQ(of_sixteen(""), 16);
  EXPECT_EQ(WithinQuota(16, root.path() + ".absent"), 16);
  EXPECT_EQ(WithinQuota(0, root.path() + ".absent"), 1);
}

TEST(UsableCpusTest, TheTightestGroupAroundTheProcessCounts) {
  const FakeRoot root;
  root.Write("/proc/self/cgroup", "0::/system.slice/mla.service\n");
  root.Write("/sys/fs/cgroup/system.slice/mla.service/cpu.max", "max 100000\n");
  root.Write("/sys/fs/cgroup/system.slice/cpu.max", "300000 100000\n");
  EXPECT_EQ(WithinQuota(16, root.path()), 3);
  root.Write("/sys/fs/cgroup/system.slice/mla.service/cpu.max", "200000 100000\n");
  EXPECT_EQ(WithinQuota(16, root.path()), 2);
}

TEST(UsableCpusTest, GroupsOfVersionOneCount) {
  const FakeRoot root;
  root.Write("/proc/self/cgroup", "5:cpu,cpuacct:/docker/7\n4:memory:/docker/7\n0::/docker/7\n");
  root.Write("/proc/self/mountinfo", kMounts1);
  root.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  root.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(WithinQuota(16, root.path()), 16);
  root.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n");
  EXPECT_EQ(WithinQuota(16, root.path()), 2);
}

TEST(UsableCpusTest, IsOneAtLeast) { EXPECT_GE(UsableCpuCount(), 1); }

TEST(ControlGroupsTest, AreThoseAroundTheProcessAsFarAsTheyAreMounted) {
  const FakeRoot root;
  EXPECT_EQ(root.Folders("memory"), Folders());
  root.Write("/proc/self/cgroup", "4:memory:/docker/7/a\n3:cpuset:/\n0::/b/c\n");
  // Without a list of mounts they are where they always are.
  EXPECT_EQ(root.Folders("memory"),
            (Folders{"1/sys/fs/cgroup/memory/docker/7/a", "1/sys/fs/cgroup/memory/docker/7",
                     "1/sys/fs/cgroup/memory/docker", "1/sys/fs/cgroup/memory",
                     "2/sys/fs/cgroup/b/c", "2/sys/fs/cgroup/b", "2/sys/fs/cgroup"}));
  root.Write("/proc/self/mountinfo",
             std::string(kMounts1) + "33 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 c rw\n");
  EXPECT_EQ(
      root.Folders("memory"),
      (Folders{"1/sys/fs/cgroup/memory/a", "1/sys/fs/cgroup/memory", "2/sys/fs/cgroup/unified/b/c",
               "2/sys/fs/cgroup/unified/b", "2/sys/fs/cgroup/unified"}));
  // A group that the mount does not show, and one outside of the process's own namespace.
  for (const char* const group : {"/docker/78", "/../8", "/"}) {
    root.Write("/proc/self/cgroup", std::string("4:memory:") + group + "\n");
    EXPECT_EQ(root.Folders("memory"), Folders{"1/sys/fs/cgroup/memory"}) << group;
  }
}

}  // namespace
}  // namespace mla::base
