// The CUDA driver's entry points that the backend uses, on top of the fake HIP runtime in the same
// library. Control blocks, faults (named by their HIP call) and kernels are the same. In addition
// it checks the driver's own rules: the calling thread needs a current context, and a launch may
// request only as much dynamic shared memory as was allowed.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "kernels/hip/emulator/block/tensor_map.h"
#include "tests/fake_hip/runtime/fake_control.h"
#include "tests/fake_hip/runtime/shared_event.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kMultiprocessorCount = 16;
constexpr int kHipMultiprocessorCount = 63;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;
constexpr int kHostPointersReach = 91;
constexpr int kRemoteReachesVirtual = 110, kRemoteFlushes = 117, kRemoteOrder = 118;
constexpr int kProcessesShareIt = 133;
constexpr int kMaxDynamicShared = 8;
constexpr unsigned kCooperative = 2;
constexpr unsigned kProgrammaticSerialization = 6;
constexpr unsigned char kProgrammaticEdge = 1;
constexpr unsigned kHostMemory = 1;
constexpr unsigned kDeviceMemory = 2;
constexpr unsigned kUnifiedMemory = 4;
constexpr unsigned kSharedWithoutAsking = 48 * 1024;
constexpr int kSharedLimit = 227 * 1024;

struct Context {
} the_context;
// Each is the_context or a context that the program created.
thread_local const void* current = nullptr;
thread_local const void* before = nullptr;

struct Allowed {
  std::mutex mutex;
  std::unordered_map<const void*, int> bytes;  // dynamic shared memory, by function
};
Allowed& AllowedShared() {
  static Allowed& allowed = *new Allowed;
  return allowed;
}

using mla::fake_hip::SharedHandle;

struct CopySide {
  size_t x, y;
  unsigned type;
  void* host;
  void* device;
  void* array;
  size_t pitch;
};
struct CopyRows {
  CopySide from, to;
  size_t bytes, rows;
};
struct LaunchAttribute {
  unsigned id;
  char pad[4];
  union {
    char reserved[64];
    int flag;
  } value;
};
struct Size3 {
  unsigned x, y, z;
};
struct KernelNode {
  void* function;
  Size3 grid, block;
  unsigned shared_bytes;
  void** parameters;
  void** extra;
  void* kernel;
  void* context;
};
struct HipKernelNode {
  Size3 block;
  void** extra;
  void* function;
  Size3 grid;
  void** parameters;
  unsigned shared_bytes;
};
struct GraphEdge {
  unsigned char from_port, to_port, type, reserved[5];
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

bool MayRun(const void* function, unsigned grid_x, unsigned grid_y, unsigned block_x,
            unsigned shared_bytes) {
  if (grid_x == 0 || grid_y == 0 || block_x == 0 || block_x > 1024) return false;
  const std::lock_guard<std::mutex> lock(AllowedShared().mutex);
  const auto found = AllowedShared().bytes.find(function);
  const unsigned allowed = found == AllowedShared().bytes.end()
                               ? kSharedWithoutAsking
                               : static_cast<unsigned>(found->second);
  return shared_bytes <= allowed;
}

bool MayRun(const KernelNode& node) {
  return MayRun(node.function, node.grid.x, node.grid.y, node.block.x, node.shared_bytes);
}

HipKernelNode HipNode(const KernelNode& node) {
  return {node.block, node.extra, node.function, node.grid, node.parameters, node.shared_bytes};
}

}  // namespace

