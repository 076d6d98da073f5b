// Gives each entry point of a vendor's GPU runtime that GpuRuntime calls one name, and lays out the
// arguments that NVIDIA passes as structures as cuda.h does.
#ifndef MLA_KERNELS_HIP_RUNTIME_RUNTIME_TABLE_H_
#define MLA_KERNELS_HIP_RUNTIME_RUNTIME_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

struct NvidiaLaunchAttribute {
  unsigned id;
  char pad[4];
  union {
    char reserved[64];
    int flag;
  } value;
};
struct NvidiaCopySide {
  size_t x, y;
  unsigned type;
  void* host;
  DevicePtr device;
  void* array;
  size_t pitch;
};
struct NvidiaCopyRows {
  NvidiaCopySide from, to;
  size_t bytes, rows;
};
static_assert(sizeof(NvidiaCopyRows) == 128);
struct NvidiaLaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Stream stream;
  NvidiaLaunchAttribute* attributes;
  unsigned attribute_count;
};

struct RuntimeTable {
  int (*init)(unsigned);
  int (*device_count)(int*);
  int (*device_name)(char*, int, int);
  int (*device_attribute)(int*, int, int);
  int (*memory_info)(size_t*, size_t*);
  int (*allocate)(DevicePtr*, size_t);
  int (*free)(DevicePtr);
  int (*allocate_host)(void**, size_t, unsigned);
  int (*free_host)(void*);
  int (*register_host)(void*, size_t, unsigned);
  int (*unregister_host)(void*);
  int (*stream_create)(Stream*, unsigned);
  int (*stream_destroy)(Stream);
  int (*stream_wait)(Stream, Event, unsigned);
  int (*stream_synchronize)(Stream);
  int (*event_create)(Event*, unsigned);
  int (*event_destroy)(Event);
  int (*event_record)(Event, Stream);
  int (*event_query)(Event);
  int (*event_elapsed)(float*, Event, Event);
  int (*copy_in)(DevicePtr, const void*, size_t, Stream);
  int (*copy_out)(void*, DevicePtr, size_t, Stream);
  int (*copy_device)(DevicePtr, DevicePtr, size_t, Stream);
  int (*fill)(DevicePtr, unsigned char, size_t, Stream);
  int (*store_word)(Stream, DevicePtr, uint32_t, unsigned);  // null if the library lacks it
  int (*module_load)(Module*, const void*);
  int (*module_unload)(Module);
  int (*module_function)(Function*, Module, const char*);
  int (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                Stream, void**, void**);
  // AMD only.
  const char* (*amd_error_text)(int);
  int (*amd_version)(int*);
  int (*amd_host_address)(void**, void*, unsigned);
  int (*amd_set_device)(int);
  int (*amd_properties)(void*, int);
  int (*amd_copy_rows)(void*, size_t, const void*, size_t, size_t, size_t, int, Stream);
  // NVIDIA only.
  int (*nvidia_error_text)(int, const char**);
  int (*nvidia_retain_context)(void**, int);
  int (*nvidia_set_context)(void*);
  int (*nvidia_copy_rows)(const NvidiaCopyRows*, Stream);
  int (*nvidia_function_attribute)(Function, int, int);
  // Null if the driver is older than CUDA 12.
  int (*nvidia_encode_map)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                           const uint32_t*, const uint32_t*, int, int, int, int);
  int (*nvidia_launch)(const NvidiaLaunchConfig*, Function, void**, void**);
};

// Fills `table` with the entry points of `library`, a handle of dlopen; the ones of the other
// vendor become null. UNAVAILABLE names the first one that is missing.
absl::Status FindEntryPoints(Vendor vendor, void* library, RuntimeTable* table);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_RUNTIME_TABLE_H_
