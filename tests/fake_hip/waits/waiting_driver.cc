// CUDA's entry points of the waiting fake driver (waiting_calls.h).
#include <array>
#include <atomic>
#include <cstring>
#include <vector>

#include "tests/fake_hip/runtime/fake_state.h"
#include "tests/fake_hip/waits/device_queue.h"
#include "tests/fake_hip/waits/waiting_calls.h"
#include "tests/fake_hip/waits/waiting_driver.h"

namespace mla::fake_hip {
namespace {

constexpr unsigned kHostMemory = 1;
constexpr size_t kHandleBytes = 64;

struct CopySide {
  size_t x, y;
  unsigned type;
  void* host;
  void* device;
  void* array;
  size_t pitch;
  void* at() const { return type == kHostMemory ? host : device; }
};
struct CopyRows {
  CopySide from, to;
  size_t bytes, rows;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  DeviceQueue* stream;
  const void* attributes;
  unsigned attribute_count;
};
struct CudaKernelNode {
  Function* function;
  Size3 grid, block;
  unsigned shared_bytes;
  void** parameters;
  void** extra;
  void* kernel;
  void* context;
};
// A node is an index into the launches.
struct WaitingGraph {
  std::vector<PendingLaunch> launches;
};

PendingLaunch LaunchOf(const CudaKernelNode& node) {
  return PendingLaunch({.block = node.block,
                        .extra = node.extra,
                        .function = node.function,
                        .grid = node.grid,
                        .parameters = node.parameters,
                        .shared_bytes = node.shared_bytes});
}

}  // namespace
}  // namespace mla::fake_hip

namespace fake = mla::fake_hip;
using fake::Call;
using fake::DeviceQueue;
using fake::LaunchOf;
using fake::Of;
using fake::Run;
using fake::TheDriver;
using fake::WaitingEvent;

