// Connections to clusters: what connections to one server do not have.
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "client/c/connection.h"
#include "client/c/handles.h"

namespace mla::capi {
namespace {

constexpr uint32_t kMostSubset = 4096;

absl::StatusOr<client::ClusterOptions> ClusterOptionsOf(const mla_cluster_options* given) {
  mla_cluster_options known;
  MLA_RETURN_IF_ERROR(Read(given, false, "cluster", &known));
  if (known.subset > kMostSubset) {
    return Refuse("cluster.subset", "0.." + std::to_string(kMostSubset),
                  std::to_string(known.subset));
  }
  if (known.keep_ms < 0) {
    return Refuse("cluster.keep_ms", "at least 0", std::to_string(known.keep_ms));
  }
  client::ClusterOptions options;
  options.home = Text(known.home);
  if (known.subset > 0) options.subset = known.subset;
  if (known.all != 0) options.subset = 0;
  if (known.keep_ms > 0) options.keep_s = static_cast<double>(known.keep_ms) / 1000;
  options.same_host = known.no_socket == 0;
  options.sockets = Text(known.sockets);
  options.etcd = {Text(known.etcd_ca), Text(known.etcd_cert), Text(known.etcd_key)};
  return options;
}

mla_recovered RecoveredOf(const std::string& how) {
  if (how == "alive") return MLA_RECOVERED_ALIVE;
  if (how == "moved") return MLA_RECOVERED_MOVED;
  if (how == "checkpoint") return MLA_RECOVERED_CHECKPOINT;
  return how == "peer" ? MLA_RECOVERED_PEER : MLA_RECOVERED_NONE;
}

absl::Status Recover(mla_client* client, mla_sequence* sequence, const mla_prefix* prefix,
                     mla_recovery* recovery) {
  auto* const one = std::get_if<client::ClusterSequence>(&sequence->sequence);
  if (one == nullptr || client->cluster == nullptr) {
    return absl::FailedPreconditionError("mla_sequence_recover: the client is not of a cluster");
  }
  MLA_ASSIGN_OR_RETURN(const auto known, PrefixOf(prefix));
  MLA_ASSIGN_OR_RETURN(const auto outcome, client->cluster->Recover(one, known));
  mla_recovery result{};
  result.how = RecoveredOf(outcome.how);
  result.rows = outcome.rows;
  result.lost = outcome.lost;
  Write(result, recovery);
  return absl::OkStatus();
}

absl::Status StatusAt(const mla_step* step, size_t place) {
  if (place >= step->sequences) {
    return Refuse("place", "below " + std::to_string(step->sequences), std::to_string(place));
  }
  if (step->cluster == nullptr) return absl::OkStatus();
  for (const client::FailedOwner& owner : step->cluster->failed()) {
    for (const size_t one : owner.sequences) {
      if (one == place) return owner.status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ConnectCluster(const char* target, const mla_connect_options* options,
                            const mla_cluster_options* cluster, mla_client** out) {
  MLA_ASSIGN_OR_RETURN(const auto known, OptionsOf(options));
  MLA_ASSIGN_OR_RETURN(const auto of_cluster, ClusterOptionsOf(cluster));
  MLA_ASSIGN_OR_RETURN(auto made, client::ClusterClient::Connect(target, known, of_cluster));
  auto client = std::make_unique<mla_client>();
  client->cluster = std::move(made);
  absl::Status last;
  // One server must answer: the home, or any other.
  MLA_ASSIGN_OR_RETURN(const auto home, client->cluster->Home());
  std::vector<std::string> addresses = {home};
  for (const client::Member& one :
       client->cluster->Members().value_or(std::vector<client::Member>())) {
    addresses.push_back(one.address());
  }
  for (const std::string& address : addresses) {
    last = client->cluster->ServerAt(address).status();
    if (!last.ok()) continue;
    *out = client.release();
    return absl::OkStatus();
  }
  return last;
}

}  // namespace mla::capi

using mla::capi::CheckNotNull;
using mla::capi::Guard;

mla_code mla_connect_cluster(const char* target, const mla_connect_options* options,
                             const mla_cluster_options* cluster, mla_client** out,
                             mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(out, "out"); !status.ok()) return status;
    *out = nullptr;
    if (absl::Status status = CheckNotNull(target, "target"); !status.ok()) return status;
    return mla::capi::ConnectCluster(target, options, cluster, out);
  });
}

const char* mla_sequence_address(const mla_sequence* sequence) {
  const auto* const one = std::get_if<mla::client::ClusterSequence>(&sequence->sequence);
  return one == nullptr ? "" : one->address().c_str();
}

mla_code mla_sequence_recover(mla_client* client, mla_sequence* sequence, const mla_prefix* prefix,
                              mla_recovery* recovery, mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(sequence, "sequence"); !status.ok()) return status;
    return mla::capi::Recover(client, sequence, prefix, recovery);
  });
}

mla_code mla_step_sequence_status(const mla_step* step, size_t place, mla_error** error) {
  return Guard(error, [&] { return mla::capi::StatusAt(step, place); });
}
