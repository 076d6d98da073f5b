// Small integers for tenant names, given once and kept: the page pool remembers which tenant last
// used a page.
#ifndef MLA_SCHEDULER_TENANT_TABLE_H_
#define MLA_SCHEDULER_TENANT_TABLE_H_

#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "scheduler/fault.h"
#include "scheduler/kvcache/kv_cache.h"

namespace mla::scheduler {

using kvcache::TenantKey;
inline constexpr TenantKey kNoTenant = 0;

// Owned by the engine role.
class TenantTable {
 public:
  explicit TenantTable(int32_t max_tenants) : max_tenants_(max_tenants) {}

  // The tenant's key, given on first use. RESOURCE_EXHAUSTED past the limit.
  absl::StatusOr<TenantKey> Intern(const std::string& name, Fault* fault) {
    const auto found = keys_.find(name);
    if (found != keys_.end()) return found->second;
    if (static_cast<int32_t>(keys_.size()) >= max_tenants_) {
      return RefuseField(fault, "tenant", absl::StrCat("one more than ", keys_.size()),
                         absl::StrCat("at most ", max_tenants_, " tenants a server lifetime"),
                         "tenants_exhausted", absl::StatusCode::kResourceExhausted);
    }
    const TenantKey key = static_cast<TenantKey>(keys_.size()) + 1;
    keys_.emplace(name, key);
    return key;
  }

  // kNoTenant if the tenant was never given a key, so owns nothing.
  TenantKey Find(const std::string& name) const {
    const auto found = keys_.find(name);
    return found == keys_.end() ? kNoTenant : found->second;
  }

 private:
  const int32_t max_tenants_;
  absl::flat_hash_map<std::string, TenantKey> keys_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TENANT_TABLE_H_
