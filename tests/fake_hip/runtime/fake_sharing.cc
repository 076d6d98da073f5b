// The fake runtime's memory and events that other processes map. Virtual memory calls use memory
// files, and events use shm_open. Both vendors' names exist. The fake CUDA driver does not require
// a current context for these calls.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/fake_hip/runtime/fake_control.h"
#include "tests/fake_hip/runtime/shared_event.h"

namespace mla::fake_hip {
namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr size_t kUnit = size_t{2} << 20;
constexpr char kUuid[] = "fake device 0001";

// CUmemAllocationProp and hipMemAllocationProp, which have one layout.
struct Properties {
  int type, handle_types, location_type, location;
  void* security;
  unsigned char compression, remote;
};
struct Allocation {
  int descriptor;
  size_t bytes;
  bool imported;
};
struct Shared {
  std::mutex mutex;
  std::map<uint64_t, Allocation> allocations;  // by handle
  uint64_t last = 0;
};
Shared& State() {
  static Shared& state = *new Shared;
  return state;
}

bool Fails(const char* call, int* code) {
  Control& control = *fake_hip_control();
  if (std::strcmp(control.fail_call, call) != 0 || control.fail_after < 0) return false;
  const int nth = control.fail_seen++ - control.fail_after;
  if (nth < 0 || (control.fail_times >= 0 && nth >= control.fail_times)) return false;
  *code = control.fail_code;
  return true;
}

uint64_t Add(const Allocation& allocation) {
  Shared& state = State();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.allocations[++state.last] = allocation;
  ++fake_hip_control()->descriptors;
  return state.last;
}

bool HasDescriptors() {
  const Control& control = *fake_hip_control();
  return control.descriptors < control.descriptor_limit;
}

int Import(uint64_t* handle, int descriptor) {
  if (!HasDescriptors()) return kOutOfMemory;
  const int made = fcntl(descriptor, F_DUPFD_CLOEXEC, 3);
  if (made < 0) return kInvalidValue;
  const off_t bytes = lseek(made, 0, SEEK_END);
  *handle = Add({made, static_cast<size_t>(bytes), true});
  return kSuccess;
}

// Before 7.1 HIP takes the address of a descriptor, and since then the descriptor itself.
constexpr int kByValueFrom = 70100000;
// The kernel never maps memory below this address.
constexpr uintptr_t kLowestAddress = 65536;

}  // namespace

std::unique_ptr<SharedEvent> SharedEvent::Map(const std::string& name, int descriptor, bool owner) {
  if (descriptor < 0) return nullptr;
  const bool sized = !owner || ftruncate(descriptor, sizeof(State)) == 0;
  void* const at =
      sized ? mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0)
            : MAP_FAILED;
  close(descriptor);
  if (at == MAP_FAILED) return nullptr;
  return std::unique_ptr<SharedEvent>(new SharedEvent(name, static_cast<State*>(at), owner));
}

std::unique_ptr<SharedEvent> SharedEvent::Make() {
  static std::atomic<int> last{0};
  const std::string name = "/fake_event." + std::to_string(getpid()) + "." + std::to_string(++last);
  return Map(name, shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600), true);
}

std::unique_ptr<SharedEvent> SharedEvent::Open(const SharedHandle& handle) {
  const std::string name(handle.data(), strnlen(handle.data(), handle.size()));
  return Map(name, shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600), false);
}

SharedEvent::~SharedEvent() {
  munmap(state_, sizeof(State));
  if (owner_) shm_unlink(name_.c_str());
}

SharedHandle SharedEvent::handle() const {
  SharedHandle made{};
  name_.copy(made.data(), made.size() - 1);
  return made;
}

}  // namespace mla::fake_hip

namespace fake = mla::fake_hip;

// Defines the function under both vendors' names. Injected faults use HIP's name.
#define BOTH(hip, cuda, parameters, arguments) \
  int cuda parameters { return hip arguments; }

#define FAIL_IF_ASKED(call) \
  if (int code = 0; fake::Fails(call, &code)) return code

