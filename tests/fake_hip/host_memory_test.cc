// Tests host memory that the device's copies access directly. Memory is pinned in place, registered
// while launches run, and released while some of them use it.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;

class HostMemoryTest : public BackendOnFakeTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(BackendOnFakeTest::SetUp());
    HipBackendOptions options = Options();
    options.reach_host = false;  // in_place_test.cc has kernels that read the memory themselves
    auto backend = HipBackend::Create(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    ASSERT_TRUE(backend_->Configure(Limits()).ok());
  }
  void TearDown() override {
    backend_.reset();  // before the test counts its memory
    BackendOnFakeTest::TearDown();
  }

  std::unique_ptr<HipBackend> backend_;
};

// Memory with its own pages, like a client's region.
class Region {
 public:
  Region() : memory_(static_cast<std::byte*>(std::aligned_alloc(4096, kBytes))) {
    std::fill_n(rows(), kBytes / 2, Bf16{0x3f80});
  }
  ~Region() { std::free(memory_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  std::span<std::byte> bytes() const { return {memory_, kBytes}; }
  Bf16* rows() const { return reinterpret_cast<Bf16*>(memory_); }

 private:
  static constexpr size_t kBytes = 16384;
  std::byte* const memory_;
};

TEST_F(HostMemoryTest, CopiesReachRegisteredMemoryWithoutStaging) {
  HipBackend& b = *backend_;
  const Region region;
  ASSERT_TRUE(AppendOnce(b, region.rows() + 8).ok());
  EXPECT_NE(control_->last_copied_in, region.rows() + 8);  // copied through the staging memory

  ASSERT_TRUE(b.RegisterHost(region.bytes()).ok());
  EXPECT_EQ(control_->registered_bytes, 16384);
  const int64_t copies = control_->copies_in;
  ASSERT_TRUE(AppendOnce(b, region.rows() + 8).ok());
  EXPECT_EQ(control_->last_copied_in, region.rows() + 8);
  EXPECT_EQ(control_->copies_in - copies, 1);  // only the row; the metadata has not changed

  b.UnregisterHost(region.bytes());
  EXPECT_EQ(control_->registered_bytes, 0);
  ASSERT_TRUE(AppendOnce(b, region.rows() + 8).ok());
  EXPECT_NE(control_->last_copied_in, region.rows() + 8);
  b.UnregisterHost(region.bytes());  // not registered: nothing to do
  EXPECT_TRUE(b.Healthy().ok());
}

TEST_F(HostMemoryTest, MemoryThatCannotBePinnedIsStaged) {
  HipBackend& b = *backend_;
  const Region region;
  control_->fail_call = "hipHostRegister";
  control_->fail_after = 0;
  control_->fail_code = 2;
  const absl::Status refused = b.RegisterHost(region.bytes());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("GPU host register: out of memory (2)"));
  ASSERT_TRUE(AppendOnce(b, region.rows()).ok());
  EXPECT_NE(control_->last_copied_in, region.rows());
  b.UnregisterHost(region.bytes());
  EXPECT_TRUE(b.Healthy().ok());
  EXPECT_EQ(control_->registered_bytes, 0);
}

TEST_F(HostMemoryTest, UnregisteringWaitsForTheLaunchesThatReachTheMemory) {
  HipBackend& b = *backend_;
  {
    const Region region;
    ASSERT_TRUE(b.RegisterHost(region.bytes()).ok());
    AppendLaunch launch;
    ASSERT_TRUE(launch.Submit(b, 0, region.rows()).ok());
    std::thread closer([&] {
      b.UnregisterHost(region.bytes());
      // After this point, the launch must not access the memory any more.
      std::fill_n(region.rows(), 576, Bf16{0x7fc0});
    });
    // Long enough that the test notices an UnregisterHost that does not wait.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(control_->registered_bytes, 16384);
    EXPECT_TRUE(b.Wait(0).ok());
    closer.join();
    EXPECT_EQ(control_->registered_bytes, 0);
  }
  EXPECT_EQ(ReadRows(b, 1), std::vector<Bf16>(576, 0x3f80));
}

TEST_F(HostMemoryTest, UnregisteringWaitsForNoLaunchOfOthers) {
  HipBackend& b = *backend_;
  const Region busy, idle;
  for (const Region* region : {&busy, &idle}) ASSERT_TRUE(b.RegisterHost(region->bytes()).ok());
  AppendLaunch of_idle, of_busy;
  ASSERT_TRUE(of_idle.Submit(b, 1, idle.rows()).ok());
  ASSERT_TRUE(b.Wait(1).ok());
  ASSERT_TRUE(of_busy.Submit(b, 0, busy.rows()).ok());
  b.UnregisterHost(idle.bytes());  // while the other region's launch runs in the waiting thread
  EXPECT_EQ(control_->registered_bytes, 16384);
  ASSERT_TRUE(b.Wait(0).ok());
  b.UnregisterHost(busy.bytes());
  EXPECT_EQ(control_->registered_bytes, 0);
}

TEST_F(HostMemoryTest, ALostDeviceKeepsThePagesAndEndsTheWait) {
  HipBackend& b = *backend_;
  const Region region;
  ASSERT_TRUE(b.RegisterHost(region.bytes()).ok());
  AppendLaunch launch;
  ASSERT_TRUE(launch.Submit(b, 0, region.rows()).ok());
  control_->hang = true;
  // A call that is already waiting returns after twice the watchdog's time.
  std::thread early([&] { b.UnregisterHost(region.bytes()); });
  EXPECT_FALSE(b.Wait(0).ok());
  early.join();
  EXPECT_EQ(control_->registered_bytes, 16384);
  const Region late;
  EXPECT_EQ(b.RegisterHost(late.bytes()).code(), absl::StatusCode::kUnavailable);
  // The device recovers and makes the copies after all, before the region is freed.
  control_->hang = false;
  backend_.reset();
}

TEST_F(HostMemoryTest, RegionsComeAndGoBesideLaunches) {
  HipBackend& b = *backend_;
  int failures = 0;
  std::thread doors([&b, &failures] {
    for (int i = 0; i < 300; ++i) {
      const Region region;
      failures += !b.RegisterHost(region.bytes()).ok();
      b.UnregisterHost(region.bytes());
    }
  });
  const Region mine;
  ASSERT_TRUE(b.RegisterHost(mine.bytes()).ok());
  for (int i = 0; i < 300; ++i) EXPECT_TRUE(AppendOnce(b, mine.rows()).ok());
  doors.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(control_->registered_bytes, 16384);
  b.UnregisterHost(mine.bytes());
  EXPECT_EQ(control_->registered_bytes, 0);
}

TEST_F(HostMemoryTest, PartsLieSideBySideWhereverTheyComeFrom) {
  HipBackend& b = *backend_;
  // Three rows of 576 elements: 200 columns pinned, 376 not.
  const Region pinned;
  ASSERT_TRUE(b.RegisterHost(pinned.bytes()).ok());
  std::vector<Bf16> loose(size_t{3} * 376);
  for (size_t i = 0; i < loose.size(); ++i) loose[i] = static_cast<Bf16>(i);
  for (size_t i = 0; i < size_t{3} * 200; ++i) {
    pinned.rows()[i] = static_cast<Bf16>(5000 + i);
  }
  LaunchLayout layout(b, 0);
  const InputPart parts[] = {{pinned.rows(), 400}, {loose.data(), 752}};
  auto kv = layout.InputParts(3, parts);
  ASSERT_TRUE(kv.ok()) << kv.status();
  const uint32_t page = 0;
  const TableRange table{0, 1};
  const AppendRecord record = Append(*kv, 3);
  Launch launch;
  launch.inputs = layout.inputs();
  launch.page_tables = {&page, 1};
  launch.table_changes = {&table, 1};
  launch.appends = {&record, 1};
  ASSERT_TRUE(b.Submit(0, launch).ok());
  ASSERT_TRUE(b.Wait(0).ok());
  EXPECT_EQ(control_->last_copied_in, pinned.rows());
  const std::vector<Bf16> read = ReadRows(b, 3);
  for (size_t row = 0; row < 3; ++row) {
    for (size_t i = 0; i < 576; ++i) {
      const Bf16 want = i < 200 ? pinned.rows()[row * 200 + i] : loose[row * 376 + i - 200];
      ASSERT_EQ(read[row * 576 + i], want) << row << " " << i;
    }
  }
}

}  // namespace
}  // namespace mla::kernels::hip
