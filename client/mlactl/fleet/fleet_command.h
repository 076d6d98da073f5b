// The command `cluster`: status, sequences, drain and rebalance of all servers of a cluster.
#ifndef MLA_CLIENT_MLACTL_FLEET_FLEET_COMMAND_H_
#define MLA_CLIENT_MLACTL_FLEET_FLEET_COMMAND_H_

#include <string>
#include <vector>

#include "client/mlactl/cli/program.h"
#include "fleet/report.pb.h"

namespace mla::mlactl {

void AddFleetCommand(Program* program);

// Sets mean, bound, and which servers get new sequences.
void Judge(fleet::FleetStatus* status);
// Servers that may take what `server` has, the one with the most room first.
std::vector<std::string> PeersFor(const fleet::FleetStatus& status, const std::string& server);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_FLEET_FLEET_COMMAND_H_
