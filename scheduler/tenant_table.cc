#include "scheduler/tenant_table.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::scheduler {
namespace {

// A tenant may have half or more of a resource that is held for long, and half of a resource that
// turns over quickly: one tenant can take most of an idle server and still leaves room for the
// next.
constexpr ResourceRow kRows[] = {
    {Resource::kKvBytes, "kv_bytes", "tenants.kv_bytes", "kv_cache.bytes", true, "pages_exhausted",
     2000, 7, "Bytes of page groups that hold the tenant's rows."},
    {Resource::kKvSlabBytes, "kv_slab_bytes", "tenants.kv_slab_bytes", "kv_cache.bytes", true,
     "pages_exhausted", 2000, 7,
     "Bytes of pool slabs that serve the tenant's models; a slab serves one model until its last "
     "page group is free."},
    {Resource::kSequences, "sequences", "tenants.sequences", "limits.max_sequences", false,
     "sequences_exhausted", 10000, 7, "Open sequences."},
    {Resource::kModels, "models", "tenants.models", "limits.max_models", false, "models_exhausted",
     10000, 7, "Registered models."},
    {Resource::kWeightBytes, "weight_bytes", "tenants.weight_bytes", "limits.weights_bytes", true,
     "weights_exhausted", 10000, 7,
     "Bytes of uploaded weights: as bf16, or as e4m3 where the model says so. CPUs without bf16 "
     "take twice as much memory."},
    {Resource::kOpenSteps, "open_steps", "tenants.open_steps", "limits.max_open_steps", false,
     "steps_exhausted", 1, 4, "Open steps."},
    {Resource::kQueuedRequests, "queued_requests", "tenants.queued_requests",
     "limits.queue_requests", false, "queue_full", 10, 4,
     "Requests accepted and not yet answered."},
    {Resource::kStagedBytes, "staged_bytes", "tenants.staged_bytes", "wire.staging_bytes", true,
     "staging_full", 10, 4, "Staging memory of requests and of replies that are not sent yet."},
    {Resource::kStreams, "streams", "tenants.streams", "wire.max_streams", false,
     "too_many_streams", 1000, 7, "Open Attend streams."},
    {Resource::kUploads, "uploads", "tenants.uploads", "wire.max_uploads", false,
     "too_many_uploads", 1000, 4,
     "UploadWeights, Export, Import, Checkpoint and Restore calls under way."},
    {Resource::kRegions, "regions", "shm.tenant_regions", "shm.regions_max", false,
     "regions_exhausted", 1000, 8, "Shared-memory regions."},
    {Resource::kRegionBytes, "region_bytes", "tenants.region_bytes", "shm.total_bytes", true,
     "regions_exhausted", 1000, 7, "Bytes of shared-memory regions."},
    {Resource::kControlCalls, "control_calls", "tenants.control_calls", "wire.control_threads",
     false, "too_many_calls", 100, 4, "Control calls under way, uploads and watchers included."},
    {Resource::kPrefixTokens, "prefix_tokens", "tenants.prefix_tokens", "limits.prefix_tokens",
     false, "prefix_tokens_exhausted", 10000, 7,
     "Rows of open sequences that were declared for the prefix cache."},
    {Resource::kControlBytes, "control_bytes", "tenants.control_bytes", "wire.control_bytes", true,
     "control_bytes_full", 100, 4, "Serialized requests of control calls under way."},
    {Resource::kTailBytes, "tail_bytes", "tenants.tail_bytes", "limits.tail_bytes", true,
     "tails_exhausted", 10000, 7, "Tails of sequences, in host memory."},
};
static_assert(std::size(kRows) == kResourceCount);

}  // namespace

std::span<const ResourceRow> ResourceRows() { return kRows; }

const ResourceRow& RowOf(Resource resource) { return kRows[static_cast<size_t>(resource) - 1]; }

