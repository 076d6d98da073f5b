// Tenants: what each of them uses of the server, and how much it may use.
//
// One table holds, for every tenant that uses something, a row with its usage and its bound of each
// resource, and one more row with the sums and bounds of the server. TryTake is the only place that
// compares a use with a bound: the tenant's first, then the server's. ResourceRows describes each
// resource once; configuration keys, metrics, Admin.GetQuota and their documentation follow from
// it.
//
// A bound comes from the default, from the configuration for that tenant, or from SetQuota at run
// time, the later of these first. It may be set below what is in use: nothing is taken away, and
// further takes are refused until enough was returned. A tenant's takes never return what another
// tenant holds.
//
// Keys: each new row gets the next key. Keys are never used again, because the page pool remembers
// who last used a page by this key: a reused one would let a page go to another tenant unscrubbed.
// A row without references and without use is idle; idle rows are dropped when room for a new
// tenant is needed, and the tenant gets a new key when it comes back.
//
// Ownership: the table owns the rows. A row lives while a TenantRef refers to it or while something
// of it is in use, so that a plain Tenant pointer is valid from a take to its return.
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

// What is counted for each tenant. The numbers are those of mla.v1.QuotaResource.
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
  const char* config_key;  // of the default bound of a tenant
  const char* server_key;  // configuration key that bounds all tenants together
  bool bytes;              // unit: bytes, else a count
  const char* reason;      // stable token of a refusal
  int32_t retry_ms;        // hint of a refusal
  int32_t share_eighths;   // default bound of a tenant: so many eighths of the server's bound
  const char* meaning;
};

// One row a resource, in the order of the enumeration.
std::span<const ResourceRow> ResourceRows();
const ResourceRow& RowOf(Resource resource);
// Null: no resource of this name.
const ResourceRow* FindResource(absl::string_view name);

inline constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

// Indexed by resource.
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

// Where a bound comes from.
enum class BoundSource : uint8_t { kDefault = 1, kConfigured, kRuntime };

// Bounds of one tenant that differ from the defaults.
struct TenantQuota {
  PerResource<std::optional<int64_t>> bounds;
  std::optional<int32_t> weight;  // 1..kMaxTenantWeight
  bool empty() const;
};

inline constexpr int32_t kMaxTenantWeight = 1000;

struct TenantTableOptions {
  int32_t max_tenants = 4096;                 // rows, and run-time quotas, at a time
  PerResource<int64_t> server_bounds;         // of all tenants together
  PerResource<int64_t> default_bounds;        // of a tenant without a quota of its own
  std::map<std::string, TenantQuota> quotas;  // from the configuration, by tenant name
  TenantTableOptions();                       // every bound kUnbounded
};

// A row. Fields are read through the table; only TenantTable changes them.
class Tenant {
 public:
  const std::string& name() const { return name_; }
  TenantKey key() const { return key_; }
  int64_t used(Resource resource) const { return used_[resource].load(std::memory_order_relaxed); }
  int64_t bound(Resource resource) const {
    return bound_[resource].load(std::memory_order_relaxed);
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

// One tenant as GetQuota and metrics show it.
struct TenantUsage {
  std::string name;
  TenantKey key = kNoTenant;  // kNoTenant: it uses nothing now, and only has a quota
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

  // The tenant's row, made if there is none. RESOURCE_EXHAUSTED when max_tenants rows are in use.
  absl::StatusOr<TenantRef> Enter(absl::string_view name);
  // kNoTenant if the tenant has no row, so holds nothing.
  TenantKey Find(absl::string_view name) const;
  // Empty if there is no such row.
  TenantRef Get(TenantKey key) const;
  // Share of a tenant in what the scheduler divides; 1 if there is no such row.
  int32_t weight(TenantKey key) const;

  // Adds `amount` (>= 0) to what the tenant uses, or refuses and changes nothing. `reserve`: so
  // much beyond both bounds is granted, for calls that must get through when others fill them.
  // REQUIRES of this and Take: a TenantRef, or something in use, keeps the row.
  bool TryTake(Tenant& tenant, Resource resource, int64_t amount, int64_t reserve = 0);
  // The same, with a status: RESOURCE_EXHAUSTED that names what was wanted, what is free, the bound
  // and whose it is. `field`: the path of the request's field, may be empty.
  absl::Status Take(Tenant& tenant, Resource resource, int64_t amount, const char* field,
                    int64_t reserve = 0);
  // The refusal of a TryTake that has failed.
  absl::Status Refusal(const Tenant& tenant, Resource resource, int64_t amount,
                       const char* field) const;
  // REQUIRES: so much was taken.
  void Return(Tenant& tenant, Resource resource, int64_t amount);

  // The server's row. Its bounds change only while the server starts.
  void SetServerBound(Resource resource, int64_t bound);
  int64_t server_used(Resource resource) const {
    return server_.used_[resource].load(std::memory_order_relaxed);
  }
  int64_t server_bound(Resource resource) const { return server_.bound(resource); }
  // Takes that were refused since the table was made, all tenants together. A request that waits
  // for its bound counts at each try.
  struct Refusals {
    uint64_t by_tenant_bound = 0, by_server_bound = 0;
  };
  Refusals refusals(Resource resource) const {
    return {tenant_refusals_[resource].load(std::memory_order_relaxed),
            server_.refused_[resource].load(std::memory_order_relaxed)};
  }

  // Run-time quotas; not persisted. Bounds that `quota` names replace those in force. `reset` drops
  // all run-time bounds of the tenant first. RESOURCE_EXHAUSTED when max_tenants tenants have
  // run-time quotas.
  absl::Status SetQuota(const std::string& name, const TenantQuota& quota, bool reset);
  // Replaces what the configuration said about tenants: their default bounds and the quotas by
  // name. What SetQuota has set stays in force. Nothing in use is taken away.
  void Reconfigure(const PerResource<int64_t>& default_bounds,
                   std::map<std::string, TenantQuota> quotas);
  // One tenant, also one that uses nothing.
  TenantUsage Usage(const std::string& name) const;
  // All rows and all tenants with a quota, by name.
  std::vector<TenantUsage> Usages() const;
  // Tenants named in the configuration: metrics show these by name in any case.
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
  std::map<std::string, TenantQuota> configured_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, TenantQuota> runtime_ ABSL_GUARDED_BY(mutex_);
};

// Counts page groups and slabs of one model for its tenant.
class TenantPoolAccount final : public kvcache::PoolAccount {
 public:
  // Both outlive it; the row because its owner holds a model of the tenant.
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
  // The bound that refused since the last call; none: the pool itself had no room.
  std::optional<Resource> TakeRefused() { return std::exchange(refused_, std::nullopt); }

 private:
  bool Take(Resource resource, int64_t bytes);

  TenantTable* const table_;
  Tenant* const tenant_;
  std::optional<Resource> refused_;
};

// What was taken of one resource; returned when this goes. Movable, may be empty.
class TenantUse final {
 public:
  TenantUse() = default;
  // `amount` was taken of `table`, which outlives this.
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
