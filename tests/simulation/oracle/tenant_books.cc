#include "tests/simulation/oracle/tenant_books.h"

#include <algorithm>

namespace mla::simulation {

const char* TenantBooks::Name(int resource) {
  constexpr const char* kNames[kResources] = {"staged_bytes", "streams",      "uploads",
                                              "regions",      "region_bytes", "control_calls"};
  return kNames[resource];
}

bool TenantBooks::InBytes(int resource) { return resource == 0 || resource == 4; }

bool TenantBooks::Quota::empty() const {
  return !others && !weight && std::none_of(bounds.begin(), bounds.end(), [](const auto& bound) {
    return bound.has_value();
  });
}

bool TenantBooks::Row::idle() const {
  return references == 0 &&
         std::all_of(used.begin(), used.end(), [](int64_t amount) { return amount == 0; });
}

bool TenantBooks::MakeRoomFor(const std::string& name) {
  if (rows_.contains(name)) return true;
  if (rows_.size() >= most_tenants_) {
    std::erase_if(rows_, [](const auto& row) { return row.second.idle(); });
  }
  return rows_.size() < most_tenants_;
}

std::string TenantBooks::Entered(const std::string& name, uint64_t key) {
  const auto found = rows_.find(name);
  if (found != rows_.end()) {
    return found->second.key == key ? "" : "a row that is in use got another key";
  }
  if (key <= last_key_) return "a key was used before";
  last_key_ = key;
  rows_[name].key = key;
  return "";
}

TenantBooks::Row* TenantBooks::Find(const std::string& name) {
  const auto found = rows_.find(name);
  return found == rows_.end() ? nullptr : &found->second;
}

int64_t TenantBooks::Bound(const std::string& name, int resource) const {
  for (const auto* quotas : {&runtime_, &configured_}) {
    const auto found = quotas->find(name);
    if (found != quotas->end() && found->second.bounds[resource]) {
      return *found->second.bounds[resource];
    }
  }
  return defaults_[resource];
}

int TenantBooks::Weight(const std::string& name) const {
  for (const auto* quotas : {&runtime_, &configured_}) {
    const auto found = quotas->find(name);
    if (found != quotas->end() && found->second.weight) return *found->second.weight;
  }
  return 1;
}

int64_t TenantBooks::ServerUsed(int resource) const {
  int64_t used = 0;
  for (const auto& [name, row] : rows_) used += row.used[resource];
  return used;
}

bool TenantBooks::MayTake(const std::string& name, int resource, int64_t amount,
                          int64_t reserve) const {
  return rows_.at(name).used[resource] + amount <= Bound(name, resource) + reserve &&
         ServerUsed(resource) + amount <= server_[resource] + reserve;
}

bool TenantBooks::MaySetQuota(const std::string& name) const {
  return runtime_.contains(name) || runtime_.size() < most_tenants_;
}

void TenantBooks::SetQuota(const std::string& name, const Quota& quota, bool reset) {
  Quota& own = runtime_[name];
  if (reset) own = Quota();
  for (int resource = 0; resource < kResources; ++resource) {
    if (quota.bounds[resource]) own.bounds[resource] = quota.bounds[resource];
  }
  if (quota.weight) own.weight = quota.weight;
  own.others |= quota.others;
  if (own.empty()) runtime_.erase(name);
}

}  // namespace mla::simulation
