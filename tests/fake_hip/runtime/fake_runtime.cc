// The HIP entry points that the backend uses, on host memory.
//
// Streams are as lazy as the API allows. Work runs only when a caller waits for it, in stream
// order, and work of another stream runs only if the stream waits for its event. A missing wait or
// host memory that is reused too early therefore gives a wrong result.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/args/kernel_args.h"
#include "tests/fake_hip/runtime/fake_control.h"
#include "tests/fake_hip/runtime/fake_image.h"
#include "tests/fake_hip/runtime/fake_memory.h"
#include "tests/fake_hip/runtime/fake_state.h"
#include "tests/fake_hip/runtime/flaws.h"
#include "tests/fake_hip/runtime/shared_event.h"

namespace mla::fake_hip {
namespace {

constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidImage = 200;
constexpr int kNotFound = 500;
constexpr int kNotReady = 600;
constexpr int kLaunchFailure = 719;
constexpr unsigned kInterprocess = 4;  // flag of events
constexpr int kHostPointersReach = 4;  // attributes of a device
constexpr int kMultiprocessorCount = 63;

struct Event {
  Stream* stream = nullptr;
  uint64_t position = 0;
  std::shared_ptr<SharedEvent> shared = nullptr;  // only if the event is interprocess
  void Complete() const {
    if (stream != nullptr) stream->RunTo(position);
  }
};

struct Module {
  const kernels::hip::host::Image* image;
  std::deque<Function> functions;
};

}  // namespace

Runtime& State() {
  static Runtime& runtime = *[] {
    auto* const made = new Runtime;
    // For programs that cannot access the control block.
    if (const char* const arch = std::getenv("FAKE_GPU_ARCH")) made->control.arch = arch;
    if (const char* const gib = std::getenv("FAKE_GPU_GIB")) {
      made->control.memory_bytes = int64_t{std::atoi(gib)} << 30;
    }
    return made;
  }();
  return runtime;
}

// Every entry point calls this first. Returns 0 to continue, else the code to return.
int Enter(const char* call) {
  Control& control = State().control;
  if (control.lost) return kLaunchFailure;
  if (std::strcmp(control.fail_call, call) != 0 || control.fail_after < 0) return 0;
  const int nth = control.fail_seen++ - control.fail_after;
  const bool fails = nth >= 0 && (control.fail_times < 0 || nth < control.fail_times);
  return fails ? control.fail_code : 0;
}

void Announce(const PendingLaunch& launch) {
  const Control& control = State().control;
  if (control.before_launch != nullptr) control.before_launch(launch.function->name.c_str());
}

void Enqueue(const PendingLaunch& launch, Stream& stream) {
  Control& control = State().control;
  const Function& function = *launch.function;
  ++control.launches;
  if (control.on_launch != nullptr) control.on_launch(function.name.c_str());
  control.expanded_launches += function.name.starts_with(kernels::hip::kExpandedPrefix);
  if (function.name == kernels::hip::kAppendKernel) {
    control.early_starts +=
        reinterpret_cast<const kernels::hip::AppendArgs*>(launch.args.data())->next_starts_early;
  }
  if (function.name == kernels::hip::kCopyTensorsKernel) {
    const auto* const copied =
        reinterpret_cast<const kernels::hip::CopyTensorsArgs*>(launch.args.data());
    for (int32_t i = 0; i < copied->count; ++i) control.bytes_by_kernel += copied->copies[i].bytes;
  }
  const char* const named = control.wrong_kernel;
  if (control.wrong_results && (named == nullptr || function.name == named)) return;
  const auto run = [function, launch, &stream, flaw = control.flaw,
                    rounded = control.rounded_inputs] {
    // A flaw is in arguments and memory as they are when the kernel begins.
    if (flaw != Flaw::kNone || rounded) stream.RunHeld();
    const kernels::hip::host::Previous previous{
        [](void* of) { static_cast<Stream*>(of)->RunHeld(); }, &stream};
    const bool holds = stream.held != nullptr;
    RunFlawed(flaw, rounded, function.name, launch.grid, launch.args, [&](const void* arguments) {
      const char* const fault = function.image->run(*function.kernel, launch.grid, arguments,
                                                    holds ? &previous : nullptr);
      if (fault == nullptr) return;
      std::fprintf(stderr, "fake device: %s\n", fault);
      State().control.lost = true;
    });
  };
  stream.AddWork({run, true, launch.overlaps});
}

bool IsPinned(const void* at) {
  for (const auto* const memory : {&State().registered, &State().host_memory}) {
    for (const auto& [begin, bytes] : *memory) {
      if (at >= begin && at < static_cast<const std::byte*>(begin) + bytes) return true;
    }
  }
  return false;
}

// Work of a stream: copies to the host, now or later.
void CopyOut(void* to, const void* from, size_t bytes) {
  if (!State().control.late_copies_out || !IsPinned(to)) {
    std::memcpy(to, from, bytes);
    return;
  }
  const auto* const first = static_cast<const std::byte*>(from);
  State().late_copies.push_back({to, {first, first + bytes}});
}

// Lets late copies arrive. Their order does not change.
void FinishCopiesOut() {
  for (const Runtime::LateCopy& copy : std::exchange(State().late_copies, {})) {
    std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
  }
}

}  // namespace mla::fake_hip