const ResourceRow* FindResource(absl::string_view name) {
  for (const ResourceRow& row : kRows) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

bool TenantQuota::empty() const {
  return !weight && std::none_of(bounds.begin(), bounds.end(),
                                 [](const auto& bound) { return bound.has_value(); });
}

TenantTableOptions::TenantTableOptions() {
  std::fill(server_bounds.begin(), server_bounds.end(), kUnbounded);
  std::fill(default_bounds.begin(), default_bounds.end(), kUnbounded);
}

TenantTable::TenantTable(TenantTableOptions options)
    : max_tenants_(options.max_tenants),
      default_bounds_(options.default_bounds),
      default_shares_(options.default_shares),
      configured_(std::move(options.quotas)) {
  for (const ResourceRow& row : kRows) {
    server_.bound_[row.resource] = options.server_bounds[row.resource];
  }
}

TenantTable::~TenantTable() = default;

absl::StatusOr<TenantRef> TenantTable::Enter(absl::string_view name) {
  const MutexLock lock(mutex_);
  if (const auto found = rows_.find(name); found != rows_.end()) {
    return TenantRef(found->second.get());
  }
  if (static_cast<int32_t>(rows_.size()) >= max_tenants_) DropIdle();
  if (static_cast<int32_t>(rows_.size()) >= max_tenants_) {
    return RefuseField({.field = "tenant",
                        .got = absl::StrCat("one more than ", rows_.size()),
                        .limit = absl::StrCat("at most ", max_tenants_, " tenants at a time"),
                        .reason = "tenants_exhausted",
                        .retry_after_ms = 1000},
                       absl::StatusCode::kResourceExhausted);
  }
  auto row = std::make_unique<Tenant>();
  row->name_ = std::string(name);
  row->key_ = ++last_key_;
  ApplyQuota(*row);
  Tenant* const raw = row.get();
  by_key_.emplace(raw->key_, raw);
  rows_.emplace(raw->name_, std::move(row));
  return TenantRef(raw);
}

TenantKey TenantTable::Find(absl::string_view name) const {
  const MutexLock lock(mutex_);
  const auto found = rows_.find(name);
  return found == rows_.end() ? kNoTenant : found->second->key_;
}

TenantRef TenantTable::Get(TenantKey key) const {
  const MutexLock lock(mutex_);
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? TenantRef() : TenantRef(found->second);
}

int32_t TenantTable::weight(TenantKey key) const {
  const MutexLock lock(mutex_);
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? 1 : found->second->weight_.load(std::memory_order_relaxed);
}

// Compares and exchanges instead of adding first, so that a refused take never makes another one
// fail.
bool TenantTable::Add(std::atomic<int64_t>& used, int64_t amount, int64_t bound) {
  int64_t before = used.load(std::memory_order_relaxed);
  do {
    if (before > bound - amount) return false;
  } while (!used.compare_exchange_weak(before, before + amount, std::memory_order_relaxed));
  return true;
}

bool TenantTable::TryTake(Tenant& tenant, Resource resource, int64_t amount, int64_t reserve) {
  const auto with_reserve = [reserve](int64_t bound) {
    return bound > kUnbounded - reserve ? kUnbounded : bound + reserve;
  };
  if (Add(tenant.used_[resource], amount, with_reserve(tenant.bound(resource)))) {
    if (Add(server_.used_[resource], amount, with_reserve(server_.bound(resource)))) return true;
    tenant.used_[resource].fetch_sub(amount, std::memory_order_release);
    NoteRefusal(tenant, resource, BoundOwner::kServer);
  } else {
    NoteRefusal(tenant, resource, BoundOwner::kTenant);
  }
  return false;
}

void TenantTable::NoteRefusal(Tenant& tenant, Resource resource, BoundOwner owner) {
  std::atomic<uint64_t>& refusals =
      owner == BoundOwner::kTenant ? tenant_refusals_[resource] : server_.refused_[resource];
  refusals.fetch_add(1, std::memory_order_relaxed);
  tenant.refused_[resource].fetch_add(1, std::memory_order_relaxed);
}

void TenantTable::Return(Tenant& tenant, Resource resource, int64_t amount) {
  server_.used_[resource].fetch_sub(amount, std::memory_order_relaxed);
  // This is the last access: the row may be dropped as soon as nothing is in use.
  tenant.used_[resource].fetch_sub(amount, std::memory_order_release);
}

absl::Status TenantTable::Refusal(const Tenant& tenant, Resource resource, int64_t amount,
                                  const char* field) const {
  const ResourceRow& row = RowOf(resource);
  const int64_t own_free = std::max<int64_t>(0, tenant.bound(resource) - tenant.used(resource));
  const int64_t server_free = std::max<int64_t>(0, server_bound(resource) - server_used(resource));
  const bool by_tenant = own_free < amount || server_free >= amount;
  const int64_t free = by_tenant ? own_free : server_free;
  const int64_t bound = by_tenant ? tenant.bound(resource) : server_bound(resource);
  const char* const unit = row.bytes ? " bytes" : "";
  // Operators read in it what to set.
  const std::string key = absl::StrCat(" (", row.config_key, " or its quota)");
  return MakeError(
      absl::StatusCode::kResourceExhausted,
      absl::StrCat(row.name, ": wanted ", amount, unit, ", ", free, " free of ", bound,
                   by_tenant ? ", the bound of this tenant" + key : ", the bound of the server"),
      {.field = field,
       .got = absl::StrCat(amount, unit, " more"),
       .limit = absl::StrCat("at most ", bound, unit,
                             by_tenant ? " of this tenant" + key : " in all", ", ", free, " free"),
       .reason = row.reason,
       .retry_after_ms = row.retry_ms,
       .resource = row.name,
       .wanted = amount,
       .free = free,
       .bound = bound,
       .bound_of = by_tenant ? BoundOwner::kTenant : BoundOwner::kServer});
}

absl::Status TenantTable::Take(Tenant& tenant, Resource resource, int64_t amount, const char* field,
                               int64_t reserve) {
  if (TryTake(tenant, resource, amount, reserve)) return absl::OkStatus();
  return Refusal(tenant, resource, amount, field);
}

bool TenantTable::Idle(const Tenant& tenant) const {
  if (tenant.references_.load(std::memory_order_acquire) != 0) return false;
  return std::all_of(std::begin(kRows), std::end(kRows), [&](const ResourceRow& row) {
    return tenant.used_[row.resource].load(std::memory_order_acquire) == 0;
  });
}

void TenantTable::DropIdle() {
  absl::erase_if(rows_, [this](const auto& row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!Idle(*row.second)) return false;
    by_key_.erase(row.second->key_);
    return true;
  });
}