extern "C" {

FORWARD_FREE(cuCtxSetCurrent, (void* context), (context))
FORWARD_FREE(cuGetErrorString, (int code, const char** text), (code, text))
FORWARD(cuInit, (unsigned flags), (flags))
FORWARD(cuDeviceGetCount, (int* count), (count))
FORWARD(cuDeviceGetName, (char* name, int bytes, int device), (name, bytes, device))
FORWARD(cuDeviceGetAttribute, (int* value, int attribute, int device), (value, attribute, device))
FORWARD(cuDeviceGetUuid_v2, (void* uuid, int device), (uuid, device))
FORWARD(cuDevicePrimaryCtxRetain, (void** context, int device), (context, device))
FORWARD(cuMemGetInfo_v2, (size_t * free_bytes, size_t* total), (free_bytes, total))

FORWARD_WAITING(cuMemAlloc_v2, (void** at, size_t bytes), (at, bytes))
FORWARD_WAITING(cuMemFree_v2, (void* at), (at))
FORWARD_WAITING(cuMemHostAlloc, (void** at, size_t bytes, unsigned flags), (at, bytes, flags))
FORWARD_WAITING(cuMemFreeHost, (void* at), (at))
FORWARD_WAITING(cuMemHostRegister_v2, (void* at, size_t bytes, unsigned flags), (at, bytes, flags))
FORWARD_WAITING(cuMemHostUnregister, (void* at), (at))
FORWARD(cuMemGetAllocationGranularity, (size_t * bytes, const void* wanted, int kind),
        (bytes, wanted, kind))
FORWARD_WAITING(cuMemCreate,
                (uint64_t * handle, size_t bytes, const void* wanted, unsigned long long flags),
                (handle, bytes, wanted, flags))
FORWARD_WAITING(cuMemRelease, (uint64_t handle), (handle))
FORWARD(cuMemExportToShareableHandle,
        (void* descriptor, uint64_t handle, int kind, unsigned long long flags),
        (descriptor, handle, kind, flags))
FORWARD(cuMemAddressReserve,
        (void** at, size_t bytes, size_t unit, void* wanted, unsigned long long flags),
        (at, bytes, unit, wanted, flags))
FORWARD(cuMemAddressFree, (void* at, size_t bytes), (at, bytes))
FORWARD_WAITING(cuMemMap,
                (void* at, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags),
                (at, bytes, offset, handle, flags))
FORWARD_WAITING(cuMemUnmap, (void* at, size_t bytes), (at, bytes))
FORWARD_WAITING(cuMemSetAccess, (void* at, size_t bytes, const void* access, size_t count),
                (at, bytes, access, count))
FORWARD(cuIpcGetMemHandle, (void* handle, void* at), (handle, at))

FORWARD_WAITING(cuModuleLoadData, (void** module, const void* image), (module, image))
FORWARD_WAITING(cuModuleUnload, (void* module), (module))
FORWARD(cuModuleGetFunction, (void** function, void* module, const char* name),
        (function, module, name))
FORWARD(cuFuncSetAttribute, (void* function, int attribute, int value),
        (function, attribute, value))
int cuFuncLoad(fake::Function* function) {
  const Call call("cuFuncLoad");
  call.AwaitDevice();
  TheDriver().loaded.insert(function);
  return fake::kSuccess;
}
// Profilers make this call.
int cuCtxSynchronize() {
  const Call call("cuCtxSynchronize");
  call.AwaitDevice();
  return fake::kSuccess;
}

int cuStreamCreate(DeviceQueue** stream, unsigned) {
  const Call call("cuStreamCreate");
  *stream = new DeviceQueue;
  TheDriver().streams.insert(*stream);
  return fake::kSuccess;
}
int cuStreamDestroy_v2(DeviceQueue* stream) {
  const Call call("cuStreamDestroy");
  TheDriver().streams.erase(stream);
  delete stream;
  return fake::kSuccess;
}
int cuStreamSynchronize(DeviceQueue* stream) {
  { const Call call("cuStreamSynchronize"); }
  stream->AwaitAll("cuStreamSynchronize");  // without the lock
  return fake::kSuccess;
}
int cuStreamWaitEvent(DeviceQueue* stream, const WaitingEvent* event, unsigned) {
  const Call call("cuStreamWaitEvent");
  if (event->stream == nullptr) return fake::kSuccess;
  stream->Add([awaited = *event] { awaited.stream->Await(awaited.position, "a stream"); });
  return fake::kSuccess;
}
int cuStreamWriteValue32_v2(DeviceQueue* stream, uint32_t* word, uint32_t value, unsigned) {
  const Call call("cuStreamWriteValue32");
  stream->Add([word, value] { std::atomic_ref(*word).store(value, std::memory_order_release); });
  return fake::kSuccess;
}

int cuEventCreate(WaitingEvent** event, unsigned) {
  const Call call("cuEventCreate");
  *event = new WaitingEvent;
  return fake::kSuccess;
}
int cuEventDestroy_v2(WaitingEvent* event) {
  const Call call("cuEventDestroy");
  delete event;
  return fake::kSuccess;
}
int cuEventRecord(WaitingEvent* event, DeviceQueue* stream) {
  const Call call("cuEventRecord");
  *event = {stream, stream->Position()};
  return fake::kSuccess;
}
int cuEventQuery(const WaitingEvent* event) {
  const Call call("cuEventQuery");
  const bool done = event->stream == nullptr || event->stream->Done(event->position);
  return done ? fake::kSuccess : fake::kNotReady;
}
int cuEventElapsedTime(float* ms, const WaitingEvent*, const WaitingEvent*) {
  const Call call("cuEventElapsedTime");
  *ms = 0.25f;
  return fake::kSuccess;
}
int cuIpcGetEventHandle(void* handle, const WaitingEvent*) {
  std::memset(handle, 0, fake::kHandleBytes);
  return fake::kSuccess;
}

int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, DeviceQueue* stream) {
  const Call call("cuMemcpyHtoDAsync");
  stream->Add([=] { std::memcpy(to, from, bytes); });
  return fake::kSuccess;
}
int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, DeviceQueue* stream) {
  const Call call("cuMemcpyDtoHAsync");
  stream->Add([=] { std::memcpy(to, from, bytes); });
  return fake::kSuccess;
}
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, DeviceQueue* stream) {
  const Call call("cuMemcpyDtoDAsync");
  stream->Add([=] { std::memcpy(to, from, bytes); });
  return fake::kSuccess;
}
int cuMemcpy2DAsync_v2(const fake::CopyRows* rows, DeviceQueue* stream) {
  const Call call("cuMemcpy2DAsync");
  stream->Add([c = *rows] {
    for (size_t row = 0; row < c.rows; ++row) {
      std::memcpy(static_cast<char*>(c.to.at()) + row * c.to.pitch,
                  static_cast<const char*>(c.from.at()) + row * c.from.pitch, c.bytes);
    }
  });
  return fake::kSuccess;
}
int cuMemsetD8Async(void* at, unsigned char value, size_t bytes, DeviceQueue* stream) {
  const Call call("cuMemsetD8Async");
  stream->Add([=] { std::memset(at, value, bytes); });
  return fake::kSuccess;
}

