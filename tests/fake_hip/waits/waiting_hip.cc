// HIP's entry points of the waiting fake driver (waiting_calls.h). HIP's runtime loads all
// functions of a module at once, so a launch loads none.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tests/fake_hip/runtime/fake_state.h"
#include "tests/fake_hip/waits/device_queue.h"
#include "tests/fake_hip/waits/waiting_calls.h"

namespace fake = mla::fake_hip;
using fake::Call;
using fake::DeviceQueue;
using fake::TheDriver;
using fake::WaitingEvent;

extern "C" {

const char* hipGetErrorString(int code) {
  return fake::Of<const char*(int)>("hipGetErrorString")(code);
}
FORWARD_FREE(hipSetDevice, (int device), (device))
FORWARD_FREE(hipGetDevice, (int* device), (device))
FORWARD(hipInit, (unsigned flags), (flags))
FORWARD(hipGetDeviceCount, (int* count), (count))
FORWARD(hipDeviceGetName, (char* name, int bytes, int device), (name, bytes, device))
FORWARD(hipDeviceGetAttribute, (int* value, int attribute, int device), (value, attribute, device))
FORWARD(hipGetDevicePropertiesR0600, (void* properties, int device), (properties, device))
FORWARD(hipRuntimeGetVersion, (int* version), (version))
FORWARD(hipHostGetDevicePointer, (void** device, void* host, unsigned flags), (device, host, flags))
FORWARD(hipMemGetInfo, (size_t * free_bytes, size_t* total), (free_bytes, total))

FORWARD_WAITING(hipMalloc, (void** at, size_t bytes), (at, bytes))
FORWARD_WAITING(hipFree, (void* at), (at))
FORWARD_WAITING(hipHostMalloc, (void** at, size_t bytes, unsigned flags), (at, bytes, flags))
FORWARD_WAITING(hipHostFree, (void* at), (at))
FORWARD_WAITING(hipHostRegister, (void* at, size_t bytes, unsigned flags), (at, bytes, flags))
FORWARD_WAITING(hipHostUnregister, (void* at), (at))
FORWARD_WAITING(hipMemCreate,
                (uint64_t * handle, size_t bytes, const void* wanted, unsigned long long flags),
                (handle, bytes, wanted, flags))
FORWARD_WAITING(hipMemRelease, (uint64_t handle), (handle))
FORWARD(hipMemAddressReserve,
        (void** at, size_t bytes, size_t unit, void* wanted, unsigned long long flags),
        (at, bytes, unit, wanted, flags))
FORWARD(hipMemAddressFree, (void* at, size_t bytes), (at, bytes))
FORWARD_WAITING(hipMemMap,
                (void* at, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags),
                (at, bytes, offset, handle, flags))
FORWARD_WAITING(hipMemUnmap, (void* at, size_t bytes), (at, bytes))
FORWARD_WAITING(hipMemSetAccess, (void* at, size_t bytes, const void* access, size_t count),
                (at, bytes, access, count))

FORWARD_WAITING(hipModuleLoadData, (void** module, const void* image), (module, image))
FORWARD_WAITING(hipModuleUnload, (void* module), (module))
FORWARD(hipModuleGetFunction, (void** function, void* module, const char* name),
        (function, module, name))
// Profilers make this call.
int hipDeviceSynchronize() {
  const Call call("hipDeviceSynchronize");
  call.AwaitDevice();
  return fake::kSuccess;
}

int hipStreamCreateWithFlags(DeviceQueue** stream, unsigned) {
  const Call call("hipStreamCreateWithFlags");
  *stream = new DeviceQueue;
  TheDriver().streams.insert(*stream);
  return fake::kSuccess;
}
int hipStreamDestroy(DeviceQueue* stream) {
  const Call call("hipStreamDestroy");
  TheDriver().streams.erase(stream);
  delete stream;
  return fake::kSuccess;
}
int hipStreamSynchronize(DeviceQueue* stream) {
  { const Call call("hipStreamSynchronize"); }
  stream->AwaitAll("hipStreamSynchronize");  // without the lock
  return fake::kSuccess;
}
int hipStreamWaitEvent(DeviceQueue* stream, const WaitingEvent* event, unsigned) {
  const Call call("hipStreamWaitEvent");
  if (event->stream == nullptr) return fake::kSuccess;
  stream->Add([awaited = *event] { awaited.stream->Await(awaited.position, "a stream"); });
  return fake::kSuccess;
}
int hipStreamWriteValue32(DeviceQueue* stream, uint32_t* word, uint32_t value, unsigned) {
  const Call call("hipStreamWriteValue32");
  stream->Add([word, value] { std::atomic_ref(*word).store(value, std::memory_order_release); });
  return fake::kSuccess;
}

int hipEventCreateWithFlags(WaitingEvent** event, unsigned) {
  const Call call("hipEventCreateWithFlags");
  *event = new WaitingEvent;
  return fake::kSuccess;
}
int hipEventDestroy(WaitingEvent* event) {
  const Call call("hipEventDestroy");
  delete event;
  return fake::kSuccess;
}
int hipEventRecord(WaitingEvent* event, DeviceQueue* stream) {
  const Call call("hipEventRecord");
  *event = {stream, stream->Position()};
  return fake::kSuccess;
}
int hipEventQuery(const WaitingEvent* event) {
  const Call call("hipEventQuery");
  const bool done = event->stream == nullptr || event->stream->Done(event->position);
  return done ? fake::kSuccess : fake::kNotReady;
}
int hipEventElapsedTime(float* ms, const WaitingEvent*, const WaitingEvent*) {
  const Call call("hipEventElapsedTime");
  *ms = 0.25f;
  return fake::kSuccess;
}

int hipMemcpyHtoDAsync(void* to, const void* from, size_t bytes, DeviceQueue* stream) {
  const Call call("hipMemcpyHtoDAsync");
  stream->Add([=] { std::memcpy(to, from, bytes); });
  return fake::kSuccess;
}
int hipMemcpyDtoHAsync(void* to, const void* from, size_t bytes, DeviceQueue* stream) {
  const Call call("hipMemcpyDtoHAsync");
  stream->Add([=] { std::memcpy(to, from, bytes); });
  return fake::kSuccess;
}
int hipMemcpyDtoDAsync(void* to, const void* from, size_t bytes, DeviceQueue* stream) {
  const Call call("hipMemcpyDtoDAsync");
  stream->Add([=] { std::memcpy(to, from, bytes); });
  return fake::kSuccess;
}
int hipMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes,
                     size_t rows, int, DeviceQueue* stream) {
  const Call call("hipMemcpy2DAsync");
  stream->Add([=] {
    for (size_t row = 0; row < rows; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch,
                  static_cast<const char*>(from) + row * from_pitch, bytes);
    }
  });
  return fake::kSuccess;
}
int hipMemsetD8Async(void* at, unsigned char value, size_t bytes, DeviceQueue* stream) {
  const Call call("hipMemsetD8Async");
  stream->Add([=] { std::memset(at, value, bytes); });
  return fake::kSuccess;
}

int hipModuleLaunchKernel(fake::Function* function, unsigned grid_x, unsigned grid_y,
                          unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, DeviceQueue* stream, void** parameters, void**) {
  const Call call("hipModuleLaunchKernel");
  const fake::PendingLaunch launch({.block = {block_x, block_y, block_z},
                                    .extra = nullptr,
                                    .function = function,
                                    .grid = {grid_x, grid_y, grid_z},
                                    .parameters = parameters,
                                    .shared_bytes = shared_bytes});
  stream->Add([launch] { fake::Run(launch); });
  return fake::kSuccess;
}

}  // extern "C"
