// Keeps the memory that the server shares with clients of the same host, in a table of regions and
// their owners.
//
// A region is a sealed memory object: its size cannot change, so no access faults. Its pages are
// allocated when it is made. A client can give pages back (fallocate, MADV_REMOVE); no seal forbids
// that to one who may write. The bytes stay counted, so the server never takes more than the sum
// that it has reserved, and the listener ends such a region (HasHoles). Its handle is 128 random
// bits: a caller that presents it must also be of the tenant it was made for. Requests hold the
// region they point into, so memory stays mapped until the last of them is answered; Remove only
// makes the handle invalid.
//
// Unpinning and unmapping take milliseconds and may wait for a launch. The thread that releases the
// last request, usually the engine's, must not do this. So the table has two threads for it: if one
// region must wait, it does not delay the others. Until it is unmapped the memory counts, and
// Create can wait for it instead of refusing for lack of room.
//
// A region may also have device memory, made and freed together with it; its bytes count like the
// region's own. If a client has mapped it, the mapping outlives the region in the client only: the
// next region gets other memory, cleared.
//
// Bounds: bytes of one region, and of each kind of memory of all regions, are bounded here. So is a
// tenant's share of each kind, for tenants with the default bound: a share of the sum alone could
// be all of one kind. Regions of one tenant and of all, and a tenant's bytes of both kinds
// together, are bounded in the tenant table, which counts a region until it is unmapped. Threading:
// all methods from any thread. Regions may outlive the table; one that is released after it is
// unmapped at once.
#ifndef MLA_SERVER_MEMORY_SHARED_REGION_H_
#define MLA_SERVER_MEMORY_SHARED_REGION_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "kernels/shared_device_memory.h"
#include "proto/wire/ring_layout.h"
#include "scheduler/tenant_table.h"

namespace mla::server {

using RegionHandle = std::array<uint8_t, wire::kHandleBytes>;

// Hooks through which device backends learn about memory that copies should reach directly.
struct RegionHooks {
  // If it fails, the region stays usable; copies then go the same way as with any other memory.
  std::function<absl::Status(std::span<std::byte>)> on_mapped;
  // Called only after on_mapped has succeeded; as long as the table lives, from its threads. May
  // block.
  std::function<void(std::span<std::byte>)> before_unmapped;
  // Makes device memory of at least `bytes` bytes, with `events` events. May block.
  std::function<absl::StatusOr<std::unique_ptr<kernels::SharedDeviceMemory>>(int64_t bytes,
                                                                             int32_t events)>
      make_device;
};

// Device memory to be made with a region.
struct DeviceWish {
  int64_t bytes = 0;  // 0: no device memory
  int32_t events = 0;
};

// A table of regions without a tenant table uses all of these bounds, others only region_bytes.
struct RegionLimits {
  int64_t region_bytes = 0;  // arena of one region
  int64_t total_bytes = 0;   // mapped, all regions
  int32_t regions = 0;
  int32_t tenant_regions = 0;
  int64_t device_bytes = 0;  // device memory of all regions
};

class SharedRegionTable;

class SharedRegion final {
 public:
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  std::byte* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  size_t arena_offset() const { return arena_offset_; }
  const RegionHandle& handle() const { return handle_; }
  int descriptor() const { return descriptor_; }
  // Returns the region's device memory, or null.
  kernels::SharedDeviceMemory* device() const { return device_.get(); }
  // Returns true if pages of the memory have been given back to the system. Only a process with the
  // descriptor can do this. The next access takes the pages again, for which the region's size
  // already counts.
  bool HasHoles() const;
  // Returns true if [offset, offset + length) lies in the arena.
  bool Holds(uint64_t offset, uint64_t length) const {
    return offset >= arena_offset_ && offset <= size() && length <= size() - offset;
  }

 private:
  friend class SharedRegionTable;
  struct Account;
  // The resources to release when the memory is not used any more.
  struct Mapping {
    std::span<std::byte> bytes;
    int descriptor = -1;
    std::unique_ptr<kernels::SharedDeviceMemory> device;
    std::function<void(std::span<std::byte>)> before_unmapped;  // null: the backend knows nothing
    scheduler::TenantRef tenant;
    int64_t counted_bytes = 0, device_bytes = 0;

    void Close();
  };
  SharedRegion() = default;
  absl::Status Map(size_t bytes, const RegionHooks& hooks);

  RegionHandle handle_{};
  std::span<std::byte> bytes_;
  size_t arena_offset_ = 0;
  int descriptor_ = -1;
  std::unique_ptr<kernels::SharedDeviceMemory> device_;
  std::function<void(std::span<std::byte>)> before_unmapped_;
  std::shared_ptr<Account> account_;  // null before the region is counted
  // Row of a table that the account keeps, so it is released first.
  scheduler::TenantRef tenant_;
  int64_t counted_bytes_ = 0, device_bytes_ = 0;
};

class SharedRegionTable final {
 public:
  // `tenants` counts and bounds the regions. Null: the table makes its own, bounded by `limits`.
  SharedRegionTable(const RegionLimits& limits, RegionHooks hooks,
                    std::shared_ptr<scheduler::TenantTable> tenants = nullptr);
  // Unmaps the regions that have been released.
  ~SharedRegionTable();
  SharedRegionTable(const SharedRegionTable&) = delete;
  SharedRegionTable& operator=(const SharedRegionTable&) = delete;

  // Makes a region with an arena of at least `arena_bytes`, rounded up to whole pages, which begins
  // at `arena_offset`. INVALID_ARGUMENT for the size; RESOURCE_EXHAUSTED for count, sum or memory;
  // or the error from making device memory. Waits while pages are taken. If only the end of regions
  // that are being closed would give room, waits for it, at most `wait`.
  absl::StatusOr<std::shared_ptr<SharedRegion>> Create(const std::string& tenant,
                                                       uint64_t arena_bytes, size_t arena_offset,
                                                       std::chrono::milliseconds wait = kCloseWait,
                                                       const DeviceWish& device = {});
  // Returns true if regions are being closed, so that memory may soon be free.
  bool closing() const;
  // Returns null if the tenant does not have such a region. The caller cannot tell apart a forged
  // handle, another tenant's, and one whose connection has ended.
  std::shared_ptr<SharedRegion> Find(const std::string& tenant, std::string_view handle) const;
  void Remove(const SharedRegion& region);
  int32_t count() const;
  // Counts regions with a handle, regions that requests still hold, and regions being closed.
  int64_t mapped_bytes() const;

  // A useful time to wait for regions that are being closed.
  static constexpr std::chrono::milliseconds kCloseWait{2000};

 private:
  absl::Status Reserve(scheduler::Tenant& tenant, int64_t bytes, int64_t device_bytes,
                       std::chrono::milliseconds wait);
  const RegionLimits limits_;
  const RegionHooks hooks_;
  const std::shared_ptr<SharedRegion::Account> account_;
  mutable Mutex mutex_;
  absl::flat_hash_map<RegionHandle, std::shared_ptr<SharedRegion>> regions_ ABSL_GUARDED_BY(mutex_);
  std::array<std::thread, 2> closers_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_MEMORY_SHARED_REGION_H_
