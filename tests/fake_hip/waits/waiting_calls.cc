#include "tests/fake_hip/waits/waiting_calls.h"

namespace mla::fake_hip {
namespace {

constexpr char kLibrary[] = "tests/fake_hip/libfake_hip.so";

}  // namespace

Driver& TheDriver() {
  static Driver& driver = *[] {
    auto* const made = new Driver;
    made->runtime = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (made->runtime == nullptr) {
      std::fprintf(stderr, "fake driver: %s\n", dlerror());
      std::abort();
    }
    return made;
  }();
  return driver;
}

Call::Call(const char* name) : name_(name) {
  Driver& driver = TheDriver();
  if (driver.control.before_call != nullptr) driver.control.before_call(name);
  driver.lock.lock();
}

void Call::AwaitDevice() const {
  Driver& driver = TheDriver();
  bool idle = true;
  for (DeviceQueue* const stream : driver.streams) idle &= stream->Idle();
  if (idle) return;
  ++driver.control.waits;
  ++driver.control.waiting;
  for (DeviceQueue* const stream : driver.streams) stream->AwaitAll(name_);
  --driver.control.waiting;
}

void Call::AwaitLoaded(const Function* function) const {
  Driver& driver = TheDriver();
  if (!driver.loaded.insert(function).second) return;
  ++driver.control.lazy_loads;
  AwaitDevice();
}

void Run(const PendingLaunch& launch) {
  const Function& function = *launch.function;
  const char* const fault =
      function.image->run(*function.kernel, launch.grid, launch.args.data(), nullptr);
  ++TheDriver().control.kernels;
  if (fault == nullptr) return;
  std::fprintf(stderr, "fake device: %s: %s\n", function.name.c_str(), fault);
  std::abort();
}

}  // namespace mla::fake_hip

mla::fake_hip::WaitingControl* waiting_driver_control() {
  return &mla::fake_hip::TheDriver().control;
}
