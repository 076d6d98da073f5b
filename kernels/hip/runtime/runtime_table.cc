#include "kernels/hip/runtime/runtime_table.h"

#include "base/shared_library.h"

namespace mla::kernels::hip {

absl::Status FindEntryPoints(Vendor vendor, void* library, RuntimeTable* table) {
  SymbolTable symbols(library);
  // A null name: the vendor has no such call.
  const auto need = [&](const char* amd, const char* nvidia, auto** function) {
    symbols.Need(vendor == Vendor::kAmd ? amd : nvidia, function);
  };
  need("hipInit", "cuInit", &table->init);
  need("hipGetDeviceCount", "cuDeviceGetCount", &table->device_count);
  need("hipDeviceGetName", "cuDeviceGetName", &table->device_name);
  need("hipDeviceGetAttribute", "cuDeviceGetAttribute", &table->device_attribute);
  need("hipMemGetInfo", "cuMemGetInfo_v2", &table->memory_info);
  need("hipMalloc", "cuMemAlloc_v2", &table->allocate);
  need("hipFree", "cuMemFree_v2", &table->free);
  need("hipHostMalloc", "cuMemHostAlloc", &table->allocate_host);
  need("hipHostFree", "cuMemFreeHost", &table->free_host);
  need("hipHostRegister", "cuMemHostRegister_v2", &table->register_host);
  need("hipHostUnregister", "cuMemHostUnregister", &table->unregister_host);
  need("hipStreamCreateWithFlags", "cuStreamCreate", &table->stream_create);
  need("hipStreamDestroy", "cuStreamDestroy_v2", &table->stream_destroy);
  need("hipStreamWaitEvent", "cuStreamWaitEvent", &table->stream_wait);
  need("hipStreamSynchronize", "cuStreamSynchronize", &table->stream_synchronize);
  need("hipEventCreateWithFlags", "cuEventCreate", &table->event_create);
  need("hipEventDestroy", "cuEventDestroy_v2", &table->event_destroy);
  need("hipEventRecord", "cuEventRecord", &table->event_record);
  need("hipEventQuery", "cuEventQuery", &table->event_query);
  need("hipEventElapsedTime", "cuEventElapsedTime", &table->event_elapsed);
  need("hipMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", &table->copy_in);
  need("hipMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2", &table->copy_out);
  need("hipMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2", &table->copy_device);
  need("hipMemsetD8Async", "cuMemsetD8Async", &table->fill);
  need("hipModuleLoadData", "cuModuleLoadData", &table->module_load);
  need("hipModuleUnload", "cuModuleUnload", &table->module_unload);
  need("hipModuleGetFunction", "cuModuleGetFunction", &table->module_function);
  need("hipModuleLaunchKernel", "cuLaunchKernel", &table->launch);
  need("hipGetErrorString", nullptr, &table->amd_error_text);
  need("hipRuntimeGetVersion", nullptr, &table->amd_version);
  need("hipHostGetDevicePointer", nullptr, &table->amd_host_address);
  need("hipSetDevice", nullptr, &table->amd_set_device);
  need("hipGetDevicePropertiesR0600", nullptr, &table->amd_properties);
  need("hipMemcpy2DAsync", nullptr, &table->amd_copy_rows);
  need(nullptr, "cuGetErrorString", &table->nvidia_error_text);
  need(nullptr, "cuDevicePrimaryCtxRetain", &table->nvidia_retain_context);
  need(nullptr, "cuCtxSetCurrent", &table->nvidia_set_context);
  need(nullptr, "cuMemcpy2DAsync_v2", &table->nvidia_copy_rows);
  need(nullptr, "cuFuncSetAttribute", &table->nvidia_function_attribute);
  need(nullptr, "cuLaunchKernelEx", &table->nvidia_launch);
  symbols.Want(vendor == Vendor::kAmd ? "hipStreamWriteValue32" : "cuStreamWriteValue32_v2",
               &table->store_word);
  symbols.Want(vendor == Vendor::kAmd ? nullptr : "cuTensorMapEncodeTiled",
               &table->nvidia_encode_map);
  return symbols.Check("the GPU runtime");
}

}  // namespace mla::kernels::hip
