#include "server/hand_over/hand_over.h"

#include <algorithm>
#include <functional>
#include <system_error>
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

using scheduler::SequenceInfo;
using std::chrono::milliseconds;

// Pause between two checks of sequences that are in a step; doubled as long as none has left its
// step.
constexpr auto kLeastPause = milliseconds(10);
constexpr auto kMostPause = milliseconds(160);

absl::Status Stopped() {
  return MakeError(absl::StatusCode::kCancelled, "the drain has ended before its turn",
                   {.reason = "stopped"});
}

// Returns true if the peer has done nothing because too many calls are under way there.
bool TooManyCalls(const absl::Status& status) {
  const std::string& reason = DetailOf(status).reason;
  return reason == "too_many_uploads" || reason == "too_many_calls";
}

// Returns true if the peer had no place for a sequence, whose size it has been told.
bool HadNoRoom(const absl::Status& status) {
  return status.code() == absl::StatusCode::kResourceExhausted;
}

// Adds a thread that does `work`. Returns false if the machine has none left; the threads that
// there are then do the work of all.
bool AddHelper(std::vector<std::thread>* helpers, std::function<void()> work) {
  try {
    helpers->emplace_back(std::move(work));
  } catch (const std::system_error& error) {
    Log(LogLevel::kWarning, "hand_over_thread", {{"message", error.what()}});
    return false;
  }
  return true;
}

// Returns the counter of sequences that stay for this reason, which is one of this server's own.
std::atomic<uint64_t>& CounterOf(HandOverCounters& counters, const std::string& reason) {
  if (reason == "stopped") return counters.stopped;
  if (reason == "nothing_to_save") return counters.empty;
  if (reason.starts_with("peer_")) return counters.peer_failed;
  return counters.changed;
}

}  // namespace

std::string DrainPeerField(size_t place) {
  return place == 0 ? "to" : absl::StrCat("also_to[", place - 1, "]");
}

HandOver::HandOver(HandOverOptions options) : options_(options), engine_(options_.engine) {}

HandOver::~HandOver() { Stop(); }

absl::StatusOr<std::unique_ptr<HandOver>> HandOver::Connect(HandOverOptions options,
                                                            std::vector<HandOverTarget> targets) {
  std::unique_ptr<HandOver> hand_over(new HandOver(options));
  MLA_RETURN_IF_ERROR(hand_over->Choose(std::move(targets)));
  return hand_over;
}

absl::Status HandOver::Choose(std::vector<HandOverTarget> targets) {
  std::vector<std::unique_ptr<PeerServer>> all;
  for (HandOverTarget& target : targets) {
    all.push_back(std::make_unique<PeerServer>(
        std::move(target.address), DrainPeerField(all.size()), std::move(target.streams)));
  }
  threads_ = all.front()->streams();
  std::vector<absl::Status> fits(all.size());
  OnThreads(all.size(), [&](size_t i) { fits[i] = all[i]->Check(options_.boot_id); });
  std::string reasons;
  for (size_t i = 0; i < all.size(); ++i) {
    for (const auto& one : peers_) {
      if (!fits[i].ok() || one->boot_id() != all[i]->boot_id()) continue;
      fits[i] = all[i]->Refuse(absl::StatusCode::kInvalidArgument,
                               absl::StrCat("the same server as ", one->address()),
                               "another server", "out_of_range");
    }
    v1::DrainPeer& asked = asked_.emplace_back();
    asked.set_address(all[i]->address());
    asked.set_free_bytes(static_cast<uint64_t>(all[i]->free_bytes()));
    if (fits[i].ok()) {
      peers_.push_back(std::move(all[i]));
      continue;
    }
    asked.set_reason(DetailOf(fits[i]).reason);
    asked.set_message(std::string(fits[i].message()));
    absl::StrAppend(&reasons, reasons.empty() ? "" : "; ", fits[i].message());
  }
  if (peers_.empty()) return MakeError(fits[0].code(), reasons, DetailOf(fits[0]));
  address_ = ByRoom().front()->address();
  return absl::OkStatus();
}