extern "C" {

const char* hipGetErrorString(int code);
int hipInit(unsigned);
int hipGetDeviceCount(int*);
int hipDeviceGetName(char*, int, int);
int hipDeviceGetAttribute(int*, int, int);
int hipMemGetInfo(size_t*, size_t*);
int hipMalloc(void**, size_t);
int hipFree(void*);
int hipHostMalloc(void**, size_t, unsigned);
int hipHostFree(void*);
int hipHostRegister(void*, size_t, unsigned);
int hipHostUnregister(void*);
int hipStreamCreateWithFlags(void**, unsigned);
int hipStreamDestroy(void*);
int hipStreamWaitEvent(void*, void*, unsigned);
int hipStreamSynchronize(void*);
int hipStreamWaitValue32(void*, void*, uint32_t, unsigned, uint32_t);
int hipStreamBatchMemOp(void*, unsigned, void*, unsigned);
int hipStreamGetCaptureInfo_v2(void*, int*, uint64_t*, void**, void* const**, size_t*);
int hipGraphExecBatchMemOpNodeSetParams(void*, void*, const void*);
int hipStreamWriteValue32(void*, void*, uint32_t, unsigned);
int hipEventCreateWithFlags(void**, unsigned);
int hipEventDestroy(void*);
int hipEventRecord(void*, void*);
int hipEventQuery(void*);
int hipIpcGetEventHandle(SharedHandle*, void*);
int hipIpcOpenEventHandle(void**, SharedHandle);
int hipIpcGetMemHandle(SharedHandle*, void*);
int hipIpcOpenMemHandle(void**, SharedHandle, unsigned);
int hipIpcCloseMemHandle(void*);
int hipEventElapsedTime(float*, void*, void*);
int hipMemcpyHtoDAsync(void*, const void*, size_t, void*);
int hipMemcpyDtoHAsync(void*, const void*, size_t, void*);
int hipMemcpyDtoDAsync(void*, const void*, size_t, void*);
int hipMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, int, void*);
int hipMemsetD8Async(void*, unsigned char, size_t, void*);
int hipModuleLoadData(void**, const void*);
int hipModuleUnload(void*);
int hipModuleGetFunction(void**, void*, const char*);
int fake_hip_launch(const HipKernelNode*, void*, int);

int hipGraphCreate(void**, unsigned);
int hipGraphDestroy(void*);
int hipGraphAddKernelNode(void**, void*, void* const*, size_t, const HipKernelNode*);
int fake_hip_instantiate(void**, void*);
int hipGraphExecDestroy(void*);
int fake_hip_set_node(void*, void*, const HipKernelNode*);
int hipGraphLaunch(void*, void*);
int fake_hip_order_nodes(void*, void*, int);

#define IN_CONTEXT(call) return current == nullptr ? kInvalidContext : call

