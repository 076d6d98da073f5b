// Makes one copy on a stream of a GPU.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_DEVICE_COPY_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_DEVICE_COPY_H_

#include <cstdint>

namespace mla::client {

// Copies rows of bytes between memory of devices and memory of the host that the GPU's driver
// knows.
struct DeviceCopy {
  void* to = nullptr;
  const void* from = nullptr;
  uint64_t width = 0, rows = 1;  // bytes of a row
  uint64_t to_pitch = 0, from_pitch = 0;
  bool from_here = false;  // the program knows that `from` is memory of the stream's device
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SHARED_MEMORY_DEVICE_COPY_H_