std::pair<int64_t, BoundSource> TenantTable::BoundFor(const std::string& name,
                                                      Resource resource) const {
  if (const auto quota = runtime_.find(name); quota != runtime_.end()) {
    if (const auto& bound = quota->second.bounds[resource]) return {*bound, BoundSource::kRuntime};
  }
  if (const auto found = configured_.find(name); found != configured_.end()) {
    if (const auto& bound = found->second.bounds[resource]) {
      return {*bound, BoundSource::kConfigured};
    }
  }
  return {default_bounds_[resource], BoundSource::kDefault};
}

int32_t TenantTable::WeightFor(const std::string& name) const {
  for (const auto* quotas : {&runtime_, &configured_}) {
    const auto found = quotas->find(name);
    if (found != quotas->end() && found->second.weight) return *found->second.weight;
  }
  return 1;
}

void TenantTable::ApplyQuota(Tenant& tenant) const {
  for (const ResourceRow& row : kRows) {
    const auto [bound, source] = BoundFor(tenant.name_, row.resource);
    tenant.bound_[row.resource] = bound;
    tenant.default_share_[row.resource] =
        source == BoundSource::kDefault && default_shares_[row.resource];
  }
  tenant.weight_ = WeightFor(tenant.name_);
}

void TenantTable::SetServerBound(Resource resource, int64_t bound) {
  server_.bound_[resource] = bound;
}

