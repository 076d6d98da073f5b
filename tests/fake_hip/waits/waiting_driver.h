// How a test steers the fake CUDA driver that waits (waiting_driver.cc). The test opens the library
// that the backend opens, and gets the one control block through waiting_driver_control().
#ifndef MLA_TESTS_FAKE_HIP_WAITS_WAITING_DRIVER_H_
#define MLA_TESTS_FAKE_HIP_WAITS_WAITING_DRIVER_H_

#include <atomic>
#include <cstdint>

namespace mla::fake_hip {

struct WaitingControl {
  // Called with the name of each entry point that takes the driver's lock, by the caller's thread
  // before it takes the lock. Set while no other thread calls the driver.
  void (*before_call)(const char* call) = nullptr;
  // Calls that hold the lock now and wait for the device, and all such calls that had to wait.
  std::atomic<int> waiting{0};
  std::atomic<int64_t> waits{0};
  // Launches of functions that were not loaded before: each waits for the device, too.
  std::atomic<int64_t> lazy_loads{0};
  std::atomic<int64_t> kernels{0};  // that have run
};

}  // namespace mla::fake_hip

extern "C" mla::fake_hip::WaitingControl* waiting_driver_control();

#endif  // MLA_TESTS_FAKE_HIP_WAITS_WAITING_DRIVER_H_