using mla::fake_hip::Enter;
using mla::fake_hip::kHostPointersReach;
using mla::fake_hip::kMultiprocessorCount;
using mla::fake_hip::State;
namespace fake = mla::fake_hip;

extern "C" {

fake::Control* fake_hip_control() { return &State().control; }

int hipInit(unsigned) {
  FAKE_ENTER("hipInit");
  return 0;
}
int hipGetDeviceCount(int* count) {
  FAKE_ENTER("hipGetDeviceCount");
  *count = State().control.devices;
  return 0;
}
int hipDeviceGetName(char* name, int bytes, int) {
  FAKE_ENTER("hipDeviceGetName");
  std::strncpy(name, "Fake Instinct", static_cast<size_t>(bytes));
  return 0;
}
int hipRuntimeGetVersion(int* version) {
  FAKE_ENTER("hipRuntimeGetVersion");
  *version = State().control.version;
  return 0;
}
int hipDeviceGetAttribute(int* value, int attribute, int) {
  FAKE_ENTER("hipDeviceGetAttribute");
  if (attribute != kHostPointersReach && attribute != kMultiprocessorCount) {
    return fake::kInvalidValue;
  }
  *value = attribute == kMultiprocessorCount ? 8 : State().control.host_pointers_reach;
  return 0;
}
int hipGetDevicePropertiesR0600(void* properties, int) {
  FAKE_ENTER("hipGetDevicePropertiesR0600");
  auto* bytes = static_cast<char*>(properties);
  std::strncpy(bytes, "Fake Instinct", 64);
  const std::string arch = std::string(State().control.arch) + ":sramecc+:xnack-";
  std::strncpy(bytes + 1160, arch.c_str(), 128);
  return 0;
}
int hipSetDevice(int) {
  FAKE_ENTER("hipSetDevice");
  return 0;
}
const char* hipGetErrorString(int code) {
  switch (code) {
    case fake::kInvalidValue:
      return "invalid argument";
    case fake::kOutOfMemory:
      return "out of memory";
    case fake::kInvalidImage:
      return "device kernel image is invalid";
    case fake::kLaunchFailure:
      return "unspecified launch failure";
    default:
      return "some error";
  }
}
int hipMemGetInfo(size_t* free_bytes, size_t* total) {
  FAKE_ENTER("hipMemGetInfo");
  *total = static_cast<size_t>(State().control.memory_bytes);
  *free_bytes = *total - static_cast<size_t>(State().control.live_bytes);
  return 0;
}
int hipMalloc(void** at, size_t bytes) {
  FAKE_ENTER("hipMalloc");
  fake::Control& control = State().control;
  if (control.live_bytes + static_cast<int64_t>(bytes) > control.memory_bytes) {
    return fake::kOutOfMemory;
  }
  *at = fake::TakeMemory(bytes);
  if (*at == nullptr) return fake::kOutOfMemory;
  std::memset(*at, 0xff, bytes);  // NaN everywhere, so reads before the first write show
  State().device_memory[*at] = static_cast<int64_t>(bytes);
  control.live_bytes += static_cast<int64_t>(bytes);
  ++control.allocations;
  return 0;
}
int hipFree(void* at) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  const auto allocation = State().device_memory.find(at);
  if (allocation == State().device_memory.end()) return fake::kInvalidValue;
  const auto bytes = static_cast<size_t>(allocation->second);
  State().control.live_bytes -= allocation->second;
  State().device_memory.erase(allocation);
  State().last_input = {};
  fake::FinishCopiesOut();
  fake::GiveMemory(at, bytes);
  return 0;
}
int hipHostMalloc(void** at, size_t bytes, unsigned) {
  FAKE_ENTER("hipHostMalloc");
  ++State().control.allocations;
  *at = ::operator new(bytes, std::align_val_t{256});
  State().host_memory[*at] = static_cast<int64_t>(bytes);
  // So that no output is right before it has arrived, because the same was there before.
  if (State().control.late_copies_out) std::memset(*at, 0xff, bytes);
  return 0;
}
int hipHostFree(void* at) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  fake::FinishCopiesOut();
  State().host_memory.erase(at);
  ::operator delete(at, std::align_val_t{256});
  return 0;
}

