#include "server/memory/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "scheduler/share_of_bound.h"
#include "server/process/process_usage.h"

namespace mla::server {
namespace {

using scheduler::Resource;

constexpr size_t kPage = 4096;
constexpr int64_t kDeviceUnit = int64_t{2} << 20;

absl::Status OutOfMemory(const char* what, size_t bytes, int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat("shared memory: ", what, " ", bytes, " bytes: ", std::strerror(error)));
}

// Memory of the host, or of the device.
struct Kind {
  const char* field;  // of a client's request
  const char* key;    // of the bound for all tenants
  int64_t bound;
  int64_t used, used_by_tenant;
};

// Judges `wanted` more bytes of a kind: by its bound, and, if the tenant has the default bound of
// all kinds together, by its share of this one. The first region of a tenant may exceed the share,
// because a pool may be made for one region; the bound of all kinds together holds for it, too. As
// in the tenant table, the tenant's bound is named first: its own release helps then.
absl::Status CheckKind(const Kind& kind, int64_t wanted, scheduler::Tenant& tenant,
                       scheduler::TenantTable& tenants) {
  const scheduler::ResourceRow& row = scheduler::RowOf(Resource::kRegionBytes);
  const int64_t share = tenant.has_default_share(Resource::kRegionBytes)
                            ? scheduler::ShareOfBound(kind.bound, row.share_eighths)
                            : kind.bound;
  const int64_t remaining = kind.bound - kind.used, share_left = share - kind.used_by_tenant;
  const bool by_tenant = kind.used_by_tenant > 0 && wanted > share_left;
  if (wanted == 0 || (wanted <= remaining && !by_tenant)) return absl::OkStatus();
  const BoundOwner owner = by_tenant ? BoundOwner::kTenant : BoundOwner::kServer;
  tenants.NoteRefusal(tenant, Resource::kRegionBytes, owner);
  return RefuseField(
      {.field = kind.field,
       .got = absl::StrCat(wanted, " bytes more"),
       .limit = by_tenant ? absl::StrCat("at most ", share, " bytes of this tenant (",
                                         row.config_key, " or its quota), its share of ", kind.key,
                                         ", ", std::max<int64_t>(0, share_left), " free")
                          : absl::StrCat("at most ", kind.bound, " bytes in all (", kind.key, "), ",
                                         remaining, " free"),
       .reason = row.reason,
       .retry_after_ms = row.retry_ms,
       .resource = row.name,
       .wanted = wanted,
       .free = by_tenant ? std::max<int64_t>(0, share_left) : remaining,
       .bound = by_tenant ? share : kind.bound,
       .bound_of = owner},
      absl::StatusCode::kResourceExhausted);
}

std::shared_ptr<scheduler::TenantTable> TableOf(const RegionLimits& limits) {
  scheduler::TenantTableOptions options;
  options.server_bounds[Resource::kRegions] = limits.regions;
  options.server_bounds[Resource::kRegionBytes] = limits.total_bytes + limits.device_bytes;
  options.default_bounds[Resource::kRegions] = limits.tenant_regions;
  return std::make_shared<scheduler::TenantTable>(std::move(options));
}

}  // namespace

void SharedRegion::Mapping::Close() {
  device.reset();
  if (before_unmapped) before_unmapped(bytes);
  if (bytes.data() != nullptr) munmap(bytes.data(), bytes.size());
  if (descriptor >= 0) close(descriptor);
}

// Counts mapped regions, including those without a handle that requests still use, and holds
// regions that are to be unmapped.
struct SharedRegion::Account {
  Mutex mutex;
  CondVar changed;
  struct Use {
    int64_t bytes = 0, device_bytes = 0;
  };
  Use all ABSL_GUARDED_BY(mutex);
  // Tenants with regions, each of which keeps the tenant's row and so its key.
  absl::flat_hash_map<scheduler::TenantKey, Use> of_tenants ABSL_GUARDED_BY(mutex);
  std::shared_ptr<scheduler::TenantTable> tenants;
  std::deque<Mapping> ended ABSL_GUARDED_BY(mutex);
  // Counts the mappings in `ended`, and those that a closer has taken from it.
  int32_t closing ABSL_GUARDED_BY(mutex) = 0;
  bool deferred ABSL_GUARDED_BY(mutex) = false;  // there are closers

