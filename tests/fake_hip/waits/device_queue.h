// Streams of the waiting fake driver. Each stream runs its work in its own thread.
#ifndef MLA_TESTS_FAKE_HIP_WAITS_DEVICE_QUEUE_H_
#define MLA_TESTS_FAKE_HIP_WAITS_DEVICE_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace mla::fake_hip {

// Does work in the order in which it was added, in its own thread. Any thread may call it.
class DeviceQueue {
 public:
  DeviceQueue();
  ~DeviceQueue();  // returns when all work is done
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  void Add(std::function<void()> work);
  // Returns the number of work items added so far. A position is such a number.
  uint64_t Position();
  bool Done(uint64_t position);
  // Ends the process if the position is not reached within a minute, because a test that hangs
  // would not show the reason.
  void Await(uint64_t position, const char* who);
  void AwaitAll(const char* who) { Await(Position(), who); }
  bool Idle() { return Done(Position()); }

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  uint64_t added_ = 0, done_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_WAITS_DEVICE_QUEUE_H_
