#include "server/hand_over/hand_over.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "server/logging/logging.h"
#include "server/pages/page_transfer.h"

namespace mla::server {
namespace {

using scheduler::TenantSequence;
using std::chrono::milliseconds;

// Pause between two checks of sequences that are in a step; doubled as long as none has left its
// step.
constexpr auto kLeastPause = milliseconds(10);
constexpr auto kMostPause = milliseconds(160);
constexpr char kCapability[] = "hand_over";
// A server with this capability takes weights for other tenants. Release 0.1.0 lacks it.
constexpr char kWeightsCapability[] = "hand_over_weights";
// A server with this capability takes version 3 of the page-group format. Release 0.1.0 lacks it.
constexpr char kXxh3Capability[] = "pages_xxh3";

absl::Status RefusePeer(absl::StatusCode code, const std::string& address, const std::string& why,
                        const std::string& limit, const std::string& reason) {
  return MakeError(code, absl::StrCat("to: ", address, ": ", why),
                   {.field = "to", .got = address, .limit = limit, .reason = reason});
}

absl::Status Stopped() {
  return MakeError(absl::StatusCode::kCancelled, "the drain has ended before its turn",
                   {.reason = "stopped"});
}

// Returns true if the peer has done nothing because too many calls are under way there.
bool TooManyCalls(const absl::Status& status) {
  const std::string& reason = DetailOf(status).reason;
  return reason == "too_many_uploads" || reason == "too_many_calls";
}

bool Has(const v1::GetServerInfoReply& info, absl::string_view capability) {
  const auto& tokens = info.capabilities();
  return std::find(tokens.begin(), tokens.end(), capability) != tokens.end();
}

// Returns the counter of sequences that stay for this reason, which is one of this server's own.
std::atomic<uint64_t>& CounterOf(HandOverCounters& counters, const std::string& reason) {
  if (reason == "stopped") return counters.stopped;
  if (reason == "nothing_to_save") return counters.empty;
  if (reason.starts_with("peer_")) return counters.peer_failed;
  return counters.changed;
}

}  // namespace

int64_t PeerChunkBytes(const v1::GetServerInfoReply& info) {
  const uint64_t taken = info.limits().weight_chunk_bytes();
  if (taken == 0) return kSentChunkBytes;  // it does not say
  return static_cast<int64_t>(std::clamp(taken, kLeastPeerChunkBytes, kMostPeerChunkBytes));
}

HandOver::HandOver(HandOverOptions options, std::vector<std::unique_ptr<HandOverPeer>> streams)
    : options_(std::move(options)), engine_(options_.engine) {
  for (auto& peer : streams) streams_.push_back({std::move(peer)});
  const MutexLock lock(mutex_);
  streams_left_ = streams_.size();
}

HandOver::~HandOver() { Stop(); }

absl::StatusOr<std::unique_ptr<HandOver>> HandOver::Connect(
    HandOverOptions options, std::vector<std::unique_ptr<HandOverPeer>> streams) {
  std::unique_ptr<HandOver> hand_over(new HandOver(std::move(options), std::move(streams)));
  MLA_RETURN_IF_ERROR(hand_over->CheckPeer());
  return hand_over;
}

absl::Status HandOver::CheckBootId(uint64_t boot_id) const {
  if (!peer_boot_id_ || boot_id == *peer_boot_id_) return absl::OkStatus();
  return RefusePeer(absl::StatusCode::kUnavailable, address(),
                    "another server answers there by now, or it has restarted",
                    "the server that was asked first", "peer_changed");
}

absl::Status HandOver::Ask(HandOverPeer& peer, v1::GetServerInfoReply* info) {
  const absl::Status status = peer.GetInfo(info);
  if (status.ok()) return CheckBootId(info->boot_id());
  const ErrorDetail& detail = DetailOf(status);
  if (detail.reason == "stopped") return status;
  if (detail.reason == "peer_revoked") {
    return RefusePeer(status.code(), address(), std::string(status.message()), detail.limit,
                      detail.reason);
  }
  return RefusePeer(absl::StatusCode::kUnavailable, address(), std::string(status.message()),
                    "a server that answers over TLS", "peer_unreachable");
}

absl::Status HandOver::CheckPeer() {
  HandOverPeer& peer = *streams_.front().peer;
  v1::GetServerInfoReply info;
  MLA_RETURN_IF_ERROR(Ask(peer, &info));
  if (info.boot_id() == options_.boot_id) {
    return RefusePeer(absl::StatusCode::kInvalidArgument, address(), "this server itself",
                      "another server", "out_of_range");
  }
  if (info.boot_id() == 0) {
    return RefusePeer(absl::StatusCode::kUnavailable, address(),
                      "it does not say which start it is of", "a server with a boot id",
                      "peer_failed");
  }
  if (!Has(info, kCapability)) {
    return RefusePeer(absl::StatusCode::kUnimplemented, address(), "it takes no sequences",
                      "a server with the capability hand_over", "peer_too_old");
  }
  peer_boot_id_ = info.boot_id();
  // TLS authenticates the bytes, so the digests are only for damage.
  if (Has(info, kXxh3Capability)) send_.digests = DigestKind::kXxh3;
  send_.chunk_bytes = PeerChunkBytes(info);
  takes_weights_ = Has(info, kWeightsCapability);
  const absl::Status status = peer.CheckOperator();
  if (status.ok()) return status;
  return RefusePeer(status.code(), address(), std::string(status.message()),
                    "a server that has this one among its server.operators", "peer_refuses");
}

void HandOver::Start() { thread_ = std::thread(&HandOver::Run, this); }

void HandOver::Interrupt() {
  const MutexLock lock(mutex_);
  stop_ = true;
  for (const Stream& stream : streams_) stream.peer->Cancel();
  changed_.NotifyAll();
}

void HandOver::Stop() {
  Interrupt();
  if (thread_.joinable()) thread_.join();
}

bool HandOver::Stopping() {
  const MutexLock lock(mutex_);
  return stop_;
}

void HandOver::Run() {
  if (takes_weights_) MoveWeights();
  // The list is complete, because calls that open sequences are refused while the server drains.
  // Listing 10,000 sequences takes the engine's role for 4 ms; checking the few that are in a step
  // takes 0.3 us.
  left_ = engine_->AllSequences();
  auto pause = kLeastPause;
  while (!left_.empty() && !Stopping()) {
    if (Pass()) {
      pause = kLeastPause;
      continue;
    }
    MutexLock lock(mutex_);
    changed_.WaitFor(lock, pause, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; });
    pause = std::min(2 * pause, kMostPause);
  }
  RefreshLeft();
  for (const TenantSequence& sequence : left_) {
    outcomes_.push_back(Outcome(sequence, v1::HAND_OVER_OUTCOME_KEPT, Stopped()));
  }
  Recall(*streams_.front().peer);
  done_ = true;
}

