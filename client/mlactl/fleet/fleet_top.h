// Rates of all servers of a cluster, live: `cluster top`, and `top` with the target of a cluster.
#ifndef MLA_CLIENT_MLACTL_FLEET_FLEET_TOP_H_
#define MLA_CLIENT_MLACTL_FLEET_FLEET_TOP_H_

#include <cstdint>
#include <string>

#include "client/cpp/cluster/registry.h"
#include "client/mlactl/cli/common.h"
#include "fleet/report.pb.h"

namespace mla::mlactl {

inline constexpr uint32_t kLeastIntervalMs = 100, kMostIntervalMs = 600000;

struct TopOptions {
  uint32_t interval_ms = 2000;
  uint64_t count = 0;  // of looks; 0: no end
};

// Looks again and again until the count or an interrupt; returns the exit code. A server that does
// not answer within two seconds is shown as away, and asked again at the next look.
int ShowFleetTop(const CommonOptions& common, const client::EtcdFiles& etcd,
                 const TopOptions& options);
// Returns one row a server, and the sums.
std::string FleetTopText(const fleet::FleetTop& top);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_FLEET_FLEET_TOP_H_
