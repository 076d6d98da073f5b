#include "server/hand_over/grpc_peer.h"

#include <grpc/compression.h>
#include <grpc/grpc_security_constants.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/auth_context.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/wire/calls/stream_call.h"
#include "proto/wire/grpc_tuning.h"
#include "proto/wire/nested_payload.h"
#include "server/grpc/grpc_status.h"

namespace mla::server {
namespace {

using std::chrono::milliseconds;

// Time limit of calls to the peer that carry no rows.
constexpr auto kCallTime = milliseconds(5000);
constexpr auto kRecallTime = milliseconds(1000);  // a drain that is cancelled waits for this
// Time between pings of a connection, and for the answer to a ping.
constexpr int kKeepaliveMs = 10000;
// Size limit of its replies. Its information about itself is the largest reply, a few thousand
// bytes. A parsed message may take 40 times its size, and parsing has no deadline.
constexpr int kMostReplyBytes = 256 << 10;
constexpr char kUnknownReason[] = "peer_failed";
constexpr char kImport[] = "/mla.v1.Cache/Import";
constexpr char kUploadWeights[] = "/mla.v1.Models/UploadWeights";
void SetDeadline(grpc::ClientContext* context, milliseconds time = kCallTime) {
  context->set_deadline(std::chrono::system_clock::now() + time);
}

// A peer may send any number as the code of its status.
absl::StatusCode CodeOf(const grpc::Status& status) {
  const int code = status.error_code();
  const bool known = code > 0 && code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  return known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown;
}

absl::Status Cancelled() {
  return MakeError(absl::StatusCode::kCancelled, "the drain has ended before its turn",
                   {.reason = "stopped"});
}

}  // namespace

std::string PrintablePeerMessage(absl::string_view message) {
  const bool cut = message.size() > kMostPeerMessageBytes;
  std::string text(message.substr(0, kMostPeerMessageBytes));
  for (char& c : text) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  }
  return cut ? absl::StrCat(text, "...") : text;
}

std::string PeerReason(absl::string_view reason) {
  const bool token = !reason.empty() && reason.size() <= kMostPeerReasonBytes &&
                     std::all_of(reason.begin(), reason.end(), [](char c) {
                       return absl::ascii_islower(static_cast<unsigned char>(c)) ||
                              absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '_';
                     });
  return token ? std::string(reason) : kUnknownReason;
}

GrpcHandOverPeer::GrpcHandOverPeer(const TlsFiles& tls, const std::string& address) : tls_(tls) {
  const std::shared_ptr<const TlsMaterial> files = tls.current();
  grpc::SslCredentialsOptions ssl;
  ssl.pem_root_certs = files->client_ca;
  ssl.pem_cert_chain = files->cert;
  ssl.pem_private_key = files->key;
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMostReplyBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, wire::kStreamWindowBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Nothing is decompressed, because a message can grow a thousandfold before its size can be
  // checked.
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE);
  // Connects directly to the address that the operator gave, even if the environment names a proxy.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  channel_ = grpc::CreateCustomChannel(address, grpc::SslCredentials(ssl), arguments);
  admin_ = v1::Admin::NewStub(channel_);
}

absl::Status GrpcHandOverPeer::StatusOf(const grpc::Status& status,
                                        const grpc::ClientContext& context, bool* refused) const {
  *refused = false;
  if (status.ok()) {
    const auto peer = context.auth_context();
    for (const char* const property :
         {GRPC_X509_PEM_CERT_PROPERTY_NAME, GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME}) {
      for (const grpc::string_ref& pem : peer->FindPropertyValues(property)) {
        if (!tls_.IsRevoked(std::string(pem.data(), pem.size()))) continue;
        return MakeError(
            absl::StatusCode::kPermissionDenied, "its certificate is revoked",
            {.limit = "a server whose certificate is not revoked", .reason = "peer_revoked"});
      }
    }
    return absl::OkStatus();
  }
  const absl::StatusCode code = CodeOf(status);
  const std::string message = PrintablePeerMessage(status.error_message());
  const auto& trailing = context.GetServerTrailingMetadata();
  const auto entry = trailing.find(kErrorDetailKey);
  v1::ErrorDetail sent;
  if (entry == trailing.end() ||
      !sent.ParseFromArray(entry->second.data(), static_cast<int>(entry->second.size()))) {
    return MakeError(code, message, {.reason = kUnknownReason});
  }
  *refused = true;
  return MakeError(code, message, {.reason = PeerReason(sent.reason())});
}

bool GrpcHandOverPeer::Begin(grpc::ClientContext* context) {
  const MutexLock lock(mutex_);
  if (!cancelled_) running_ = context;
  return !cancelled_;
}

void GrpcHandOverPeer::End() {
  const MutexLock lock(mutex_);
  running_ = nullptr;
}

void GrpcHandOverPeer::Cancel() {
  const MutexLock lock(mutex_);
  cancelled_ = true;
  if (running_ != nullptr) running_->TryCancel();
}

absl::Status GrpcHandOverPeer::GetInfo(v1::GetServerInfoReply* info) {
  grpc::ClientContext context;
  SetDeadline(&context);
  if (!Begin(&context)) return Cancelled();
  bool refused = false;
  const grpc::Status status = admin_->GetServerInfo(&context, {}, info);
  End();
  return StatusOf(status, context, &refused);
}