std::vector<scheduler::SequenceInfo> HandOver::Find(const std::string& tenant,
                                                    std::vector<scheduler::SequenceId> ids) {
  scheduler::SequenceSelection named;
  named.tenant = tenant;
  named.ids = std::move(ids);
  return engine_->GetSequences(named).sequences;
}

void HandOver::RefreshLeft() {
  std::vector<TenantSequence> now;
  for (auto first = left_.begin(); first != left_.end();) {
    std::vector<scheduler::SequenceId> ids;
    auto end = first;
    for (; end != left_.end() && end->tenant == first->tenant; ++end) ids.push_back(end->info.id);
    for (scheduler::SequenceInfo& info : Find(first->tenant, std::move(ids))) {
      now.push_back({first->tenant, std::move(info)});
    }
    first = end;
  }
  left_ = std::move(now);
}

void HandOver::OnStreams(size_t count, const std::function<void(Stream&, size_t)>& work) {
  std::atomic<size_t> next{0};
  const auto run = [&](Stream& stream) {
    while (!stream.ended && !Stopping()) {
      const size_t i = next++;
      if (i >= count) return;
      work(stream, i);
    }
  };
  std::vector<Stream*> used;
  for (Stream& stream : streams_) {
    if (!stream.ended && used.size() < count) used.push_back(&stream);
  }
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < used.size(); ++i) helpers.emplace_back(run, std::ref(*used[i]));
  if (!used.empty()) run(*used.front());
  for (std::thread& helper : helpers) helper.join();
}

void HandOver::MoveWeights() {
  std::vector<scheduler::HeldWeights> models = engine_->AllWeights();
  // Each repetition has fewer streams than the one before, and the last stream tries all.
  while (!models.empty() && !Stopping()) {
    std::vector<uint8_t> untried(models.size(), 1);
    OnStreams(models.size(), [&](Stream& stream, size_t i) {
      untried[i] = TryWeights(stream, models[i]) ? 0 : 1;
    });
    std::vector<scheduler::HeldWeights> left;
    for (size_t i = 0; i < models.size(); ++i) {
      if (untried[i] != 0) left.push_back(std::move(models[i]));
    }
    models = std::move(left);
  }
}

