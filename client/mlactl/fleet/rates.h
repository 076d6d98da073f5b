// Counters of two replies as rates, for one server and for all of a cluster.
#ifndef MLA_CLIENT_MLACTL_FLEET_RATES_H_
#define MLA_CLIENT_MLACTL_FLEET_RATES_H_

#include <cstdint>

#include "fleet/report.pb.h"
#include "mla/v1/admin.pb.h"

namespace mla::mlactl {

class Rates final {
 public:
  // The replies must outlive it.
  Rates(const v1::GetStatsReply& before, const v1::GetStatsReply& now, double seconds)
      : before_(before), now_(now), seconds_(seconds) {}

  // After a restart a server's counters begin at 0.
  double operator()(uint64_t (v1::GetStatsReply::*counter)() const) const {
    const uint64_t first = before_.boot_id() == now_.boot_id() ? (before_.*counter)() : 0;
    const uint64_t last = (now_.*counter)();
    return last >= first && seconds_ > 0 ? static_cast<double>(last - first) / seconds_ : 0;
  }

 private:
  const v1::GetStatsReply& before_;
  const v1::GetStatsReply& now_;
  const double seconds_;
};

inline double Percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

// Sets what the server has now, and the rates since `before`, `seconds` ago.
void SetRates(const v1::GetStatsReply& before, const v1::GetStatsReply& now, double seconds,
              fleet::ServerRates* rates);
// Sets the sums over the servers that answered.
void SetTotal(fleet::FleetTop* top);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_FLEET_RATES_H_
