// Copies of one call as one kernel: a launch costs the host as much as one of the driver's copies.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_ROW_COPIER_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_ROW_COPIER_H_

#include <memory>
#include <span>

#include "client/cpp/shared_memory/device_copy.h"
#include "client/cpp/shared_memory/device_runtime.h"

namespace mla::client {

// Copies rows by a kernel of NVIDIA's devices; their driver compiles it for the device that is
// there. All calls need the device's context to be current. Threading: as DeviceRegion.
class RowCopier final {
 public:
  // Loads the kernel and launches it once without work, so that no later call loads anything.
  // Waits for that. Returns null if the driver lacks a call for it or refuses the kernel.
  static std::unique_ptr<RowCopier> Create(const DeviceRuntime& api, int device);
  ~RowCopier();

  // Returns true if a kernel on the device can make these copies, and takes fewer launches than
  // they are: there are several, they consist of aligned pieces, and their sources are memory of
  // this device, which the driver is asked for unless the copy says so. The caller must make
  // sure that the kernel may write the targets.
  bool Takes(std::span<const DeviceCopy> copies) const;
  // Gives `stream` the copies. REQUIRES: Takes. Returns the driver's code; 0 is success.
  int Copy(std::span<const DeviceCopy> copies, void* stream) const;

 private:
  RowCopier(const DeviceRuntime& api, int device) : api_(api), device_(device) {}
  bool IsHere(const void* memory) const;

  const DeviceRuntime& api_;
  const int device_;
  void* module_ = nullptr;
  void* kernel_ = nullptr;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SHARED_MEMORY_ROW_COPIER_H_
