#include "client/cpp/shared_memory/device_runtime.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

namespace mla::client {
namespace {

struct Alias {
  const char* amd;  // null: the vendor does not have such a call
  const char* nvidia;
  size_t offset;
};
#define MLA_ALIAS(field, amd, nvidia) \
  Alias { amd, nvidia, offsetof(DeviceRuntime, field) }
constexpr Alias kAliases[] = {
    MLA_ALIAS(init, "hipInit", "cuInit"),
    MLA_ALIAS(device_count, "hipGetDeviceCount", "cuDeviceGetCount"),
    MLA_ALIAS(uuid, "hipDeviceGetUuid", "cuDeviceGetUuid_v2"),
    MLA_ALIAS(import_memory, "hipMemImportFromShareableHandle", "cuMemImportFromShareableHandle"),
    MLA_ALIAS(reserve, "hipMemAddressReserve", "cuMemAddressReserve"),
    MLA_ALIAS(unreserve, "hipMemAddressFree", "cuMemAddressFree"),
    MLA_ALIAS(map, "hipMemMap", "cuMemMap"),
    MLA_ALIAS(unmap, "hipMemUnmap", "cuMemUnmap"),
    MLA_ALIAS(release, "hipMemRelease", "cuMemRelease"),
    MLA_ALIAS(set_access, "hipMemSetAccess", "cuMemSetAccess"),
    MLA_ALIAS(open_memory, "hipIpcOpenMemHandle", "cuIpcOpenMemHandle_v2"),
    MLA_ALIAS(close_memory, "hipIpcCloseMemHandle", "cuIpcCloseMemHandle"),
    MLA_ALIAS(open_event, "hipIpcOpenEventHandle", "cuIpcOpenEventHandle"),
    MLA_ALIAS(event_create, "hipEventCreateWithFlags", "cuEventCreate"),
    MLA_ALIAS(event_destroy, "hipEventDestroy", "cuEventDestroy_v2"),
    MLA_ALIAS(event_record, "hipEventRecord", "cuEventRecord"),
    MLA_ALIAS(stream_create, "hipStreamCreateWithFlags", "cuStreamCreate"),
    MLA_ALIAS(stream_destroy, "hipStreamDestroy", "cuStreamDestroy_v2"),
    MLA_ALIAS(stream_finish, "hipStreamSynchronize", "cuStreamSynchronize"),
    MLA_ALIAS(stream_wait, "hipStreamWaitEvent", "cuStreamWaitEvent"),
    MLA_ALIAS(amd_version, "hipRuntimeGetVersion", nullptr),
    MLA_ALIAS(amd_get_device, "hipGetDevice", nullptr),
    MLA_ALIAS(amd_set_device, "hipSetDevice", nullptr),
    MLA_ALIAS(nvidia_retain, nullptr, "cuDevicePrimaryCtxRetain"),
    MLA_ALIAS(nvidia_push, nullptr, "cuCtxPushCurrent_v2"),
    MLA_ALIAS(nvidia_pop, nullptr, "cuCtxPopCurrent_v2"),
    MLA_ALIAS(nvidia_attribute, nullptr, "cuDeviceGetAttribute"),
    MLA_ALIAS(nvidia_create, nullptr, "cuCtxCreate_v2"),
    MLA_ALIAS(nvidia_destroy, nullptr, "cuCtxDestroy_v2"),
};
constexpr Alias kOptional[] = {
    MLA_ALIAS(register_host, "hipHostRegister", "cuMemHostRegister_v2"),
    MLA_ALIAS(unregister_host, "hipHostUnregister", "cuMemHostUnregister"),
    MLA_ALIAS(device_address, "hipHostGetDevicePointer", "cuMemHostGetDevicePointer_v2"),
    MLA_ALIAS(store_word, "hipStreamWriteValue32", "cuStreamWriteValue32_v2"),
    MLA_ALIAS(amd_await_word, "hipStreamWaitValue32", nullptr),
    MLA_ALIAS(nvidia_await_word, nullptr, "cuStreamWaitValue32_v2"),
    MLA_ALIAS(batch_words, "hipStreamBatchMemOp", "cuStreamBatchMemOp_v2"),
    MLA_ALIAS(capture_info, "hipStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v2"),
    MLA_ALIAS(set_word_node, "hipGraphExecBatchMemOpNodeSetParams",
              "cuGraphExecBatchMemOpNodeSetParams"),
    MLA_ALIAS(amd_copy_rows, "hipMemcpy2DAsync", nullptr),
    MLA_ALIAS(nvidia_copy_rows, nullptr, "cuMemcpy2DAsync_v2"),
};
#undef MLA_ALIAS

// Names of the library for the loader. AMD's library is also searched in ROCm's folders, because
// its packages do not always configure the loader.
std::vector<std::string> Libraries(bool nvidia) {
  if (nvidia) return {"libcuda.so.1"};
  std::vector<std::string> names;
  const char* const rocm = std::getenv("ROCM_PATH");
  const std::string in_rocm = rocm == nullptr ? "" : absl::StrCat(rocm, "/lib/");
  for (const std::string& folder : {std::string(), in_rocm, std::string("/opt/rocm/lib/")}) {
    if (folder.empty() && !names.empty()) continue;  // no ROCM_PATH
    for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6"}) {
      names.push_back(absl::StrCat(folder, name));
    }
  }
  return names;
}

// Never closed: the vendors' runtimes do not survive being unloaded.
absl::StatusOr<void*> OpenLibrary(bool nvidia, const std::string& library) {
  const std::vector<std::string> names =
      library.empty() ? Libraries(nvidia) : std::vector<std::string>{library};
  // A second copy of the runtime in a process would not share the state of the first.
  for (const std::string& name : names) {
    if (void* const loaded = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD)) return loaded;
  }
  std::string reasons;
  for (const std::string& name : names) {
    void* const opened = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened != nullptr) return opened;
    absl::StrAppend(&reasons, reasons.empty() ? "" : "; ", dlerror());
  }
  return absl::UnavailableError(absl::StrCat("no GPU runtime: ", reasons));
}

}  // namespace

absl::StatusOr<DeviceRuntime> OpenDeviceRuntime(bool nvidia, const std::string& library) {
  absl::StatusOr<void*> found = OpenLibrary(nvidia, library);
  if (!found.ok()) return found.status();
  void* const opened = *found;
  DeviceRuntime table{};
  for (const Alias& alias : kAliases) {
    const char* const name = nvidia ? alias.nvidia : alias.amd;
    if (name == nullptr) continue;
    void* const entry = dlsym(opened, name);
    if (entry == nullptr) {
      return absl::UnavailableError(absl::StrCat("the GPU runtime has no entry point ", name));
    }
    std::memcpy(reinterpret_cast<char*>(&table) + alias.offset, &entry, sizeof(entry));
  }
  for (const Alias& alias : kOptional) {
    const char* const name = nvidia ? alias.nvidia : alias.amd;
    void* const entry = name == nullptr ? nullptr : dlsym(opened, name);
    std::memcpy(reinterpret_cast<char*>(&table) + alias.offset, &entry, sizeof(entry));
  }
  return table;
}

}  // namespace mla::client
