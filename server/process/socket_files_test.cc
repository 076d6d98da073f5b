// Tests where the sockets of a server may lie.
#include "server/process/socket_files.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

namespace mla::server {
namespace {

class SocketFilesTest : public testing::Test {
 protected:
  ~SocketFilesTest() override {
    unlink(path_.c_str());
    rmdir(folder_.c_str());
  }
  absl::Status Prepare(bool open_folder = false, uid_t uid = geteuid()) const {
    return CheckSocketPath("server.unix_path", path_, open_folder, uid);
  }
  void MakeSocket() const { ASSERT_EQ(mknod(path_.c_str(), S_IFSOCK | 0600, 0), 0); }
  void Open(mode_t mode) const { ASSERT_EQ(chmod(folder_.c_str(), mode), 0); }

  char name_[24] = "/tmp/mla-sockets-XXXXXX";
  const std::string folder_ = mkdtemp(name_);
  const std::string path_ = folder_ + "/mla.sock";
};

TEST_F(SocketFilesTest, AFolderThatAllMayWriteToIsRefused) {
  EXPECT_EQ(Prepare(), absl::OkStatus());
  for (const mode_t mode : {01777, 0777, 0703}) {
    Open(mode);
    EXPECT_TRUE(absl::IsInvalidArgument(Prepare())) << mode;
    EXPECT_NE(Prepare().message().find("server.unix_path: " + path_), std::string::npos);
    EXPECT_EQ(Prepare(/*open_folder=*/true), absl::OkStatus()) << mode;
  }
  Open(0770);
  EXPECT_EQ(Prepare(), absl::OkStatus());
}

TEST_F(SocketFilesTest, AFileOfAnotherUserIsLeftAlone) {
  MakeSocket();
  EXPECT_EQ(Prepare(), absl::OkStatus());
  EXPECT_TRUE(absl::IsInvalidArgument(Prepare(/*open_folder=*/true, geteuid() + 1)));
}

TEST_F(SocketFilesTest, AFolderThatIsMissingIsNamed) {
  const absl::Status status = PrepareSocketFolder("shm.path", folder_ + "/none/mla.sock", false);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_NE(status.message().find(folder_ + "/none: "), std::string::npos) << status;
}

TEST_F(SocketFilesTest, TheDefaultIsAFolderOfTheUsersOwn) {
  setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
  EXPECT_EQ(RuntimeFolder(), "/run/user/7");
  unsetenv("XDG_RUNTIME_DIR");
  const std::string own = RuntimeFolder();
  EXPECT_EQ(own, "/tmp/mla-server-" + std::to_string(geteuid()));
  EXPECT_EQ(PrepareSocketFolder("server.unix_path", own + "/x", false), absl::OkStatus());
  struct stat about {};
  ASSERT_EQ(lstat(own.c_str(), &about), 0);
  EXPECT_TRUE(S_ISDIR(about.st_mode));
  EXPECT_EQ(about.st_mode & 0022, 0u);
  // As if another user had made it first.
  EXPECT_TRUE(absl::IsInvalidArgument(
      CheckSocketPath("server.unix_path", own + "/x", false, geteuid() + 1)));
}

}  // namespace
}  // namespace mla::server
