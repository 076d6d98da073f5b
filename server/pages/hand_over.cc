#include "server/pages/hand_over.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/auth_context.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "proto/wire/grpc_tuning.h"
#include "server/grpc/grpc_status.h"
#include "server/logging/logging.h"
#include "server/pages/page_transfer.h"

namespace mla::server {
namespace {

using scheduler::TenantSequence;
using std::chrono::milliseconds;

constexpr auto kPoll = milliseconds(10);
// Of calls to the peer that carry no rows.
constexpr auto kCallTime = milliseconds(5000);
constexpr auto kEvictTime = milliseconds(1000);  // a drain that is cancelled waits for it
// Between pings of a connection, and for the answer to one.
constexpr int kKeepaliveMs = 10000;
constexpr char kCapability[] = "hand_over";

void SetDeadline(grpc::ClientContext* context, milliseconds time = kCallTime) {
  context->set_deadline(std::chrono::system_clock::now() + time);
}

// What the peer has answered; *refused: with a detail, so it has done nothing.
absl::Status FromPeer(const grpc::Status& status, const grpc::ClientContext& context,
                      bool* refused) {
  *refused = false;
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  const auto& trailing = context.GetServerTrailingMetadata();
  const auto found = trailing.find(kErrorDetailKey);
  v1::ErrorDetail sent;
  if (found == trailing.end() ||
      !sent.ParseFromArray(found->second.data(), static_cast<int>(found->second.size()))) {
    return MakeError(code, status.error_message(), {.reason = "peer_failed"});
  }
  *refused = true;
  return MakeError(code, status.error_message(), {.reason = sent.reason()});
}

absl::Status RefusePeer(absl::StatusCode code, const std::string& address, const std::string& why,
                        const char* limit, const char* reason) {
  return MakeError(code, absl::StrCat("to: ", address, ": ", why),
                   {.field = "to", .got = address, .limit = limit, .reason = reason});
}

v1::HandedOver Outcome(const TenantSequence& sequence, v1::HandOverOutcome outcome,
                       const absl::Status& why = absl::OkStatus()) {
  v1::HandedOver to;
  to.set_tenant(sequence.tenant);
  to.set_sequence_id(sequence.info.id);
  to.set_outcome(outcome);
  to.set_rows(static_cast<uint64_t>(sequence.info.length));
  if (!why.ok()) {
    to.set_reason(DetailOf(why).reason);
    to.set_message(std::string(why.message()));
  }
  const bool moved = outcome == v1::HAND_OVER_OUTCOME_MOVED;
  Log(moved ? LogLevel::kInfo : LogLevel::kWarning, "handed_over",
      {{"outcome", v1::HandOverOutcome_Name(outcome)},
       {"tenant", to.tenant()},
       {"sequence", to.sequence_id()},
       {"rows", to.rows()},
       {"message", to.message()},
       {"reason", to.reason()}});
  return to;
}

absl::Status Stopped() {
  return MakeError(absl::StatusCode::kCancelled, "the drain has ended before its turn",
                   {.reason = "stopped"});
}

}  // namespace

HandOver::HandOver(scheduler::Engine* engine, const TlsFiles& tls, std::string address)
    : engine_(engine), tls_(tls), address_(std::move(address)) {
  const std::shared_ptr<const TlsMaterial> files = tls.current();
  grpc::SslCredentialsOptions ssl;
  ssl.pem_root_certs = files->client_ca;
  ssl.pem_cert_chain = files->cert;
  ssl.pem_private_key = files->key;
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, wire::kStreamWindowBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel = grpc::CreateCustomChannel(address_, grpc::SslCredentials(ssl), arguments);
  admin_ = v1::Admin::NewStub(channel);
  cache_ = v1::Cache::NewStub(channel);
}

HandOver::~HandOver() { Stop(); }

absl::StatusOr<std::unique_ptr<HandOver>> HandOver::Connect(scheduler::Engine* engine,
                                                            const TlsFiles& tls, uint64_t boot_id,
                                                            const std::string& address) {
  std::unique_ptr<HandOver> hand_over(new HandOver(engine, tls, address));
  absl::Status fit = hand_over->CheckPeer(boot_id);
  if (!fit.ok()) return fit;
  return hand_over;
}

absl::Status HandOver::CheckServer(const grpc::ClientContext& context, uint64_t boot_id) const {
  const auto peer = context.auth_context();
  for (const char* const property :
       {GRPC_X509_PEM_CERT_PROPERTY_NAME, GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME}) {
    for (const grpc::string_ref& pem : peer->FindPropertyValues(property)) {
      if (!tls_.IsRevoked(std::string(pem.data(), pem.size()))) continue;
      return RefusePeer(absl::StatusCode::kPermissionDenied, address_, "its certificate is revoked",
                        "a server whose certificate is not revoked", "peer_revoked");
    }
  }
  if (peer_boot_id_ == 0 || boot_id == peer_boot_id_) return absl::OkStatus();
  return RefusePeer(absl::StatusCode::kUnavailable, address_,
                    "another server answers there by now, or it has restarted",
                    "the server that was asked first", "peer_changed");
}

absl::Status HandOver::Ask(v1::GetServerInfoReply* info) {
  grpc::ClientContext context;
  SetDeadline(&context);
  if (!Begin(&context)) return Stopped();
  bool refused = false;
  const absl::Status status =
      FromPeer(admin_->GetServerInfo(&context, {}, info), context, &refused);
  End();
  if (status.ok()) return CheckServer(context, info->boot_id());
  return RefusePeer(absl::StatusCode::kUnavailable, address_, std::string(status.message()),
                    "a server that answers over TLS", "peer_unreachable");
}

absl::Status HandOver::CheckPeer(uint64_t boot_id) {
  v1::GetServerInfoReply info;
  if (absl::Status status = Ask(&info); !status.ok()) return status;
  if (info.boot_id() == boot_id) {
    return RefusePeer(absl::StatusCode::kInvalidArgument, address_, "this server itself",
                      "another server", "out_of_range");
  }
  const auto& tokens = info.capabilities();
  if (std::find(tokens.begin(), tokens.end(), kCapability) == tokens.end()) {
    return RefusePeer(absl::StatusCode::kUnimplemented, address_, "it takes no sequences",
                      "a server with the capability hand_over", "peer_too_old");
  }
  peer_boot_id_ = info.boot_id();
  // Operators alone may ask for all tenants.
  bool refused = false;
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::GetQuotaRequest all;
  all.set_all(true);
  v1::GetQuotaReply quotas;
  const absl::Status status = FromPeer(admin_->GetQuota(&context, all, &quotas), context, &refused);
  if (status.ok()) return status;
  return RefusePeer(status.code(), address_, std::string(status.message()),
                    "a server that has this one among its server.operators", "peer_refuses");
}

void HandOver::Start() { thread_ = std::thread(&HandOver::Run, this); }

void HandOver::Stop() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    if (running_ != nullptr) running_->TryCancel();
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

bool HandOver::Stopping() {
  const MutexLock lock(mutex_);
  return stop_;
}

bool HandOver::Begin(grpc::ClientContext* context) {
  const MutexLock lock(mutex_);
  if (!stop_) running_ = context;
  return !stop_;
}

void HandOver::End() {
  const MutexLock lock(mutex_);
  running_ = nullptr;
}

void HandOver::Run() {
  bool left = true;
  while (left && !Stopping()) {
    if (Pass(&left) || !left) continue;
    MutexLock lock(mutex_);
    changed_.WaitFor(lock, kPoll, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; });
  }
  for (const TenantSequence& sequence : engine_->AllSequences()) {
    if (!tried_.insert(sequence.info.id).second) continue;
    outcomes_.push_back(Outcome(sequence, v1::HAND_OVER_OUTCOME_KEPT, Stopped()));
  }
  done_ = true;
}

