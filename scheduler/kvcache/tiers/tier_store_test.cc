// Seals, the file, rooms and jobs of the slower tiers.
#include "scheduler/kvcache/tiers/tier_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"

namespace {
bool cannot_allocate = false;  // as on file systems that only write
}  // namespace

// These two take the place of the C library's functions. On file systems that cannot allocate, the
// library falls back to writes, which O_DIRECT refuses.
extern "C" int fallocate(int file, int mode, off_t at, off_t bytes) {
  if (!cannot_allocate) return static_cast<int>(syscall(SYS_fallocate, file, mode, at, bytes));
  errno = EOPNOTSUPP;
  return -1;
}
extern "C" int posix_fallocate(int file, off_t at, off_t bytes) {
  if (cannot_allocate) return EINVAL;
  return syscall(SYS_fallocate, file, 0, at, bytes) == 0 ? 0 : errno;
}

namespace mla::kvcache {
namespace {

constexpr int64_t kGroup = 10'000;  // no multiple of anything
constexpr int64_t kRoom = 3 * kTierBlock;

std::string TempPath(const std::string& name) {
  const char* const folder = std::getenv("TEST_TMPDIR");
  return std::string(folder == nullptr ? "/tmp" : folder) + "/" + name;
}

class TierStoreTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<TierStore>> TryOpen(int threads, int64_t file_groups) {
    memory_.resize(static_cast<size_t>(8 * kRoom + kTierBlock));
    TierStoreOptions options;
    options.memory = memory_;
    options.host_bytes = 8 * kRoom;
    if (file_groups > 0) options.file_path = path_;
    options.file_bytes = file_groups * kRoom;
    options.threads = threads;
    return TierStore::Open(options);
  }
  void Open(int threads = 0, int64_t file_groups = 4) {
    auto opened = TryOpen(threads, file_groups);
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
  }
  // A job on a room filled with bytes of its own.
  TierJob Fill(int value) {
    TierJob job;
    job.host = store_->host_bytes(store_->host().Take(kGroup), kGroup);
    job.bytes = kGroup;
    std::iota(reinterpret_cast<uint8_t*>(job.host.data()),
              reinterpret_cast<uint8_t*>(job.host.data()) + kGroup, static_cast<uint8_t>(value));
    job.digest = DigestOf(job.host.first(job.bytes));
    return job;
  }
  const absl::Status& Run(TierJob* job, TierJob::Kind kind) {
    job->kind = kind;
    store_->Start(job);
    while (store_->Collect().empty()) std::this_thread::yield();
    return job->status;
  }
  void ChangeFile(int64_t offset) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(offset);
    const auto byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(offset);
    file.put(byte);
  }

  const std::string path_ = TempPath("tier");
  std::vector<std::byte> memory_;
  std::unique_ptr<TierStore> store_;
};

TEST_F(TierStoreTest, ASealFindsAnyChange) {
  GroupMac mac;
  std::vector<std::byte> bytes(1000, std::byte{5});
  const GroupSeal seal = mac.Seal(bytes);
  EXPECT_TRUE(mac.Holds(seal, bytes));
  for (size_t i = 0; i < bytes.size(); i += 37) {
    bytes[i] ^= std::byte{1};
    EXPECT_FALSE(mac.Holds(seal, bytes)) << i;
    bytes[i] ^= std::byte{1};
  }
  EXPECT_FALSE(mac.Holds(seal, std::span(bytes).first(999)));
  EXPECT_TRUE(mac.Holds(seal, bytes));
  // Another key, or another use of this one, gives another tag.
  EXPECT_NE(mac.Seal(bytes).tag, seal.tag);
  EXPECT_FALSE(GroupMac().Holds(seal, bytes));
}

