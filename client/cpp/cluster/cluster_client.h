// Uses all servers of a cluster from one client as if they were one server (docs/cluster.md).
//
//   auto client = ClusterClient::Connect("etcd://registry:2379/fleet", {});
//   (*client)->RegisterModel(spec);
//   auto sequence = (*client)->OpenSequence("my-model", prefix);    // where it costs least
//   auto session = (*client)->OpenSession();                        // cluster_step.h
//   auto step = session->Begin("my-model", {{&*sequence, rows}});
//   if (!(*step)->Attend(call).ok()) (*client)->Recover(&*sequence, prefix);  // and send again
//
// A sequence is its server's own: calls and steps on it go there, and nothing of this library is in
// the way. Errors are those of Client, and those with the reasons registry_away and no_servers.
//
// Ownership: a ClusterClient must outlive its sessions, and sessions their steps. Sequences keep
// their connection, and may be destroyed at any time; their calls need the ClusterClient.
// Threading: any thread may use a ClusterClient; one thread at a time may use a sequence.
#ifndef MLA_CLIENT_CPP_CLUSTER_CLUSTER_CLIENT_H_
#define MLA_CLIENT_CPP_CLUSTER_CLUSTER_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/cpp/client.h"
#include "client/cpp/cluster/cluster_sequence.h"
#include "client/cpp/cluster/members.h"
#include "client/cpp/cluster/owners.h"
#include "client/cpp/cluster/placement.h"
#include "client/cpp/cluster/registry.h"
#include "client/cpp/same_host.h"
#include "client/cpp/shared_memory/home.h"

namespace mla::client {

class ClusterSession;

// At most this number of servers is tried for a new sequence, the probed ones included.
inline constexpr size_t kMostTried = 16;
// A server that has left the registry, or whose sequence is to be recovered, has so long to answer.
inline constexpr double kGoneSeconds = 1.0;

struct ClusterOptions {
  // Address of the server for sequences that share nothing; empty: by the client_id.
  std::string home;
  // The number of servers that this worker uses while they have room; 0: all. A server has no more
  // connections than its share of the workers.
  size_t subset = 8;
  Costs costs;
  double keep_s = 600;     // how long members are used while the registry does not answer
  double refresh_s = 1.0;  // how often the registry is read
  // Servers of this host are reached by the unix sockets that the registry has; without TLS only.
  bool same_host = true;
  // Paths of this host's sockets, with wildcards as in glob(7) ("/run/mla/*.sock"). Servers of this
  // host are then reached by these sockets, whatever the registry says, also with TLS. Calls over a
  // socket have the tenant that the server gives to the socket's users (server.unix_tenant). Empty:
  // none.
  std::string sockets = {};
  EtcdFiles etcd;
  // Called for each server before a model is used there, after what was uploaded so far: for
  // weights that are to be read again instead of being kept.
  std::function<absl::Status(Client* server, const v1::ModelSpec& model)> on_peer;
};

// Says what became of a sequence that was recovered. `how` is "alive": its server has it as before;
// "moved": a drain has moved it; "checkpoint"; "peer": from rows that another server had; "none":
// all rows are to be sent again.
struct Recovery {
  std::string how, address;
  uint64_t rows = 0;  // that it has
  uint64_t lost = 0;  // that it had before and has not now
};

class ClusterClient final {
 public:
  // Reads the registry, and connects to servers when they are needed. `options` are of the
  // connection to each server. INVALID_ARGUMENT: the target is not one of a cluster
  // (NamesCluster). UNAVAILABLE: the registry did not answer. FAILED_PRECONDITION: "forked".
  static absl::StatusOr<std::unique_ptr<ClusterClient>> Connect(const std::string& target,
                                                                const ClientOptions& options,
                                                                const ClusterOptions& cluster = {});
  ~ClusterClient();
  ClusterClient(const ClusterClient&) = delete;
  ClusterClient& operator=(const ClusterClient&) = delete;

  const std::string& client_id() const { return options_.client_id; }
  absl::StatusOr<std::vector<Member>> Members() const { return members_->All(); }
  // Returns the address of this worker's home.
  absl::StatusOr<std::string> Home();
  // Returns the client of a server, connected if it was not. It lives until the server is given up.
  absl::StatusOr<std::shared_ptr<Client>> ServerAt(const std::string& address);
  // Asks the server that is the home now (Client::Probe).
  absl::StatusOr<v1::ProbeReply> ProbeHome(const std::string& model_id, const v1::Prefix& prefix);
  // Returns the info of the server that is the home now, which is asked whether it still runs.
  absl::StatusOr<v1::GetServerInfoReply> HomeInfo();

  // --- Models. Each is registered with a server when a sequence comes there first.
  // Registers the model as Client does: on the home now, or on another server if the home does not
  // answer. A repeat renews the lease on all servers that have the model, and gives them what it
  // sets of the other arguments. What was uploaded is sent again only to servers that had
  // unregistered the model.
  absl::StatusOr<v1::RegisterReply> RegisterModel(const v1::ModelSpec& model, uint32_t lease_ms = 0,
                                                  std::span<const float> kv_scales = {},
                                                  std::span<const float> sinks = {});
  static constexpr char kScales[] = "scales";
  absl::StatusOr<v1::ModelSpec> RegisteredModel(const std::string& model_id) const;
  // Calls `upload` for each server that has the model now, and for others when they get it. A
  // repeat about the same replaces the one before, and a registration that sets scales replaces
  // uploads about kScales. What it refers to must stay until the model is unregistered. Fails if no
  // server took it.
  absl::Status Upload(const std::string& model_id, const std::string& about,
                      std::function<absl::Status(Client* server)> upload);
  absl::Status UnregisterModel(const std::string& model_id);

