// The peer of a hand-over over gRPC with mutual TLS. It uses the files of this server: its
// certificate as the client's, and tls.client_ca to check the peer's.
#ifndef MLA_SERVER_HAND_OVER_GRPC_PEER_H_
#define MLA_SERVER_HAND_OVER_GRPC_PEER_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/channel.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "mla/v1/admin.grpc.pb.h"
#include "proto/wire/calls/reused_bytes.h"
#include "proto/wire/calls/stream_call.h"
#include "server/connections/tls_files.h"
#include "server/hand_over/hand_over.h"
#include "server/hand_over/peer.h"

namespace mla::server {

// Bound of a peer's message, which goes into replies and logs of this server.
inline constexpr size_t kMostPeerMessageBytes = 512;
// Bound of a peer's reason token.
inline constexpr size_t kMostPeerReasonBytes = 64;

// Returns a peer's message in a form that is safe in logs and errors: printable ASCII, with '?' for
// each other byte. A message that is too long is cut, and ends with "...".
std::string PrintablePeerMessage(absl::string_view message);
// Returns `reason` if it consists of lower-case letters, digits and underscores, else
// "peer_failed".
std::string PeerReason(absl::string_view reason);

class GrpcHandOverPeer final : public HandOverPeer {
 public:
  // Reads the files now; the first call connects. Borrows tls.
  GrpcHandOverPeer(const TlsFiles& tls, const std::string& address);

  absl::Status GetInfo(v1::GetServerInfoReply* info) override;
  absl::StatusOr<uint64_t> FreeBytes() override;
  PeerImport Import(const v1::ImportTarget& target, const SendParts& send) override;
  PeerWeights UploadWeights(const SendMessages& send) override;
  absl::StatusOr<uint32_t> Recall(const v1::EvictSequencesRequest& request) override;
  void Cancel() override;

 private:
  // Sends the messages of a call to the peer. CANCELLED once the peer has ended the call.
  class Outgoing {
   public:
    Outgoing(wire::StreamCall* call, wire::ReusedBytes* buffers) : call_(call), buffers_(buffers) {}
    // `more`: another message follows at once.
    absl::Status Send(const google::protobuf::MessageLite& message, bool more);
    // Sends a message that proto/wire/nested_payload.h describes, without a copy of the payload.
    // Leaves other memory in `payload`, with any contents.
    absl::Status SendPayload(std::span<const int> path, const google::protobuf::MessageLite& inside,
                             std::string* payload);
    // Waits until the peer has said with its initial metadata that it accepts the first message.
    absl::Status Accepted(const grpc::ClientContext& context);
    bool open() const { return open_; }

   private:
    absl::Status AnyError() const;

    wire::StreamCall* const call_;
    wire::ReusedBytes* const buffers_;
    std::string header_;
    bool open_ = true;
  };
  // The end of a call that streamed messages to the peer.
  struct Sent {
    absl::Status answer;   // the peer's
    bool refused = false;  // the peer has done nothing
    // The call has ended with OK, which a peer whose certificate is revoked can answer, too.
    bool accepted = false;
    absl::Status sent;  // OK: all messages were sent
    // True if this server has ended the call because of `sent`. If it is false and `sent` is an
    // error, the peer has ended the call.
    bool broken_off = false;
  };
  Sent Stream(const char* method,
              const std::function<absl::Status(Outgoing&, const grpc::ClientContext&)>& send,
              google::protobuf::MessageLite* reply);
  // Returns the peer's answer; sets *refused if it has a detail, because then the peer has done
  // nothing.
  absl::Status StatusOf(const grpc::Status& status, const grpc::ClientContext& context,
                        bool* refused) const;
  // Between Begin and End, Cancel ends the call. Begin returns false if Cancel has been called
  // already.
  bool Begin(grpc::ClientContext* context);
  void End();

  const TlsFiles& tls_;
  wire::ReusedBytes buffers_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Admin::Stub> admin_;
  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* running_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

// Returns a target for each address, with `streams` streams. Borrows tls.
std::vector<HandOverTarget> GrpcTargets(const TlsFiles& tls,
                                        const std::vector<std::string>& addresses, int32_t streams);

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_GRPC_PEER_H_
