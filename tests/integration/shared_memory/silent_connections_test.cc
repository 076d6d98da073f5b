// The shared-memory listener with connections that never send a request. Their number is bounded,
// and they keep no client out.
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/cpp/shared_memory/shared_memory.h"
#include "gtest/gtest.h"
#include "server/memory/shared_region.h"
#include "server/metrics/metrics.h"
#include "server/shared_memory/shared_memory_listener.h"
#include "tests/integration/shared_memory/ring/ring_hand.h"

namespace mla::integration {
namespace {

using client::SharedMemory;
using server::Metrics;
using server::RegionHooks;
using server::RegionLimits;
using server::SharedMemoryListener;
using server::SharedMemoryListenerOptions;
using server::SharedRegionTable;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kMiB = 1 << 20;
constexpr uid_t kFlood = 1001, kOther = 1002, kThird = 1003;

class SilentConnectionsTest : public ::testing::Test {
 protected:
  SilentConnectionsTest() {
    RegionHooks hooks;
    hooks.on_mapped = [](std::span<std::byte>) { return absl::OkStatus(); };
    hooks.before_unmapped = [this](std::span<std::byte>) {
      ++closing_;
      held_.wait(true);
    };
    regions_ = std::make_unique<SharedRegionTable>(RegionLimits{kMiB, 8 * kMiB, 4, 1}, hooks);
  }
  ~SilentConnectionsTest() override {
    held_ = false;
    held_.notify_all();
    listener_.reset();
    regions_.reset();
    rmdir(folder_.c_str());
  }

  // Allows `in_all` connections without a request, and `of_user` of one user.
  void Listen(int in_all, int of_user, int64_t handshake_ms = 3'600'000) {
    SharedMemoryListenerOptions options;
    options.regions = regions_.get();
    options.metrics = &metrics_;
    options.boot_id = 7;
    options.path = path_;
    options.shm.handshakes_max = in_all;
    options.shm.user_handshakes = of_user;
    options.shm.handshake_ms = handshake_ms;
    options.any_user = true;
    options.user_of = [this](int) {
      if (before_room_) std::exchange(before_room_, nullptr)();
      ++accepted_;
      return std::optional<uid_t>(user_);
    };
    auto opened = SharedMemoryListener::Open(std::move(options));
    ASSERT_TRUE(opened.ok()) << opened.status();
    listener_ = *std::move(opened);
  }

  // Opens a connection of that user, and waits until the listener has accepted it.
  std::unique_ptr<ShmConnection> Connect(uid_t user) {
    user_ = user;
    const int before = accepted_;
    auto connection = std::make_unique<ShmConnection>(path_);
    EXPECT_TRUE(connection->connected());
    EXPECT_TRUE(Becomes([&] { return accepted_ > before; }));
    return connection;
  }
  void ConnectSilently(uid_t user, int count) {
    for (int i = 0; i < count; ++i) silent_.push_back(Connect(user));
  }
  static bool Becomes(const std::function<bool()>& holds) {
    for (int i = 0; i < 20000 && !holds(); ++i) std::this_thread::sleep_for(milliseconds(1));
    return holds();
  }
  // Returns true if that silent connection is still open. The listener has done everything that it
  // did before accepting a later connection.
  bool Open(size_t number) const { return !silent_[number]->Ended(milliseconds(0)); }
  uint64_t displaced() { return metrics_.wire().shm_displaced.load(); }

  absl::Status Enter(const std::string& tenant) {
    client::SharedMemoryOptions options;
    options.tenant = tenant;
    options.ring = false;
    options.bytes = 4096;
    return SharedMemory::Connect(path_, options).status();
  }

