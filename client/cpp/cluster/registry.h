// Reads the members of a cluster: from etcd, from the name service, or from a list that stays.
//
// Calls are UNAVAILABLE (reason "registry_away") if the registry does not answer within a short
// time; the members' list serves until it does. Threading: any thread.
#ifndef MLA_CLIENT_CPP_CLUSTER_REGISTRY_H_
#define MLA_CLIENT_CPP_CLUSTER_REGISTRY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/cluster/members.h"

namespace mla::client {

// Paths of the registry's PEM files: its authorities, and this client's certificate and key. Empty:
// the system's authorities, and no certificate. Calls after a change of the files use the new ones.
struct EtcdFiles {
  std::string ca, cert, key;
};

// Only an operator's registry has the calls after Read.
class Registry {
 public:
  virtual ~Registry() = default;
  virtual absl::StatusOr<std::vector<Member>> Read() = 0;
  // The address of the server to which a drain has moved a sequence; "": nothing is known.
  virtual absl::StatusOr<std::string> Moved(uint64_t) { return std::string(); }
  // Writes down, for an hour, that sequences are at `address` now. UNIMPLEMENTED for a registry
  // that cannot be written.
  virtual absl::Status WriteMoved(const std::vector<uint64_t>& /*sequence_ids*/,
                                  const std::string& /*address*/) {
    return absl::UnimplementedError("lists and the name service have no room for moved sequences");
  }
  // Writes the value of a member under a lease of so many seconds; the calls after the first one
  // renew it, and write again what has changed. Only one thread at a time may announce one member.
  // UNIMPLEMENTED for a registry that cannot be written.
  virtual absl::Status Announce(const Member&, int64_t /*lease_seconds*/) {
    return absl::UnimplementedError("lists and the name service have no room for announcements");
  }
  // Takes that value out.
  virtual absl::Status Withdraw() { return absl::OkStatus(); }
};

// Returns the registry that a target names. INVALID_ARGUMENT: the target has another form, or a
// file cannot be used.
absl::StatusOr<std::unique_ptr<Registry>> RegistryOf(const std::string& target,
                                                     const EtcdFiles& files = {});

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_REGISTRY_H_
