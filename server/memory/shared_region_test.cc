// Regions: calls of the backend, lifetime of memory, and who unmaps it.
#include "server/memory/shared_region.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/wire/ring_layout.h"
#include "scheduler/share_of_bound.h"

namespace mla::server {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

// A backend that takes its time to let memory go.
class Backend {
 public:
  RegionHooks Hooks() {
    return {[this](std::span<std::byte> memory) {
              mapped_.push_back(memory.data());
              return answer_;
            },
            [this](std::span<std::byte> memory) {
              std::unique_lock lock(mutex_);
              asked_ = true;
              changed_.notify_all();
              changed_.wait(lock, [this] { return !holding_; });
              // Still mapped: the unpinning code may read it.
              memory[0] = std::byte{1};
              unmapped_.push_back(memory.data());
              unmapped_by_.push_back(std::this_thread::get_id());
              changed_.notify_all();
            },
            nullptr};
  }
  void Refuse() { answer_ = absl::ResourceExhaustedError("no more pages may be pinned"); }
  void Hold() {
    const std::lock_guard lock(mutex_);
    holding_ = true;
  }
  void AwaitAsked() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return asked_; });
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    holding_ = false;
    changed_.notify_all();
  }
  void AwaitUnmapped(size_t regions) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return unmapped_.size() == regions; });
  }
  const std::vector<std::byte*>& mapped() const { return mapped_; }
  std::vector<std::byte*> unmapped() const {
    const std::lock_guard lock(mutex_);
    return unmapped_;
  }
  std::vector<std::thread::id> unmapped_by() const {
    const std::lock_guard lock(mutex_);
    return unmapped_by_;
  }

 private:
  absl::Status answer_;
  std::vector<std::byte*> mapped_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool holding_ = false, asked_ = false;
  std::vector<std::byte*> unmapped_;
  std::vector<std::thread::id> unmapped_by_;
};

class SharedRegionTest : public ::testing::Test {
 protected:
  static constexpr RegionLimits kLimits = {kMiB, 4 * kMiB, 3, 2};
  std::shared_ptr<SharedRegion> Make(uint64_t bytes = 5000) {
    auto region = table_->Create("a", bytes, 4096);
    EXPECT_TRUE(region.ok()) << region.status();
    return *std::move(region);
  }
  void End(std::shared_ptr<SharedRegion>&& region) {
    table_->Remove(*region);
    region.reset();
  }
  // Waits until no region is being closed.
  int64_t MappedAfterClosing() {
    while (table_->mapped_bytes() > 0) std::this_thread::yield();
    return table_->mapped_bytes();
  }

  Backend backend_;
  std::unique_ptr<SharedRegionTable> table_ =
      std::make_unique<SharedRegionTable>(kLimits, backend_.Hooks());
};

TEST_F(SharedRegionTest, TheBackendKnowsTheMemoryFromFirstToLast) {
  auto region = Make();
  EXPECT_EQ(backend_.mapped(), std::vector<std::byte*>{region->data()});
  std::byte* const memory = region->data();
  std::shared_ptr<SharedRegion> of_a_request = region;
  End(std::move(region));
  EXPECT_TRUE(backend_.unmapped().empty()) << "a request still points into it";
  of_a_request.reset();
  backend_.AwaitUnmapped(1);
  EXPECT_EQ(backend_.unmapped(), std::vector<std::byte*>{memory});
  EXPECT_EQ(MappedAfterClosing(), 0);
}

TEST_F(SharedRegionTest, MemoryThatCannotBePinnedServesAllTheSame) {
  backend_.Refuse();
  auto region = Make();
  std::fill_n(region->data(), region->size(), std::byte{7});
  EXPECT_EQ(table_->Find("a", {reinterpret_cast<const char*>(region->handle().data()),
                               region->handle().size()}),
            region);
  End(std::move(region));
  EXPECT_EQ(MappedAfterClosing(), 0);
  EXPECT_TRUE(backend_.unmapped().empty()) << "what was not registered is not unregistered";
  EXPECT_EQ(table_->count(), 0);
}

// The engine's thread lets the last request go: it must not wait for the backend.
TEST_F(SharedRegionTest, WhoLetsTheLastRequestGoDoesNotWaitForTheBackend) {
  auto region = Make();
  const int64_t bytes = static_cast<int64_t>(region->size());
  backend_.Hold();
  End(std::move(region));  // would never return if it waited
  backend_.AwaitAsked();
  EXPECT_EQ(table_->mapped_bytes(), bytes) << "counted for as long as it is mapped";
  EXPECT_EQ(table_->count(), 0);
  backend_.Release();
  EXPECT_EQ(MappedAfterClosing(), 0);
  ASSERT_EQ(backend_.unmapped_by().size(), 1u);
  EXPECT_NE(backend_.unmapped_by()[0], std::this_thread::get_id());
}

