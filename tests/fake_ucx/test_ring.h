// A command ring whose server is the test: entries that a relay hands on lie in `submitted`, and
// Complete answers them. Threading: any thread; `submitted` while no relay runs, or under its lock.
#ifndef MLA_TESTS_FAKE_UCX_TEST_RING_H_
#define MLA_TESTS_FAKE_UCX_TEST_RING_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "client/cpp/shared_memory/ring_memory.h"

namespace mla::fake_ucx {

class TestRing final : public client::RingMemory {
 public:
  TestRing(uint32_t entries, uint64_t arena_bytes)
      : entries_(entries), bytes_(wire::RingBytes(entries) + arena_bytes) {
    SetRegion(bytes_, wire::RingBytes(entries));
  }
  std::string_view transport() const override { return "test"; }
  uint32_t ring_entries() const override { return entries_; }
  bool Submit(wire::SubmissionEntry entry, const client::RingPlaces&, void*, bool) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (in_flight_ == entries_) return false;
    ++in_flight_;
    submitted.push_back(entry);
    return true;
  }
  bool Poll(wire::CompletionEntry* entry) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (completions_.empty()) return false;
    *entry = completions_.front();
    completions_.pop_front();
    --in_flight_;
    return true;
  }
  absl::Status Wait(wire::CompletionEntry* entry, std::chrono::nanoseconds) override {
    if (Poll(entry)) return absl::OkStatus();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    return ended_ ? absl::UnavailableError("the ring has ended")
                  : absl::DeadlineExceededError("nothing");
  }
  bool Connected() const override { return !ended_; }
  uint64_t in_flight() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_flight_;
  }
  void Close(std::chrono::milliseconds) override {}
  void Disconnect() override {}

  void Complete(const wire::CompletionEntry& entry) {
    const std::lock_guard<std::mutex> lock(mutex_);
    completions_.push_back(entry);
  }
  void End() { ended_ = true; }
  size_t waiting() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return completions_.size();
  }

  std::vector<wire::SubmissionEntry> submitted;

 private:
  const uint32_t entries_;
  std::vector<std::byte> bytes_;
  mutable std::mutex mutex_;
  uint64_t in_flight_ = 0;
  std::deque<wire::CompletionEntry> completions_;
  std::atomic<bool> ended_{false};
};

}  // namespace mla::fake_ucx

#endif  // MLA_TESTS_FAKE_UCX_TEST_RING_H_