extern "C" {

int hipDeviceGetUuid(void* uuid, int) {
  std::memcpy(uuid, fake::kUuid, 16);
  return fake::kSuccess;
}
int hipMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = fake::kUnit;
  return fake::kSuccess;
}
int hipMemCreate(uint64_t* handle, size_t bytes, const void* wanted, unsigned long long) {
  FAIL_IF_ASKED("hipMemCreate");
  fake::Control& control = *fake_hip_control();
  if (bytes == 0 || bytes % fake::kUnit != 0) return fake::kInvalidValue;
  if (control.live_bytes + static_cast<int64_t>(bytes) > control.memory_bytes) {
    return fake::kOutOfMemory;
  }
  if (!fake::HasDescriptors()) return fake::kOutOfMemory;
  const int descriptor = memfd_create("fake-device-memory", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    if (descriptor >= 0) close(descriptor);
    return fake::kOutOfMemory;
  }
  // New device memory is not cleared, so it holds other data here, too.
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return fake::kOutOfMemory;
  std::memset(at, 0xff, bytes);
  munmap(at, bytes);
  control.live_bytes += static_cast<int64_t>(bytes);
  // Tests of the driver's waits give no properties.
  if (wanted != nullptr && static_cast<const fake::Properties*>(wanted)->remote != 0) {
    control.remote_bytes += static_cast<int64_t>(bytes);
  }
  *handle = fake::Add({descriptor, bytes, false});
  return fake::kSuccess;
}
int hipMemRelease(uint64_t handle) {
  fake::Shared& state = fake::State();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto allocation = state.allocations.find(handle);
  if (allocation == state.allocations.end()) return fake::kInvalidValue;
  if (!allocation->second.imported) {
    fake_hip_control()->live_bytes -= static_cast<int64_t>(allocation->second.bytes);
  }
  close(allocation->second.descriptor);
  --fake_hip_control()->descriptors;
  state.allocations.erase(allocation);
  return fake::kSuccess;
}
int hipMemExportToShareableHandle(void* descriptor, uint64_t handle, int, unsigned long long) {
  FAIL_IF_ASKED("hipMemExportToShareableHandle");
  fake::Shared& state = fake::State();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.allocations.find(handle);
  if (found == state.allocations.end()) return fake::kInvalidValue;
  const int made = fcntl(found->second.descriptor, F_DUPFD_CLOEXEC, 3);
  std::memcpy(descriptor, &made, sizeof(made));
  return made < 0 ? fake::kInvalidValue : fake::kSuccess;
}
int hipMemImportFromShareableHandle(uint64_t* handle, void* descriptor, int) {
  FAIL_IF_ASKED("hipMemImportFromShareableHandle");
  const auto value = reinterpret_cast<uintptr_t>(descriptor);
  if (fake_hip_control()->version >= fake::kByValueFrom) {
    return fake::Import(handle, static_cast<int>(value));
  }
  if (value < fake::kLowestAddress) {
    std::fprintf(stderr, "fake runtime: reads a descriptor at address %zu: segmentation fault\n",
                 static_cast<size_t>(value));
    std::abort();
  }
  return fake::Import(handle, *static_cast<const int*>(descriptor));
}
int cuMemImportFromShareableHandle(uint64_t* handle, void* descriptor, int) {
  return fake::Import(handle, static_cast<int>(reinterpret_cast<uintptr_t>(descriptor)));
}
int hipMemAddressReserve(void** at, size_t bytes, size_t, void*, unsigned long long) {
  *at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *at == MAP_FAILED ? fake::kOutOfMemory : fake::kSuccess;
}
int hipMemAddressFree(void* at, size_t bytes) {
  return munmap(at, bytes) == 0 ? fake::kSuccess : fake::kInvalidValue;
}
int hipMemMap(void* at, size_t bytes, size_t offset, uint64_t handle, unsigned long long) {
  fake::Shared& state = fake::State();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto allocation = state.allocations.find(handle);
  if (allocation == state.allocations.end() || bytes + offset > allocation->second.bytes) {
    return fake::kInvalidValue;
  }
  // The memory is inaccessible until hipMemSetAccess.
  return mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->second.descriptor,
              static_cast<off_t>(offset)) == MAP_FAILED
             ? fake::kInvalidValue
             : fake::kSuccess;
}
int hipMemUnmap(void* at, size_t bytes) {
  return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
              0) == MAP_FAILED
             ? fake::kInvalidValue
             : fake::kSuccess;
}
int hipMemSetAccess(void* at, size_t bytes, const void*, size_t) {
  return mprotect(at, bytes, PROT_READ | PROT_WRITE) == 0 ? fake::kSuccess : fake::kInvalidValue;
}

BOTH(hipDeviceGetUuid, cuDeviceGetUuid_v2, (void* uuid, int device), (uuid, device))
BOTH(hipMemGetAllocationGranularity, cuMemGetAllocationGranularity,
     (size_t * bytes, const void* wanted, int kind), (bytes, wanted, kind))
BOTH(hipMemCreate, cuMemCreate,
     (uint64_t * handle, size_t bytes, const void* wanted, unsigned long long flags),
     (handle, bytes, wanted, flags))
BOTH(hipMemRelease, cuMemRelease, (uint64_t handle), (handle))
BOTH(hipMemExportToShareableHandle, cuMemExportToShareableHandle,
     (void* descriptor, uint64_t handle, int kind, unsigned long long flags),
     (descriptor, handle, kind, flags))
BOTH(hipMemAddressReserve, cuMemAddressReserve,
     (void** at, size_t bytes, size_t unit, void* wanted, unsigned long long flags),
     (at, bytes, unit, wanted, flags))
BOTH(hipMemAddressFree, cuMemAddressFree, (void* at, size_t bytes), (at, bytes))
BOTH(hipMemMap, cuMemMap,
     (void* at, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags),
     (at, bytes, offset, handle, flags))
BOTH(hipMemUnmap, cuMemUnmap, (void* at, size_t bytes), (at, bytes))
BOTH(hipMemSetAccess, cuMemSetAccess, (void* at, size_t bytes, const void* access, size_t count),
     (at, bytes, access, count))

}  // extern "C"