int cuFlushGPUDirectRDMAWrites(int, int) {
  ++fake_hip_control()->remote_shown;
  return kSuccess;
}
int cuInit(unsigned flags) { return hipInit(flags); }
int cuDeviceGetCount(int* count) { return hipGetDeviceCount(count); }
int cuDeviceGetName(char* name, int bytes, int device) {
  return hipDeviceGetName(name, bytes, device);
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute == kMultiprocessorCount) {
    return hipDeviceGetAttribute(value, kHipMultiprocessorCount, device);
  }
  if (attribute == kHostPointersReach || attribute == kProcessesShareIt ||
      attribute == kRemoteReachesVirtual) {
    *value = attribute != kProcessesShareIt || fake_hip_control()->served_by_mps ? 1 : 0;
    return kSuccess;
  }
  if (attribute == kRemoteOrder || attribute == kRemoteFlushes) {
    const mla::fake_hip::Control& control = *fake_hip_control();
    *value = attribute == kRemoteOrder ? control.remote_order : control.remote_flushes;
    return kSuccess;
  }
  // In "sm_90" the last digit is the minor number.
  const std::string arch = fake_hip_control()->arch;
  const int number = std::atoi(arch.substr(arch.find('_') + 1).c_str());
  if (attribute == kCapabilityMajor) *value = number / 10;
  if (attribute == kCapabilityMinor) *value = number % 10;
  return attribute == kCapabilityMajor || attribute == kCapabilityMinor ? kSuccess : kInvalidValue;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &the_context;
  return kSuccess;
}
int cuCtxSetCurrent(void* context) {
  if (context != &the_context) return kInvalidContext;
  current = context;
  return kSuccess;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == kInvalidContext ? "invalid device context" : hipGetErrorString(code);
  return kSuccess;
}
int cuCtxCreate_v2(void** context, unsigned, int) {
  before = current;
  current = *context = new Context;
  return kSuccess;
}
int cuCtxDestroy_v2(void* context) {
  if (context != current || context == &the_context) return kInvalidContext;
  delete static_cast<Context*>(context);
  current = before;
  return kSuccess;
}
int cuCtxGetCurrent(void** context) {
  *context = const_cast<void*>(current);
  return kSuccess;
}
int cuCtxPushCurrent_v2(void* context) { return cuCtxSetCurrent(context); }
int cuCtxPopCurrent_v2(void** context) {
  *context = const_cast<void*>(current);
  current = nullptr;
  return kSuccess;
}
int cuIpcGetEventHandle(SharedHandle* handle, void* event) {
  IN_CONTEXT(hipIpcGetEventHandle(handle, event));
}
int cuIpcOpenEventHandle(void** event, SharedHandle handle) {
  IN_CONTEXT(hipIpcOpenEventHandle(event, handle));
}
int cuIpcOpenMemHandle_v2(void** at, SharedHandle handle, unsigned flags) {
  IN_CONTEXT(hipIpcOpenMemHandle(at, handle, flags));
}
int cuIpcCloseMemHandle(void* at) { IN_CONTEXT(hipIpcCloseMemHandle(at)); }
int cuIpcGetMemHandle(SharedHandle* handle, void* at) {
  IN_CONTEXT(hipIpcGetMemHandle(handle, at));
}
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  IN_CONTEXT(hipMemGetInfo(free_bytes, total));
}
int cuMemAlloc_v2(void** at, size_t bytes) { IN_CONTEXT(hipMalloc(at, bytes)); }
int cuMemFree_v2(void* at) { IN_CONTEXT(hipFree(at)); }
int cuMemHostAlloc(void** at, size_t bytes, unsigned flags) {
  IN_CONTEXT(hipHostMalloc(at, bytes, flags));
}
int cuMemFreeHost(void* at) { IN_CONTEXT(hipHostFree(at)); }
int cuMemHostRegister_v2(void* at, size_t bytes, unsigned flags) {
  IN_CONTEXT(hipHostRegister(at, bytes, flags));
}
int cuMemHostUnregister(void* at) { IN_CONTEXT(hipHostUnregister(at)); }
int cuStreamCreate(void** stream, unsigned flags) {
  IN_CONTEXT(hipStreamCreateWithFlags(stream, flags));
}
int cuStreamDestroy_v2(void* stream) { IN_CONTEXT(hipStreamDestroy(stream)); }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  IN_CONTEXT(hipStreamWaitEvent(stream, event, flags));
}
int cuStreamWaitValue32_v2(void* stream, void* word, uint32_t value, unsigned flags) {
  IN_CONTEXT(hipStreamWaitValue32(stream, word, value, flags, 0xffffffffu));
}
int cuStreamWriteValue32_v2(void* stream, void* word, uint32_t value, unsigned flags) {
  if (fake_hip_control()->busy_connections && current == &the_context) return kSuccess;
  IN_CONTEXT(hipStreamWriteValue32(stream, word, value, flags));
}
int cuStreamBatchMemOp_v2(void* stream, unsigned count, void* operations, unsigned flags) {
  IN_CONTEXT(hipStreamBatchMemOp(stream, count, operations, flags));
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph,
                              void* const** nodes, size_t* count) {
  IN_CONTEXT(hipStreamGetCaptureInfo_v2(stream, status, id, graph, nodes, count));
}
int cuGraphExecBatchMemOpNodeSetParams(void* exec, void* node, const void* params) {
  IN_CONTEXT(hipGraphExecBatchMemOpNodeSetParams(exec, node, params));
}
int cuMemHostGetDevicePointer_v2(void** there, void* here, unsigned flags) {
  *there = here;
  return current == nullptr ? kInvalidContext : kSuccess;
}
int cuStreamSynchronize(void* stream) { IN_CONTEXT(hipStreamSynchronize(stream)); }
int cuEventCreate(void** event, unsigned flags) {
  IN_CONTEXT(hipEventCreateWithFlags(event, flags));
}
int cuEventDestroy_v2(void* event) { IN_CONTEXT(hipEventDestroy(event)); }
int cuEventRecord(void* event, void* stream) { IN_CONTEXT(hipEventRecord(event, stream)); }
int cuEventQuery(void* event) { IN_CONTEXT(hipEventQuery(event)); }
int cuEventElapsedTime(float* ms, void* from, void* to) {
  IN_CONTEXT(hipEventElapsedTime(ms, from, to));
}
int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  IN_CONTEXT(hipMemcpyHtoDAsync(to, from, bytes, stream));
}
int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  IN_CONTEXT(hipMemcpyDtoHAsync(to, from, bytes, stream));
}
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  IN_CONTEXT(hipMemcpyDtoDAsync(to, from, bytes, stream));
}
int cuMemcpy2DAsync_v2(const CopyRows* copy, void* stream) {
  if (current == nullptr) return kInvalidContext;
  const bool in = copy->from.type == kHostMemory && copy->to.type == kDeviceMemory;
  const bool out = copy->from.type == kDeviceMemory && copy->to.type == kHostMemory;
  const bool on = copy->from.type == copy->to.type &&
                  (copy->to.type == kDeviceMemory || copy->to.type == kUnifiedMemory);
  if (!in && !out && !on) return kInvalidValue;
  return hipMemcpy2DAsync(out ? copy->to.host : copy->to.device, copy->to.pitch,
                          in ? copy->from.host : copy->from.device, copy->from.pitch, copy->bytes,
                          copy->rows,
                          in    ? 1
                          : out ? 2
                                : 3,
                          stream);
}
int cuMemsetD8Async(void* at, unsigned char value, size_t bytes, void* stream) {
  IN_CONTEXT(hipMemsetD8Async(at, value, bytes, stream));
}
int cuModuleLoadData(void** module, const void* image) {
  IN_CONTEXT(hipModuleLoadData(module, image));
}
int cuModuleUnload(void* module) { IN_CONTEXT(hipModuleUnload(module)); }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  IN_CONTEXT(hipModuleGetFunction(function, module, name));
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (current == nullptr) return kInvalidContext;
  if (attribute != kMaxDynamicShared || value < 0 || value > kSharedLimit) return kInvalidValue;
  const std::lock_guard<std::mutex> lock(AllowedShared().mutex);
  AllowedShared().bytes[function] = value;
  return kSuccess;
}
int cuLaunchKernelEx(const LaunchConfig* c, void* function, void** parameters, void** extra) {
  int overlaps = 0;
  for (unsigned i = 0; i < c->attribute_count; ++i) {
    const LaunchAttribute& a = c->attributes[i];
    if (a.id != kProgrammaticSerialization && a.id != kCooperative) return kInvalidValue;
    if (a.id == kProgrammaticSerialization) overlaps = a.value.flag;
  }
  if (current == nullptr) return kInvalidContext;
  if (!MayRun(function, c->grid_x, c->grid_y, c->block_x, c->shared_bytes)) return kInvalidValue;
  const HipKernelNode node{{c->block_x, c->block_y, c->block_z}, extra,      function,
                           {c->grid_x, c->grid_y, c->grid_z},    parameters, c->shared_bytes};
  return fake_hip_launch(&node, c->stream, overlaps);
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void* stream, void** parameters, void** extra) {
  const LaunchConfig config{grid_x,  grid_y,       grid_z, block_x, block_y,
                            block_z, shared_bytes, stream, nullptr, 0};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}
