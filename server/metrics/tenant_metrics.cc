#include "server/metrics/tenant_metrics.h"

#include <algorithm>
#include <utility>

namespace mla::server {
namespace {

// Returns the largest fraction of one of its bounds that the tenant uses.
double ShareOf(const scheduler::TenantUsage& usage) {
  double share = 0;
  for (const scheduler::ResourceRow& row : scheduler::ResourceRows()) {
    const auto bound = static_cast<double>(std::max<int64_t>(1, usage.bound[row.resource]));
    share = std::max(share, static_cast<double>(usage.used[row.resource]) / bound);
  }
  return share;
}

}  // namespace

void TenantMetrics::Watch(std::shared_ptr<const scheduler::TenantTable> table, int32_t limit) {
  table_ = std::move(table);
  limit_ = static_cast<size_t>(limit);
}

void TenantMetrics::Show(const scheduler::TenantUsage& usage, bool with_bounds) {
  for (const scheduler::ResourceRow& row : scheduler::ResourceRows()) {
    const prometheus::Labels labels = {{"tenant", usage.name}, {"resource", row.name}};
    used_shown_.push_back(&families_.used->Add(labels));
    used_shown_.back()->Set(static_cast<double>(usage.used[row.resource]));
    if (!with_bounds || usage.bound[row.resource] == scheduler::kUnbounded) continue;
    bound_shown_.push_back(&families_.bound->Add(labels));
    bound_shown_.back()->Set(static_cast<double>(usage.bound[row.resource]));
  }
}

void TenantMetrics::Update() {
  if (table_ == nullptr) return;
  for (prometheus::Gauge* gauge : used_shown_) families_.used->Remove(gauge);
  for (prometheus::Gauge* gauge : bound_shown_) families_.bound->Remove(gauge);
  used_shown_.clear();
  bound_shown_.clear();
  const scheduler::TenantTable& table = *table_;
  std::vector<scheduler::TenantUsage> usages = table.Usages();
  std::erase_if(usages, [&](const scheduler::TenantUsage& usage) {
    // The server's self-test uses a tenant of its own, which is not shown.
    return usage.name.front() == ' ' || (ShareOf(usage) == 0 && !table.Configured(usage.name));
  });
  std::stable_sort(usages.begin(), usages.end(), [&](const auto& a, const auto& b) {
    const bool first = table.Configured(a.name), second = table.Configured(b.name);
    return first != second ? first : ShareOf(a) > ShareOf(b);
  });
  families_.tenants->Set(static_cast<double>(
      std::count_if(usages.begin(), usages.end(), [](const auto& u) { return ShareOf(u) > 0; })));
  scheduler::TenantUsage other;
  other.name = "other";
  for (size_t i = 0; i < usages.size(); ++i) {
    if (i < limit_) {
      Show(usages[i], true);
      continue;
    }
    for (const scheduler::ResourceRow& row : scheduler::ResourceRows()) {
      other.used[row.resource] += usages[i].used[row.resource];
    }
  }
  if (usages.size() > limit_) Show(other, false);
  families_.staging_used->Set(
      static_cast<double>(table.server_used(scheduler::Resource::kStagedBytes)));
  families_.staging->Set(
      static_cast<double>(table.server_bound(scheduler::Resource::kStagedBytes)));
  for (const scheduler::ResourceRow& row : scheduler::ResourceRows()) {
    const scheduler::TenantTable::Refusals total = table.refusals(row.resource);
    for (const auto& [owner, count] :
         {std::pair("tenant", total.by_tenant_bound), std::pair("server", total.by_server_bound)}) {
      prometheus::Counter& counter =
          families_.refusals->Add({{"resource", row.name}, {"bound_of", owner}});
      counter.Increment(std::max(0.0, static_cast<double>(count) - counter.Value()));
    }
  }
}

}  // namespace mla::server
