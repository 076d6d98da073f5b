// Parses targets that name a cluster.
//
//   etcd://HOST:2379[,HOST:2379...]/PREFIX    leases that `announce` keeps next to each server
//   etcds://...                               the same over TLS
//   dns:///NAME:50551                         every address of a name: a headless service
//   a:50551,b:50551                           a list that stays
//
// Threading: any thread.
#ifndef MLA_CLIENT_CPP_CLUSTER_TARGETS_H_
#define MLA_CLIENT_CPP_CLUSTER_TARGETS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace mla::client {

inline constexpr uint16_t kEtcdPort = 2379;
inline constexpr uint16_t kServerPort = 50551;
inline constexpr size_t kMostStatic = 1024;
inline constexpr size_t kMostEndpoints = 16;

struct Endpoint {
  std::string host;  // an IPv6 address is without brackets
  uint16_t port = 0;
  std::string ToString() const;
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

struct EtcdTarget {
  std::vector<Endpoint> endpoints;
  std::string prefix;
  bool tls = false;
};

// Returns true for a target of a cluster, false for one of a server.
bool NamesCluster(std::string_view target);

bool IsEtcdTarget(std::string_view target);
bool IsDnsTarget(std::string_view target);

// All are INVALID_ARGUMENT with the field "target" for a target of another form. A port that is not
// given is kEtcdPort or kServerPort.
absl::StatusOr<EtcdTarget> ParseEtcdTarget(std::string_view target);
absl::StatusOr<Endpoint> ParseDnsTarget(std::string_view target);
absl::StatusOr<std::vector<std::string>> ParseStaticTarget(std::string_view target);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_TARGETS_H_