bool HandOver::Pass(bool* left) {
  *left = false;
  bool any = false;
  for (const TenantSequence& sequence : engine_->AllSequences()) {
    if (tried_.contains(sequence.info.id)) continue;
    if (Stopping()) return any;
    if (sequence.info.in_step) {
      *left = true;
      continue;
    }
    tried_.insert(sequence.info.id);
    // As it is by now: its client may have cut it, or given it back, while others went.
    const scheduler::SequenceList now = Find(sequence);
    if (now.sequences.empty()) continue;
    v1::HandedOver outcome = Move({sequence.tenant, now.sequences.front()});
    const bool moved = outcome.outcome() == v1::HAND_OVER_OUTCOME_MOVED;
    if (moved || !Find(sequence).sequences.empty()) outcomes_.push_back(std::move(outcome));
    any = true;
  }
  return any;
}

scheduler::SequenceList HandOver::Find(const TenantSequence& sequence) {
  scheduler::SequenceSelection named;
  named.tenant = sequence.tenant;
  named.ids = {sequence.info.id};
  return engine_->GetSequences(named);
}

v1::HandedOver HandOver::Move(const TenantSequence& sequence) {
  const auto kept = [&](const absl::Status& why) {
    return Outcome(sequence, v1::HAND_OVER_OUTCOME_KEPT, why);
  };
  if (sequence.info.length == 0) {
    return kept(MakeError(absl::StatusCode::kFailedPrecondition, "a sequence without rows",
                          {.reason = "nothing_to_save"}));
  }
  // By now a connection may be another one, to another server.
  v1::GetServerInfoReply info;
  if (absl::Status same = Ask(&info); !same.ok()) return kept(Stopping() ? Stopped() : same);
  const scheduler::ExportArgs rows = {
      sequence.tenant,  sequence.info.id, sequence.info.epoch, 0, sequence.info.length,
      /*in_place=*/true};
  const absl::StatusOr<scheduler::MovingPages> pages = engine_->BeginExport(rows);
  if (!pages.ok()) return kept(pages.status());
  grpc::ClientContext context;
  if (!Begin(&context)) return kept(Stopped());
  bool refused = false, uncertain = false;
  absl::Status status = Send(sequence, *pages, &context, &refused, &uncertain);
  End();
  if (refused) return Outcome(sequence, v1::HAND_OVER_OUTCOME_REFUSED, status);
  if (status.ok()) {
    status = engine_->EndHandOver(sequence, address_);
    uncertain = !status.ok();
  }
  if (uncertain) EvictThere(sequence);
  if (status.ok()) return Outcome(sequence, v1::HAND_OVER_OUTCOME_MOVED);
  return kept(Stopping() ? Stopped() : status);
}