TEST_F(SharedRegionTest, RoomThatIsBeingMadeIsWaitedFor) {
  auto first = Make();
  auto second = Make();
  // All that a tenant may have.
  const absl::Status full = table_->Create("a", 5000, 4096).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  backend_.Hold();
  End(std::move(first));
  backend_.AwaitAsked();
  std::thread later([this] { backend_.Release(); });
  auto third = table_->Create("a", 5000, 4096);
  later.join();
  EXPECT_TRUE(third.ok()) << third.status();
}

TEST_F(SharedRegionTest, ABackendThatNeverLetsGoOnlyCostsItsRegion) {
  auto first = Make();
  auto second = Make();
  backend_.Hold();
  End(std::move(first));
  backend_.AwaitAsked();
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status full = table_->Create("a", 5000, 4096).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_GE(std::chrono::steady_clock::now() - begin, SharedRegionTable::kCloseWait);
  EXPECT_TRUE(table_->Create("b", 5000, 4096).ok());
  backend_.Release();
}

TEST_F(SharedRegionTest, TheTablesEndUnmapsWhatWasReleasedAndLeavesWhatIsUsed) {
  auto kept = Make();
  End(Make());
  std::shared_ptr<SharedRegion> used = kept;
  End(std::move(kept));
  table_.reset();
  EXPECT_EQ(backend_.unmapped().size(), 1u);
  used->data()[0] = std::byte{3};
  used.reset();
  EXPECT_EQ(backend_.unmapped().size(), 2u);
  EXPECT_EQ(backend_.unmapped_by()[1], std::this_thread::get_id());
}