bool HandOver::TryWeights(Stream& stream, const scheduler::HeldWeights& model) {
  // The address may lead to another server by now.
  v1::GetServerInfoReply info;
  absl::Status status = Ask(*stream.peer, &info);
  if (!status.ok() && !Stopping() && EndStream(stream)) return false;
  bool refused = false;
  if (status.ok()) status = UploadWeights(*stream.peer, model, &refused);
  if (refused && TooManyCalls(status) && EndStream(stream)) return false;
  HandOverCounters& counters = *options_.counters;
  ++(status.ok() ? counters.weights_moved
     : refused   ? counters.weights_refused
                 : counters.weights_failed);
  Log(status.ok() ? LogLevel::kInfo : LogLevel::kWarning, "handed_over_weights",
      {{"tenant", model.tenant},
       {"model", model.spec->id},
       {"outcome", status.ok() ? "moved"
                   : refused   ? "refused"
                               : "failed"},
       {"message", std::string(status.message())},
       {"reason", DetailOf(status).reason}});
  return true;
}

absl::Status HandOver::UploadWeights(HandOverPeer& peer, const scheduler::HeldWeights& model,
                                     bool* refused) {
  uint64_t bytes = 0;
  const PeerWeights answer = peer.UploadWeights(
      [&](const WeightsSink& sink) { return SendWeights(engine_, model, sink, &bytes); });
  *refused = answer.refused;
  MLA_RETURN_IF_ERROR(answer.status);
  MLA_RETURN_IF_ERROR(CheckBootId(answer.reply.boot_id()));
  const uint64_t taken = answer.reply.bytes();  // 0: it had the weights already
  if (!answer.reply.complete() || (taken != 0 && taken != bytes)) {
    return RefusePeer(absl::StatusCode::kDataLoss, address(),
                      absl::StrCat("it has taken ", taken, " bytes of weights, ",
                                   answer.reply.complete() ? "and says all" : "not all"),
                      absl::StrCat("all ", bytes, " bytes"), "peer_failed");
  }
  options_.counters->weights_sent_bytes += taken;
  return absl::OkStatus();
}

bool HandOver::Pass() {
  RefreshLeft();
  std::atomic<bool> any{false};
  std::vector<uint8_t> untried(left_.size(), 1);  // each is one stream's until all have ended
  OnStreams(left_.size(),
            [&](Stream& stream, size_t i) { untried[i] = Try(stream, left_[i], &any) ? 0 : 1; });
  std::vector<TenantSequence> left;
  for (size_t i = 0; i < left_.size(); ++i) {
    if (untried[i] != 0) left.push_back(std::move(left_[i]));
  }
  left_ = std::move(left);
  return any;
}

bool HandOver::EndStream(Stream& stream) {
  const MutexLock lock(mutex_);
  if (streams_left_ == 1) return false;
  --streams_left_;
  stream.ended = true;
  return true;
}

bool HandOver::Try(Stream& stream, const TenantSequence& listed, std::atomic<bool>* any) {
  const std::string& tenant = listed.tenant;
  // Looked up again, because the client may have truncated or released the sequence while others
  // were moved.
  const auto now = Find(tenant, {listed.info.id});
  if (now.empty()) return true;
  const TenantSequence sequence = {tenant, now.front()};
  if (sequence.info.in_step) return false;
  *any = true;
  std::optional<v1::HandedOver> outcome = Move(stream, sequence);
  if (!outcome) return false;
  const bool moved = outcome->outcome() == v1::HAND_OVER_OUTCOME_MOVED;
  if (moved || !Find(tenant, {sequence.info.id}).empty()) {
    const MutexLock lock(mutex_);
    outcomes_.push_back(*std::move(outcome));
  }
  return true;
}

v1::HandedOver HandOver::Outcome(const TenantSequence& sequence, v1::HandOverOutcome outcome,
                                 const absl::Status& why) {
  v1::HandedOver to;
  to.set_tenant(sequence.tenant);
  to.set_sequence_id(sequence.info.id);
  to.set_outcome(outcome);
  to.set_rows(static_cast<uint64_t>(sequence.info.length));
  if (!why.ok()) {
    // It is never empty, because operators and clients rely on it.
    const std::string& reason = DetailOf(why).reason;
    to.set_reason(reason.empty() ? absl::AsciiStrToLower(absl::StatusCodeToString(why.code()))
                                 : reason);
    to.set_message(std::string(why.message()));
  }
  HandOverCounters& counters = *options_.counters;
  const bool moved = outcome == v1::HAND_OVER_OUTCOME_MOVED;
  if (moved) {
    ++counters.moved;
  } else if (outcome == v1::HAND_OVER_OUTCOME_REFUSED) {
    ++counters.refused;
  } else {
    ++CounterOf(counters, to.reason());
  }
  Log(moved ? LogLevel::kInfo : LogLevel::kWarning, "handed_over",
      {{"outcome", v1::HandOverOutcome_Name(outcome)},
       {"tenant", to.tenant()},
       {"sequence", to.sequence_id()},
       {"rows", to.rows()},
       {"message", to.message()},
       {"reason", to.reason()}});
  return to;
}