TEST_F(TierStoreTest, ADigestFindsAnyChange) {
  std::vector<std::byte> bytes(200'000, std::byte{5});
  const GroupDigest digest = DigestOf(bytes);
  EXPECT_EQ(DigestOf(bytes), digest);
  for (size_t i = 0; i < bytes.size(); i += 7919) {
    bytes[i] ^= std::byte{1};
    EXPECT_NE(DigestOf(bytes), digest) << i;
    bytes[i] ^= std::byte{1};
  }
  EXPECT_NE(DigestOf(std::span(bytes).first(199'999)), digest);
}

TEST_F(TierStoreTest, ADigestIsThatOfTheDigestsOfItsParts) {
  std::vector<std::byte> bytes(3 * kernels::kDigestPartBytes + 256, std::byte{5});
  std::vector<kernels::PartDigest> parts;
  for (size_t at = 0; at < bytes.size(); at += kernels::kDigestPartBytes) {
    const size_t size = std::min<size_t>(kernels::kDigestPartBytes, bytes.size() - at);
    parts.push_back(kernels::DigestOfPart(std::span(bytes).subspan(at, size)));
  }
  EXPECT_EQ(DigestOfParts(parts), DigestOf(bytes));
  std::swap(parts.front(), parts.back());
  EXPECT_NE(DigestOfParts(parts), DigestOf(bytes));
}

TEST_F(TierStoreTest, OnlyBytesOfTheDigestGetASeal) {
  GroupMac mac;
  // Several parts, and a short last one.
  std::vector<std::byte> bytes(200'000, std::byte{5});
  const GroupDigest digest = DigestOf(bytes);
  const std::optional<GroupSeal> seal = mac.SealIf(digest, bytes);
  ASSERT_TRUE(seal.has_value());
  EXPECT_TRUE(mac.Holds(*seal, bytes));
  bytes.back() ^= std::byte{1};
  EXPECT_FALSE(mac.Holds(*seal, bytes));
  EXPECT_FALSE(mac.SealIf(digest, bytes).has_value());
}

TEST_F(TierStoreTest, RoomsOfAllSizesShareOneBudget) {
  TierRooms rooms(16 * kTierBlock);
  const uint32_t small = rooms.Take(1);
  const uint32_t large = rooms.Take(8 * kTierBlock);
  ASSERT_NE(small, TierRooms::kNone);
  ASSERT_NE(large, TierRooms::kNone);
  EXPECT_EQ(rooms.offset(large) % kTierBlock, 0);
  EXPECT_EQ(rooms.Take(8 * kTierBlock), TierRooms::kNone);
  EXPECT_EQ(rooms.bytes_used(), 9 * kTierBlock);
  rooms.Free(large, 8 * kTierBlock);
  EXPECT_EQ(rooms.bytes_used(), kTierBlock);
  EXPECT_NE(rooms.Take(15 * kTierBlock), TierRooms::kNone);
  EXPECT_EQ(rooms.Take(17 * kTierBlock), TierRooms::kNone);
}

TEST_F(TierStoreTest, AGroupComesBackFromTheFileAsItWas) {
  Open();
  TierJob job = Fill(3);
  const std::vector<std::byte> before(job.host.begin(), job.host.begin() + kGroup);
  job.at = store_->file_offset(store_->file()->Take(kGroup));
  ASSERT_TRUE(Run(&job, TierJob::Kind::kWrite).ok()) << job.status;
  std::memset(job.host.data(), 0, job.host.size());
  ASSERT_TRUE(Run(&job, TierJob::Kind::kRead).ok()) << job.status;
  EXPECT_TRUE(std::equal(before.begin(), before.end(), job.host.begin()));
}

TEST_F(TierStoreTest, WhatMemoryHasChangedIsNotWritten) {
  Open();
  TierJob job = Fill(3);
  job.host[kGroup - 1] ^= std::byte{4};
  job.at = store_->file_offset(store_->file()->Take(kGroup));
  EXPECT_EQ(Run(&job, TierJob::Kind::kWrite).code(), absl::StatusCode::kDataLoss);
}

TEST_F(TierStoreTest, AFileThatWasChangedBehindItsBackIsFoundOut) {
  Open();
  TierJob first = Fill(3), second = Fill(50);
  for (TierJob* const job : {&first, &second}) {
    job->at = store_->file_offset(store_->file()->Take(kGroup));
    ASSERT_TRUE(Run(job, TierJob::Kind::kWrite).ok());
  }
  ChangeFile(first.at + 4321);
  EXPECT_EQ(Run(&first, TierJob::Kind::kRead).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(DetailOf(first.status).reason, "tier_damaged");
  // The place of another group.
  std::swap(first.at, second.at);
  EXPECT_EQ(Run(&first, TierJob::Kind::kRead).code(), absl::StatusCode::kDataLoss);
  std::swap(first.at, second.at);
  EXPECT_TRUE(Run(&second, TierJob::Kind::kRead).ok());
  // It ends too early.
  std::filesystem::resize_file(path_, static_cast<uintmax_t>(second.at + 100));
  EXPECT_EQ(Run(&second, TierJob::Kind::kRead).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(DetailOf(second.status).reason, "disk_failed");
}

TEST_F(TierStoreTest, AFullDiskIsSaid) {
  // Files of this process may be no longer than the header and two groups.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  Open();
  TierJob job = Fill(3);
  const rlimit low = {static_cast<rlim_t>(TierFile::kHeaderBytes + kTierBlock), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  job.at = store_->file_offset(store_->file()->Take(kGroup));
  // The first block is written, the next is not.
  const absl::Status written = Run(&job, TierJob::Kind::kWrite);
  const auto opened = TryOpen(0, 4);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(written.code(), absl::StatusCode::kUnavailable) << written;
  EXPECT_EQ(DetailOf(written).reason, "disk_full");
  EXPECT_FALSE(opened.ok());
}

TEST_F(TierStoreTest, AFileSystemThatCannotAllocateIsWrittenTo) {
  cannot_allocate = true;
  const auto opened = TryOpen(0, 4);
  cannot_allocate = false;
  ASSERT_TRUE(opened.ok()) << opened.status();
  struct stat about;
  ASSERT_EQ(stat(path_.c_str(), &about), 0);
  EXPECT_EQ(about.st_size, TierFile::kHeaderBytes + 4 * kRoom);
  EXPECT_GE(about.st_blocks * 512, about.st_size);  // no later write finds the disk full
}

TEST_F(TierStoreTest, OnlyAFileOfItsKindIsTakenOver) {
  {
    std::ofstream other(path_);
    other << std::string(8192, 'x');
  }
  const auto refused = TryOpen(0, 4);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_EQ(std::filesystem::file_size(path_), 8192u);
  std::filesystem::remove(path_);
  Open();
  EXPECT_EQ(TryOpen(0, 4).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::filesystem::exists(path_));
  store_.reset();
  EXPECT_FALSE(std::filesystem::exists(path_));
  // A file that another server has left.
  {
    std::ofstream left(path_);
    left << "MLATIER\n" << std::string(100'000, 'y');
  }
  Open();
  EXPECT_EQ(std::filesystem::file_size(path_),
            static_cast<size_t>(TierFile::kHeaderBytes + 4 * kRoom));
}

TEST_F(TierStoreTest, ALeftFileIsForItsUserAloneAndUnderOneName) {
  namespace fs = std::filesystem;
  const auto leave = [this] { std::ofstream(path_) << "MLATIER\n" << std::string(9000, 'y'); };
  leave();
  fs::permissions(path_, fs::perms::all);
  Open();
  EXPECT_EQ(fs::status(path_).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  store_.reset();
  leave();
  fs::create_hard_link(path_, path_ + ".other");
  EXPECT_EQ(TryOpen(0, 4).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(fs::file_size(path_), 9008u);
  fs::remove(path_);
  fs::create_symlink(path_ + ".other", path_);
  EXPECT_FALSE(TryOpen(0, 4).ok());
  fs::remove(path_);
  fs::remove(path_ + ".other");
  if (geteuid() != 0) return;  // files of others cannot be made
  leave();
  ASSERT_EQ(chown(path_.c_str(), 12345, 0), 0);
  EXPECT_EQ(TryOpen(0, 4).status().code(), absl::StatusCode::kFailedPrecondition);
  fs::remove(path_);
}

TEST_F(TierStoreTest, BooksGrowWithTheGroupsThereAre) {
  const auto taken = [] {
    const struct mallinfo2 now = mallinfo2();
    return static_cast<int64_t>(now.uordblks + now.hblkhd);
  };
  const int64_t before = taken();
  TierRooms rooms(int64_t{1} << 36);
  ASSERT_NE(rooms.Take(1), TierRooms::kNone);
  EXPECT_LT(taken() - before, 1 << 20);
}

TEST_F(TierStoreTest, ThreadsCarryGroupsToTheFileAndBack) {
  Open(2, 8);
  std::vector<TierJob> jobs;
  const auto all = [&](TierJob::Kind kind) {
    for (TierJob& job : jobs) {
      job.kind = kind;
      store_->Start(&job);
    }
    for (size_t ended = 0; ended < jobs.size();) ended += store_->Collect().size();
  };
  for (int i = 0; i < 8; ++i) {
    jobs.push_back(Fill(i));
    jobs.back().at = store_->file_offset(store_->file()->Take(kGroup));
  }
  std::vector<std::vector<std::byte>> before;
  for (const TierJob& job : jobs) before.emplace_back(job.host.begin(), job.host.end());
  for (int round = 0; round < 20; ++round) {
    all(TierJob::Kind::kWrite);
    for (TierJob& job : jobs) {
      ASSERT_TRUE(job.status.ok()) << job.status;
      std::memset(job.host.data(), 0, job.host.size());
    }
    all(TierJob::Kind::kRead);
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_TRUE(jobs[i].status.ok()) << jobs[i].status;
      EXPECT_TRUE(std::equal(before[i].begin(), before[i].end(), jobs[i].host.begin()));
    }
  }
  ChangeFile(jobs[3].at);
  all(TierJob::Kind::kRead);
  for (size_t i = 0; i < jobs.size(); ++i) EXPECT_EQ(jobs[i].status.ok(), i != 3);
  // Running jobs end before the store does.
  for (TierJob& job : jobs) store_->Start(&job);
  store_.reset();
}

TEST_F(TierStoreTest, ThreadsRunJobsAndWakeTheirCollector) {
  Open(3, 8);
  std::atomic<int> woken = 0;
  store_->set_wake([&] { ++woken; });
  std::vector<TierJob> jobs;
  for (int i = 0; i < 8; ++i) {
    jobs.push_back(Fill(i));
    jobs.back().at = store_->file_offset(store_->file()->Take(kGroup));
  }
  for (int round = 0; round < 50; ++round) {
    for (TierJob& job : jobs) {
      job.kind = round % 2 == 0 ? TierJob::Kind::kWrite : TierJob::Kind::kRead;
      store_->Start(&job);
    }
    for (size_t ended = 0; ended < jobs.size();) ended += store_->Collect().size();
    for (const TierJob& job : jobs) EXPECT_TRUE(job.status.ok());
  }
  while (woken < 400) std::this_thread::yield();
  for (TierJob& job : jobs) store_->Start(&job);
  store_.reset();
}

}  // namespace
}  // namespace mla::kvcache