  char name_[23] = "/tmp/mla-silent-XXXXXX";
  const std::string folder_ = mkdtemp(name_);
  const std::string path_ = folder_ + "/shm";
  Metrics metrics_;
  std::atomic<bool> held_{false};
  std::atomic<int> closing_{0}, accepted_{0};
  std::atomic<uid_t> user_{kFlood};
  std::function<void()> before_room_;  // called by the listener, once, when it has accepted a
                                       // connection
  std::unique_ptr<SharedRegionTable> regions_;
  std::unique_ptr<SharedMemoryListener> listener_;
  std::vector<std::unique_ptr<ShmConnection>> silent_;
};

TEST_F(SilentConnectionsTest, TheOldestOfTheUserMakesRoom) {
  Listen(/*in_all=*/8, /*of_user=*/4);
  ConnectSilently(kOther, 1);
  ConnectSilently(kFlood, 80);
  EXPECT_TRUE(silent_[76]->Ended(seconds(20)));
  EXPECT_TRUE(Open(0));
  for (size_t i = 77; i <= 80; ++i) EXPECT_TRUE(Open(i)) << i;
  EXPECT_TRUE(Becomes([&] { return displaced() == 76; }));
  // A client of either user gets its region at once, because one of the flood's connections made
  // room.
  EXPECT_EQ(Enter("a"), absl::OkStatus());
  user_ = kOther;
  EXPECT_EQ(Enter("b"), absl::OkStatus());
  EXPECT_TRUE(Open(0));
}

TEST_F(SilentConnectionsTest, TheUserWithMostMakesRoomForAnother) {
  Listen(/*in_all=*/6, /*of_user=*/4);
  ConnectSilently(kOther, 2);
  ConnectSilently(kFlood, 4);
  const auto third = Connect(kThird);
  EXPECT_TRUE(silent_[2]->Ended(seconds(20)));
  EXPECT_TRUE(Open(0) && Open(1) && Open(3) && Open(4) && Open(5));
  EXPECT_FALSE(third->Ended(milliseconds(0)));
  EXPECT_TRUE(Becomes([&] { return displaced() == 1; }));
}

// A request that the listener has not read yet when its connection is about to be displaced.
TEST_F(SilentConnectionsTest, ARequestThatHasComeIsServed) {
  Listen(/*in_all=*/1, /*of_user=*/1);
  const auto client = Connect(kFlood);
  const wire::ConnectRequest request = ShmConnection::Request("a", 4096, /*ring=*/false);
  before_room_ = [&] { EXPECT_TRUE(client->Send(&request, sizeof(request))); };
  ConnectSilently(kFlood, 1);
  const auto reply = client->Receive(seconds(20));
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->code, 0);
  EXPECT_EQ(displaced(), 0u);
}

TEST_F(SilentConnectionsTest, AFloodKeepsNoClientOut) {
  Listen(/*in_all=*/32, /*of_user=*/8);
  std::atomic<bool> stop{false};
  std::thread flood([&] {
    std::vector<std::unique_ptr<ShmConnection>> open(128);
    for (size_t next = 0; !stop; next = (next + 1) % open.size()) {
      open[next] = std::make_unique<ShmConnection>(path_);
    }
  });
  EXPECT_TRUE(Becomes([&] { return displaced() > 100; }));
  for (int i = 0; i < 50; ++i) {
    const absl::Status entered = Enter("a");
    EXPECT_EQ(entered, absl::OkStatus()) << i;
    EXPECT_TRUE(Becomes([&] { return regions_->count() == 0 && !regions_->closing(); }));
  }
  stop = true;
  flood.join();
}

TEST_F(SilentConnectionsTest, AConnectionWithoutARequestIsClosedInTime) {
  Listen(/*in_all=*/8, /*of_user=*/8, /*handshake_ms=*/1);
  ConnectSilently(kFlood, 1);
  EXPECT_TRUE(silent_[0]->Ended(seconds(20)));
  EXPECT_EQ(displaced(), 0u);
}

// Requests that wait for memory of a region that is closing.
TEST_F(SilentConnectionsTest, RequestsThatWaitAreBounded) {
  Listen(/*in_all=*/3, /*of_user=*/2);
  held_ = true;
  ASSERT_EQ(Enter("a"), absl::OkStatus());
  ASSERT_TRUE(Becomes([&] { return closing_ == 1; }));
  std::vector<std::unique_ptr<ShmConnection>> clients;
  const wire::ConnectRequest request = ShmConnection::Request("a", 4096, /*ring=*/false);
  const auto ask = [&](uid_t user) {
    clients.push_back(Connect(user));
    EXPECT_TRUE(clients.back()->Send(&request, sizeof(request)));
    return clients.back()->Receive(milliseconds(300));
  };
  EXPECT_FALSE(ask(kFlood).has_value());
  EXPECT_FALSE(ask(kFlood).has_value());
  const auto third = ask(kFlood);
  ASSERT_TRUE(third.has_value());
  EXPECT_EQ(third->code, static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_FALSE(ask(kOther).has_value());
  EXPECT_TRUE(ask(kThird).has_value());  // there are three in all
  user_ = kThird;
  EXPECT_EQ(Enter("b"), absl::OkStatus());  // there is room for it
}

}  // namespace
}  // namespace mla::integration