  void Let(Mapping mapping);
  void Run();
  void Count(scheduler::TenantKey tenant, int64_t bytes, int64_t device_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Forget(const Mapping& mapping) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
};

void SharedRegion::Account::Let(Mapping mapping) {
  {
    const MutexLock lock(mutex);
    if (deferred) {
      ended.push_back(std::move(mapping));
      ++closing;
      changed.NotifyAll();
      return;
    }
  }
  mapping.Close();
  const MutexLock lock(mutex);
  Forget(mapping);
}

// The loop of a closing thread; it ends when it has closed all mappings and closing is not deferred
// any more.
void SharedRegion::Account::Run() {
  MutexLock lock(mutex);
  while (true) {
    changed.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      return !ended.empty() || !deferred;
    });
    if (ended.empty()) return;
    Mapping mapping = std::move(ended.front());
    ended.pop_front();
    lock.Unlock();
    mapping.Close();
    lock.Lock();
    --closing;
    Forget(mapping);
    changed.NotifyAll();
  }
}

// Amounts below 0 are given back.
void SharedRegion::Account::Count(scheduler::TenantKey tenant, int64_t bytes,
                                  int64_t device_bytes) {
  Use& own = of_tenants[tenant];
  for (Use* const use : {&own, &all}) {
    use->bytes += bytes;
    use->device_bytes += device_bytes;
  }
  if (own.bytes == 0 && own.device_bytes == 0) of_tenants.erase(tenant);
}

void SharedRegion::Account::Forget(const Mapping& mapping) {
  Count(mapping.tenant->key(), -mapping.counted_bytes, -mapping.device_bytes);
  tenants->Return(*mapping.tenant, Resource::kRegionBytes,
                  mapping.counted_bytes + mapping.device_bytes);
  tenants->Return(*mapping.tenant, Resource::kRegions, 1);
}

