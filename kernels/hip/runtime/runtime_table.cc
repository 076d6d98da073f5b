#include "kernels/hip/runtime/runtime_table.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace mla::kernels::hip {
namespace {

struct Alias {
  const char* amd;  // null: the vendor has no such call
  const char* nvidia;
  size_t offset;
};

#define MLA_ALIAS(field, amd, nvidia) \
  Alias { amd, nvidia, offsetof(RuntimeTable, field) }
constexpr Alias kAliases[] = {
    MLA_ALIAS(init, "hipInit", "cuInit"),
    MLA_ALIAS(device_count, "hipGetDeviceCount", "cuDeviceGetCount"),
    MLA_ALIAS(device_name, "hipDeviceGetName", "cuDeviceGetName"),
    MLA_ALIAS(device_attribute, "hipDeviceGetAttribute", "cuDeviceGetAttribute"),
    MLA_ALIAS(memory_info, "hipMemGetInfo", "cuMemGetInfo_v2"),
    MLA_ALIAS(allocate, "hipMalloc", "cuMemAlloc_v2"),
    MLA_ALIAS(free, "hipFree", "cuMemFree_v2"),
    MLA_ALIAS(allocate_host, "hipHostMalloc", "cuMemHostAlloc"),
    MLA_ALIAS(free_host, "hipHostFree", "cuMemFreeHost"),
    MLA_ALIAS(register_host, "hipHostRegister", "cuMemHostRegister_v2"),
    MLA_ALIAS(unregister_host, "hipHostUnregister", "cuMemHostUnregister"),
    MLA_ALIAS(stream_create, "hipStreamCreateWithFlags", "cuStreamCreate"),
    MLA_ALIAS(stream_destroy, "hipStreamDestroy", "cuStreamDestroy_v2"),
    MLA_ALIAS(stream_wait, "hipStreamWaitEvent", "cuStreamWaitEvent"),
    MLA_ALIAS(stream_synchronize, "hipStreamSynchronize", "cuStreamSynchronize"),
    MLA_ALIAS(event_create, "hipEventCreateWithFlags", "cuEventCreate"),
    MLA_ALIAS(event_destroy, "hipEventDestroy", "cuEventDestroy_v2"),
    MLA_ALIAS(event_record, "hipEventRecord", "cuEventRecord"),
    MLA_ALIAS(event_query, "hipEventQuery", "cuEventQuery"),
    MLA_ALIAS(event_elapsed, "hipEventElapsedTime", "cuEventElapsedTime"),
    MLA_ALIAS(copy_in, "hipMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2"),
    MLA_ALIAS(copy_out, "hipMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"),
    MLA_ALIAS(copy_device, "hipMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2"),
    MLA_ALIAS(fill, "hipMemsetD8Async", "cuMemsetD8Async"),
    MLA_ALIAS(module_load, "hipModuleLoadData", "cuModuleLoadData"),
    MLA_ALIAS(module_unload, "hipModuleUnload", "cuModuleUnload"),
    MLA_ALIAS(module_function, "hipModuleGetFunction", "cuModuleGetFunction"),
    MLA_ALIAS(launch, "hipModuleLaunchKernel", "cuLaunchKernel"),
    MLA_ALIAS(amd_error_text, "hipGetErrorString", nullptr),
    MLA_ALIAS(amd_version, "hipRuntimeGetVersion", nullptr),
    MLA_ALIAS(amd_host_address, "hipHostGetDevicePointer", nullptr),
    MLA_ALIAS(amd_set_device, "hipSetDevice", nullptr),
    MLA_ALIAS(amd_properties, "hipGetDevicePropertiesR0600", nullptr),
    MLA_ALIAS(amd_copy_rows, "hipMemcpy2DAsync", nullptr),
    MLA_ALIAS(nvidia_error_text, nullptr, "cuGetErrorString"),
    MLA_ALIAS(nvidia_retain_context, nullptr, "cuDevicePrimaryCtxRetain"),
    MLA_ALIAS(nvidia_set_context, nullptr, "cuCtxSetCurrent"),
    MLA_ALIAS(nvidia_copy_rows, nullptr, "cuMemcpy2DAsync_v2"),
    MLA_ALIAS(nvidia_function_attribute, nullptr, "cuFuncSetAttribute"),
    MLA_ALIAS(nvidia_launch, nullptr, "cuLaunchKernelEx"),
};
constexpr Alias kOptional[] = {
    MLA_ALIAS(store_word, "hipStreamWriteValue32", "cuStreamWriteValue32_v2"),
};
#undef MLA_ALIAS

void Set(RuntimeTable* table, const Alias& alias, void* entry) {
  std::memcpy(reinterpret_cast<char*>(table) + alias.offset, &entry, sizeof(entry));
}

}  // namespace

absl::Status FindEntryPoints(Vendor vendor, void* library, RuntimeTable* table) {
  std::memset(table, 0, sizeof(*table));
  for (const Alias& alias : kAliases) {
    const char* name = vendor == Vendor::kAmd ? alias.amd : alias.nvidia;
    if (name == nullptr) continue;
    void* entry = dlsym(library, name);
    if (entry == nullptr) {
      return absl::UnavailableError(absl::StrCat("the GPU runtime has no entry point ", name));
    }
    Set(table, alias, entry);
  }
  for (const Alias& alias : kOptional) {
    Set(table, alias, dlsym(library, vendor == Vendor::kAmd ? alias.amd : alias.nvidia));
  }
  return absl::OkStatus();
}

}  // namespace mla::kernels::hip