TEST_F(SharedRegionTest, MemoryIsBoundedForAllAndRegionsForEachTenant) {
  const auto refused = [this](const std::string& tenant, uint64_t bytes) {
    return table_->Create(tenant, bytes, 0).status().code();
  };
  EXPECT_EQ(refused("a", 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused("a", kMiB + 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused("a", std::numeric_limits<uint64_t>::max()), absl::StatusCode::kInvalidArgument);
  auto first = table_->Create("a", kMiB, 0);
  auto second = table_->Create("a", kMiB, 0);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(refused("a", 1), absl::StatusCode::kResourceExhausted);  // two of its two
  // Its ring and arena take the remaining bytes.
  auto third = table_->Create("b", kMiB, kMiB);
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(table_->mapped_bytes(), 4 * kMiB);
  EXPECT_EQ(refused("c", 1), absl::StatusCode::kResourceExhausted);
  table_->Remove(**third);
  third->reset();
  auto larger = table_->Create("b", kMiB, kMiB + 4096);
  EXPECT_EQ(larger.status().code(), absl::StatusCode::kResourceExhausted) << "2 MiB are left";
  EXPECT_EQ(table_->mapped_bytes(), 2 * kMiB);
  EXPECT_TRUE(table_->Create("b", kMiB, 4096).ok());
}

// Device memory that nothing uses.
class FakeDeviceMemory final : public kernels::SharedDeviceMemory {
 public:
  std::span<std::byte> bytes() const override { return {}; }
  const Export& exported() const override { return export_; }
  absl::StatusOr<bool> Done(size_t) override { return true; }

 private:
  const Export export_;
};

// A server with 8 MiB for regions and four times as much of the device, and default bounds.
class SharesTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHost = 8 * kMiB, kDevice = 32 * kMiB;

  SharesTest() { Start(kHost, kDevice); }

  // Replaces the server by one with so many bytes of each kind.
  void Start(int64_t host, int64_t device) {
    RegionHooks hooks = backend_.Hooks();
    hooks.make_device = [](int64_t, int32_t) { return std::make_unique<FakeDeviceMemory>(); };
    scheduler::TenantTableOptions options;
    options.server_bounds[kBytes] = host + device;
    options.default_bounds[kBytes] =
        scheduler::ShareOfBound(host + device, scheduler::RowOf(kBytes).share_eighths);
    options.default_shares[kBytes] = true;
    options_ = options;
    tenants_ = std::make_shared<scheduler::TenantTable>(std::move(options));
    table_ = std::make_unique<SharedRegionTable>(RegionLimits{host, host, 100, 100, device},
                                                 std::move(hooks), tenants_);
  }

  // Makes regions until one is refused, and returns how many there are.
  int Fill(const std::string& tenant, int64_t bytes, int64_t device_bytes = 0) {
    for (int created = 0;; ++created) {
      auto region = table_->Create(tenant, static_cast<uint64_t>(bytes), 0,
                                   std::chrono::milliseconds(0), {device_bytes, 1});
      if (!region.ok()) {
        refused_ = region.status();
        EXPECT_EQ(refused_.code(), absl::StatusCode::kResourceExhausted) << refused_;
        return created;
      }
      regions_.push_back(*std::move(region));
    }
  }

  void EndAll() {
    for (const auto& region : regions_) table_->Remove(*region);
    regions_.clear();
    while (table_->closing()) std::this_thread::yield();
  }

  static constexpr scheduler::Resource kBytes = scheduler::Resource::kRegionBytes;
  Backend backend_;
  scheduler::TenantTableOptions options_;
  std::shared_ptr<scheduler::TenantTable> tenants_;
  std::unique_ptr<SharedRegionTable> table_;
  std::vector<std::shared_ptr<SharedRegion>> regions_;
  absl::Status refused_;
};

TEST_F(SharesTest, ATenantLeavesAPartOfEachKindOfMemory) {
  EXPECT_EQ(Fill("a", kMiB), 7);
  EXPECT_EQ(DetailOf(refused_).field, "bytes");
  EXPECT_EQ(DetailOf(refused_).got, absl::StrCat(kMiB, " bytes more"));
  EXPECT_EQ(DetailOf(refused_).limit, absl::StrCat("at most ", 7 * kMiB,
                                                   " bytes of this tenant (tenants.region_bytes or "
                                                   "its quota), its share of shm.total_bytes, "
                                                   "0 free"));
  EXPECT_EQ(DetailOf(refused_).bound_of, BoundOwner::kTenant);
  EXPECT_EQ(Fill("b", kMiB), 1);
  EXPECT_EQ(DetailOf(refused_).bound_of, BoundOwner::kServer);
  EndAll();
  EXPECT_EQ(Fill("a", 4096, 2 * kMiB), 14);
  EXPECT_EQ(DetailOf(refused_).field, "device_bytes");
  EXPECT_EQ(DetailOf(refused_).bound, 28 * kMiB);
  EXPECT_EQ(Fill("b", 4096, 2 * kMiB), 2);
}

// Operators see by these counts that a tenant lacks memory.
TEST_F(SharesTest, ARefusalByAShareIsCounted) {
  ASSERT_EQ(Fill("a", kMiB), 7);
  EXPECT_EQ(tenants_->Usage("a").refused[kBytes], 1u);
  EXPECT_EQ(tenants_->refusals(kBytes).by_tenant_bound, 1u);
  EXPECT_EQ(tenants_->refusals(kBytes).by_server_bound, 0u);
  ASSERT_EQ(Fill("b", 2 * kMiB), 0);
  EXPECT_EQ(tenants_->Usage("b").refused[kBytes], 1u);
  EXPECT_EQ(tenants_->refusals(kBytes).by_tenant_bound, 1u);
  EXPECT_EQ(tenants_->refusals(kBytes).by_server_bound, 1u);
}

TEST_F(SharesTest, ATenantsFirstRegionMayBeAsLargeAsThePool) {
  EXPECT_EQ(Fill("a", kMiB, kDevice), 1);
  EXPECT_EQ(DetailOf(refused_).limit,
            absl::StrCat("at most ", 28 * kMiB,
                         " bytes of this tenant (tenants.region_bytes or its quota), its share of "
                         "shm.device_bytes, 0 free"));
  EndAll();
  EXPECT_EQ(Fill("a", kHost), 1);
}

TEST_F(SharesTest, AFirstRegionLeavesAPartOfBothKindsTogether) {
  Start(kHost, 0);
  EXPECT_EQ(Fill("a", kHost), 0);
  EXPECT_EQ(DetailOf(refused_).limit, absl::StrCat("at most ", 7 * kMiB,
                                                   " bytes of this tenant (tenants.region_bytes "
                                                   "or its quota), ",
                                                   7 * kMiB, " free"));
  EXPECT_EQ(Fill("a", 7 * kMiB), 1);
  EndAll();
  Start(kHost, 8 * kHost);
  EXPECT_EQ(Fill("a", kMiB, 8 * kHost), 0);
  EXPECT_EQ(DetailOf(refused_).bound, 63 * kMiB);
  EXPECT_EQ(DetailOf(refused_).bound_of, BoundOwner::kTenant);
  EXPECT_EQ(Fill("a", kMiB, 62 * kMiB), 1);
}

// A client's log is all that an operator may have; a handshake cuts the text.
TEST_F(SharesTest, TheHandshakesTextNamesTheKeyToSet) {
  constexpr int64_t kTib = int64_t{1} << 40;
  constexpr size_t kKept = wire::kHandshakeTextBytes - 1;
  Start(kHost, kTib);
  ASSERT_EQ(Fill("a", 4096, kTib / 8 * 5), 1);
  EXPECT_THAT(std::string(refused_.message().substr(0, kKept)), HasSubstr("tenants.region_bytes"));
  EndAll();
  ASSERT_EQ(Fill("a", 4096, kTib), 0);
  EXPECT_THAT(std::string(refused_.message().substr(0, kKept)), HasSubstr("tenants.region_bytes"));
}

// Only its own release helps, even if the server has less than it asks for.
TEST_F(SharesTest, ATenantBeyondItsShareIsNotToldToWaitForOthers) {
  ASSERT_EQ(Fill("a", kMiB), 7);
  ASSERT_EQ(Fill("a", 2 * kMiB), 0);
  EXPECT_EQ(DetailOf(refused_).bound_of, BoundOwner::kTenant);
  EXPECT_EQ(DetailOf(refused_).free, 0);
  EXPECT_EQ(DetailOf(refused_).bound, 7 * kMiB);
}

// The operator has chosen it for both kinds together.
TEST_F(SharesTest, ABoundOfItsOwnIsForTheSum) {
  scheduler::TenantQuota quota;
  quota.bounds[kBytes] = kHost + kDevice;
  ASSERT_EQ(tenants_->SetQuota("a", quota, false), absl::OkStatus());
  EXPECT_EQ(Fill("a", kMiB, 2 * kMiB), 8);
  EXPECT_EQ(Fill("b", kMiB), 0);
}

// An operator may choose the very number of the default.
TEST_F(SharesTest, AChosenBoundOfTheDefaultsSizeIsForTheSum) {
  const int64_t bound = options_.default_bounds[kBytes];
  scheduler::TenantQuota quota;
  quota.bounds[kBytes] = bound;
  ASSERT_EQ(tenants_->SetQuota("a", quota, false), absl::OkStatus());
  EXPECT_EQ(Fill("a", kMiB), 8);
  EndAll();
  ASSERT_EQ(tenants_->SetQuota("a", {}, true), absl::OkStatus());
  EXPECT_EQ(Fill("a", kMiB), 7) << "the default holds again";
  EndAll();
  options_.default_shares[kBytes] = false;  // tenants.region_bytes
  tenants_->Reconfigure(options_);
  EXPECT_EQ(Fill("a", kMiB), 8);
}

// A client that could shrink the file would kill the server with its next access.
TEST_F(SharedRegionTest, TheFileKeepsItsSize) {
  auto region = table_->Create("a", 8192, 0);
  ASSERT_TRUE(region.ok()) << region.status();
  const int file = (*region)->descriptor();
  for (const off_t size : {off_t{0}, off_t{4096}, off_t{1} << 20}) {
    EXPECT_EQ(ftruncate(file, size), -1);
    EXPECT_EQ(errno, EPERM) << size;
  }
  EXPECT_EQ(fcntl(file, F_ADD_SEALS, F_SEAL_WRITE), -1) << "nor may it become read-only";
  EXPECT_EQ(lseek(file, 0, SEEK_END), 8192);
}

TEST_F(SharedRegionTest, NothingOutsideTheArenaIsHeld) {
  auto region = table_->Create("a", 8192, 4096);
  ASSERT_TRUE(region.ok()) << region.status();
  const SharedRegion& r = **region;
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  EXPECT_TRUE(r.Holds(4096, 8192));
  EXPECT_TRUE(r.Holds(r.size(), 0));
  EXPECT_TRUE(r.Holds(r.size() - 1, 1));
  EXPECT_FALSE(r.Holds(4095, 1));
  EXPECT_FALSE(r.Holds(0, 0));
  EXPECT_FALSE(r.Holds(4096, 8193));
  EXPECT_FALSE(r.Holds(r.size(), 1));
  EXPECT_FALSE(r.Holds(r.size() + 1, 0));
  EXPECT_FALSE(r.Holds(kMost, 2));
  EXPECT_FALSE(r.Holds(8192, kMost));
  EXPECT_FALSE(r.Holds(8192, kMost - 8191));
}

}  // namespace
}  // namespace mla::server