absl::Status TenantTable::SetQuota(const std::string& name, const TenantQuota& quota, bool reset) {
  const MutexLock lock(mutex_);
  if (!runtime_.contains(name) && static_cast<int32_t>(runtime_.size()) >= max_tenants_) {
    return RefuseField("tenant", absl::StrCat("one more than ", runtime_.size()),
                       absl::StrCat("at most ", max_tenants_, " tenants with quotas"),
                       "tenants_exhausted", absl::StatusCode::kResourceExhausted);
  }
  TenantQuota& quota_of_tenant = runtime_[name];
  if (reset) quota_of_tenant = TenantQuota();
  for (const ResourceRow& row : kRows) {
    if (quota.bounds[row.resource])
      quota_of_tenant.bounds[row.resource] = quota.bounds[row.resource];
  }
  if (quota.weight) quota_of_tenant.weight = quota.weight;
  if (quota_of_tenant.empty()) runtime_.erase(name);
  if (const auto found = rows_.find(name); found != rows_.end()) ApplyQuota(*found->second);
  return absl::OkStatus();
}

void TenantTable::Reconfigure(TenantTableOptions options) {
  const MutexLock lock(mutex_);
  default_bounds_ = options.default_bounds;
  default_shares_ = options.default_shares;
  configured_ = std::move(options.quotas);
  for (const auto& row : rows_) ApplyQuota(*row.second);
}

bool TenantTable::Configured(const std::string& name) const {
  const MutexLock lock(mutex_);
  return configured_.contains(name);
}

TenantUsage TenantTable::UsageOf(const std::string& name, const Tenant* tenant) const {
  TenantUsage usage;
  usage.name = name;
  usage.weight = WeightFor(name);
  if (tenant != nullptr) usage.key = tenant->key_;
  for (const ResourceRow& row : kRows) {
    std::tie(usage.bound[row.resource], usage.source[row.resource]) = BoundFor(name, row.resource);
    if (tenant == nullptr) continue;
    usage.used[row.resource] = tenant->used(row.resource);
    usage.refused[row.resource] = tenant->refused_[row.resource].load(std::memory_order_relaxed);
  }
  return usage;
}

TenantUsage TenantTable::Usage(const std::string& name) const {
  const MutexLock lock(mutex_);
  const auto found = rows_.find(name);
  return UsageOf(name, found == rows_.end() ? nullptr : found->second.get());
}

std::vector<TenantUsage> TenantTable::Usages() const {
  const MutexLock lock(mutex_);
  std::set<std::string> names;
  for (const auto& row : rows_) names.insert(row.first);
  for (const auto& quota : configured_) names.insert(quota.first);
  for (const auto& quota : runtime_) names.insert(quota.first);
  std::vector<TenantUsage> usages;
  for (const std::string& name : names) {
    const auto found = rows_.find(name);
    usages.push_back(UsageOf(name, found == rows_.end() ? nullptr : found->second.get()));
  }
  return usages;
}

int32_t TenantTable::size() const {
  const MutexLock lock(mutex_);
  return static_cast<int32_t>(rows_.size());
}

// The first page group of a tenant is granted whatever its share is, unless its bound is 0. In a
// small pool the default share may be less than one slab.
bool TenantPoolAccount::Take(Resource resource, int64_t bytes) {
  if (table_->TryTake(*tenant_, resource, bytes)) return true;
  if (tenant_->used(resource) == 0 && tenant_->bound(resource) > 0 &&
      table_->TryTake(*tenant_, resource, bytes, bytes)) {
    return true;
  }
  refused_ = resource;
  return false;
}

}  // namespace mla::scheduler
