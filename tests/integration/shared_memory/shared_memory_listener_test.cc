// The listener when it must make room first.
#include "server/shared_memory/shared_memory_listener.h"

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "client/cpp/shared_memory/shared_memory.h"
#include "gtest/gtest.h"
#include "server/memory/shared_region.h"
#include "server/metrics/metrics.h"

namespace mla::integration {
namespace {

using client::SharedMemory;
using server::Metrics;
using server::RegionHooks;
using server::RegionLimits;
using server::SharedMemoryListener;
using server::SharedMemoryListenerOptions;
using server::SharedRegionTable;
using std::chrono::steady_clock;

constexpr int64_t kMiB = 1 << 20;

class SharedMemoryListenerTest : public ::testing::Test {
 protected:
  SharedMemoryListenerTest() {
    RegionHooks hooks;
    hooks.on_mapped = [](std::span<std::byte>) { return absl::OkStatus(); };
    hooks.before_unmapped = [this](std::span<std::byte>) {
      ++closing_;
      held_.wait(true);
    };
    // One region for each tenant, two in all.
    regions_ = std::make_unique<SharedRegionTable>(RegionLimits{kMiB, 8 * kMiB, 2, 1}, hooks);
    SharedMemoryListenerOptions options;
    options.regions = regions_.get();
    options.metrics = &metrics_;
    options.boot_id = 7;
    options.path = folder_ + "/shm";
    auto opened = SharedMemoryListener::Open(std::move(options));
    EXPECT_TRUE(opened.ok()) << opened.status();
    listener_ = *std::move(opened);
  }
  ~SharedMemoryListenerTest() override {
    Release();
    listener_.reset();
    regions_.reset();
    rmdir(folder_.c_str());
  }
  void Release() {
    held_ = false;
    held_.notify_all();
  }
  absl::StatusOr<std::unique_ptr<SharedMemory>> Enter(const std::string& tenant) {
    client::SharedMemoryOptions options;
    options.tenant = tenant;
    options.ring = false;
    options.bytes = 4096;
    return SharedMemory::Connect(folder_ + "/shm", options);
  }
  // A tenant connects and leaves, and its region takes long to close.
  void LeaveRegionClosing(const std::string& tenant, int regions) {
    ASSERT_TRUE(Enter(tenant).ok());
    for (int i = 0; i < 5000 && closing_ < regions; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_EQ(closing_, regions);
  }

  char name_[21] = "/tmp/mla-shm-XXXXXX";
  const std::string folder_ = mkdtemp(name_);
  Metrics metrics_;
  std::atomic<bool> held_{true};
  std::atomic<int> closing_{0};
  std::unique_ptr<SharedRegionTable> regions_;
  std::unique_ptr<SharedMemoryListener> listener_;
};

TEST_F(SharedMemoryListenerTest, AnIntroducedConnectionHasTheTenantThatItWasGiven) {
  const absl::StatusOr<int> socket = listener_->ConnectFor("alice");
  ASSERT_TRUE(socket.ok()) << socket.status();
  client::SharedMemoryOptions options;
  options.tenant = "mallory";  // not read
  options.ring = false;
  options.bytes = 4096;
  auto memory = SharedMemory::Attach(*socket, options);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const std::string handle((*memory)->handle());
  EXPECT_NE(regions_->Find("alice", handle), nullptr);
  EXPECT_EQ(regions_->Find("mallory", handle), nullptr);
  memory->reset();
  for (int i = 0; i < 5000 && regions_->Find("alice", handle) != nullptr; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(regions_->Find("alice", handle), nullptr);
}

TEST_F(SharedMemoryListenerTest, WhoWaitsForRoomKeepsNobodyElseWaiting) {
  LeaveRegionClosing("a", 1);
  const auto begin = steady_clock::now();
  auto again = std::async(std::launch::async, [this] { return Enter("a"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_TRUE(Enter("b").ok());
  EXPECT_LT(steady_clock::now() - begin, SharedRegionTable::kCloseWait / 2);
  EXPECT_EQ(again.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  Release();
  EXPECT_TRUE(again.get().ok());
}

TEST_F(SharedMemoryListenerTest, WhoWaitsInVainIsRefusedInTheEnd) {
  LeaveRegionClosing("a", 1);
  const auto begin = steady_clock::now();
  EXPECT_TRUE(absl::IsResourceExhausted(Enter("a").status()));
  EXPECT_GE(steady_clock::now() - begin, SharedRegionTable::kCloseWait);
  Release();
  for (int i = 0; i < 5000 && regions_->closing(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(Enter("a").ok());
}

TEST_F(SharedMemoryListenerTest, WhoWaitsAndLeavesIsForgotten) {
  LeaveRegionClosing("a", 1);
  {
    client::SharedMemoryOptions hasty;
    hasty.tenant = "a";
    hasty.ring = false;
    hasty.bytes = 4096;
    hasty.connect_timeout_ms = 50;
    EXPECT_FALSE(SharedMemory::Connect(folder_ + "/shm", hasty).ok());
  }
  EXPECT_TRUE(Enter("b").ok());
  Release();
  EXPECT_TRUE(Enter("a").ok());
}

// A region that takes long to close does not keep another one from closing.
TEST_F(SharedMemoryListenerTest, ARegionThatIsLongInClosingIsNotAlone) {
  LeaveRegionClosing("a", 1);
  LeaveRegionClosing("b", 2);
}

}  // namespace
}  // namespace mla::integration