std::vector<PeerServer*> HandOver::ByRoom() const {
  std::vector<std::pair<int64_t, PeerServer*>> rooms;
  for (const auto& peer : peers_) rooms.emplace_back(peer->free_bytes(), peer.get());
  std::stable_sort(rooms.begin(), rooms.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<PeerServer*> peers;
  for (const auto& room : rooms) peers.push_back(room.second);
  return peers;
}

absl::Status HandOver::MakeThread() {
  try {
    thread_ = std::thread([this] {
      {
        MutexLock lock(mutex_);
        changed_.Wait(lock,
                      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return begun_ || stop_; });
        if (!begun_) return;
      }
      Run();
    });
  } catch (const std::system_error& error) {
    return absl::UnavailableError(absl::StrCat("no thread for the hand-over: ", error.what()));
  }
  return absl::OkStatus();
}

void HandOver::Start() {
  const MutexLock lock(mutex_);
  begun_ = true;
  changed_.NotifyAll();
}

void HandOver::Interrupt() {
  const MutexLock lock(mutex_);
  stop_ = true;
  for (const auto& peer : peers_) peer->Cancel();
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
  models_ = engine_->AllWeights();
  OnThreads(models_.size(), [&](size_t i) { EnsureWeights(*ByRoom().front(), models_[i]); });
  // The list is complete, because calls that open sequences are refused while the server drains.
  // Listing 10,000 sequences takes the engine's role for 4 ms; checking the few that are in a step
  // takes 0.3 us.
  remaining_ = engine_->AllSequences();
  auto pause = kLeastPause;
  while (!remaining_.empty() && !Stopping()) {
    if (Pass()) {
      pause = kLeastPause;
      continue;
    }
    MutexLock lock(mutex_);
    changed_.WaitFor(lock, pause, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; });
    pause = std::min(2 * pause, kMostPause);
  }
  RefreshRemaining();
  for (const SequenceInfo& sequence : remaining_) {
    outcomes_.push_back(Outcome(sequence, v1::HAND_OVER_OUTCOME_KEPT, Stopped()));
  }
  for (const auto& peer : peers_) peer->RecallAtLast(options_.counters);
  done_ = true;
}

std::vector<SequenceInfo> HandOver::Find(const std::string& tenant,
                                         std::vector<scheduler::SequenceId> ids) {
  scheduler::SequenceSelection named;
  named.tenant = tenant;
  named.ids = std::move(ids);
  std::vector<SequenceInfo> found = engine_->GetSequences(named).sequences;
  for (SequenceInfo& sequence : found) sequence.tenant = tenant;
  return found;
}

void HandOver::RefreshRemaining() {
  std::vector<SequenceInfo> now;
  for (auto first = remaining_.begin(); first != remaining_.end();) {
    std::vector<scheduler::SequenceId> ids;
    auto end = first;
    for (; end != remaining_.end() && end->tenant == first->tenant; ++end) ids.push_back(end->id);
    for (SequenceInfo& sequence : Find(first->tenant, std::move(ids))) {
      now.push_back(std::move(sequence));
    }
    first = end;
  }
  remaining_ = std::move(now);
}

void HandOver::OnThreads(size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  const auto run = [&] {
    while (!Stopping()) {
      const size_t i = next++;
      if (i >= count) return;
      work(i);
    }
  };
  std::vector<std::thread> helpers;
  while (helpers.size() + 1 < std::min(count, threads_) && AddHelper(&helpers, run)) {
  }
  run();
  for (std::thread& helper : helpers) helper.join();
}

// ------------------------------------------------------------------------------------- Weights

void HandOver::EnsureWeights(PeerServer& peer, const scheduler::HeldWeights& model) {
  const bool takes = model.sinks.empty() ? peer.takes_weights() : peer.takes_sinks();
  if (!takes || !peer.BeginWeights(model)) return;
  bool refused = false;
  const absl::Status status = SendWeightsTo(peer, model, &refused);
  peer.EndWeights(model);
  HandOverCounters& counters = *options_.counters;
  ++(status.ok() ? counters.weights_moved
     : refused   ? counters.weights_refused
                 : counters.weights_failed);
  Log(status.ok() ? LogLevel::kInfo : LogLevel::kWarning, "handed_over_weights",
      {{"tenant", model.tenant},
       {"model", model.spec->id},
       {"peer", peer.address()},
       {"outcome", status.ok() ? "moved"
                   : refused   ? "refused"
                               : "failed"},
       {"message", std::string(status.message())},
       {"reason", DetailOf(status).reason}});
}

absl::Status HandOver::SendWeightsTo(PeerServer& peer, const scheduler::HeldWeights& model,
                                     bool* refused) {
  while (true) {
    PeerServer::Use stream(&peer);
    if (stream.get() == nullptr) return Stopped();
    // The address may lead to another server by now.
    absl::Status status = peer.Ask(*stream.get());
    if (!status.ok() && !Stopping() && stream.End()) continue;
    if (status.ok()) status = UploadWeights(peer, *stream.get(), model, refused);
    if (*refused && TooManyCalls(status) && stream.End()) continue;
    return status;
  }
}

