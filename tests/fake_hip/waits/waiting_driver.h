// Lets a test control the waiting fake CUDA driver (waiting_driver.cc). The test opens the same
// library as the backend and gets its one control block through waiting_driver_control().
#ifndef MLA_TESTS_FAKE_HIP_WAITS_WAITING_DRIVER_H_
#define MLA_TESTS_FAKE_HIP_WAITS_WAITING_DRIVER_H_

#include <atomic>
#include <cstdint>

namespace mla::fake_hip {

struct WaitingControl {
  // Called with the name of each entry point that takes the driver's lock, in the caller's thread
  // and before it takes the lock. Set this only while no other thread calls the driver.
  void (*before_call)(const char* call) = nullptr;
  // Number of calls that hold the lock and wait for the device now, and of all calls that had to
  // wait.
  std::atomic<int> waiting{0};
  std::atomic<int64_t> waits{0};
  // Launches of functions that were not loaded before. Each waits for the device.
  std::atomic<int64_t> lazy_loads{0};
  std::atomic<int64_t> kernels{0};  // kernels that have run
};

}  // namespace mla::fake_hip

extern "C" mla::fake_hip::WaitingControl* waiting_driver_control();

#endif  // MLA_TESTS_FAKE_HIP_WAITS_WAITING_DRIVER_H_
