// Tenants: how much each of them uses of the server, and how much it may use.
//
// One table holds a row for every tenant that uses something, with its usage and its bound of each
// resource. One more row holds the sums and bounds of the server. TryTake is the only place that
// compares a use with a bound: the tenant's first, then the server's. ResourceRows describes each
// resource once; configuration keys, metrics, Admin.GetQuota and their documentation follow from
// it.
//
// A bound comes from the default, from the configuration for that tenant, or from SetQuota at run
// time, the later of these first. A bound may be set below the present use: nothing is taken away,
// and further takes are refused until enough has been returned. A tenant's takes never return what
// another tenant holds.
//
// Keys: each new row gets the next key. Keys are never used again, because the page pool remembers
// who last used a page by this key: a reused one would let a page go to another tenant unscrubbed.
// A row without references and without use is idle. Idle rows are dropped when a new tenant needs
// room; a tenant that comes back gets a new key.
//
// Ownership: the table owns the rows. A row lives while a TenantRef refers to it or while its
// tenant uses something, so a plain Tenant pointer is valid from a take to the matching return.
// Threading: every method may be called from any thread. TryTake and Return are a few atomic
// operations; Enter, names and bounds take one short lock.
#ifndef MLA_SCHEDULER_TENANT_TABLE_H_
#define MLA_SCHEDULER_TENANT_TABLE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/error.h"
#include "base/mutex.h"
#include "scheduler/kvcache/pool/slab_pool.h"

namespace mla::scheduler {

using kvcache::TenantKey;
inline constexpr TenantKey kNoTenant = 0;

// The resources that are counted for each tenant. Numbered as mla.v1.QuotaResource.
enum class Resource : uint8_t {
  kKvBytes = 1,
  kKvSlabBytes,
  kSequences,
  kModels,
  kWeightBytes,
  kOpenSteps,
  kQueuedRequests,
  kStagedBytes,
  kStreams,
  kUploads,
  kRegions,
  kRegionBytes,
  kControlCalls,
  kPrefixTokens,
  kControlBytes,
  kTailBytes,
};
inline constexpr size_t kResourceCount = 16;

struct ResourceRow {
  Resource resource;
  const char* name;        // in metrics, quotas and per-tenant configuration
  const char* config_key;  // for a tenant's default bound
  const char* server_key;  // configuration key that bounds all tenants together
  bool bytes;              // unit: bytes, else a count
  const char* reason;      // stable token of a refusal
  int32_t retry_ms;        // hint of a refusal
  int32_t share_eighths;   // a tenant's default bound, in eighths of the server's bound
  const char* meaning;
};

// Returns one row for each resource, in the order of the enumeration.
std::span<const ResourceRow> ResourceRows();
const ResourceRow& RowOf(Resource resource);
// Returns null if no resource has this name.
const ResourceRow* FindResource(absl::string_view name);

inline constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

// An array that is indexed by resource.
template <typename T>
class PerResource {
 public:
  T& operator[](Resource resource) { return values_[static_cast<size_t>(resource) - 1]; }
  const T& operator[](Resource resource) const {
    return values_[static_cast<size_t>(resource) - 1];
  }
  auto begin() { return values_.begin(); }
  auto end() { return values_.end(); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::array<T, kResourceCount> values_{};
};

// Says where a bound comes from.
enum class BoundSource : uint8_t { kDefault = 1, kConfigured, kRuntime };

// The bounds of one tenant that differ from the defaults.
struct TenantQuota {
  PerResource<std::optional<int64_t>> bounds;
  std::optional<int32_t> weight;  // 1..kMaxTenantWeight
  bool empty() const;
};

inline constexpr int32_t kMaxTenantWeight = 1000;

struct TenantTableOptions {
  int32_t max_tenants = 4096;                 // most rows, and most tenants with run-time quotas
  PerResource<int64_t> server_bounds;         // for the sum over all tenants
  PerResource<int64_t> default_bounds;        // for a tenant without its own quota
  PerResource<bool> default_shares;           // default bounds that no operator has chosen
  std::map<std::string, TenantQuota> quotas;  // from the configuration, by tenant name
  TenantTableOptions();                       // every bound kUnbounded
};

// The row of one tenant. Anyone may read the fields; only TenantTable changes them.
class Tenant {
 public:
  const std::string& name() const { return name_; }
  TenantKey key() const { return key_; }
  int64_t used(Resource resource) const { return used_[resource].load(std::memory_order_relaxed); }
  int64_t bound(Resource resource) const {
    return bound_[resource].load(std::memory_order_relaxed);
  }
  // Returns true if the bound is a share of the server's, which no operator has chosen.
  bool has_default_share(Resource resource) const {
    return default_share_[resource].load(std::memory_order_relaxed);
  }
  int32_t weight() const { return weight_.load(std::memory_order_relaxed); }