absl::Status HandOver::UploadWeights(PeerServer& peer, HandOverPeer& stream,
                                     const scheduler::HeldWeights& model, bool* refused) {
  OutgoingWeights weights{engine_, &model, peer.takes_parts() ? RandomNumber() | 1 : 0};
  uint64_t bytes = 0;
  Parts parts;
  const PeerWeights answer =
      stream.UploadWeights([&](const WeightsSink& sink, const HandOverPeer::Accepted& accepted) {
        return SendTransfer(peer, weights, sink, accepted, &bytes, &parts);
      });
  // The peer may have noticed first that a part has failed; the part knows why.
  *refused = parts.failed.ok() ? answer.refused : parts.refused;
  MLA_RETURN_IF_ERROR(parts.failed);
  MLA_RETURN_IF_ERROR(answer.status);
  MLA_RETURN_IF_ERROR(peer.CheckBootId(answer.reply.boot_id()));
  const uint64_t taken = answer.reply.bytes();  // 0: it had the weights already
  if (!answer.reply.complete() || (taken != 0 && taken != bytes)) {
    return peer.Refuse(absl::StatusCode::kDataLoss,
                       absl::StrCat("it has taken ", taken, " bytes of weights, ",
                                    answer.reply.complete() ? "and says all" : "not all"),
                       absl::StrCat("all ", bytes, " bytes"), "peer_failed");
  }
  options_.counters->weights_sent_bytes += taken;
  return absl::OkStatus();
}

absl::Status HandOver::SendTransfer(PeerServer& peer, OutgoingWeights& weights,
                                    const WeightsSink& sink, const HandOverPeer::Accepted& accepted,
                                    uint64_t* bytes, Parts* parts) {
  WeightsCall call(&weights, sink);
  MLA_RETURN_IF_ERROR(call.SendHeader(/*is_part=*/false));
  std::vector<std::unique_ptr<PeerServer::Use>> streams;
  while (weights.attempt != 0 && weights.model->sinks.empty() && streams.size() < peer.streams()) {
    auto stream = std::make_unique<PeerServer::Use>(&peer, /*waits=*/false);
    if (stream->get() == nullptr) break;
    streams.push_back(std::move(stream));
  }
  // A part must not come first: the peer would not know its transfer.
  if (!streams.empty()) MLA_RETURN_IF_ERROR(accepted());
  std::vector<std::thread> helpers;
  for (auto& stream : streams) {
    const auto send = [&, part = stream.get()] { SendPart(peer, *part, weights, parts); };
    if (!AddHelper(&helpers, send)) break;
  }
  absl::Status status = call.SendHeads();
  if (!status.ok()) weights.failed = true;
  for (std::thread& helper : helpers) helper.join();
  *bytes = call.bytes() + parts->bytes;
  MLA_RETURN_IF_ERROR(parts->failed);
  MLA_RETURN_IF_ERROR(status);
  return call.SendTrailer(parts->ended);
}

void HandOver::SendPart(PeerServer& peer, PeerServer::Use& stream, OutgoingWeights& weights,
                        Parts* parts) {
  absl::Status status = peer.Ask(*stream.get());
  bool began = false;
  PeerWeights answer;
  uint64_t bytes = 0;
  if (status.ok()) {
    answer = stream.get()->UploadWeights(
        [&](const WeightsSink& sink, const HandOverPeer::Accepted& accepted) {
          WeightsCall call(&weights, sink);
          MLA_RETURN_IF_ERROR(call.SendHeader(/*is_part=*/true));
          MLA_RETURN_IF_ERROR(accepted());
          began = true;
          MLA_RETURN_IF_ERROR(call.SendHeads());
          bytes = call.bytes();
          return call.SendTrailer(0);
        });
    status = answer.status;
    if (status.ok()) status = peer.CheckBootId(answer.reply.boot_id());
  }
  if (!began) {
    // The other streams send all heads then. The stream ends only if the call broke off or the peer
    // takes no further call; any other refusal concerns the transfer.
    if (!Stopping() && (!answer.refused || TooManyCalls(status))) stream.End();
    return;
  }
  if (status.ok() && answer.reply.bytes() != bytes) {
    status = peer.Refuse(absl::StatusCode::kDataLoss,
                         absl::StrCat("it has taken ", answer.reply.bytes(), " bytes of a part"),
                         absl::StrCat("all ", bytes, " bytes"), "peer_failed");
  }
  const MutexLock lock(mutex_);
  if (status.ok()) {
    ++parts->ended;
    parts->bytes += bytes;
  } else if (!weights.failed.exchange(true)) {
    parts->failed = status;  // the first failure is the reason of the others
    parts->refused = answer.refused;
  }
}

