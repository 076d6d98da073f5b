// Calls a vendor's GPU runtime, which is opened by name, from a process that maps a server's device
// memory.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_DEVICE_RUNTIME_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_DEVICE_RUNTIME_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "proto/wire/ring_layout.h"

namespace mla::client {

// The entry points of the runtime. A name with a vendor in it is null for the other vendor. Only
// NVIDIA's runtime has contexts; with AMD's a call selects a device instead.
struct DeviceRuntime {
  using Handle = std::array<uint8_t, wire::kDeviceHandleBytes>;
  using Uuid = std::array<uint8_t, 16>;
  struct Access {
    int type, id, flags;
  };
  // CUDA_MEMCPY2D; memory by addresses alone, which say whose they are.
  struct CopyRows {
    static constexpr int kUnified = 4;
    struct Side {
      size_t first_byte, first_row;
      int type;
      const void* host;
      void* at;
      void* array;
      size_t pitch;
    } from, to;
    size_t width, rows;
  };
  // The layout of CUstreamBatchMemOpParams and hipStreamBatchMemOpParams.
  struct WordOperation {
    static constexpr int kAwait = 1, kStore = 2;
    int operation = 0;
    void* word = nullptr;
    uint64_t value = 0;
    unsigned flags = 0;
    uint64_t alias = 0, reserved = 0;
  };
  static_assert(sizeof(WordOperation) == 48);
  static constexpr unsigned kStreamNonBlocking = 1;
  // The layout of CUDA_BATCH_MEM_OP_NODE_PARAMS and hipBatchMemOpNodeParams.
  struct WordNode {
    void* context = nullptr;
    unsigned count = 0;
    WordOperation* operations = nullptr;
    unsigned flags = 0;
  };
  // As hipRuntimeGetVersion counts: from ROCm 7.1 on a descriptor is imported by value, as CUDA's
  // are. Before, the call is given the address of one.
  static constexpr int kAmdImportsByValue = 70100000;

  int (*init)(unsigned);
  int (*device_count)(int*);
  int (*uuid)(Uuid*, int);
  int (*import_memory)(uint64_t*, void*, int);
  int (*reserve)(void**, size_t, size_t, void*, unsigned long long);
  int (*unreserve)(void*, size_t);
  int (*map)(void*, size_t, size_t, uint64_t, unsigned long long);
  int (*unmap)(void*, size_t);
  int (*release)(uint64_t);
  int (*set_access)(void*, size_t, const Access*, size_t);
  int (*open_memory)(void**, Handle, unsigned);
  int (*close_memory)(void*);
  int (*open_event)(void**, Handle);
  int (*event_create)(void**, unsigned);
  int (*event_destroy)(void*);
  int (*event_record)(void*, void*);
  int (*stream_create)(void**, unsigned);
  int (*stream_destroy)(void*);
  int (*stream_finish)(void*);
  int (*stream_wait)(void*, void*, unsigned);
  // AMD only.
  int (*amd_version)(int*);
  int (*amd_get_device)(int*);
  int (*amd_set_device)(int);
  // NVIDIA only.
  int (*nvidia_retain)(void**, int);
  int (*nvidia_push)(void*);
  int (*nvidia_pop)(void**);
  int (*nvidia_attribute)(int*, int, int);
  int (*nvidia_create)(void**, unsigned, int);
  int (*nvidia_destroy)(void*);
  // Null if the runtime does not have the call.
  int (*nvidia_current)(void**);
  int (*nvidia_flush_remote)(int, int);
  int (*register_host)(void*, size_t, unsigned);
  int (*unregister_host)(void*);
  int (*device_address)(void**, void*, unsigned);
  int (*store_word)(void*, void*, uint32_t, unsigned);
  int (*amd_await_word)(void*, void*, uint32_t, unsigned, uint32_t);
  int (*nvidia_await_word)(void*, void*, uint32_t, unsigned);
  int (*batch_words)(void*, unsigned, WordOperation*, unsigned);
  int (*capture_info)(void*, int*, uint64_t*, void**, void* const**, size_t*);
  int (*set_word_node)(void*, void*, const WordNode*);
  int (*amd_copy_rows)(void*, size_t, const void*, size_t, size_t, size_t, int, void*);
  int (*nvidia_copy_rows)(const CopyRows*, void*);
  int (*nvidia_load_module)(void**, const void*);
  int (*nvidia_unload_module)(void*);
  int (*nvidia_function)(void**, void*, const char*);
  int (*nvidia_launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void*, void**, void**);
  int (*nvidia_pointer_attributes)(unsigned, int*, void**, const void*);
};

// `library` empty: the one that the process has loaded, else libcuda.so.1, or libamdhip64.so.7 or
// .6 from the loader's folders, then from $ROCM_PATH/lib and /opt/rocm/lib. UNAVAILABLE has the
// loader's reasons, or names an entry point that is missing. The library is never closed.
absl::StatusOr<DeviceRuntime> OpenDeviceRuntime(bool nvidia, const std::string& library);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SHARED_MEMORY_DEVICE_RUNTIME_H_
