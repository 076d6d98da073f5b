// Moves between memory and a tier's file, by the kernel's queue and by threads; also moves that the
// kernel does not take.
#include "scheduler/kvcache/tiers/disk_queue.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "scheduler/kvcache/tiers/io_ring.h"

namespace mla::kvcache {
namespace {

constexpr size_t kBytes = 3 * kTierBlock;
constexpr int kMoves = 100;  // more than the kernel's queue takes at a time

class DiskQueueTest : public ::testing::TestWithParam<DiskQueue::Kind> {
 protected:
  void SetUp() override {
    auto opened = TierFile::Open(path_, kMoves * kBytes);
    ASSERT_TRUE(opened.ok()) << opened.status();
    file_ = *std::move(opened);
    memory_.reset(static_cast<std::byte*>(
        std::aligned_alloc(static_cast<size_t>(kTierBlock), kMoves * kBytes)));
    for (int i = 0; i < kMoves; ++i) {
      DiskMove& move = moves_[static_cast<size_t>(i)];
      move.bytes = {memory_.get() + static_cast<size_t>(i) * kBytes, kBytes};
      move.at = TierFile::kHeaderBytes + i * static_cast<int64_t>(kBytes);
      move.done = [this] { ++done_; };
      std::memset(move.bytes.data(), i + 1, kBytes);
    }
    queue_ = std::make_unique<DiskQueue>(file_.get(), 2, GetParam());
  }
  void StartAll(bool write) {
    done_ = 0;
    for (DiskMove& move : moves_) {
      move.write = write;
      queue_->Start(&move);
    }
  }
  void All(bool write) {
    StartAll(write);
    while (done_ < kMoves) std::this_thread::yield();
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const char* const folder_ = std::getenv("TEST_TMPDIR");
  const std::string path_ = std::string(folder_ == nullptr ? "/tmp" : folder_) + "/disk_queue";
  std::unique_ptr<TierFile> file_;
  std::unique_ptr<std::byte, Free> memory_;
  std::vector<DiskMove> moves_ = std::vector<DiskMove>(kMoves);
  std::atomic<int> done_ = 0;
  std::unique_ptr<DiskQueue> queue_;  // ends before the objects that it uses
};

INSTANTIATE_TEST_SUITE_P(Kinds, DiskQueueTest,
                         ::testing::Values(DiskQueue::Kind::kBest, DiskQueue::Kind::kThreads),
                         [](const auto& param) {
                           return param.param == DiskQueue::Kind::kBest ? "best" : "threads";
                         });

TEST_P(DiskQueueTest, WhatWasWrittenIsRead) {
  All(true);
  for (const DiskMove& move : moves_) EXPECT_TRUE(move.status.ok()) << move.status;
  std::memset(memory_.get(), 0, kMoves * kBytes);
  All(false);
  for (int i = 0; i < kMoves; ++i) {
    const DiskMove& move = moves_[static_cast<size_t>(i)];
    ASSERT_TRUE(move.status.ok()) << move.status;
    EXPECT_EQ(std::count(move.bytes.begin(), move.bytes.end(), static_cast<std::byte>(i + 1)),
              static_cast<ptrdiff_t>(kBytes));
  }
}

TEST_P(DiskQueueTest, AFileThatEndsInsideAMoveIsSaid) {
  All(true);
  std::filesystem::resize_file(path_, static_cast<uintmax_t>(moves_[50].at + kTierBlock));
  All(false);
  for (int i = 0; i < kMoves; ++i) {
    const DiskMove& move = moves_[static_cast<size_t>(i)];
    EXPECT_EQ(DetailOf(move.status).reason, i < 50 ? "" : "disk_failed") << i << move.status;
  }
}

TEST_P(DiskQueueTest, AReadThatTheKernelRefusesIsSaid) {
  All(true);
  std::byte* const closed = moves_[50].bytes.data();
  ASSERT_EQ(mprotect(closed, kBytes, PROT_READ), 0);
  All(false);
  ASSERT_EQ(mprotect(closed, kBytes, PROT_READ | PROT_WRITE), 0);
  for (int i = 0; i < kMoves; ++i) {
    const DiskMove& move = moves_[static_cast<size_t>(i)];
    EXPECT_EQ(DetailOf(move.status).reason, i == 50 ? "disk_failed" : "") << i << move.status;
  }
  All(false);
  for (const DiskMove& move : moves_) EXPECT_TRUE(move.status.ok()) << move.status;
}

TEST_P(DiskQueueTest, AFullDiskIsSaid) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  // The first block of one move is written, the next is not.
  const auto most = static_cast<rlim_t>(moves_[50].at + kTierBlock);
  const rlimit low = {most, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  All(true);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  for (int i = 0; i < kMoves; ++i) {
    const DiskMove& move = moves_[static_cast<size_t>(i)];
    EXPECT_EQ(DetailOf(move.status).reason, i < 50 ? "" : "disk_full") << i << move.status;
  }
  All(true);
  for (const DiskMove& move : moves_) EXPECT_TRUE(move.status.ok()) << move.status;
}

TEST_P(DiskQueueTest, MovesUnderWayEndWithTheQueue) {
  for (int round = 0; round < 10; ++round) {
    StartAll(true);
    queue_ = nullptr;
    const int done = done_;
    EXPECT_LE(done, kMoves);
    std::this_thread::yield();
    EXPECT_EQ(done_, done);
    queue_ = std::make_unique<DiskQueue>(file_.get(), 2, GetParam());
  }
}

// From now on the kernel refuses to take one entry, and takes two.
bool RefuseOne() {
  std::array filter = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 0, 3),
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {filter.size(), filter.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Ends the process: 0, or the number of the step that went wrong.
void RefusedAndTaken(const char* path) {
  const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
  const std::unique_ptr<IoRing> ring = IoRing::Make(4);
  if (ring == nullptr || file < 0) std::exit(0);  // threads do its work here
  if (!RefuseOne()) std::exit(1);
  std::array<std::byte, 3> bytes = {std::byte{1}, std::byte{2}, std::byte{3}};
  const std::span<const std::byte> from = bytes;
  for (uint64_t round = 0; round < 10; ++round) {  // more rounds than the ring has entries
    if (ring->StartWrite(file, from.first(3), 1, 7)) std::exit(2);
    if (!ring->StartWrite(file, from.first(1), 0, 8 + round)) std::exit(3);
    const IoRing::Ended ended = ring->Next();
    if (ended.tag != 8 + round || ended.result != 1) std::exit(4);
  }
  if (lseek(file, 0, SEEK_END) != 1) std::exit(5);  // a refused write was done
  std::exit(0);
}

TEST(IoRingTest, WhatWasRefusedIsNotDoneLater) {
  const char* const folder = std::getenv("TEST_TMPDIR");
  const std::string path = std::string(folder == nullptr ? "/tmp" : folder) + "/io_ring";
  EXPECT_EXIT(RefusedAndTaken(path.c_str()), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace mla::kvcache