// Only maps that copies of boxes of rows need.
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* first, const uint64_t* dims,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps,
                           int interleave, int swizzle, int, int fill) {
  using mla::kernels::hip::host::TensorMap;
  if (!fake_hip_control()->encodes_maps) return kInvalidValue;
  if (!fake_hip_control()->encodes_narrow_maps && box[0] * 2 < 128) return kInvalidValue;
  constexpr int kOfBf16 = 9;
  constexpr uint32_t kSwizzles[] = {0, 32, 64, 128};  // bytes
  constexpr unsigned kMostOfBox = 256;
  constexpr uint64_t kMostOfDim = uint64_t{1} << 32, kMostStride = uint64_t{1} << 40;
  if (type != kOfBf16 || rank != 3 || interleave != 0 || swizzle < 0 || swizzle > 3 || fill != 0 ||
      reinterpret_cast<uintptr_t>(map) % 64 != 0 || reinterpret_cast<uintptr_t>(first) % 16 != 0 ||
      box[0] * 2 % 16 != 0 || (swizzle != 0 && box[0] * 2 != kSwizzles[swizzle]) || box[2] != 1) {
    return kInvalidValue;
  }
  TensorMap made = {};
  made.mark = TensorMap::kMark;
  made.swizzle = kSwizzles[swizzle];
  made.first = static_cast<const char*>(first);
  for (unsigned i = 0; i < rank; ++i) {
    if (dims[i] == 0 || dims[i] > kMostOfDim || box[i] == 0 || box[i] > kMostOfBox || steps[i] != 1)
      return kInvalidValue;
    made.dims[i] = dims[i];
    made.box[i] = box[i];
  }
  for (unsigned i = 0; i + 1 < rank; ++i) {
    if (strides[i] % 16 != 0 || strides[i] >= kMostStride) return kInvalidValue;
    made.strides[i] = strides[i];
  }
  std::memcpy(map, &made, sizeof(made));
  return kSuccess;
}
int cuGraphCreate(void** graph, unsigned flags) { IN_CONTEXT(hipGraphCreate(graph, flags)); }
int cuGraphDestroy(void* graph) { IN_CONTEXT(hipGraphDestroy(graph)); }
int cuGraphAddKernelNode_v2(void** node, void* graph, void* const* after, size_t count,
                            const KernelNode* params) {
  if (current == nullptr) return kInvalidContext;
  if (!MayRun(*params)) return kInvalidValue;
  const HipKernelNode made = HipNode(*params);
  return hipGraphAddKernelNode(node, graph, after, count, &made);
}
int cuGraphAddDependencies_v2(void*, void* const* from, void* const* to, const GraphEdge* edges,
                              size_t count) {
  if (current == nullptr) return kInvalidContext;
  if (count != 1 || edges->from_port > 2 || edges->to_port != 0) return kInvalidValue;
  return fake_hip_order_nodes(*from, *to, edges->type == kProgrammaticEdge ? 1 : 0);
}
int cuGraphKernelNodeSetAttribute(void* node, unsigned id, const void* value) {
  if (current == nullptr) return kInvalidContext;
  return node != nullptr && id == kCooperative && value != nullptr ? 0 : kInvalidValue;
}
int cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
  IN_CONTEXT(fake_hip_instantiate(exec, graph));
}
int cuGraphExecDestroy(void* exec) { IN_CONTEXT(hipGraphExecDestroy(exec)); }
int cuGraphExecKernelNodeSetParams_v2(void* exec, void* node, const KernelNode* params) {
  if (current == nullptr) return kInvalidContext;
  if (!MayRun(*params)) return kInvalidValue;
  const HipKernelNode made = HipNode(*params);
  return fake_hip_set_node(exec, node, &made);
}
int cuGraphLaunch(void* exec, void* stream) { IN_CONTEXT(hipGraphLaunch(exec, stream)); }

}  // extern "C"