absl::Status HandOver::Send(const TenantSequence& sequence, const scheduler::MovingPages& pages,
                            grpc::ClientContext* context, bool* refused, bool* uncertain) {
  v1::ImportReply reply;
  const auto writer = cache_->Import(context, &reply);
  v1::ImportRequest message;
  v1::ImportTarget* const target = message.mutable_target();
  target->set_model_id(sequence.info.model_id);
  target->set_client_id(sequence.info.client_id);
  target->set_lease_ms(static_cast<uint32_t>(sequence.info.lease_ms));
  target->set_tenant(sequence.tenant);
  target->set_new_sequence_id(sequence.info.id);
  bool open = writer->Write(message);
  const absl::Status sent =
      SendPages(engine_, sequence.tenant, pages, [&](const v1::PagesPart& part) {
        *message.mutable_part() = part;
        open = open && writer->Write(message);
        return open ? absl::OkStatus() : absl::CancelledError("the peer has ended the call");
      });
  // Rows that this server could not give must not look like all of them.
  if (!sent.ok() && open) context->TryCancel();
  writer->WritesDone();
  absl::Status answered = FromPeer(writer->Finish(), *context, refused);
  if (answered.ok()) answered = CheckAnswer(sequence, *context, reply);
  if (!sent.ok() && open) {
    *refused = false;
    return sent;
  }
  // Behind the trailer the peer may have taken the sequence, and its answer been lost.
  *uncertain = sent.ok() && !answered.ok() && !*refused;
  return answered.ok() ? sent : answered;
}

absl::Status HandOver::CheckAnswer(const TenantSequence& sequence,
                                   const grpc::ClientContext& context,
                                   const v1::ImportReply& reply) const {
  absl::Status same = CheckServer(context, reply.boot_id());
  if (!same.ok()) return same;
  const v1::SequenceInfo& there = reply.sequence();
  if (there.sequence_id() == sequence.info.id &&
      std::cmp_equal(there.length(), sequence.info.length)) {
    return same;
  }
  return RefusePeer(
      absl::StatusCode::kDataLoss, address_,
      absl::StrCat("it has taken ", there.length(), " rows as sequence ", there.sequence_id()),
      "all rows, under the id that they have here", "peer_failed");
}

// As far as the peer can be reached: else its lease ends there, and no client knows of it.
void HandOver::EvictThere(const TenantSequence& sequence) {
  grpc::ClientContext context;
  SetDeadline(&context, kEvictTime);
  v1::EvictSequencesRequest request;
  request.set_tenant(sequence.tenant);
  request.add_sequence_ids(sequence.info.id);
  v1::EvictSequencesReply reply;
  const grpc::Status status = admin_->EvictSequences(&context, request, &reply);
  Log(LogLevel::kWarning, "taken_back",
      {{"tenant", sequence.tenant},
       {"sequence", sequence.info.id},
       {"evicted", reply.evicted()},
       {"peer", status.ok() ? "" : status.error_message()}});
}

}  // namespace mla::server