int cuLaunchKernelEx(const fake::LaunchConfig* c, fake::Function* function, void** parameters,
                     void**) {
  const Call call("cuLaunchKernel");
  call.AwaitLoaded(function);
  const fake::PendingLaunch launch = LaunchOf({.function = function,
                                               .grid = {c->grid_x, c->grid_y, c->grid_z},
                                               .block = {c->block_x, c->block_y, c->block_z},
                                               .shared_bytes = c->shared_bytes,
                                               .parameters = parameters,
                                               .extra = nullptr,
                                               .kernel = nullptr,
                                               .context = nullptr});
  c->stream->Add([launch] { Run(launch); });
  return fake::kSuccess;
}
int cuLaunchKernel(fake::Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   DeviceQueue* stream, void** parameters, void** extra) {
  const fake::LaunchConfig config{grid_x,  grid_y,       grid_z, block_x, block_y,
                                  block_z, shared_bytes, stream, nullptr, 0};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}

int cuGraphCreate(fake::WaitingGraph** graph, unsigned) {
  const Call call("cuGraphCreate");
  *graph = new fake::WaitingGraph;
  return fake::kSuccess;
}
int cuGraphDestroy(fake::WaitingGraph* graph) {
  const Call call("cuGraphDestroy");
  delete graph;
  return fake::kSuccess;
}
int cuGraphAddKernelNode_v2(size_t* node, fake::WaitingGraph* graph, const void*, size_t,
                            const fake::CudaKernelNode* params) {
  const Call call("cuGraphAddKernelNode");
  call.AwaitLoaded(params->function);
  graph->launches.push_back(LaunchOf(*params));
  *node = graph->launches.size();  // starts at 1, so a node is never null
  return fake::kSuccess;
}
int cuGraphAddDependencies_v2(void*, const void*, const void*, const void*, size_t) {
  const Call call("cuGraphAddDependencies");
  return fake::kSuccess;
}
int cuGraphKernelNodeSetAttribute(void*, unsigned, const void*) {
  const Call call("cuGraphKernelNodeSetAttribute");
  return fake::kSuccess;
}
int cuGraphInstantiateWithFlags(fake::WaitingGraph** exec, const fake::WaitingGraph* graph,
                                unsigned long long) {
  const Call call("cuGraphInstantiate");
  *exec = new fake::WaitingGraph(*graph);
  return fake::kSuccess;
}
int cuGraphExecDestroy(fake::WaitingGraph* exec) {
  const Call call("cuGraphExecDestroy");
  delete exec;
  return fake::kSuccess;
}
int cuGraphExecKernelNodeSetParams_v2(fake::WaitingGraph* exec, size_t node,
                                      const fake::CudaKernelNode* params) {
  const Call call("cuGraphExecKernelNodeSetParams");
  exec->launches[node - 1] = LaunchOf(*params);
  return fake::kSuccess;
}
int cuGraphLaunch(const fake::WaitingGraph* exec, DeviceQueue* stream) {
  const Call call("cuGraphLaunch");
  for (const fake::PendingLaunch& launch : exec->launches) {
    stream->Add([launch] { Run(launch); });
  }
  return fake::kSuccess;
}

}  // extern "C"
