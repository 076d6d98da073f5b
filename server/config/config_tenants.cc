// Declares the keys of tenants: shares, and quotas of tenants by name.
#include <algorithm>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "scheduler/share_of_bound.h"
#include "server/config/config.h"
#include "server/config/config_key.h"

namespace mla::server {
namespace {

using scheduler::Resource;
using scheduler::ResourceRow;
using scheduler::ShareOfBound;

scheduler::PerResource<int64_t> ServerBounds(const Config& config) {
  const int32_t control_calls = config.wire.control_threads - ControlReserve(config);
  scheduler::PerResource<int64_t> bounds;
  bounds[Resource::kKvBytes] = config.limits.kv_cache_bytes;
  bounds[Resource::kKvSlabBytes] = config.limits.kv_cache_bytes;
  bounds[Resource::kSequences] = config.limits.max_sequences;
  bounds[Resource::kModels] = config.limits.max_models;
  bounds[Resource::kWeightBytes] = config.limits.weights_bytes;
  bounds[Resource::kOpenSteps] = config.limits.max_open_steps;
  bounds[Resource::kQueuedRequests] = config.limits.queue_requests;
  bounds[Resource::kStagedBytes] = config.wire.staging_bytes;
  bounds[Resource::kStreams] = config.wire.max_streams;
  // Uploads must leave at least one control call to others.
  bounds[Resource::kUploads] = std::clamp(config.wire.max_uploads, 1, control_calls - 1);
  bounds[Resource::kRegions] = config.shm.regions_max;
  bounds[Resource::kRegionBytes] = config.shm.total_bytes + config.shm.device_bytes;
  bounds[Resource::kControlCalls] = control_calls;
  bounds[Resource::kPrefixTokens] = config.limits.prefix_tokens;
  bounds[Resource::kControlBytes] = config.wire.control_bytes;
  bounds[Resource::kTailBytes] = config.limits.tail_bytes;
  return bounds;
}

}  // namespace

int32_t ControlReserve(const Config& config) {
  return std::min(config.wire.control_reserve, config.wire.control_threads / 4);
}

scheduler::TenantTableOptions TenantOptionsOf(const Config& config) {
  scheduler::TenantTableOptions options;
  options.max_tenants = config.limits.max_tenants;
  options.server_bounds = ServerBounds(config);
  for (const ResourceRow& row : scheduler::ResourceRows()) {
    const int64_t given = config.tenants.bounds[row.resource];
    options.default_shares[row.resource] = given == 0;
    options.default_bounds[row.resource] =
        given > 0 ? given : ShareOfBound(options.server_bounds[row.resource], row.share_eighths);
  }
  options.default_bounds[Resource::kRegions] = config.shm.tenant_regions;
  options.default_shares[Resource::kRegions] = false;
  options.quotas = config.tenants.quotas;
  return options;
}

std::string TenantBoundText(const ResourceRow& row) {
  const std::string share = row.share_eighths == 4 ? "half" : absl::StrCat(row.share_eighths, "/8");
  const std::string other_kind =
      row.resource == Resource::kRegionBytes
          ? absl::StrCat(" and ", share, " of shm.device_bytes; a value is for their sum")
          : "";
  return absl::StrCat("0: ", share, " of ", row.server_key, other_kind,
                      "; what exceeds it is RESOURCE_EXHAUSTED with reason ", row.reason, ".");
}

std::string SetTenantQuota(const std::string& key, const std::string& text, Config* config) {
  const std::string rest = key.substr(sizeof(kTenantQuotas) - 1);
  const size_t dot = rest.rfind('.');  // tenant names may contain dots, resources may not
  if (dot == std::string::npos || dot == 0) return "must be tenants.quotas.TENANT.RESOURCE";
  const std::string name = rest.substr(0, dot), resource = rest.substr(dot + 1);
  const auto printable = [](char c) { return c > 0x20 && c < 0x7f; };
  if (!std::all_of(name.begin(), name.end(), printable)) {
    return "tenant names are printable ASCII characters";
  }
  scheduler::TenantQuota& quota = config->tenants.quotas[name];
  int64_t value = 0;
  if (resource == "weight") {
    if (!absl::SimpleAtoi(text, &value) || value < 1 || value > scheduler::kMaxTenantWeight) {
      return absl::StrCat("got \"", text, "\", must be 1 .. ", scheduler::kMaxTenantWeight);
    }
    quota.weight = static_cast<int32_t>(value);
    return "";
  }
  const ResourceRow* const row = scheduler::FindResource(resource);
  if (row == nullptr) return absl::StrCat("unknown resource \"", resource, "\"");
  const bool parsed = row->bytes ? ParseBytes(text, &value) : absl::SimpleAtoi(text, &value);
  if (!parsed || value < 0) {
    return absl::StrCat("got \"", text, "\", must be ", row->bytes ? "bytes" : "a count",
                        ", 0 or more");
  }
  quota.bounds[row->resource] = value;
  return "";
}

}  // namespace mla::server