// ----------------------------------------------------------------------------------- Sequences

bool HandOver::Pass() {
  RefreshRemaining();
  std::vector<uint8_t> untried(remaining_.size(), 1);  // each is one thread's until all have ended
  OnThreads(remaining_.size(), [&](size_t i) { untried[i] = TryOne(remaining_[i]) ? 0 : 1; });
  std::vector<SequenceInfo> rest;
  for (size_t i = 0; i < remaining_.size(); ++i) {
    if (untried[i] != 0) rest.push_back(std::move(remaining_[i]));
  }
  const bool any = rest.size() < remaining_.size();
  remaining_ = std::move(rest);
  return any;
}

bool HandOver::TryOne(const SequenceInfo& listed) {
  const std::string& tenant = listed.tenant;
  // Looked up again, because the client may have truncated or released the sequence while others
  // were moved.
  const auto now = Find(tenant, {listed.id});
  if (now.empty()) return true;
  const SequenceInfo& sequence = now.front();
  if (sequence.in_step) return false;
  v1::HandedOver outcome = Offer(sequence);
  const bool moved = outcome.outcome() == v1::HAND_OVER_OUTCOME_MOVED;
  if (moved || !Find(tenant, {sequence.id}).empty()) {
    const MutexLock lock(mutex_);
    outcomes_.push_back(std::move(outcome));
  }
  return true;
}

v1::HandedOver HandOver::Offer(SequenceInfo sequence) {
  if (sequence.length == 0) {
    return Outcome(sequence, v1::HAND_OVER_OUTCOME_KEPT,
                   MakeError(absl::StatusCode::kFailedPrecondition, "a sequence without rows",
                             {.reason = "nothing_to_save"}));
  }
  bool refused = true;  // by all
  size_t asked = 0;
  absl::Status why;  // of the first one
  for (PeerServer* const peer : ByRoom()) {
    const Try tried = MoveTo(*peer, &sequence);
    if (tried.status.ok()) {
      return Outcome(sequence, v1::HAND_OVER_OUTCOME_MOVED, tried.status, peer->address());
    }
    if (Stopping()) return Outcome(sequence, v1::HAND_OVER_OUTCOME_KEPT, Stopped());
    refused = refused && tried.refused;
    if (asked++ == 0) why = tried.status;
    if (tried.settled) break;
    if (peers_.size() == 1) continue;
    Log(LogLevel::kInfo, "not_taken",
        {{"tenant", sequence.tenant},
         {"sequence", sequence.id},
         {"peer", peer->address()},
         {"message", std::string(tried.status.message())},
         {"reason", DetailOf(tried.status).reason}});
  }
  if (asked > 1) {
    why = MakeError(why.code(),
                    absl::StrCat(why.message(), "; none of ", asked, " servers has taken it"),
                    DetailOf(why));
  }
  return Outcome(sequence, refused ? v1::HAND_OVER_OUTCOME_REFUSED : v1::HAND_OVER_OUTCOME_KEPT,
                 why);
}

HandOver::Try HandOver::MoveTo(PeerServer& peer, SequenceInfo* sequence) {
  for (const scheduler::HeldWeights& model : models_) {
    if (model.tenant == sequence->tenant && model.spec->id == sequence->model_id) {
      EnsureWeights(peer, model);
    }
  }
  const int64_t bytes = sequence->kv_bytes;
  peer.Promise(bytes);
  Try tried;
  for (bool ended = true; ended;) {
    PeerServer::Use stream(&peer);
    if (stream.get() == nullptr) return {.status = Stopped(), .settled = true};
    tried = MoveOver(peer, &stream, sequence, &ended);
  }
  if (!tried.status.ok()) peer.Promise(-bytes);
  return tried;
}

