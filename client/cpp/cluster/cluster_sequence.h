// One open sequence of a cluster, and the server that has it.
//
// Calls go to that server. When it says that a drain has moved the sequence, the call is made again
// at the sequence's new server, where the object is from then on.
#ifndef MLA_CLIENT_CPP_CLUSTER_CLUSTER_SEQUENCE_H_
#define MLA_CLIENT_CPP_CLUSTER_CLUSTER_SEQUENCE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/cluster/owners.h"

namespace mla::client {

class ClusterClient;

// One call follows a sequence through at most this many moves. More moves than this in one call are
// not the work of drains.
inline constexpr int kMostMoves = 3;

// The destructor releases the sequence at its server, unless Detach was called or its connection
// was given up. It does not look for a sequence that has moved: that one's lease ends.
class ClusterSequence final {
 public:
  ClusterSequence(ClusterSequence&&) noexcept = default;
  ClusterSequence& operator=(ClusterSequence&& other) noexcept;
  ~ClusterSequence();

  uint64_t id() const { return sequence_->id(); }
  uint64_t epoch() const { return sequence_->epoch(); }
  uint64_t length() const { return sequence_->length(); }
  const std::string& model_id() const { return model_id_; }
  const std::string& address() const { return connection_->address(); }
  // Returns the client of its server, for calls that concern that server alone: exports,
  // checkpoints, hints. It lives as long as this sequence stays on that server.
  Client* server() const { return connection_->client(); }
  // Returns true if the server was given up: only Recover helps.
  bool lost() const { return connection_->dropped(); }

  // These are the calls of Sequence. They follow moves, for which the ClusterClient must still be
  // there.
  absl::StatusOr<ClusterSequence> Fork(std::optional<uint64_t> length = std::nullopt);
  absl::StatusOr<v1::PrefixMatch> Match(const v1::Prefix& prefix, uint64_t first_row = 0);
  absl::Status Truncate(uint64_t length);
  absl::StatusOr<Sequence::Tail> ReadTail();
  absl::Status Refresh();
  absl::Status Release();
  void Detach();

 private:
  friend class ClusterClient;
  friend class ClusterSession;
  friend class ClusterStep;
  friend class SequenceRecovery;
  ClusterSequence(ClusterClient* client, std::shared_ptr<Connection> connection, Sequence sequence,
                  std::string model_id);
  // Is `other` from now on; what it was stays on its server.
  void Become(ClusterSequence other);
  // Makes the call where the sequence is; `call` gets the sequence of its server.
  template <typename Result, typename Call>
  Result WhereItIs(Call call);

  ClusterClient* client_;
  std::shared_ptr<Connection> connection_;
  std::unique_ptr<Sequence> sequence_;  // its place stays when this object is moved
  std::string model_id_;
  bool held_ = true;  // neither released nor detached
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_CLUSTER_SEQUENCE_H_