 private:
  friend class TenantTable;
  friend class TenantRef;
  std::string name_;
  TenantKey key_ = kNoTenant;
  std::atomic<int32_t> references_{0};
  std::atomic<int32_t> weight_{1};
  PerResource<std::atomic<int64_t>> used_;
  PerResource<std::atomic<int64_t>> bound_;
  PerResource<std::atomic<bool>> default_share_;
  PerResource<std::atomic<uint64_t>> refused_;
};

// Keeps a row alive. Movable, copyable, may be empty.
class TenantRef {
 public:
  TenantRef() = default;
  TenantRef(const TenantRef& other) : tenant_(other.tenant_) { Add(); }
  TenantRef(TenantRef&& other) noexcept : tenant_(std::exchange(other.tenant_, nullptr)) {}
  TenantRef& operator=(TenantRef other) noexcept {
    std::swap(tenant_, other.tenant_);
    return *this;
  }
  ~TenantRef() {
    if (tenant_ != nullptr) tenant_->references_.fetch_sub(1, std::memory_order_release);
  }
  Tenant* get() const { return tenant_; }
  Tenant& operator*() const { return *tenant_; }
  Tenant* operator->() const { return tenant_; }
  explicit operator bool() const { return tenant_ != nullptr; }

 private:
  friend class TenantTable;
  explicit TenantRef(Tenant* tenant) : tenant_(tenant) { Add(); }
  void Add() {
    if (tenant_ != nullptr) tenant_->references_.fetch_add(1, std::memory_order_relaxed);
  }
  Tenant* tenant_ = nullptr;
};

// The state of one tenant for GetQuota and metrics.
struct TenantUsage {
  std::string name;
  TenantKey key = kNoTenant;  // kNoTenant: it uses nothing now and only has a quota
  int32_t weight = 1;
  PerResource<int64_t> used;
  PerResource<int64_t> bound;
  PerResource<BoundSource> source;
  PerResource<uint64_t> refused;  // takes, since the row exists
};

class TenantTable {
 public:
  explicit TenantTable(TenantTableOptions options);
  ~TenantTable();

  // Returns the tenant's row, and makes one if necessary. RESOURCE_EXHAUSTED when max_tenants rows
  // are in use.
  absl::StatusOr<TenantRef> Enter(absl::string_view name);
  // Returns kNoTenant if the tenant has no row and therefore uses nothing.
  TenantKey Find(absl::string_view name) const;
  // Returns an empty reference if no tenant has the key.
  TenantRef Get(TenantKey key) const;
  // Returns the tenant's weight when the scheduler divides service; 1 if no tenant has the key.
  int32_t weight(TenantKey key) const;

  // Adds `amount` (>= 0) to the tenant's use. Returns true if the bounds allow it; else nothing has
  // changed. `reserve`: both bounds may be exceeded by this amount, for calls that must succeed
  // when others have used everything. REQUIRES for TryTake and Take: a TenantRef, or something in
  // use, keeps the row alive.
  bool TryTake(Tenant& tenant, Resource resource, int64_t amount, int64_t reserve = 0);
  // As TryTake, with a status: RESOURCE_EXHAUSTED names the wanted amount, the free amount, the
  // bound and its owner. `field`: the path of the request's field, may be empty.
  absl::Status Take(Tenant& tenant, Resource resource, int64_t amount, const char* field,
                    int64_t reserve = 0);
  // Counts a take that the caller has refused by a bound of its own, before it came to TryTake.
  void NoteRefusal(Tenant& tenant, Resource resource, BoundOwner owner);
  // Returns the error for a TryTake that returned false.
  absl::Status Refusal(const Tenant& tenant, Resource resource, int64_t amount,
                       const char* field) const;
  // REQUIRES: the tenant uses at least `amount`.
  void Return(Tenant& tenant, Resource resource, int64_t amount);

  // Sets a bound for all tenants together. REQUIRES: the server is starting.
  void SetServerBound(Resource resource, int64_t bound);
  int64_t server_used(Resource resource) const {
    return server_.used_[resource].load(std::memory_order_relaxed);
  }
  int64_t server_bound(Resource resource) const { return server_.bound(resource); }
  // Takes refused since the table was made, of all tenants. A request that waits for its bound
  // counts each time it tries.
  struct Refusals {
    uint64_t by_tenant_bound = 0, by_server_bound = 0;
  };
  Refusals refusals(Resource resource) const {
    return {tenant_refusals_[resource].load(std::memory_order_relaxed),
            server_.refused_[resource].load(std::memory_order_relaxed)};
  }