int hipHostRegister(void* at, size_t bytes, unsigned) {
  FAKE_ENTER("hipHostRegister");
  State().control.registered_bytes += static_cast<int64_t>(bytes);
  State().registered[at] = static_cast<int64_t>(bytes);
  return 0;
}
int hipHostUnregister(void* at) {
  FAKE_ENTER("hipHostUnregister");
  const auto found = State().registered.find(at);
  if (found == State().registered.end()) return fake::kInvalidValue;
  fake::FinishCopiesOut();
  State().control.registered_bytes -= found->second;
  State().registered.erase(found);
  return 0;
}

int hipStreamCreateWithFlags(fake::Stream** stream, unsigned) {
  FAKE_ENTER("hipStreamCreateWithFlags");
  *stream = new fake::Stream;
  return 0;
}
int hipStreamDestroy(fake::Stream* stream) {
  delete stream;
  return 0;
}
int hipStreamWaitEvent(fake::Stream* stream, fake::Event* event, unsigned) {
  FAKE_ENTER("hipStreamWaitEvent");
  if (State().control.stream_waits++ == State().control.ignored_wait) return 0;
  stream->Add([snapshot = *event] { snapshot.Complete(); });
  return 0;
}
int hipStreamSynchronize(fake::Stream* stream) {
  FAKE_ENTER("hipStreamSynchronize");
  stream->RunTo(stream->enqueued);
  fake::FinishCopiesOut();
  return 0;
}
int hipEventCreateWithFlags(fake::Event** event, unsigned flags) {
  FAKE_ENTER("hipEventCreateWithFlags");
  auto result = std::make_unique<fake::Event>();
  if ((flags & fake::kInterprocess) != 0) {
    result->shared = fake::SharedEvent::Make();
    if (result->shared == nullptr) return fake::kOutOfMemory;
  }
  *event = result.release();
  return 0;
}
int hipIpcGetEventHandle(fake::SharedHandle* handle, fake::Event* event) {
  FAKE_ENTER("hipIpcGetEventHandle");
  if (event->shared == nullptr) return fake::kInvalidValue;
  *handle = event->shared->handle();
  return 0;
}
int hipIpcOpenEventHandle(fake::Event** event, fake::SharedHandle handle) {
  FAKE_ENTER("hipIpcOpenEventHandle");
  std::shared_ptr<fake::SharedEvent> shared = fake::SharedEvent::Open(handle);
  if (shared == nullptr) return fake::kInvalidValue;
  *event = new fake::Event{nullptr, 0, std::move(shared)};
  return 0;
}
int hipGetDevice(int* device) {
  *device = 0;
  return 0;
}
int hipEventDestroy(fake::Event* event) {
  delete event;
  return 0;
}
int hipEventRecord(fake::Event* event, fake::Stream* stream) {
  FAKE_ENTER("hipEventRecord");
  event->stream = stream;
  event->position = stream == nullptr ? 0 : stream->enqueued;
  if (event->shared == nullptr) return 0;
  // Another process cannot run this process's streams, so the stream's work runs here, unless the
  // device hangs.
  event->shared->Record();
  if (State().control.hang) return 0;
  event->Complete();
  event->shared->Complete();
  return 0;
}
int hipEventQuery(fake::Event* event) {
  FAKE_ENTER("hipEventQuery");
  if (event->shared != nullptr) return event->shared->Done() ? 0 : fake::kNotReady;
  if (State().control.hang) return fake::kNotReady;
  event->Complete();
  return 0;
}
int hipEventElapsedTime(float* ms, fake::Event*, fake::Event*) {
  FAKE_ENTER("hipEventElapsedTime");
  *ms = 0.25f;
  return 0;
}

