// Brings a lost sequence back: one whose server has failed, drained or restarted.
//
// It tries the ways that keep most rows first: the server that has the sequence after all; where a
// drain has moved it; its checkpoint; the rows that another server has of its prefix; an empty
// sequence, whose rows the worker sends again.
#ifndef MLA_CLIENT_CPP_CLUSTER_RECOVERY_H_
#define MLA_CLIENT_CPP_CLUSTER_RECOVERY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/cluster/cluster_client.h"
#include "client/cpp/cluster/owners.h"

namespace mla::client {

// Recovers one sequence, once. Threading: only the thread that uses the sequence.
class SequenceRecovery final {
 public:
  // All must live as long as this object. `prefix` says what the sequence's rows stand for.
  SequenceRecovery(ClusterClient* cluster, ModelRecord* model, const v1::Prefix& prefix,
                   ClusterSequence* sequence)
      : cluster_(cluster), model_(model), prefix_(prefix), sequence_(sequence) {}

  // As ClusterClient::Recover.
  absl::StatusOr<Recovery> Run();

 private:
  // The ways to recover, tried in this order. Each makes the sequence another one and returns true,
  // or leaves it as it was.
  bool Alive();
  bool Moved();
  bool Checkpoint();
  bool Restore(const std::string& address);  // from a checkpoint that this server has
  // Fetches the rows that `holder` has of the prefix to server `to`.
  bool Fetch(const std::string& holder, const std::string& destination);
  // Opens the sequence again, with the rows of a peer or with none.
  absl::Status OpenAgain();
  // Tells the old server, if it is there after all, that it need not keep the sequence until the
  // lease ends.
  void Forget();

  ClusterClient* const cluster_;
  ModelRecord* const model_;
  const v1::Prefix& prefix_;
  ClusterSequence* const sequence_;
  bool silent_ = false;  // its server did not answer
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_RECOVERY_H_
