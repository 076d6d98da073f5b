// Metrics of what tenants use, with a bounded number of time series: tenants that the configuration
// names, then those that use the largest share of one of their bounds, and the rest as "other".
//
// Threading: the caller's; Metrics calls it with its mutex held.
#ifndef MLA_SERVER_METRICS_TENANT_METRICS_H_
#define MLA_SERVER_METRICS_TENANT_METRICS_H_

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "scheduler/tenant_table.h"

namespace mla::server {

class TenantMetrics final {
 public:
  // Where the values go. All outlive the object.
  struct Families {
    prometheus::Family<prometheus::Gauge>* used;   // by tenant and resource
    prometheus::Family<prometheus::Gauge>* bound;  // the same
    prometheus::Family<prometheus::Counter>* refusals;
    prometheus::Gauge* tenants;
    prometheus::Gauge* staging_used;
    prometheus::Gauge* staging;
  };

  explicit TenantMetrics(const Families& families) : to_(families) {}
  // `most`: tenants shown by name.
  void Watch(std::shared_ptr<const scheduler::TenantTable> table, int32_t most);
  // Takes over what the table says now. Does nothing before Watch.
  void Update();

 private:
  void Show(const scheduler::TenantUsage& usage, bool with_bounds);

  const Families to_;
  std::shared_ptr<const scheduler::TenantTable> table_;
  size_t most_ = 0;
  // Of the last update: tenants come and go, and with them their series.
  std::vector<prometheus::Gauge*> used_shown_, bound_shown_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_METRICS_TENANT_METRICS_H_