int hipMemcpyHtoDAsync(void* to, const void* from, size_t bytes, fake::Stream* stream) {
  FAKE_ENTER("hipMemcpyHtoDAsync");
  ++State().control.copies_in;
  State().control.bytes_in += static_cast<int64_t>(bytes);
  State().control.last_copied_in = from;
  State().control.last_copied_in_bytes = static_cast<int64_t>(bytes);
  stream->Add([=] {
    if (State().control.stale_replay == fake::StaleReplay::kInputs) {
      const auto* const old = static_cast<const std::byte*>(to);
      State().last_input = {to, {old, old + bytes}};
    }
    std::memcpy(to, from, bytes);
  });
  return 0;
}
int hipMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes,
                     size_t rows, int direction, fake::Stream* stream) {
  FAKE_ENTER("hipMemcpy2DAsync");
  if (direction < 1 || direction > 3) return fake::kInvalidValue;
  if (bytes > to_pitch || bytes > from_pitch) return fake::kInvalidValue;
  const bool captured = fake::AddCaptured(stream, [=](fake::Stream* other) {
    return hipMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, rows, direction, other);
  });
  if (captured) return 0;
  fake::Control& control = State().control;
  ++(direction == 1   ? control.copies_in
     : direction == 2 ? control.copies_out
                      : control.copies_on_device);
  if (direction == 1) control.bytes_in += static_cast<int64_t>(bytes * rows);
  if (direction == 1) control.last_copied_in = from;
  if (direction == 2) control.last_copied_out = to;
  stream->Add([=] {
    for (size_t row = 0; row < rows; ++row) {
      char* const row_to = static_cast<char*>(to) + row * to_pitch;
      const char* const row_from = static_cast<const char*>(from) + row * from_pitch;
      if (direction == 2) {
        fake::CopyOut(row_to, row_from, bytes);
      } else {
        std::memcpy(row_to, row_from, bytes);
      }
    }
  });
  return 0;
}
int hipMemcpyDtoHAsync(void* to, const void* from, size_t bytes, fake::Stream* stream) {
  FAKE_ENTER("hipMemcpyDtoHAsync");
  ++State().control.copies_out;
  State().control.last_copied_out = to;
  stream->Add([=] { fake::CopyOut(to, from, bytes); });
  return 0;
}
int hipMemcpyDtoDAsync(void* to, const void* from, size_t bytes, fake::Stream* stream) {
  FAKE_ENTER("hipMemcpyDtoDAsync");
  const auto* target = static_cast<const char*>(to);
  const auto* source = static_cast<const char*>(from);
  if (target < source + bytes && source < target + bytes)
    return fake::kInvalidValue;  // the ranges
                                 // overlap
  ++State().control.copies_on_device;
  stream->Add([=] { std::memcpy(to, from, bytes); });
  return 0;
}
int hipMemsetD8Async(void* to, unsigned char value, size_t bytes, fake::Stream* stream) {
  FAKE_ENTER("hipMemsetD8Async");
  stream->Add([=] { std::memset(to, value, bytes); });
  return 0;
}

int hipModuleLoadData(fake::Module** module, const void* bytes) {
  FAKE_ENTER("hipModuleLoadData");
  const mla::kernels::hip::host::Image* const image = fake::LoadImage(bytes, State().control.arch);
  if (image == nullptr) return fake::kInvalidImage;
  *module = new fake::Module{image, {}};
  return 0;
}
int hipModuleUnload(fake::Module* module) {
  delete module;
  return 0;
}
int hipModuleGetFunction(fake::Function** function, fake::Module* module, const char* name) {
  FAKE_ENTER("hipModuleGetFunction");
  for (size_t i = 0; i < module->image->kernel_count; ++i) {
    const mla::kernels::hip::host::Kernel& kernel = module->image->kernels[i];
    if (std::strcmp(kernel.name, name) != 0) continue;
    *function = &module->functions.emplace_back(fake::Function{name, module->image, &kernel});
    return 0;
  }
  return fake::kNotFound;
}
int fake_hip_launch(const fake::KernelNodeParams* params, fake::Stream* stream, int overlaps) {
  fake::PendingLaunch launch(*params);
  launch.overlaps = overlaps != 0;
  fake::Announce(launch);
  FAKE_ENTER("hipModuleLaunchKernel");
  fake::Enqueue(launch, *stream);
  return 0;
}
int hipModuleLaunchKernel(fake::Function* function, unsigned grid_x, unsigned grid_y, unsigned,
                          unsigned block_x, unsigned, unsigned, unsigned shared_bytes,
                          fake::Stream* stream, void** parameters, void**) {
  const fake::KernelNodeParams params{.block = {block_x, 1, 1},
                                      .extra = nullptr,
                                      .function = function,
                                      .grid = {grid_x, grid_y, 1},
                                      .parameters = parameters,
                                      .shared_bytes = shared_bytes};
  return fake_hip_launch(&params, stream, 0);
}

}  // extern "C"
