#include "tests/bench/wire/parallel_touch.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "proto/wire/futex.h"

namespace mla::bench {
namespace {

constexpr uint64_t kLine = 64;

// Wide loads and four sums, so that memory is the limit.
uint64_t SumBytes(const std::byte* at, uint64_t bytes) {
  using Words = uint64_t __attribute__((vector_size(32)));
  Words sums[4] = {};
  for (uint64_t i = 0; i + sizeof(sums) <= bytes; i += sizeof(sums)) {
    Words words[4];
    std::memcpy(words, at + i, sizeof(words));
    for (int k = 0; k < 4; ++k) sums[k] += words[k];
  }
  uint64_t sum = 0;
  for (uint64_t i = bytes / sizeof(sums) * sizeof(sums); i < bytes; ++i) {
    sum += static_cast<uint64_t>(at[i]);
  }
  const Words all = sums[0] + sums[1] + sums[2] + sums[3];
  return sum + all[0] + all[1] + all[2] + all[3];
}

}  // namespace

ParallelTouch::ParallelTouch(int32_t threads, const std::atomic<int32_t>* word)
    : word_(word), threads_(threads) {
  for (int32_t place = 1; place < threads_; ++place) {
    helpers_.emplace_back([this, place] { Help(place); });
  }
}

ParallelTouch::~ParallelTouch() {
  stop_ = true;
  for (std::thread& helper : helpers_) helper.join();
}

void ParallelTouch::DoPart(int32_t place) {
  const uint64_t bytes = bytes_;
  const uint64_t lines = (bytes + kLine - 1) / kLine;
  const auto share = [&](int32_t part) {
    return std::min(bytes,
                    lines * static_cast<uint64_t>(part) / static_cast<uint64_t>(threads_) * kLine);
  };
  (*body_)(share(place), share(place + 1));
}

void ParallelTouch::Help(int32_t place) {
  uint64_t seen = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint64_t round = round_.load(std::memory_order_acquire);
    if (round != seen) {
      seen = round;
      DoPart(place);
      busy_.fetch_sub(1, std::memory_order_release);
    } else if (word_->load(std::memory_order_relaxed) > 1) {
      wire::SpinPause();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void ParallelTouch::Share(uint64_t bytes, const std::function<void(uint64_t, uint64_t)>& body) {
  const MutexLock lock(mutex_);
  if (helpers_.empty() || word_->load(std::memory_order_relaxed) <= 1) return body(0, bytes);
  body_ = &body;
  bytes_ = bytes;
  busy_.store(threads_ - 1, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  DoPart(0);
  while (busy_.load(std::memory_order_acquire) > 0) wire::SpinPause();
}

void ParallelTouch::Fill(void* data, uint64_t bytes, int value) {
  Share(bytes, [=](uint64_t begin, uint64_t end) {
    std::memset(static_cast<std::byte*>(data) + begin, value, end - begin);
  });
}

uint64_t ParallelTouch::Sum(const void* data, uint64_t bytes) {
  const Piece piece(static_cast<const std::byte*>(data), bytes);
  return SumPieces({&piece, 1});
}

uint64_t ParallelTouch::SumPieces(std::span<const Piece> pieces) {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.size();
  std::atomic<uint64_t> sum{0};
  Share(bytes, [&](uint64_t begin, uint64_t end) {
    uint64_t mine = 0, first = 0;
    for (const Piece& piece : pieces) {
      const uint64_t from = std::max(begin, first), to = std::min(end, first + piece.size());
      if (from < to) mine += SumBytes(piece.data() + (from - first), to - from);
      first += piece.size();
    }
    sum.fetch_add(mine, std::memory_order_relaxed);
  });
  return sum;
}

}  // namespace mla::bench