  // Run-time quotas; not persisted. Bounds in `quota` replace the present ones. `reset` drops all
  // run-time bounds of the tenant first. RESOURCE_EXHAUSTED when max_tenants tenants have run-time
  // quotas.
  absl::Status SetQuota(const std::string& name, const TenantQuota& quota, bool reset);
  // Replaces the configuration's default bounds and quotas by name; the bounds of the server and
  // max_tenants stay as they are. Bounds that SetQuota has set stay in force. Nothing in use is
  // taken away.
  void Reconfigure(TenantTableOptions options);
  // Returns the use of one tenant, which may use nothing.
  TenantUsage Usage(const std::string& name) const;
  // Returns the use of all tenants that have a row or a quota, ordered by name.
  std::vector<TenantUsage> Usages() const;
  // Returns true if the configuration names the tenant; metrics show such tenants by name in any
  // case.
  bool Configured(const std::string& name) const;
  int32_t size() const;  // rows, idle ones included

 private:
  static bool Add(std::atomic<int64_t>& used, int64_t amount, int64_t bound);
  bool Idle(const Tenant& tenant) const;
  void DropIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ApplyQuota(Tenant& tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::pair<int64_t, BoundSource> BoundFor(const std::string& name, Resource resource) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int32_t WeightFor(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  TenantUsage UsageOf(const std::string& name, const Tenant* tenant) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int32_t max_tenants_;
  Tenant server_;
  PerResource<std::atomic<uint64_t>> tenant_refusals_;
  mutable Mutex mutex_;
  TenantKey last_key_ ABSL_GUARDED_BY(mutex_) = kNoTenant;
  absl::flat_hash_map<std::string, std::unique_ptr<Tenant>> rows_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<TenantKey, Tenant*> by_key_ ABSL_GUARDED_BY(mutex_);
  PerResource<int64_t> default_bounds_ ABSL_GUARDED_BY(mutex_);
  PerResource<bool> default_shares_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, TenantQuota> configured_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, TenantQuota> runtime_ ABSL_GUARDED_BY(mutex_);
};

// Counts page groups and slabs of one model for its tenant.
class TenantPoolAccount final : public kvcache::PoolAccount {
 public:
  // The table and the row must outlive it. The row does, because the account's owner holds a model
  // of the tenant.
  TenantPoolAccount(TenantTable* table, Tenant* tenant) : table_(table), tenant_(tenant) {}
  bool TakeGroup(int64_t bytes) override { return Take(Resource::kKvBytes, bytes); }
  bool TakeSlab(int64_t bytes) override { return Take(Resource::kKvSlabBytes, bytes); }
  void ReturnGroup(int64_t bytes) override { table_->Return(*tenant_, Resource::kKvBytes, bytes); }
  void ReturnSlab(int64_t bytes) override {
    table_->Return(*tenant_, Resource::kKvSlabBytes, bytes);
  }
  int64_t GroupRoom() const override {
    return tenant_->bound(Resource::kKvBytes) - tenant_->used(Resource::kKvBytes);
  }
  int64_t GroupBound() const override { return tenant_->bound(Resource::kKvBytes); }
  const void* owner() const override { return tenant_; }
  // Returns the bound that refused since the last call, or nullopt if the pool itself had no room.
  std::optional<Resource> TakeRefused() { return std::exchange(refused_, std::nullopt); }

 private:
  bool Take(Resource resource, int64_t bytes);

  TenantTable* const table_;
  Tenant* const tenant_;
  std::optional<Resource> refused_;
};

// An amount taken of one resource; the destructor returns it. Movable, may be empty.
class TenantUse final {
 public:
  TenantUse() = default;
  // `amount` has been taken from `table`, which must outlive this.
  TenantUse(TenantTable* table, TenantRef tenant, Resource resource, int64_t amount)
      : table_(table), tenant_(std::move(tenant)), resource_(resource), amount_(amount) {}
  TenantUse(TenantUse&& other) noexcept = default;
  TenantUse& operator=(TenantUse&& other) noexcept {
    std::swap(table_, other.table_);
    std::swap(tenant_, other.tenant_);
    std::swap(resource_, other.resource_);
    std::swap(amount_, other.amount_);
    return *this;
  }
  ~TenantUse() {
    if (tenant_) table_->Return(*tenant_, resource_, amount_);
  }

 private:
  TenantTable* table_ = nullptr;
  TenantRef tenant_;
  Resource resource_ = Resource::kControlCalls;
  int64_t amount_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TENANT_TABLE_H_
