#include "server/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::server {
namespace {

constexpr size_t kPage = 4096;

absl::Status OutOfMemory(const char* what, size_t bytes, int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat("shared memory: ", what, " ", bytes, " bytes: ", std::strerror(error)));
}

}  // namespace

// What is mapped, also for requests whose region has lost its handle.
struct SharedRegion::Account {
  std::mutex mutex;
  int64_t bytes = 0;
  int32_t regions = 0;
  absl::flat_hash_map<std::string, int32_t> of_tenant;
};

absl::Status SharedRegion::Map(size_t bytes) {
  descriptor_ = memfd_create("mla-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor_ < 0) return OutOfMemory("cannot create", bytes, errno);
  if (ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
    return OutOfMemory("cannot size", bytes, errno);
  }
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (at == MAP_FAILED) return OutOfMemory("cannot map", bytes, errno);
  bytes_ = {static_cast<std::byte*>(at), bytes};
  // Huge pages where the system gives them to whoever asks; they are chosen at the first touch,
  // through a mapping that has asked. Kernels that know neither leave it to the next call.
  madvise(at, bytes, MADV_HUGEPAGE);
  madvise(at, bytes, MADV_POPULATE_WRITE);
  // Taken now: memory that is missing must refuse the region, not kill whoever touches it later.
  if (const int error = posix_fallocate(descriptor_, 0, static_cast<off_t>(bytes)); error != 0) {
    return OutOfMemory("cannot take", bytes, error);
  }
  if (fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return OutOfMemory("cannot seal", bytes, errno);
  }
  registered_ = hooks_.on_mapped && hooks_.on_mapped(bytes_).ok();
  return absl::OkStatus();
}

SharedRegion::~SharedRegion() {
  if (registered_ && hooks_.before_unmapped) hooks_.before_unmapped(bytes_);
  if (bytes_.data() != nullptr) munmap(bytes_.data(), bytes_.size());
  if (descriptor_ >= 0) close(descriptor_);
  if (account_ == nullptr) return;
  const std::lock_guard lock(account_->mutex);
  account_->bytes -= counted_bytes_;
  --account_->regions;
  if (--account_->of_tenant[tenant_] == 0) account_->of_tenant.erase(tenant_);
}

SharedRegionTable::SharedRegionTable(const RegionLimits& limits, RegionHooks hooks)
    : limits_(limits),
      hooks_(std::move(hooks)),
      account_(std::make_shared<SharedRegion::Account>()) {}

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegionTable::Create(const std::string& tenant,
                                                                        uint64_t arena_bytes,
                                                                        size_t arena_offset) {
  if (arena_bytes == 0 || arena_bytes > static_cast<uint64_t>(limits_.region_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes: got ", arena_bytes, ", must be 1..", limits_.region_bytes));
  }
  const size_t bytes = arena_offset + (arena_bytes + kPage - 1) / kPage * kPage;
  std::shared_ptr<SharedRegion> region(new SharedRegion);
  region->tenant_ = tenant;
  region->arena_offset_ = arena_offset;
  region->hooks_ = hooks_;
  {
    const std::lock_guard lock(account_->mutex);
    const auto owned = account_->of_tenant.find(tenant);
    const int32_t of_tenant = owned == account_->of_tenant.end() ? 0 : owned->second;
    if (account_->regions >= limits_.regions || of_tenant >= limits_.tenant_regions) {
      return absl::ResourceExhaustedError(
          absl::StrCat("regions: there are ", account_->regions, " of ", limits_.regions, ", ",
                       of_tenant, " of ", limits_.tenant_regions, " of this tenant"));
    }
    if (static_cast<int64_t>(bytes) > limits_.total_bytes - account_->bytes) {
      return absl::ResourceExhaustedError(absl::StrCat("bytes: got ", bytes, ", ",
                                                       limits_.total_bytes - account_->bytes,
                                                       " are left of ", limits_.total_bytes));
    }
    account_->bytes += static_cast<int64_t>(bytes);
    ++account_->regions;
    ++account_->of_tenant[tenant];
  }
  region->account_ = account_;
  region->counted_bytes_ = static_cast<int64_t>(bytes);
  if (absl::Status status = region->Map(bytes); !status.ok()) return status;
  if (getrandom(region->handle_.data(), region->handle_.size(), 0) !=
      static_cast<ssize_t>(region->handle_.size())) {
    return absl::InternalError("shared memory: no random bytes");
  }
  const std::lock_guard lock(mutex_);
  regions_[region->handle_] = region;
  return region;
}

std::shared_ptr<SharedRegion> SharedRegionTable::Find(const std::string& tenant,
                                                      std::string_view handle) const {
  RegionHandle key;
  if (handle.size() != key.size()) return nullptr;
  std::memcpy(key.data(), handle.data(), key.size());
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(key);
  if (found == regions_.end() || found->second->tenant_ != tenant) return nullptr;
  return found->second;
}

void SharedRegionTable::Remove(const SharedRegion& region) {
  std::shared_ptr<SharedRegion> last;  // outlives the lock: unmapping may wait for the engine
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(region.handle_);
  if (found == regions_.end()) return;
  last = std::move(found->second);
  regions_.erase(found);
}

int32_t SharedRegionTable::count() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int32_t>(regions_.size());
}

int64_t SharedRegionTable::mapped_bytes() const {
  const std::lock_guard lock(account_->mutex);
  return account_->bytes;
}

}  // namespace mla::server
