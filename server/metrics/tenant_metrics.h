// Shows the use by tenants in a bounded number of time series: tenants that the configuration
// names, then tenants with the largest share of one of their bounds, and the rest as "other".
//
// Threading: none of its own; Metrics calls it with its mutex held.
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
  // The metrics to set. All outlive the object.
  struct Families {
    prometheus::Family<prometheus::Gauge>* used;   // by tenant and resource
    prometheus::Family<prometheus::Gauge>* bound;  // bounds of the same resources
    prometheus::Family<prometheus::Counter>* refusals;
    prometheus::Gauge* tenants;
    prometheus::Gauge* staging_used;
    prometheus::Gauge* staging;
  };

  explicit TenantMetrics(const Families& families) : families_(families) {}
  // At most `limit` tenants are shown by name.
  void Watch(std::shared_ptr<const scheduler::TenantTable> table, int32_t limit);
  // Sets the metrics to the table's present values. Does nothing before Watch.
  void Update();

 private:
  void Show(const scheduler::TenantUsage& usage, bool with_bounds);

  const Families families_;
  std::shared_ptr<const scheduler::TenantTable> table_;
  size_t limit_ = 0;
  // Series of the last update: they are removed when their tenant is gone.
  std::vector<prometheus::Gauge*> used_shown_, bound_shown_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_METRICS_TENANT_METRICS_H_