std::optional<v1::HandedOver> HandOver::Move(Stream& stream, const TenantSequence& sequence) {
  HandOverPeer& peer = *stream.peer;
  const auto kept = [&](const absl::Status& why) {
    return Outcome(sequence, v1::HAND_OVER_OUTCOME_KEPT, Stopping() ? Stopped() : why);
  };
  if (sequence.info.length == 0) {
    return Outcome(sequence, v1::HAND_OVER_OUTCOME_KEPT,
                   MakeError(absl::StatusCode::kFailedPrecondition, "a sequence without rows",
                             {.reason = "nothing_to_save"}));
  }
  // The address may lead to another server by now.
  v1::GetServerInfoReply info;
  if (absl::Status same = Ask(peer, &info); !same.ok()) {
    // The name may lead to several servers, of which another stream has the right one.
    if (!Stopping() && EndStream(stream)) return std::nullopt;
    return kept(same);
  }
  Recall(peer);
  const scheduler::ExportArgs rows = {
      sequence.tenant,  sequence.info.id, sequence.info.epoch, 0, sequence.info.length,
      /*in_place=*/true};
  const absl::StatusOr<scheduler::MovingPages> pages = engine_->BeginExport(rows);
  if (!pages.ok()) return kept(pages.status());
  bool refused = false;
  const absl::Status status = Import(peer, sequence, *pages, &refused);
  if (status.ok()) return Outcome(sequence, v1::HAND_OVER_OUTCOME_MOVED);
  if (refused && TooManyCalls(status) && EndStream(stream)) return std::nullopt;
  return refused ? Outcome(sequence, v1::HAND_OVER_OUTCOME_REFUSED, status) : kept(status);
}

absl::Status HandOver::Import(HandOverPeer& peer, const TenantSequence& sequence,
                              const scheduler::MovingPages& pages, bool* refused) {
  v1::ImportTarget target;
  target.set_model_id(sequence.info.model_id);
  target.set_client_id(sequence.info.client_id);
  target.set_lease_ms(static_cast<uint32_t>(sequence.info.lease_ms));
  target.set_tenant(sequence.tenant);
  target.set_new_sequence_id(sequence.info.id);
  target.set_attempt(RandomNumber());
  uint64_t bytes = 0;
  const PeerImport import = peer.Import(target, [&](const PartSink& sink) {
    return SendPages(
        engine_, sequence.tenant, pages,
        [&](v1::PagesPart& part) {
          bytes += part.chunk().payload().size();
          return sink(part);
        },
        send_);
  });
  *refused = import.refused;
  absl::Status status = import.status;
  if (status.ok()) status = CheckAnswer(sequence, import.reply);
  if (status.ok()) status = engine_->EndHandOver(sequence, address());
  if (status.ok()) {
    options_.counters->sent_bytes += bytes;
  } else if (import.sent && !import.refused) {
    // The peer may have the sequence even if its answer was lost.
    v1::EvictSequencesRequest request;
    request.set_tenant(sequence.tenant);
    request.add_sequence_ids(sequence.info.id);
    request.set_attempt(target.attempt());
    {
      const MutexLock lock(mutex_);
      abandoned_.push_back(std::move(request));
    }
    Recall(peer);
  }
  return status;
}

absl::Status HandOver::CheckAnswer(const TenantSequence& sequence,
                                   const v1::ImportReply& reply) const {
  absl::Status same = CheckBootId(reply.boot_id());
  if (!same.ok()) return same;
  const v1::SequenceInfo& there = reply.sequence();
  if (there.sequence_id() == sequence.info.id &&
      std::cmp_equal(there.length(), sequence.info.length)) {
    return same;
  }
  return RefusePeer(
      absl::StatusCode::kDataLoss, address(),
      absl::StrCat("it has taken ", there.length(), " rows as sequence ", there.sequence_id()),
      "all rows, under the id that they have here", "peer_failed");
}

void HandOver::Recall(HandOverPeer& peer) {
  while (true) {
    v1::EvictSequencesRequest request;
    {
      const MutexLock lock(mutex_);
      if (abandoned_.empty()) return;
      request = std::move(abandoned_.back());
      abandoned_.pop_back();
    }
    const absl::StatusOr<uint32_t> evicted = peer.Recall(request);
    Log(LogLevel::kWarning, "taken_back",
        {{"tenant", request.tenant()},
         {"sequence", request.sequence_ids(0)},
         {"evicted", evicted.ok() ? *evicted : 0},
         {"peer", evicted.ok() ? "" : std::string(evicted.status().message())}});
    if (!evicted.ok()) {
      const MutexLock lock(mutex_);
      abandoned_.push_back(std::move(request));
      return;
    }
    ++options_.counters->taken_back;
  }
}

}  // namespace mla::server
