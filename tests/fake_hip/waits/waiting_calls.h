// What CUDA's and HIP's entry points of the waiting fake driver share.
//
// The driver blocks as the real one was observed to. All calls take one lock of the context, and
// some hold it while they wait for the device, so other threads that enqueue work wait too. Each
// stream works in its own thread, so kernels run while the host continues.
//
// The fake runtime (tests/fake_hip/runtime), which this library opens, provides memory, modules
// and attributes. Streams, events, copies, launches and graphs are this library's. Kernels run one
// after another, because the emulated device runs one at a time; copies and words run in parallel.
//
// Only for some calls of the real drivers it is known that they wait. Here every call waits that
// allocates, frees or maps memory or loads code, so a program that passes here also works if fewer
// calls wait.
#ifndef MLA_TESTS_FAKE_HIP_WAITS_WAITING_CALLS_H_
#define MLA_TESTS_FAKE_HIP_WAITS_WAITING_CALLS_H_

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "tests/fake_hip/runtime/fake_state.h"
#include "tests/fake_hip/waits/device_queue.h"
#include "tests/fake_hip/waits/waiting_driver.h"

namespace mla::fake_hip {

inline constexpr int kSuccess = 0;
inline constexpr int kNotReady = 600;

struct WaitingEvent {
  DeviceQueue* stream = nullptr;
  uint64_t position = 0;
};

struct Driver {
  WaitingControl control;
  void* runtime;    // the fake runtime's library
  std::mutex lock;  // the context's lock; it guards all members below
  std::set<DeviceQueue*> streams;
  std::set<const Function*> loaded;
};
Driver& TheDriver();

// Returns the runtime's entry point of this name.
template <class Entry>
Entry* Of(const char* name) {
  auto* const entry = reinterpret_cast<Entry*>(dlsym(TheDriver().runtime, name));
  if (entry != nullptr) return entry;
  std::fprintf(stderr, "fake driver: no %s\n", name);
  std::abort();
}

// Holds the lock during its lifetime.
class Call {
 public:
  explicit Call(const char* name);
  ~Call() { TheDriver().lock.unlock(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void AwaitDevice() const;
  // A function that was not loaded is loaded, which waits for the device.
  void AwaitLoaded(const Function* function) const;

 private:
  const char* const name_;
};

// Runs a kernel in the caller's thread.
void Run(const PendingLaunch& launch);

}  // namespace mla::fake_hip

// Forwards a call to the runtime while holding the lock. FORWARD_WAITING also waits until the
// device is idle.
#define FORWARD(name, parameters, arguments)                     \
  int name parameters {                                          \
    const ::mla::fake_hip::Call call(#name);                     \
    return ::mla::fake_hip::Of<int parameters>(#name) arguments; \
  }
#define FORWARD_WAITING(name, parameters, arguments)             \
  int name parameters {                                          \
    const ::mla::fake_hip::Call call(#name);                     \
    call.AwaitDevice();                                          \
    return ::mla::fake_hip::Of<int parameters>(#name) arguments; \
  }
// Forwards without the lock, because these calls are very frequent.
#define FORWARD_FREE(name, parameters, arguments) \
  int name parameters { return ::mla::fake_hip::Of<int parameters>(#name) arguments; }

#endif  // MLA_TESTS_FAKE_HIP_WAITS_WAITING_CALLS_H_
