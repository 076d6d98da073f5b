// Defines the opaque types of connections, to one server or to a cluster. Both have the same calls.
//
// Ownership and threading: as mla_client.h says.
#ifndef MLA_CLIENT_C_CONNECTION_H_
#define MLA_CLIENT_C_CONNECTION_H_

#include <cstddef>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/c/mla_client.h"
#include "client/cpp/client.h"
#include "client/cpp/cluster/cluster_client.h"
#include "client/cpp/cluster/cluster_step.h"
#include "client/cpp/session.h"

struct mla_client {
  // Exactly one of the two is set.
  std::unique_ptr<mla::client::Client> client;
  std::unique_ptr<mla::client::ClusterClient> cluster;
  // Texts of infos that were given: they stay as long as the client.
  mutable mla::Mutex texts_mutex;
  mutable std::set<std::string> texts ABSL_GUARDED_BY(texts_mutex);

  // Calls `act` with the one that there is.
  template <typename Act>
  auto With(Act act) {
    return cluster != nullptr ? act(cluster.get()) : act(client.get());
  }
};

struct mla_sequence {
  std::variant<mla::client::Sequence, mla::client::ClusterSequence> sequence;

  template <typename Act>
  auto With(Act act) {
    return std::visit(act, sequence);
  }
  template <typename Act>
  auto With(Act act) const {
    return std::visit(act, sequence);
  }
};

struct mla_session {
  std::unique_ptr<mla::client::Session> session;
  std::unique_ptr<mla::client::ClusterSession> cluster;

  template <typename Act>
  auto With(Act act) const {
    return cluster != nullptr ? act(cluster.get()) : act(session.get());
  }
};

struct mla_step {
  std::unique_ptr<mla::client::Step> step;
  std::unique_ptr<mla::client::ClusterStep> cluster;
  size_t sequences = 0;

  template <typename Act>
  auto With(Act act) const {
    return cluster != nullptr ? act(cluster.get()) : act(step.get());
  }
};

struct mla_pending {
  std::variant<mla::client::PendingAttend, mla::client::PendingClusterAttend> attend;
};

namespace mla::capi {

absl::StatusOr<client::ClientOptions> OptionsOf(const mla_connect_options* given);
absl::StatusOr<v1::Prefix> PrefixOf(const mla_prefix* given);
// Connects to a cluster, and to the home of this worker.
absl::Status ConnectCluster(const char* target, const mla_connect_options* options,
                            const mla_cluster_options* cluster, mla_client** out);

}  // namespace mla::capi

#endif  // MLA_CLIENT_C_CONNECTION_H_
