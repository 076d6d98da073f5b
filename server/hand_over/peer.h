// The server that gets the sequences of a drain, as HandOver sees it. It is either a server that is
// reached over gRPC (grpc_peer.h), or one that a test has made.
//
// Threading: one call at a time, except that any thread may call Cancel.
#ifndef MLA_SERVER_HAND_OVER_PEER_H_
#define MLA_SERVER_HAND_OVER_PEER_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mla/v1/admin.pb.h"
#include "mla/v1/cache.pb.h"
#include "mla/v1/model.pb.h"
#include "server/hand_over/weights_sender.h"
#include "server/pages/page_transfer.h"

namespace mla::server {

// The result of an import or of an upload of weights at the peer, as far as this server knows it.
template <typename Reply>
struct PeerAnswer {
  absl::Status status;   // OK: the peer says that it has all that was sent
  Reply reply;           // valid if the status is OK
  bool refused = false;  // the peer refused and keeps nothing
  // All was sent. Unless `refused` is true, the peer may have it then, whatever `status` says. A
  // repeat of weights does no harm.
  bool sent = false;
};
using PeerImport = PeerAnswer<v1::ImportReply>;
using PeerWeights = PeerAnswer<v1::UploadWeightsReply>;

class HandOverPeer {
 public:
  // Passes all parts of a sequence to the sink, and returns its own error or the sink's.
  using SendParts = std::function<absl::Status(const PartSink&)>;

  // Waits until the peer has accepted the header of the call. CANCELLED if the peer has ended it.
  using Accepted = std::function<absl::Status()>;
  // Passes all messages of an upload of weights to the sink, and returns its own error or one of
  // these two. May call the second one once, after the header, if that has an attempt.
  using SendMessages = std::function<absl::Status(const WeightsSink&, const Accepted&)>;

  virtual ~HandOverPeer() = default;

  // UNAVAILABLE if the peer cannot be reached; PERMISSION_DENIED if its certificate is revoked.
  virtual absl::Status GetInfo(v1::GetServerInfoReply* info) = 0;
  // Returns the bytes of KV cache that are free at the peer; an error unless the peer accepts this
  // server as an operator.
  virtual absl::StatusOr<uint64_t> FreeBytes() = 0;
  // Calls Cache.Import. Sends the parts that `send` produces.
  virtual PeerImport Import(const v1::ImportTarget& target, const SendParts& send) = 0;
  // Calls Models.UploadWeights. Sends the messages that `send` produces, fewer if the peer has the
  // weights already.
  virtual PeerWeights UploadWeights(const SendMessages& send) = 0;
  // Calls Admin.EvictSequences for what an import may have left at the peer. Works even after
  // Cancel. Returns the number of sequences evicted.
  virtual absl::StatusOr<uint32_t> Recall(const v1::EvictSequencesRequest& request) = 0;
  // Ends the present call with CANCELLED, and all later ones except Recall.
  virtual void Cancel() = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_PEER_H_
