#include "server/process/service_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

namespace mla::server {
namespace {

// A manager's socket, at a name of its own.
class Manager {
 public:
  explicit Manager(const std::string& name) : name_(name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    if (name[0] == '@') address.sun_path[0] = '\0';
    handle_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    bound_ = bind(handle_, reinterpret_cast<const sockaddr*>(&address),
                  static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size())) == 0;
    setenv("NOTIFY_SOCKET", name.c_str(), 1);
  }
  ~Manager() {
    close(handle_);
    if (name_[0] == '/') unlink(name_.c_str());
    unsetenv("NOTIFY_SOCKET");
  }

  bool bound() const { return bound_; }
  std::string Read() const {
    char text[256];
    const ssize_t size = recv(handle_, text, sizeof(text), 0);
    return size < 0 ? "nothing" : std::string(text, static_cast<size_t>(size));
  }

 private:
  const std::string name_;
  int handle_ = -1;
  bool bound_ = false;
};

TEST(ServiceManagerTest, TextsReachTheSocket) {
  for (const std::string& name :
       {std::string("@mla-notify-") + std::to_string(getpid()),
        std::string(std::getenv("TEST_TMPDIR") != nullptr ? std::getenv("TEST_TMPDIR") : "/tmp") +
            "/n"}) {
    if (name.size() >= sizeof(sockaddr_un::sun_path)) continue;
    const Manager manager(name);
    ASSERT_TRUE(manager.bound()) << name;
    EXPECT_TRUE(NotifyManager("READY=1\nSTATUS=serving"));
    EXPECT_EQ(manager.Read(), "READY=1\nSTATUS=serving");
    EXPECT_TRUE(NotifyManager(ReloadingText()));
    EXPECT_THAT(manager.Read(), testing::MatchesRegex("RELOADING=1\nMONOTONIC_USEC=[0-9]+"));
  }
}

TEST(ServiceManagerTest, NothingIsSentWhereThereIsNoManager) {
  unsetenv("NOTIFY_SOCKET");
  EXPECT_FALSE(NotifyManager("READY=1"));
  for (const char* name : {"", "/", "relative", "@no-listener-here", "vsock:2:1"}) {
    setenv("NOTIFY_SOCKET", name, 1);
    EXPECT_FALSE(NotifyManager("READY=1")) << name;
  }
  setenv("NOTIFY_SOCKET", std::string(200, 'x').insert(0, "/").c_str(), 1);
  EXPECT_FALSE(NotifyManager("READY=1"));
  unsetenv("NOTIFY_SOCKET");
}

// A manager that has stopped reading holds up no caller.
TEST(ServiceManagerTest, AFullSocketDoesNotBlock) {
  const Manager manager("@mla-full-" + std::to_string(getpid()));
  ASSERT_TRUE(manager.bound());
  bool sent = true;
  for (int i = 0; i < 100'000 && sent; ++i) sent = NotifyManager("WATCHDOG=1");
  EXPECT_FALSE(sent);
}

}  // namespace
}  // namespace mla::server
