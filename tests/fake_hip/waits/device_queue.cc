#include "tests/fake_hip/waits/device_queue.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace mla::fake_hip {

DeviceQueue::DeviceQueue() : thread_([this] { Run(); }) {}

DeviceQueue::~DeviceQueue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void DeviceQueue::Add(std::function<void()> work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    ++added_;
  }
  changed_.notify_all();
}

uint64_t DeviceQueue::Position() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return added_;
}

bool DeviceQueue::Done(uint64_t position) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= position;
}

void DeviceQueue::Await(uint64_t position, const char* who) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto reached = [&] { return done_ >= position; };
  if (changed_.wait_for(lock, std::chrono::minutes(1), reached)) return;
  std::fprintf(stderr, "fake driver: %s waits for work that never ends\n", who);
  std::abort();
}

void DeviceQueue::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !work_.empty(); });
    if (work_.empty()) return;
    const std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    work();
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

}  // namespace mla::fake_hip