HandOver::Try HandOver::MoveOver(PeerServer& peer, PeerServer::Use* stream, SequenceInfo* sequence,
                                 bool* ended) {
  *ended = false;
  // The address may lead to another server by now.
  if (absl::Status same = peer.Ask(*stream->get()); !same.ok()) {
    // The name may lead to several servers; then another stream may be connected to the right one.
    *ended = !Stopping() && stream->End();
    if (!*ended) peer.SetFull();
    return {.status = same};
  }
  peer.Recall(*stream->get(), options_.counters);
  auto now = Find(sequence->tenant, {sequence->id});
  if (now.empty()) {
    return {.status = MakeError(absl::StatusCode::kNotFound, "its client has released it",
                                {.reason = "sequence_not_found"}),
            .settled = true};
  }
  *sequence = std::move(now.front());
  const scheduler::ExportArgs rows = {sequence->tenant, sequence->id, sequence->epoch, 0,
                                      sequence->length,
                                      /*in_place=*/true};
  const absl::StatusOr<scheduler::MovingPages> pages = engine_->BeginExport(rows);
  if (!pages.ok()) return {.status = pages.status(), .settled = true};
  Try tried = Import(peer, *stream->get(), *sequence, *pages);
  *ended = tried.refused && TooManyCalls(tried.status) && stream->End();
  return tried;
}

HandOver::Try HandOver::Import(PeerServer& peer, HandOverPeer& stream, const SequenceInfo& sequence,
                               const scheduler::MovingPages& pages) {
  v1::ImportTarget target;
  target.set_model_id(sequence.model_id);
  target.set_client_id(sequence.client_id);
  target.set_lease_ms(static_cast<uint32_t>(sequence.lease_ms));
  target.set_tenant(sequence.tenant);
  target.set_new_sequence_id(sequence.id);
  target.set_attempt(RandomNumber());
  uint64_t bytes = 0;
  const PeerImport import = stream.Import(target, [&](const PartSink& sink) {
    return SendPages(
        engine_, sequence.tenant, pages,
        [&](v1::PagesPart& part) {
          bytes += part.chunk().payload().size();
          return sink(part);
        },
        peer.send());
  });
  Try tried = {.status = import.status, .refused = import.refused};
  if (tried.status.ok()) tried.status = peer.CheckAnswer(sequence, import.reply);
  // The others are asked first from now on.
  if (import.refused ? HadNoRoom(tried.status) : !tried.status.ok()) peer.SetFull();
  if (tried.status.ok()) tried.status = engine_->EndHandOver(sequence, peer.address());
  if (tried.status.ok()) {
    options_.counters->sent_bytes += bytes;
    return tried;
  }
  if (import.sent && !import.refused) {
    // The peer may have the sequence even if its answer was lost.
    v1::EvictSequencesRequest request;
    request.set_tenant(sequence.tenant);
    request.add_sequence_ids(sequence.id);
    request.set_attempt(target.attempt());
    peer.GiveUp(std::move(request));
    tried.settled = !peer.Recall(stream, options_.counters);
  }
  return tried;
}

v1::HandedOver HandOver::Outcome(const SequenceInfo& sequence, v1::HandOverOutcome outcome,
                                 const absl::Status& why, const std::string& peer) {
  v1::HandedOver entry;
  entry.set_tenant(sequence.tenant);
  entry.set_sequence_id(sequence.id);
  entry.set_outcome(outcome);
  entry.set_peer(peer);
  entry.set_rows(static_cast<uint64_t>(sequence.length));
  if (!why.ok()) {
    // It is never empty, because operators and clients rely on it.
    const std::string& reason = DetailOf(why).reason;
    entry.set_reason(reason.empty() ? absl::AsciiStrToLower(absl::StatusCodeToString(why.code()))
                                    : reason);
    entry.set_message(std::string(why.message()));
  }
  HandOverCounters& counters = *options_.counters;
  const bool moved = outcome == v1::HAND_OVER_OUTCOME_MOVED;
  if (moved) {
    ++counters.moved;
  } else if (outcome == v1::HAND_OVER_OUTCOME_REFUSED) {
    ++counters.refused;
  } else {
    ++CounterOf(counters, entry.reason());
  }
  Log(moved ? LogLevel::kInfo : LogLevel::kWarning, "handed_over",
      {{"outcome", v1::HandOverOutcome_Name(outcome)},
       {"tenant", entry.tenant()},
       {"sequence", entry.sequence_id()},
       {"rows", entry.rows()},
       {"peer", entry.peer()},
       {"message", entry.message()},
       {"reason", entry.reason()}});
  return entry;
}

}  // namespace mla::server
