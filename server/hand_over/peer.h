// The server that gets the sequences of a drain, as HandOver asks it. One over gRPC
// (grpc_peer.h), or one of a test.
//
// Threading: one call at a time, and Cancel from any thread.
#ifndef MLA_SERVER_HAND_OVER_PEER_H_
#define MLA_SERVER_HAND_OVER_PEER_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mla/v1/admin.pb.h"
#include "mla/v1/cache.pb.h"
#include "server/pages/page_transfer.h"

namespace mla::server {

// How an import at the peer has ended, as far as this server knows.
struct PeerImport {
  absl::Status status;    // OK: the peer says that it has the rows
  v1::ImportReply reply;  // valid if the status is OK
  bool refused = false;   // by the peer, which has nothing of it
  // All rows were sent. Unless it was refused, the peer may have the sequence, whatever `status`
  // says.
  bool sent = false;
};

class HandOverPeer {
 public:
  // Gives all parts of a sequence to the sink, and returns its error or its own.
  using SendParts = std::function<absl::Status(const PartSink&)>;

  virtual ~HandOverPeer() = default;

  // UNAVAILABLE where it cannot be reached, PERMISSION_DENIED where its certificate is revoked.
  virtual absl::Status GetInfo(v1::GetServerInfoReply* info) = 0;
  // OK if it takes this server for an operator.
  virtual absl::Status CheckOperator() = 0;
  // Cache.Import. Parts are sent as `send` gives them.
  virtual PeerImport Import(const v1::ImportTarget& target, const SendParts& send) = 0;
  // Admin.EvictSequences, of what an import may have left. Also after Cancel. The sequences that
  // have gone.
  virtual absl::StatusOr<uint32_t> Recall(const v1::EvictSequencesRequest& request) = 0;
  // Ends the present call with CANCELLED, and all later ones except Recall.
  virtual void Cancel() = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_PEER_H_
