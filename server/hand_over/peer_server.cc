#include "server/hand_over/peer_server.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

constexpr char kCapability[] = "hand_over";
// A server with this capability takes weights for other tenants. Release 0.1.0 lacks it.
constexpr char kWeightsCapability[] = "hand_over_weights";
constexpr char kPartsCapability[] = "hand_over_weight_parts",
               kSinksCapability[] = "hand_over_sinks";
// A server with this capability takes version 3 of the page-group format. Release 0.1.0 lacks it.
constexpr char kXxh3Capability[] = "pages_xxh3";

bool Has(const v1::GetServerInfoReply& info, absl::string_view capability) {
  const auto& tokens = info.capabilities();
  return std::find(tokens.begin(), tokens.end(), capability) != tokens.end();
}

std::pair<std::string, std::string> KeyOf(const scheduler::HeldWeights& model) {
  return {model.tenant, model.spec->id};
}

}  // namespace

int64_t PeerChunkBytes(const v1::GetServerInfoReply& info) {
  const uint64_t taken = info.limits().weight_chunk_bytes();
  if (taken == 0) return kSentChunkBytes;  // it does not say
  return static_cast<int64_t>(std::clamp(taken, kLeastPeerChunkBytes, kMostPeerChunkBytes));
}

PeerServer::PeerServer(std::string address, std::string field,
                       std::vector<std::unique_ptr<HandOverPeer>> streams)
    : address_(std::move(address)), field_(std::move(field)), streams_(std::move(streams)) {
  const MutexLock lock(mutex_);
  // The first one is taken first.
  for (auto stream = streams_.rbegin(); stream != streams_.rend(); ++stream) {
    free_.push_back(stream->get());
  }
  streams_left_ = streams_.size();
}

absl::Status PeerServer::Refuse(absl::StatusCode code, const std::string& why,
                                const std::string& limit, const std::string& reason) const {
  return MakeError(code, absl::StrCat(field_, ": ", address_, ": ", why),
                   {.field = field_, .got = address_, .limit = limit, .reason = reason});
}

absl::Status PeerServer::CheckBootId(uint64_t boot_id) const {
  if (boot_id_ == 0 || boot_id == boot_id_) return absl::OkStatus();
  return Refuse(absl::StatusCode::kUnavailable,
                "another server answers there by now, or it has restarted",
                "the server that was asked first", "peer_changed");
}

absl::Status PeerServer::Check(uint64_t own_boot_id) {
  HandOverPeer& stream = *streams_.front();
  v1::GetServerInfoReply info;
  const absl::Status answers = stream.GetInfo(&info);
  MLA_RETURN_IF_ERROR(Answered(answers, info));
  if (info.boot_id() == own_boot_id) {
    return Refuse(absl::StatusCode::kInvalidArgument, "this server itself", "another server",
                  "out_of_range");
  }
  if (info.boot_id() == 0) {
    return Refuse(absl::StatusCode::kUnavailable, "it does not say which start it is of",
                  "a server with a boot id", "peer_failed");
  }
  if (!Has(info, kCapability)) {
    return Refuse(absl::StatusCode::kUnimplemented, "it takes no sequences",
                  "a server with the capability hand_over", "peer_too_old");
  }
  boot_id_ = info.boot_id();
  // TLS authenticates the bytes, so the digests are only for damage.
  if (Has(info, kXxh3Capability)) send_.digests = DigestKind::kXxh3;
  send_.chunk_bytes = PeerChunkBytes(info);
  takes_weights_ = Has(info, kWeightsCapability);
  takes_parts_ = Has(info, kPartsCapability);
  takes_sinks_ = Has(info, kSinksCapability);
  const absl::StatusOr<uint64_t> room = stream.FreeBytes();
  if (!room.ok()) {
    return Refuse(room.status().code(), std::string(room.status().message()),
                  "a server that has this one among its server.operators", "peer_refuses");
  }
  const MutexLock lock(mutex_);
  free_bytes_ = static_cast<int64_t>(std::min<uint64_t>(*room, INT64_MAX));
  return absl::OkStatus();
}

absl::Status PeerServer::Answered(const absl::Status& status,
                                  const v1::GetServerInfoReply& info) const {
  if (status.ok()) return CheckBootId(info.boot_id());
  const ErrorDetail& detail = DetailOf(status);
  if (detail.reason == "stopped") return status;
  const std::string why(status.message());
  if (detail.reason == "peer_revoked") {
    return Refuse(status.code(), why, detail.limit, detail.reason);
  }
  return Refuse(absl::StatusCode::kUnavailable, why, "a server that answers over TLS",
                "peer_unreachable");
}