absl::Status SharedRegion::Map(size_t bytes, const RegionHooks& hooks) {
  descriptor_ = memfd_create("mla-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor_ < 0) return OutOfMemory("cannot create", bytes, errno);
  if (InDescriptorReserve(descriptor_)) return OutOfMemory("cannot create", bytes, EMFILE);
  if (ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
    return OutOfMemory("cannot size", bytes, errno);
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (memory == MAP_FAILED) return OutOfMemory("cannot map", bytes, errno);
  bytes_ = {static_cast<std::byte*>(memory), bytes};
  // Asks for huge pages. The system chooses them at the first touch, through a mapping that has
  // asked for them. A kernel that does not support this takes ordinary pages in the next call.
  madvise(memory, bytes, MADV_HUGEPAGE);
  madvise(memory, bytes, MADV_POPULATE_WRITE);
  // All pages are taken now: a lack of memory must refuse the region, not kill a process that
  // touches it later.
  if (const int error = posix_fallocate(descriptor_, 0, static_cast<off_t>(bytes)); error != 0) {
    return OutOfMemory("cannot take", bytes, error);
  }
  if (fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return OutOfMemory("cannot seal", bytes, errno);
  }
  if (hooks.on_mapped && hooks.on_mapped(bytes_).ok()) before_unmapped_ = hooks.before_unmapped;
  return absl::OkStatus();
}

bool SharedRegion::HasHoles() const {
  constexpr int64_t kStatBlock = 512;
  struct stat found {};
  return fstat(descriptor_, &found) == 0 &&
         found.st_blocks * kStatBlock < static_cast<int64_t>(size());
}

SharedRegion::~SharedRegion() {
  if (account_ == nullptr) return;  // nothing was mapped
  account_->Let({bytes_, descriptor_, std::move(device_), std::move(before_unmapped_), tenant_,
                 counted_bytes_, device_bytes_});
}

SharedRegionTable::SharedRegionTable(const RegionLimits& limits, RegionHooks hooks,
                                     std::shared_ptr<scheduler::TenantTable> tenants)
    : limits_(limits),
      hooks_(std::move(hooks)),
      account_(std::make_shared<SharedRegion::Account>()) {
  account_->tenants = tenants != nullptr ? std::move(tenants) : TableOf(limits);
  account_->deferred = true;
  for (std::thread& closer : closers_) {
    closer = std::thread([account = account_] { account->Run(); });
  }
}

SharedRegionTable::~SharedRegionTable() {
  regions_.clear();
  {
    const MutexLock lock(account_->mutex);
    account_->deferred = false;
  }
  account_->changed.NotifyAll();
  for (std::thread& closer : closers_) closer.join();
}

absl::Status SharedRegionTable::Reserve(scheduler::Tenant& tenant, int64_t bytes,
                                        int64_t device_bytes, std::chrono::milliseconds wait) {
  SharedRegion::Account& account = *account_;
  scheduler::TenantTable& tenants = *account.tenants;
  const auto take = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(account.mutex) {
    const auto known = account.of_tenants.find(tenant.key());
    const auto own =
        known != account.of_tenants.end() ? known->second : SharedRegion::Account::Use();
    const Kind device = {"device_bytes", "shm.device_bytes", limits_.device_bytes,
                         account.all.device_bytes, own.device_bytes};
    const Kind host = {"bytes", "shm.total_bytes", limits_.total_bytes, account.all.bytes,
                       own.bytes};
    MLA_RETURN_IF_ERROR(CheckKind(device, device_bytes, tenant, tenants));
    MLA_RETURN_IF_ERROR(CheckKind(host, bytes, tenant, tenants));
    MLA_RETURN_IF_ERROR(tenants.Take(tenant, Resource::kRegions, 1, ""));
    absl::Status status = tenants.Take(tenant, Resource::kRegionBytes, bytes + device_bytes, "");
    if (!status.ok()) tenants.Return(tenant, Resource::kRegions, 1);
    return status;
  };
  const auto end = std::chrono::steady_clock::now() + wait;
  MutexLock lock(account.mutex);
  absl::Status status = take();
  for (bool time_left = true; !status.ok() && account.closing > 0 && time_left;) {
    time_left = account.changed.WaitUntil(lock, end);
    status = take();
  }
  if (!status.ok()) return status;
  account.Count(tenant.key(), bytes, device_bytes);
  return status;
}

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegionTable::Create(
    const std::string& tenant, uint64_t arena_bytes, size_t arena_offset,
    std::chrono::milliseconds wait, const DeviceWish& device) {
  if (arena_bytes == 0 || arena_bytes > static_cast<uint64_t>(limits_.region_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes: got ", arena_bytes, ", must be 1..", limits_.region_bytes));
  }
  const size_t bytes = arena_offset + (arena_bytes + kPage - 1) / kPage * kPage;
  MLA_ASSIGN_OR_RETURN(scheduler::TenantRef row, account_->tenants->Enter(tenant));
  // The account counts whole units of the device's allocator, because that is what the allocator
  // takes.
  const int64_t device_bytes = (device.bytes + kDeviceUnit - 1) / kDeviceUnit * kDeviceUnit;
  MLA_RETURN_IF_ERROR(Reserve(*row, static_cast<int64_t>(bytes), device_bytes, wait));
  std::shared_ptr<SharedRegion> region(new SharedRegion);
  region->tenant_ = std::move(row);
  region->arena_offset_ = arena_offset;
  region->account_ = account_;
  region->counted_bytes_ = static_cast<int64_t>(bytes);
  region->device_bytes_ = device_bytes;
  MLA_RETURN_IF_ERROR(region->Map(bytes, hooks_));
  if (device_bytes > 0) {
    MLA_ASSIGN_OR_RETURN(region->device_, hooks_.make_device(device_bytes, device.events));
  }
  if (!FillRandom(&region->handle_)) {
    return absl::InternalError("shared memory: no random bytes");
  }
  const MutexLock lock(mutex_);
  regions_[region->handle_] = region;
  return region;
}

std::shared_ptr<SharedRegion> SharedRegionTable::Find(const std::string& tenant,
                                                      std::string_view handle) const {
  RegionHandle key;
  if (handle.size() != key.size()) return nullptr;
  std::memcpy(key.data(), handle.data(), key.size());
  const MutexLock lock(mutex_);
  const auto found = regions_.find(key);
  if (found == regions_.end() || found->second->tenant_->name() != tenant) return nullptr;
  return found->second;
}

void SharedRegionTable::Remove(const SharedRegion& region) {
  std::shared_ptr<SharedRegion> last;  // outlives the lock
  const MutexLock lock(mutex_);
  const auto entry = regions_.find(region.handle_);
  if (entry == regions_.end()) return;
  last = std::move(entry->second);
  regions_.erase(entry);
}

int32_t SharedRegionTable::count() const {
  const MutexLock lock(mutex_);
  return static_cast<int32_t>(regions_.size());
}

bool SharedRegionTable::closing() const {
  const MutexLock lock(account_->mutex);
  return account_->closing > 0;
}

int64_t SharedRegionTable::mapped_bytes() const {
  const MutexLock lock(account_->mutex);
  return account_->all.bytes;
}

}  // namespace mla::server