absl::StatusOr<uint64_t> GrpcHandOverPeer::FreeBytes() {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::GetQuotaReply quota;
  if (!Begin(&context)) return Cancelled();
  bool refused = false;
  const grpc::Status status = admin_->GetQuota(&context, {}, &quota);
  End();
  absl::Status asked = StatusOf(status, context, &refused);
  // Only operators see the use of the whole server, and every answer to an operator has it.
  if (!asked.ok()) return asked;
  if (quota.server_size() == 0) {
    return MakeError(absl::StatusCode::kPermissionDenied,
                     "it does not take this server for an operator", {.reason = "peer_refuses"});
  }
  for (const v1::QuotaUsage& usage : quota.server()) {
    if (usage.resource() != v1::QUOTA_RESOURCE_KV_BYTES) continue;
    return usage.bound() - std::min(usage.used(), usage.bound());
  }
  return 0;  // it does not say
}

GrpcHandOverPeer::Sent GrpcHandOverPeer::Stream(
    const char* method,
    const std::function<absl::Status(Outgoing&, const grpc::ClientContext&)>& send,
    google::protobuf::MessageLite* reply) {
  Sent result;
  grpc::ClientContext context;
  if (!Begin(&context)) {
    result.answer = result.sent = Cancelled();
    return result;
  }
  wire::StreamCall call(channel_, &context, method);
  Outgoing out(&call, &buffers_);
  result.sent = send(out, context);
  result.broken_off = !result.sent.ok() && out.open();
  // If this server could not send everything, what it has sent must not look complete.
  if (result.broken_off) context.TryCancel();
  const grpc::Status answer = call.FinishWith(reply);
  End();
  result.accepted = answer.ok();
  result.answer = StatusOf(answer, context, &result.refused);
  if (result.broken_off) {
    result.refused = false;
    result.answer = result.sent;
  }
  return result;
}

absl::Status GrpcHandOverPeer::Outgoing::Send(const google::protobuf::MessageLite& message,
                                              bool more) {
  open_ = open_ && call_->Write(message, more);
  return AnyError();
}

absl::Status GrpcHandOverPeer::Outgoing::SendPayload(std::span<const int> path,
                                                     const google::protobuf::MessageLite& inside,
                                                     std::string* payload) {
  wire::EncodeNested(path, inside, payload->size(), &header_);
  const grpc::Slice slices[] = {grpc::Slice(header_), buffers_->SliceOf(payload)};
  open_ = open_ && call_->Write(grpc::ByteBuffer(slices, std::size(slices)));
  return AnyError();
}

absl::Status GrpcHandOverPeer::Outgoing::Accepted(const grpc::ClientContext& context) {
  open_ = open_ && call_->AwaitInitialMetadata() &&
          context.GetServerInitialMetadata().contains(kAcceptedKey);
  return AnyError();
}

absl::Status GrpcHandOverPeer::Outgoing::AnyError() const {
  if (open_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kCancelled, "the peer has ended the call",
                   {.reason = kUnknownReason});
}

PeerImport GrpcHandOverPeer::Import(const v1::ImportTarget& target, const SendParts& send) {
  PeerImport result;
  const Sent sent = Stream(
      kImport,
      [&](Outgoing& out, const grpc::ClientContext&) {
        v1::ImportRequest message;
        *message.mutable_target() = target;
        MLA_RETURN_IF_ERROR(out.Send(message, /*more=*/true));
        return send([&](v1::PagesPart& part) {
          if (part.has_chunk() && !part.chunk().payload().empty()) {
            return out.SendPayload(kImportRowsPath, v1::PageChunk(),
                                   part.mutable_chunk()->mutable_payload());
          }
          message.mutable_part()->Swap(&part);
          return out.Send(message, /*more=*/!message.part().has_trailer());
        });
      },
      &result.reply);
  result.refused = sent.refused;
  result.sent = sent.sent.ok() || sent.accepted;
  result.status = sent.answer.ok() ? sent.sent : sent.answer;
  return result;
}

PeerWeights GrpcHandOverPeer::UploadWeights(const SendMessages& send) {
  PeerWeights result;
  // A peer that has the weights already answers before all of them were sent. A chunk is never
  // empty, so that its payload can go as it is.
  const Sent sent = Stream(
      kUploadWeights,
      [&](Outgoing& out, const grpc::ClientContext& context) {
        std::string payload;
        return send(
            [&](v1::UploadWeightsRequest& message) {
              if (!message.has_chunk()) return out.Send(message, /*more=*/false);
              message.mutable_chunk()->mutable_payload()->swap(payload);
              message.mutable_chunk()->clear_payload();
              absl::Status sent = out.SendPayload(kWeightsPath, message.chunk(), &payload);
              message.mutable_chunk()->mutable_payload()->swap(payload);
              return sent;
            },
            [&] { return out.Accepted(context); });
      },
      &result.reply);
  result.status = sent.answer;
  result.refused = sent.refused;
  return result;
}

absl::StatusOr<uint32_t> GrpcHandOverPeer::Recall(const v1::EvictSequencesRequest& request) {
  grpc::ClientContext context;
  SetDeadline(&context, kRecallTime);
  v1::EvictSequencesReply reply;
  bool refused = false;
  const grpc::Status status = admin_->EvictSequences(&context, request, &reply);
  MLA_RETURN_IF_ERROR(StatusOf(status, context, &refused));
  return reply.evicted();
}

std::vector<HandOverTarget> GrpcTargets(const TlsFiles& tls,
                                        const std::vector<std::string>& addresses,
                                        int32_t streams) {
  std::vector<HandOverTarget> targets;
  for (const std::string& address : addresses) {
    HandOverTarget& target = targets.emplace_back();
    target.address = address;
    for (int32_t i = 0; i < streams; ++i) {
      target.streams.push_back(std::make_unique<GrpcHandOverPeer>(tls, address));
    }
  }
  return targets;
}

}  // namespace mla::server
