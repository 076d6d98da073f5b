// Streams of the fake driver that waits: they work by themselves.
#ifndef MLA_TESTS_FAKE_HIP_WAITS_DEVICE_QUEUE_H_
#define MLA_TESTS_FAKE_HIP_WAITS_DEVICE_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace mla::fake_hip {

// Work in the order in which it was added, done by a thread of its own. Any thread may call it.
class DeviceQueue {
 public:
  DeviceQueue();
  ~DeviceQueue();  // once all is done
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  void Add(std::function<void()> work);
  // How much has been added. A position is such a count.
  uint64_t Position();
  bool Done(uint64_t position);
  // Ends the process where the position is not reached within a minute: a test that waits for ever
  // would not say why.
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
