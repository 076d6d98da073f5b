#include "proto/wire/thread_team.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "proto/wire/futex.h"
#include "proto/wire/tensor_codec.h"

namespace mla::wire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpinsPerClock = 64;
// Spins of a caller whose last pieces are with helpers, 20 to 100 us. A piece takes less, so a
// longer wait means that a helper lacks a core.
constexpr int kSpinsForHelpers = 2000;

}  // namespace

ThreadTeam::ThreadTeam(const ThreadTeamOptions& options) : options_(options) {
  if (options_.threads <= 1) return;
  helpers_.reserve(static_cast<size_t>(options_.threads) - 1);
  try {
    for (int32_t i = 1; i < options_.threads; ++i) helpers_.emplace_back([this] { Help(); });
  } catch (const std::system_error&) {
    // The system has no more threads: the existing ones do all the work.
  }
}

ThreadTeam::~ThreadTeam() {
  {
    const MutexLock lock(sleep_);
    stop_ = true;
  }
  wake_.NotifyAll();
  for (std::thread& helper : helpers_) helper.join();
}

// Does one unclaimed piece; returns false if there is none.
bool ThreadTeam::DoPiece(bool helping) {
  uint32_t unclaimed = unclaimed_.load(std::memory_order_acquire);
  do {
    if (unclaimed == 0) return false;
  } while (!unclaimed_.compare_exchange_weak(unclaimed, unclaimed - 1, std::memory_order_acq_rel,
                                             std::memory_order_acquire));
  // `left` may have been counted for an earlier job: this does no harm, because it was valid when
  // it was claimed.
  (*work_)(pieces_ - unclaimed);
  if (helping) helped_.fetch_add(1, std::memory_order_relaxed);
  if (unfinished_.fetch_sub(1, std::memory_order_release) == 1 && helping) unfinished_.notify_one();
  return true;
}

bool ThreadTeam::Run(uint32_t pieces, Work work) {
  if (helpers_.empty() || !busy_.TryLock()) return false;
  RunShared(pieces, work);
  busy_.Unlock();
  return true;
}

void ThreadTeam::Gather(std::span<const Fragment> fragments, size_t offset, size_t size,
                        std::byte* destination) {
  const auto copy = [&](uint32_t piece) {
    const size_t begin = size_t{piece} * kPieceBytes;
    GatherBytes(fragments, offset + begin, std::min(kPieceBytes, size - begin),
                destination + begin);
  };
  const auto pieces = static_cast<uint32_t>((size + kPieceBytes - 1) / kPieceBytes);
  if (size >= kSharedBytes && Run(pieces, copy)) return;
  GatherBytes(fragments, offset, size, destination);
}

void ThreadTeam::RunShared(uint32_t pieces, const Work& work) {
  work_ = &work;
  pieces_ = pieces;
  unfinished_.store(pieces, std::memory_order_relaxed);
  // Against a helper that is about to sleep: one of the two sees the other's store.
  unclaimed_.store(pieces, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    {
      const MutexLock sleepers(sleep_);
    }
    wake_.NotifyAll();
  }
  while (DoPiece(false)) {
  }
  uint32_t unfinished = unfinished_.load(std::memory_order_acquire);
  for (int spins = 0; unfinished > 0; unfinished = unfinished_.load(std::memory_order_acquire)) {
    if (spins++ < kSpinsForHelpers) {
      SpinPause();
    } else {
      unfinished_.wait(unfinished, std::memory_order_acquire);
    }
  }
}

void ThreadTeam::Help() {
  auto last = Clock::now();
  while (!stop_.load(std::memory_order_relaxed)) {
    bool worked = false;
    for (int i = 0; i < kSpinsPerClock && !worked; ++i) {
      worked = DoPiece(true);
      if (!worked) SpinPause();
    }
    const auto now = Clock::now();
    if (worked) last = now;
    if (now - last < std::chrono::microseconds(options_.spin_us)) continue;
    MutexLock lock(sleep_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    wake_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sleep_) {
      return stop_ || unclaimed_.load(std::memory_order_seq_cst) > 0;
    });
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    last = Clock::now();
  }
}

}  // namespace mla::wire