absl::Status PeerServer::Ask(HandOverPeer& stream) const {
  v1::GetServerInfoReply info;
  const absl::Status status = stream.GetInfo(&info);
  return Answered(status, info);
}

absl::Status PeerServer::CheckAnswer(const scheduler::SequenceInfo& sequence,
                                     const v1::ImportReply& reply) const {
  MLA_RETURN_IF_ERROR(CheckBootId(reply.boot_id()));
  const v1::SequenceInfo& there = reply.sequence();
  if (there.sequence_id() == sequence.id && std::cmp_equal(there.length(), sequence.length)) {
    return absl::OkStatus();
  }
  return Refuse(
      absl::StatusCode::kDataLoss,
      absl::StrCat("it has taken ", there.length(), " rows as sequence ", there.sequence_id()),
      "all rows, under the id that they have here", "peer_failed");
}

// ------------------------------------------------------------------------------------- Streams

HandOverPeer* PeerServer::Take(bool waits) {
  MutexLock lock(mutex_);
  changed_.Wait(lock, [this, waits]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !waits || cancelled_ || !free_.empty();
  });
  if (cancelled_ || free_.empty()) return nullptr;
  HandOverPeer* const stream = free_.back();
  free_.pop_back();
  return stream;
}

void PeerServer::Return(HandOverPeer* stream) {
  if (stream == nullptr) return;
  const MutexLock lock(mutex_);
  free_.push_back(stream);
  changed_.NotifyAll();
}

bool PeerServer::Use::End() {
  const MutexLock lock(server_.mutex_);
  if (stream_ == nullptr || server_.streams_left_ == 1) return false;
  --server_.streams_left_;
  stream_ = nullptr;
  return true;
}

void PeerServer::Cancel() {
  const MutexLock lock(mutex_);
  cancelled_ = true;
  for (const auto& stream : streams_) stream->Cancel();
  changed_.NotifyAll();
}

// ---------------------------------------------------------------------------------------- Room

int64_t PeerServer::free_bytes() const {
  const MutexLock lock(mutex_);
  return free_bytes_;
}

void PeerServer::Promise(int64_t bytes) {
  const MutexLock lock(mutex_);
  free_bytes_ -= bytes;
}

void PeerServer::SetFull() {
  const MutexLock lock(mutex_);
  free_bytes_ = std::min<int64_t>(free_bytes_, 0);
}

// ------------------------------------------------------------------------------------- Weights

bool PeerServer::BeginWeights(const scheduler::HeldWeights& model) {
  MutexLock lock(mutex_);
  const auto [state, first] = weights_.try_emplace(KeyOf(model), Weights::kSending);
  if (first) return true;
  changed_.Wait(lock, [this, &state = state->second]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return cancelled_ || state == Weights::kSent;
  });
  return false;
}

void PeerServer::EndWeights(const scheduler::HeldWeights& model) {
  const MutexLock lock(mutex_);
  weights_[KeyOf(model)] = Weights::kSent;
  changed_.NotifyAll();
}

// ---------------------------------------------------------------------------- What was given up

void PeerServer::GiveUp(v1::EvictSequencesRequest request) {
  const MutexLock lock(mutex_);
  abandoned_.push_back(std::move(request));
}

bool PeerServer::Recall(HandOverPeer& stream, HandOverCounters* counters) {
  while (true) {
    v1::EvictSequencesRequest request;
    {
      const MutexLock lock(mutex_);
      if (abandoned_.empty()) return true;
      request = std::move(abandoned_.back());
      abandoned_.pop_back();
    }
    const absl::StatusOr<uint32_t> evicted = stream.Recall(request);
    Log(LogLevel::kWarning, "taken_back",
        {{"tenant", request.tenant()},
         {"sequence", request.sequence_ids(0)},
         {"from", address_},
         {"evicted", evicted.ok() ? *evicted : 0},
         {"peer", evicted.ok() ? "" : std::string(evicted.status().message())}});
    if (!evicted.ok()) {
      GiveUp(std::move(request));
      return false;
    }
    ++counters->taken_back;
  }
}

void PeerServer::RecallAtLast(HandOverCounters* counters) { Recall(*streams_.front(), counters); }

}  // namespace mla::server