  // --- Sequences
  // As Client's, on the server where it costs least. `last`: address of the server that had the
  // conversation before; empty: what this client remembers.
  absl::StatusOr<ClusterSequence> OpenSequence(const std::string& model_id,
                                               const v1::Prefix& prefix = {},
                                               v1::PrefixMatch* match = nullptr,
                                               const std::string& last = "");
  // Attaches to a sequence that is open on some server. NOT_FOUND if none that answers has it.
  absl::StatusOr<ClusterSequence> Attach(const std::string& model_id, uint64_t id);
  // Goes on with a sequence whose server has failed, drained or restarted: the object is the same;
  // its server, id, epoch and length may be others. Rows from its length on are to be sent again.
  // `prefix` says what its rows stand for, as far as the caller knows. Tries, in this order: where
  // it was, where a drain has moved it, its checkpoint, rows of a peer, nothing.
  absl::StatusOr<Recovery> Recover(ClusterSequence* sequence, const v1::Prefix& prefix = {});
  // Renews the leases on all servers that were used; returns the number of renewed leases. Returns
  // the first error after all were asked.
  absl::StatusOr<uint64_t> RenewLeases();

  // Opens streams where steps need them. `home`: address of the server whose memory the session has
  // (Allocate); empty: this worker's home. A worker whose steps go to several servers at the same
  // time has a session for each, so that no tensor is copied.
  std::unique_ptr<ClusterSession> OpenSession(const std::string& home = "");

  struct Counts {
    uint64_t opened = 0, asked = 0, spilled = 0, recovered = 0;
  };
  Counts counts() const;

 private:
  friend class ClusterSequence;
  friend class ClusterSession;
  friend class ClusterStep;
  friend class SequenceRecovery;

  // A sequence that is to be placed: what is known before any server is asked.
  struct Turn {
    ModelRecord* model = nullptr;
    std::vector<std::string> everyone,
        addresses;  // usable servers, and this worker's share of them
    Fills fills;
    std::string home, last;
    std::optional<std::string> key;  // absent: the prefix says nothing
  };

  ClusterClient(ClientOptions options, ClusterOptions cluster, std::unique_ptr<Registry> registry);
  absl::StatusOr<std::unique_ptr<Client>> ConnectTo(const Member& member) const;
  void Gone(const std::vector<std::string>& addresses);
  absl::StatusOr<std::vector<Member>> Usable();
  std::string HomeAmong(const std::vector<std::string>& addresses) const;
  // Calls `act` with the home, and again if the home has just restarted or gone.
  absl::Status AtHome(const std::function<absl::Status(Client* home)>& act);
  absl::StatusOr<std::shared_ptr<ModelRecord>> FindModel(const std::string& id) const;
  absl::Status Ensure(Connection* connection, ModelRecord* model);
  absl::StatusOr<std::shared_ptr<Connection>> WithModel(const std::string& address,
                                                        ModelRecord* model);
  // Connects to the server and calls `act`, again if another process answers now.
  absl::StatusOr<std::shared_ptr<Connection>> Reach(
      const std::string& address, const std::function<absl::Status(Connection*)>& act);
  absl::Status OnPeer(Client* server, const ModelRecord& model) const;
  absl::StatusOr<v1::RegisterReply> RegisterAt(const std::string& address, ModelRecord* model);
  // The terms that a repeated registration sets, and the terms that then hold.
  struct Repeat {
    const ModelRecord::Terms& set;
    const ModelRecord::Terms& newest;
  };
  // Repeats the registration on a server, which gets the model if it does not have it.
  absl::StatusOr<v1::RegisterReply> RepeatAt(const std::string& address, const Repeat& repeat,
                                             ModelRecord* model);
  // Repeats the registration on the servers that have the model, except for `done`. Returns the
  // first error of a server that answers, after all were asked.
  absl::Status RepeatElsewhere(const std::string& done, const Repeat& repeat, ModelRecord* model);
  void Keep(const std::shared_ptr<ModelRecord>& record, const Repeat& terms,
            const v1::RegisterReply& reply);
  absl::StatusOr<ClusterSequence> OpenAt(const std::string& address, ModelRecord* model,
                                         const v1::Prefix& prefix, v1::PrefixMatch* match);
  absl::StatusOr<ClusterSequence> AttachAt(const std::string& address, ModelRecord* model,
                                           uint64_t id);
  absl::StatusOr<Turn> Begin(ModelRecord* model, const v1::Prefix& prefix, const std::string& last);
  bool GoesHome(const Turn& turn) const;
  std::vector<Choice> Choices(const Turn& turn, const v1::Prefix& prefix);

  // Attaches at the server to which drains have moved the sequence from `address`.
  absl::StatusOr<ClusterSequence> AttachFrom(std::string address, ModelRecord* model, uint64_t id);
  // Moves a sequence to where its own server says that it is; false if it does not say so.
  bool Follow(ClusterSequence* sequence);

  const class Home process_;
  ClientOptions options_;
  const ClusterOptions cluster_;
  const std::unique_ptr<Registry> registry_;
  Marks marks_;
  mutable Mutex mutex_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  Counts counts_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<ModelRecord>> models_ ABSL_GUARDED_BY(mutex_);
  // Models that were registered again in another form; connections know records by their place.
  std::vector<std::shared_ptr<ModelRecord>> old_models_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<SameHost> same_host_;
  std::unique_ptr<Owners> owners_;
  std::unique_ptr<MemberList> members_;  // its thread uses the others
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_CLUSTER_CLIENT_H_
