#include "client/cpp/shared_memory/device_runtime.h"

#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/shared_library.h"
#include "base/status_macros.h"

namespace mla::client {
namespace {

// Returns the names of the library for the loader. AMD's library is also searched in ROCm's
// folders, because its packages do not always configure the loader.
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

}  // namespace

absl::StatusOr<DeviceRuntime> OpenDeviceRuntime(bool nvidia, const std::string& library) {
  const std::vector<std::string> names =
      library.empty() ? Libraries(nvidia) : std::vector<std::string>{library};
  MLA_ASSIGN_OR_RETURN(const SharedLibrary opened,
                       OpenSharedLibrary(names, LoadedCopy::kShare, "no GPU runtime"));
  SymbolTable symbols(opened.handle);
  // A null name: the vendor does not have such a call.
  const auto need = [&](const char* amd, const char* other, auto** function) {
    symbols.Need(nvidia ? other : amd, function);
  };
  const auto want = [&](const char* amd, const char* other, auto** function) {
    symbols.Want(nvidia ? other : amd, function);
  };
  DeviceRuntime table{};
  need("hipInit", "cuInit", &table.init);
  need("hipGetDeviceCount", "cuDeviceGetCount", &table.device_count);
  need("hipDeviceGetUuid", "cuDeviceGetUuid_v2", &table.uuid);
  need("hipMemImportFromShareableHandle", "cuMemImportFromShareableHandle", &table.import_memory);
  need("hipMemAddressReserve", "cuMemAddressReserve", &table.reserve);
  need("hipMemAddressFree", "cuMemAddressFree", &table.unreserve);
  need("hipMemMap", "cuMemMap", &table.map);
  need("hipMemUnmap", "cuMemUnmap", &table.unmap);
  need("hipMemRelease", "cuMemRelease", &table.release);
  need("hipMemSetAccess", "cuMemSetAccess", &table.set_access);
  need("hipIpcOpenMemHandle", "cuIpcOpenMemHandle_v2", &table.open_memory);
  need("hipIpcCloseMemHandle", "cuIpcCloseMemHandle", &table.close_memory);
  need("hipIpcOpenEventHandle", "cuIpcOpenEventHandle", &table.open_event);
  need("hipEventCreateWithFlags", "cuEventCreate", &table.event_create);
  need("hipEventDestroy", "cuEventDestroy_v2", &table.event_destroy);
  need("hipEventRecord", "cuEventRecord", &table.event_record);
  need("hipStreamCreateWithFlags", "cuStreamCreate", &table.stream_create);
  need("hipStreamDestroy", "cuStreamDestroy_v2", &table.stream_destroy);
  need("hipStreamSynchronize", "cuStreamSynchronize", &table.stream_finish);
  need("hipStreamWaitEvent", "cuStreamWaitEvent", &table.stream_wait);
  need("hipRuntimeGetVersion", nullptr, &table.amd_version);
  need("hipGetDevice", nullptr, &table.amd_get_device);
  need("hipSetDevice", nullptr, &table.amd_set_device);
  need(nullptr, "cuDevicePrimaryCtxRetain", &table.nvidia_retain);
  need(nullptr, "cuCtxPushCurrent_v2", &table.nvidia_push);
  need(nullptr, "cuCtxPopCurrent_v2", &table.nvidia_pop);
  need(nullptr, "cuDeviceGetAttribute", &table.nvidia_attribute);
  need(nullptr, "cuCtxCreate_v2", &table.nvidia_create);
  need(nullptr, "cuCtxDestroy_v2", &table.nvidia_destroy);
  want(nullptr, "cuCtxGetCurrent", &table.nvidia_current);
  want(nullptr, "cuFlushGPUDirectRDMAWrites", &table.nvidia_flush_remote);
  want("hipHostRegister", "cuMemHostRegister_v2", &table.register_host);
  want("hipHostUnregister", "cuMemHostUnregister", &table.unregister_host);
  want("hipHostGetDevicePointer", "cuMemHostGetDevicePointer_v2", &table.device_address);
  want("hipStreamWriteValue32", "cuStreamWriteValue32_v2", &table.store_word);
  want("hipStreamWaitValue32", nullptr, &table.amd_await_word);
  want(nullptr, "cuStreamWaitValue32_v2", &table.nvidia_await_word);
  want("hipStreamBatchMemOp", "cuStreamBatchMemOp_v2", &table.batch_words);
  want("hipStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v2", &table.capture_info);
  want("hipGraphExecBatchMemOpNodeSetParams", "cuGraphExecBatchMemOpNodeSetParams",
       &table.set_word_node);
  want("hipMemcpy2DAsync", nullptr, &table.amd_copy_rows);
  want(nullptr, "cuMemcpy2DAsync_v2", &table.nvidia_copy_rows);
  want(nullptr, "cuModuleLoadData", &table.nvidia_load_module);
  want(nullptr, "cuModuleUnload", &table.nvidia_unload_module);
  want(nullptr, "cuModuleGetFunction", &table.nvidia_function);
  want(nullptr, "cuLaunchKernel", &table.nvidia_launch);
  want(nullptr, "cuPointerGetAttributes", &table.nvidia_pointer_attributes);
  MLA_RETURN_IF_ERROR(symbols.Check("the GPU runtime"));
  return table;
}

}  // namespace mla::client
