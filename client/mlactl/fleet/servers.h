// Finds the servers of a cluster, for commands that ask all of them.
#ifndef MLA_CLIENT_MLACTL_FLEET_SERVERS_H_
#define MLA_CLIENT_MLACTL_FLEET_SERVERS_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/cluster/members.h"
#include "client/cpp/cluster/registry.h"
#include "client/mlactl/cli/common.h"

namespace mla::mlactl {

using Members = std::vector<client::Member>;

// States of a server in the output.
inline constexpr char kAway[] = "away";
inline constexpr char kServing[] = "serving";

// Returns the members of the cluster that common.target names.
absl::StatusOr<Members> ReadMembers(const CommonOptions& common, const client::EtcdFiles& etcd);
// Returns a client of one server, with the common options' certificates and times.
absl::StatusOr<std::unique_ptr<client::Client>> ConnectTo(const CommonOptions& common,
                                                          const std::string& address);
// Calls `act` for each number below `count`, kMostAtOnce at the same time, in threads.
void ForEach(size_t count, const std::function<void(size_t place)>& act);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_FLEET_SERVERS_H_
