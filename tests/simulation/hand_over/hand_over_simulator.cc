#include "tests/simulation/hand_over/hand_over_simulator.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/splitmix.h"
#include "scheduler/limits.h"
#include "scheduler/testing/engine_harness.h"
#include "server/logging/logging.h"
#include "server/pages/page_stream.h"
#include "tests/simulation/hand_over/dealt_weights.h"

namespace mla::simulation {
namespace {

constexpr size_t kMostTexts = 8;
constexpr uint64_t kMostRows = 12;
const std::array<std::string, 2> kTenants = {"red", "blue"};

absl::Status Unreachable() {
  return MakeError(absl::StatusCode::kUnavailable, "the connection is cut",
                   {.reason = "peer_failed"});
}

absl::Status Stopped() {
  return MakeError(absl::StatusCode::kCancelled, "stopped", {.reason = "stopped"});
}

}  // namespace

// The connection to the other server, with its faults. Clients of both servers act between any two
// of its messages.
class HandOverSimulator::Peer final : public server::HandOverPeer {
 public:
  Peer(HandOverSimulator* simulator, int to, const Faults& faults)
      : sim_(*simulator), to_(to), faults_(faults), takes_parts_(sim_.Chance(60)) {}

  absl::Status GetInfo(v1::GetServerInfoReply* info) override {
    Between();
    if (cancelled_) return Stopped();
    if (sim_.Chance(faults_.unreachable)) return Unreachable();
    info->set_boot_id(there().boot_id());
    info->add_capabilities("hand_over");
    info->add_capabilities("hand_over_weights");
    if (takes_parts_) info->add_capabilities("hand_over_weight_parts");
    return absl::OkStatus();
  }
  absl::StatusOr<uint64_t> FreeBytes() override {
    const scheduler::EngineStats stats = there().engine().Stats();
    return static_cast<uint64_t>(stats.kv_bytes_total - stats.kv_bytes_used);
  }
  server::PeerImport Import(const v1::ImportTarget& target, const SendParts& send) override;
  server::PeerWeights UploadWeights(const SendMessages& send) override;
  absl::StatusOr<uint32_t> Recall(const v1::EvictSequencesRequest& request) override;
  void Cancel() override { cancelled_ = true; }

  // Actions of a client of either server, of an operator or of a failure between two messages.
  void Between();

 private:
  SimServer& there() { return *sim_.servers_[static_cast<size_t>(to_)]; }
  absl::StatusOr<v1::ImportReply> Serve(const v1::ImportTarget& target,
                                        const std::vector<v1::PagesPart>& parts, bool whole);

  // Serves a transfer, in parts if there are any; the clients act between its messages. Fails if a
  // part that comes too late has an effect.
  absl::StatusOr<v1::UploadWeightsReply> ServeDealt(const DealtWeights& dealt, bool whole);

  HandOverSimulator& sim_;
  const int to_;
  const Faults faults_;
  const bool takes_parts_;
  bool cancelled_ = false;
};

void HandOverSimulator::Peer::Between() {
  if (sim_.Chance(faults_.client)) sim_.ClientAt(static_cast<int>(sim_.Pick(kServers)));
  if (!sim_.late_.empty() && sim_.Chance(20)) sim_.RunLate(sim_.Pick(sim_.late_.size()));
  if (!sim_.in_import_ && sim_.Chance(faults_.restart)) sim_.Restart(to_);
  if (sim_.hand_over_ != nullptr && sim_.Chance(faults_.stop)) {
    // Either an operator cancels it, or the whole server is gone; in the latter case nothing of it
    // reaches a peer any more.
    sim_.crashed_ = sim_.crashed_ || sim_.Chance(30);
    sim_.hand_over_->Interrupt();
  }
}

absl::StatusOr<v1::ImportReply> HandOverSimulator::Peer::Serve(
    const v1::ImportTarget& target, const std::vector<v1::PagesPart>& parts, bool whole) {
  const std::pair<int, uint64_t> stray = {to_, target.new_sequence_id()};
  const bool was = sim_.strays_.contains(stray);
  if (!was) sim_.strays_[stray] = false;
  sim_.in_import_ = true;
  auto reply = there().ServeImport(target, parts, whole, [this] { Between(); });
  sim_.in_import_ = false;
  if (!reply.ok() && !was) sim_.strays_.erase(stray);
  return reply;
}

server::PeerImport HandOverSimulator::Peer::Import(const v1::ImportTarget& target,
                                                   const SendParts& send) {
  server::PeerImport result;
  if (cancelled_) {
    result.status = Stopped();
    return result;
  }
  const uint64_t boot_id = there().boot_id();
  for (const auto& [server, id] : sim_.unsure_) {
    if (server != to_ && id == target.new_sequence_id()) {
      sim_.Fail("a sequence that one server may have is offered to another");
    }
  }
  std::vector<v1::PagesPart> parts;
  bool cut = false;
  const absl::Status sent = send([&](const v1::PagesPart& part) -> absl::Status {
    Between();
    if (part.has_header() && part.header().version() != server::kPagesVersion) {
      sim_.Fail("a peer that does not know the digests of XXH3 gets them");
    }
    cut = cut || cancelled_ || sim_.Chance(faults_.cut) || there().boot_id() != boot_id;
    if (cut) return absl::CancelledError("the connection is cut");
    parts.push_back(part);
    return absl::OkStatus();
  });
  Between();
  cut = cut || there().boot_id() != boot_id;
  result.sent = sent.ok();
  sim_.counts_.cut += cut;
  const bool whole = sent.ok() && !cut;
  if (!whole || sim_.Chance(faults_.late)) {
    // The peer may process what has arrived later.
    if (there().boot_id() == boot_id) sim_.late_.push_back({to_, boot_id, target, parts, whole});
    result.status = sent.ok() ? Unreachable() : sent;
    return result;
  }
  absl::StatusOr<v1::ImportReply> reply = Serve(target, parts, whole);
  Between();
  if (cancelled_ || sim_.Chance(faults_.lost_answer) || there().boot_id() != boot_id) {
    result.status = cancelled_ ? Stopped() : Unreachable();
    return result;
  }
  result.status = reply.status();
  result.refused = !reply.ok();
  if (!reply.ok()) {
    sim_.refused_.insert({to_, target.new_sequence_id()});
    return result;
  }
  result.reply = *reply;
  if (sim_.Chance(faults_.lie)) {
    v1::SequenceInfo* const told = result.reply.mutable_sequence();
    if (sim_.Chance(50)) {
      told->set_length(told->length() - 1);
    } else {
      result.reply.set_boot_id(boot_id + 1);
    }
    return result;
  }
  sim_.acknowledged_.insert({to_, target.new_sequence_id()});
  return result;
}

server::PeerWeights HandOverSimulator::Peer::UploadWeights(const SendMessages& send) {
  server::PeerWeights result;
  if (cancelled_) {
    result.status = Stopped();
    return result;
  }
  const uint64_t boot_id = there().boot_id();
  std::vector<v1::UploadWeightsRequest> messages;
  bool cut = false;
  const absl::Status sent = send(
      [&](v1::UploadWeightsRequest& message) -> absl::Status {
        Between();
        cut = cut || cancelled_ || sim_.Chance(faults_.cut) || there().boot_id() != boot_id;
        if (cut) return absl::CancelledError("the connection is cut");
        messages.push_back(message);
        return absl::OkStatus();
      },
      [] { return absl::OkStatus(); });
  Between();
  cut = cut || there().boot_id() != boot_id;
  if (there().boot_id() != boot_id) messages.clear();  // what arrived went with the old server
  const bool whole = sent.ok() && !cut;
  sim_.counts_.weights_cut += whole ? 0 : 1;
  const std::pair<int, std::string> own = {to_,
                                           messages.empty() ? "" : messages[0].header().tenant()};
  const auto had = sim_.weights_.find(own);
  const auto sends = sim_.weights_.find({sim_.draining_, own.second});
  sim_.in_import_ = true;
  DealtWeights dealt;
  dealt.calls.push_back(messages);
  if (!messages.empty() && (messages[0].header().attempt() != 0) != takes_parts_) {
    sim_.Fail("a peer gets an attempt that it does not know, or none");
  }
  if (whole && takes_parts_) {
    const uint64_t drawn = sim_.Pick(2 * kWeightsFaults);
    const auto fault = static_cast<WeightsFault>(drawn < kWeightsFaults ? drawn : 0);
    dealt = DealWeights(messages, fault, [this](uint64_t below) { return sim_.Pick(below); });
  }
  const bool spoilt = dealt.fault != WeightsFault::kNone;
  sim_.counts_.weights_spoilt += spoilt ? 1 : 0;
  const auto reply = ServeDealt(dealt, whole);
  sim_.in_import_ = false;
  const bool differ =
      had != sim_.weights_.end() && sends != sim_.weights_.end() && had->second != sends->second;
  if (spoilt && reply.ok()) sim_.Fail("a transfer with a fault has brought weights");
  if (whole && !spoilt && reply.ok() == differ) {
    sim_.Fail(absl::StrCat("weights of ", own.second, differ ? " replace others" : ": ",
                           reply.status().ToString()));
  }
  if (reply.ok() && sends != sim_.weights_.end()) sim_.weights_[own] = sends->second;
  Between();
  if (!whole || cancelled_ || sim_.Chance(faults_.lost_answer) || there().boot_id() != boot_id) {
    result.status = cancelled_ ? Stopped() : sent.ok() ? Unreachable() : sent;
    return result;
  }
  result.status = reply.status();
  result.refused = !reply.ok();
  sim_.counts_.weights_moved += reply.ok() ? 1 : 0;
  sim_.counts_.weights_refused += result.refused ? 1 : 0;
  if (reply.ok()) result.reply = *reply;
  return result;
}

absl::StatusOr<v1::UploadWeightsReply> HandOverSimulator::Peer::ServeDealt(
    const DealtWeights& dealt, bool whole) {
  size_t next = 1;
  const auto serve_part = [&] {
    const size_t part = next++;
    const bool cut = dealt.fault == WeightsFault::kCut && part == dealt.spoilt;
    const auto reply = there().ServeWeights(dealt.calls[part], !cut, [this] { Between(); });
    sim_.counts_.weight_parts += reply.ok() ? 1 : 0;
    return reply.ok();
  };
  const size_t late =
      dealt.fault == WeightsFault::kLate ? dealt.calls.size() - 1 : dealt.calls.size();
  size_t messages = 1;  // that the transfer's own call has had
  auto reply = there().ServeWeights(dealt.calls[0], whole, [&] {
    Between();
    const bool last = ++messages >= dealt.calls[0].size();
    while (next < late && (last || sim_.Chance(40))) serve_part();
  });
  while (next < dealt.calls.size()) {
    if (serve_part()) sim_.Fail("a part that comes too late is taken");
  }
  return reply;
}

absl::StatusOr<uint32_t> HandOverSimulator::Peer::Recall(const v1::EvictSequencesRequest& request) {
  Between();
  const std::pair<int, uint64_t> stray = {to_, request.sequence_ids(0)};
  if (sim_.crashed_ || sim_.Chance(faults_.lost_take_back)) {
    // It may have arrived although its reply was lost.
    if (!sim_.crashed_ && sim_.Chance(50)) there().Evict(request);
    sim_.strays_[stray] = true;
    sim_.unsure_.insert(stray);
    return Unreachable();
  }
  const uint32_t evicted = there().Evict(request);
  sim_.strays_.erase(stray);
  sim_.unsure_.erase(stray);
  sim_.given_up_.insert(request.attempt());
  return evicted;
}

uint64_t HandOverSimulator::Pick(uint64_t below) { return (random_ = SplitMix(random_)) % below; }

HandOverSimulator::HandOverSimulator(uint64_t seed)
    : random_(SplitMix(seed ^ 0x68616e646f766572u)), clock_(1'000'000) {
  // Every outcome of a drain is logged, which is not needed here.
  static const bool quiet = [] {
    server::ConfigureLogging("text", "error");
    return true;
  }();
  static_cast<void>(quiet);
  for (size_t i = 0; i < servers_.size(); ++i) {
    servers_[i] = std::make_unique<SimServer>(
        absl::StrCat("server-", i, ":1"), std::vector(kTenants.begin(), kTenants.end()), &clock_);
  }
}

void HandOverSimulator::Fail(const std::string& what) {
  if (violation_.empty()) {
    violation_ = absl::StrCat("hand-over: after ", counts_.operations, " operations: ", what);
  }
}

std::string HandOverSimulator::Run(int operations) {
  for (int i = 0; i < operations && !failed(); ++i) {
    counts_.operations += Operate() ? 1 : 0;
    if (!failed()) Check();
    hash_ = (hash_ ^ random_) * 0x100000001b3u;
  }
  if (!failed()) Finish();
  return violation_;
}

bool HandOverSimulator::Operate() {
  const int server = static_cast<int>(Pick(kServers));
  const uint64_t drawn = Pick(100);
  if (drawn < 34) return Open(server);
  if (drawn < 46) return Extend(server);
  if (drawn < 54) return Truncate(server);
  if (drawn < 60) return Fork(server);
  if (drawn < 66) return Release(server);
  if (drawn < 70) return Look(server);
  if (drawn < 72) return Restart(server);
  if (drawn < 80 && !late_.empty()) {
    RunLate(Pick(late_.size()));
    return true;
  }
  if (drawn < 84) return LoadWeights(server);
  return drawn >= 86 && Drain(server);
}

void HandOverSimulator::ClientAt(int server) {
  const uint64_t drawn = Pick(100);
  if (drawn < 30) {
    Open(server);
  } else if (drawn < 50) {
    Truncate(server);
  } else if (drawn < 60) {
    Fork(server);
  } else if (drawn < 75) {
    Release(server);
  } else {
    Extend(server);
  }
}

std::map<uint64_t, HandOverSimulator::Text>::iterator HandOverSimulator::AnyText(int server) {
  std::vector<uint64_t> there;
  for (auto& [id, text] : texts_) {
    // Finds where the sequence is now, because it may have just moved.
    CheckText(id, &text);
    if (text.server == server) there.push_back(id);
  }
  return there.empty() || failed() ? texts_.end() : texts_.find(there[Pick(there.size())]);
}

void HandOverSimulator::ExpectDraining(const absl::Status& status, bool opens) {
  const ErrorDetail& detail = DetailOf(status);
  if (detail.reason != "draining" || detail.peer != (opens ? named_ : "")) {
    Fail(absl::StrCat("a call of a server that drains: ", status.ToString(), " ", detail.peer));
  }
}

bool HandOverSimulator::Open(int server) {
  if (texts_.size() == kMostTexts) return false;
  Text text;
  text.tenant = kTenants[Pick(kTenants.size())];
  text.server = server;
  for (uint64_t rows = 1 + Pick(kMostRows); rows > 0; --rows) text.rows.push_back(next_key_++);
  const auto info = servers_[static_cast<size_t>(server)]->AddRows(text.tenant, 0, 0, 0, text.rows);
  if (server == draining_) {
    ExpectDraining(info.status(), /*opens=*/true);
    return true;
  }
  if (!info.ok()) {
    if (info.status().code() != absl::StatusCode::kResourceExhausted) {
      Fail(absl::StrCat("Open: ", info.status().ToString()));
    }
    return true;
  }
  text.epoch = info->epoch;
  texts_[info->id] = std::move(text);
  return true;
}

bool HandOverSimulator::Extend(int server) {
  const auto entry = AnyText(server);
  if (entry == texts_.end()) return false;
  Text& text = entry->second;
  RowKeys keys;
  for (uint64_t rows = 1 + Pick(kMostRows); rows > 0; --rows) keys.push_back(next_key_++);
  const auto info = servers_[static_cast<size_t>(server)]->AddRows(
      text.tenant, entry->first, text.epoch, static_cast<int64_t>(text.rows.size()), keys);
  if (server == draining_) {
    ExpectDraining(info.status(), /*opens=*/false);
  } else if (info.ok()) {
    text.rows.insert(text.rows.end(), keys.begin(), keys.end());
  }
  return true;
}

bool HandOverSimulator::Truncate(int server) {
  const auto entry = AnyText(server);
  if (entry == texts_.end()) return false;
  Text& text = entry->second;
  const uint64_t length = Pick(text.rows.size() + 1);
  const auto info = servers_[static_cast<size_t>(server)]->engine().TruncateSequence(
      text.tenant, entry->first, static_cast<int64_t>(length), text.epoch);
  if (!info.ok()) {
    Fail(absl::StrCat("Truncate: ", info.status().ToString()));
    return true;
  }
  text.epoch = info->epoch;
  text.rows.resize(length);
  return true;
}

bool HandOverSimulator::Fork(int server) {
  const auto entry = AnyText(server);
  if (entry == texts_.end() || texts_.size() == kMostTexts) return false;
  Text text = entry->second;
  scheduler::ForkArgs args;
  args.tenant = text.tenant;
  args.parent = entry->first;
  args.expected_epoch = text.epoch;
  const uint64_t length = Pick(text.rows.size() + 1);
  args.length = static_cast<int64_t>(length);
  const auto info = servers_[static_cast<size_t>(server)]->engine().ForkSequence(args);
  if (server == draining_) {
    ExpectDraining(info.status(), /*opens=*/false);
    return true;
  }
  if (!info.ok()) return true;
  text.epoch = info->epoch;
  text.rows.resize(length);
  texts_[info->id] = std::move(text);
  return true;
}

bool HandOverSimulator::Release(int server) {
  const auto entry = AnyText(server);
  if (entry == texts_.end()) return false;
  std::vector<scheduler::SequenceId> absent;
  const std::vector<scheduler::SequenceId> ids = {entry->first};
  servers_[static_cast<size_t>(server)]->engine().ReleaseSequences(entry->second.tenant, ids,
                                                                   &absent);
  if (!absent.empty()) Fail("Release: a sequence that is there was not found");
  texts_.erase(entry);
  return true;
}

bool HandOverSimulator::Look(int server) {
  const auto at = AnyText(server);
  if (at == texts_.end()) return false;
  CheckRows(at->first, at->second);
  return true;
}

bool HandOverSimulator::LoadWeights(int server) {
  const std::string& tenant = kTenants[Pick(kTenants.size())];
  const auto variant = static_cast<int>(Pick(SimServer::kWeightVariants));
  const absl::Status status = servers_[static_cast<size_t>(server)]->LoadWeights(tenant, variant);
  const auto [has, made] = weights_.try_emplace({server, tenant}, variant);
  if (status.ok() != (made || has->second == variant)) {
    Fail(absl::StrCat("LoadWeights: ", status.ToString()));
  }
  return true;
}

bool HandOverSimulator::Restart(int server) {
  for (auto& [id, text] : texts_) CheckText(id, &text);
  DropServer(server);
  return true;
}

void HandOverSimulator::DropServer(int server) {
  servers_[static_cast<size_t>(server)]->Restart();
  std::erase_if(texts_, [server](const auto& one) { return one.second.server == server; });
  std::erase_if(strays_, [server](const auto& one) { return one.first.first == server; });
  std::erase_if(late_, [server](const Late& late) { return late.server == server; });
  std::erase_if(weights_, [server](const auto& one) { return one.first.first == server; });
}

// Runs an import that ends after its caller has given up. It must bring nothing, or bring what the
// caller could not learn of.
void HandOverSimulator::RunLate(size_t index) {
  const Late late = std::move(late_[index]);
  late_.erase(late_.begin() + static_cast<ptrdiff_t>(index));
  if (late.server == draining_) return;
  ++counts_.late;
  SimServer& server = *servers_[static_cast<size_t>(late.server)];
  const bool within = std::exchange(in_import_, true);
  const auto reply = server.ServeImport(late.target, late.parts, late.whole, [] {});
  in_import_ = within;
  if (!reply.ok()) return;
  if (given_up_.contains(late.target.attempt())) {
    Fail("an import that was given up has brought its sequence");
  }
  strays_.try_emplace({late.server, late.target.new_sequence_id()}, false);
}

HandOverSimulator::Faults HandOverSimulator::DrawFaults() {
  Faults faults;
  // Most drains have one kind of trouble, some have none, and some have all.
  uint64_t* const kinds[] = {&faults.unreachable, &faults.cut,   &faults.lost_answer,
                             &faults.late,        &faults.lie,   &faults.restart,
                             &faults.stop,        &faults.client};
  const uint64_t kind = Pick(std::size(kinds) + 2);
  for (size_t i = 0; i < std::size(kinds); ++i) {
    if (i == kind || kind == std::size(kinds)) *kinds[i] = 2 + Pick(20);
  }
  faults.client = std::max<uint64_t>(faults.client, Pick(10));
  faults.lost_take_back = Chance(30) ? 40 : 0;
  return faults;
}

bool HandOverSimulator::Drain(int from) {
  Check();
  if (failed() || texts_.empty()) return false;
  const Faults faults = DrawFaults();
  // Both other servers, in either order, or one of them.
  const int first = static_cast<int>((static_cast<size_t>(from) + 1 + Pick(2)) % kServers);
  std::vector<int> to = {first};
  if (Chance(60)) to.push_back(static_cast<int>(kServers) - from - first);
  std::vector<server::HandOverTarget> targets;
  for (const int server : to) {
    targets.push_back({servers_[static_cast<size_t>(server)]->address(), {}});
    targets.back().streams.push_back(std::make_unique<Peer>(this, server, faults));
  }
  SimServer& here = *servers_[static_cast<size_t>(from)];
  crashed_ = false;
  const auto connected = server::HandOver::Connect(
      {&here.engine(), &here.counters(), here.boot_id()}, std::move(targets));
  if (!connected.ok()) {
    if (DetailOf(connected.status()).reason != "peer_unreachable") {
      Fail(absl::StrCat("Connect: ", connected.status().ToString()));
    }
    return true;
  }
  ++counts_.drains;
  draining_ = from;
  named_ = (*connected)->address();
  acknowledged_.clear();
  refused_.clear();
  unsure_.clear();
  here.engine().StartDrain(named_);
  const std::map<uint64_t, Text> before = texts_;
  hand_over_ = connected->get();
  hand_over_->Run();
  hand_over_ = nullptr;
  if (!failed()) CheckAnswer(from, before, **connected);
  draining_ = -1;
  if (crashed_) ++counts_.crashes;
  if (crashed_ || Chance(30)) {
    DropServer(from);
  } else {
    here.engine().CancelDrain();
  }
  return true;
}

// ------------------------------------------------------------------------------------------ Checks

int HandOverSimulator::ServerAt(const std::string& address) const {
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (servers_[i]->address() == address) return static_cast<int>(i);
  }
  return -1;
}

void HandOverSimulator::CheckAnswer(int from, const std::map<uint64_t, Text>& before,
                                    const server::HandOver& hand_over) {
  for (auto& [id, text] : texts_) CheckText(id, &text);
  const auto peers = static_cast<size_t>(
      std::count_if(hand_over.asked().begin(), hand_over.asked().end(),
                    [](const v1::DrainPeer& one) { return one.reason().empty(); }));
  std::set<uint64_t> named;
  std::set<int> reached;
  for (const v1::HandedOver& one : hand_over.outcomes()) {
    const int at = ServerAt(one.peer());
    const bool moved = one.outcome() == v1::HAND_OVER_OUTCOME_MOVED;
    if (moved != (at >= 0 && at != from)) return Fail("the answer names no server that has it");
    if (moved) reached.insert(at);
    if (strays_.contains({from, one.sequence_id()})) {
      // A sequence that an earlier drain has left here is drained like the others.
      if (moved) strays_[{at, one.sequence_id()}] = true;
      if (moved) strays_.erase({from, one.sequence_id()});
      continue;
    }
    const auto was = before.find(one.sequence_id());
    if (was == before.end() || was->second.server != from || one.tenant() != was->second.tenant ||
        !named.insert(one.sequence_id()).second) {
      return Fail("the answer names a sequence that was not there, or twice, or as another's");
    }
    CheckOutcome(from, one, peers);
  }
  counts_.divided += reached.size() > 1;
  for (const auto& [id, text] : before) {
    const auto now = texts_.find(id);
    if (text.server == from && now != texts_.end() && now->second.server == from &&
        !named.contains(id)) {
      Fail("the answer does not name a sequence that is here");
    }
  }
  for (const auto& [stray, stays] : strays_) {
    if (stray.first != from && !stays && !failed()) {
      Fail("a peer was not told to forget a sequence that it may have");
    }
  }
}

void HandOverSimulator::CheckOutcome(int from, const v1::HandedOver& one, size_t peers) {
  const bool moved = one.outcome() == v1::HAND_OVER_OUTCOME_MOVED;
  const bool refused = one.outcome() == v1::HAND_OVER_OUTCOME_REFUSED;
  size_t refusals = 0;
  for (int server = 0; server < static_cast<int>(kServers); ++server) {
    refusals += refused_.contains({server, one.sequence_id()});
  }
  counts_.moved += moved;
  counts_.refused += refused;
  counts_.kept += one.outcome() == v1::HAND_OVER_OUTCOME_KEPT;
  counts_.passed_on += moved && refusals > 0;
  if (refused && refusals != peers) Fail("a peer that might take a sequence was not asked");
  const auto now = texts_.find(one.sequence_id());
  const bool here = now != texts_.end() && now->second.server == from;
  if (moved && here) Fail("the answer says moved of a sequence that is here");
  if (!moved && now != texts_.end() && !here) {
    Fail("the answer says kept of a sequence that has moved");
  }
}

void HandOverSimulator::Check() {
  for (auto& [id, text] : texts_) {
    if (!failed()) CheckText(id, &text);
  }
  for (int server = 0; server < static_cast<int>(kServers) && !failed(); ++server) {
    CheckStrays(server);
    CheckWeights(server);
  }
}

// Looks for a sequence as its client would.
void HandOverSimulator::CheckText(uint64_t id, Text* text) {
  if (failed()) return;
  SimServer& server = *servers_[static_cast<size_t>(text->server)];
  const auto list = server.engine().GetSequences({text->tenant, {id}, ""});
  if (list.sequences.empty()) return CheckMoved(id, text);
  const scheduler::SequenceInfo& info = list.sequences[0];
  if (info.epoch != text->epoch || info.length != static_cast<int64_t>(text->rows.size())) {
    Fail(absl::StrCat("a sequence of ", text->rows.size(), " rows has ", info.length));
  }
}

void HandOverSimulator::CheckMoved(uint64_t id, Text* text) {
  SimServer& here = *servers_[static_cast<size_t>(text->server)];
  const auto told = here.engine().GetSequences({text->tenant, {id}, ""}).moved;
  if (told.empty()) return Fail("a sequence is lost");
  const int target = ServerAt(told[0].second);
  if (target < 0 || target == text->server) return Fail("the wrong server is named");
  if (!acknowledged_.contains({target, id})) {
    return Fail("a sequence has moved that its peer does not have");
  }
  SimServer& there = *servers_[static_cast<size_t>(target)];
  const auto list = there.engine().GetSequences({text->tenant, {id}, ""});
  if (list.sequences.empty()) {
    return Fail(absl::StrCat("a sequence that has moved is not there, as ", text->tenant, "'s"));
  }
  text->server = target;
  text->epoch = list.sequences[0].epoch;
  strays_.erase({target, id});
  CheckRows(id, *text);
}

void HandOverSimulator::CheckRows(uint64_t id, const Text& text) {
  SimServer& server = *servers_[static_cast<size_t>(text.server)];
  const auto list = server.engine().GetSequences({text.tenant, {id}, ""});
  if (list.sequences.empty()) return Fail("a sequence is lost");
  ++counts_.checked;
  const absl::Status same = server.CheckRows(text.tenant, list.sequences[0], text.rows);
  if (!same.ok()) Fail(absl::StrCat("rows differ: ", same.ToString()));
}

void HandOverSimulator::CheckStrays(int server) {
  for (const scheduler::SequenceInfo& one :
       servers_[static_cast<size_t>(server)]->engine().AllSequences()) {
    const auto text = texts_.find(one.id);
    if (text != texts_.end() && text->second.server == server &&
        text->second.tenant == one.tenant) {
      continue;
    }
    if (!strays_.contains({server, one.id})) {
      return Fail("a server has a sequence that is elsewhere, or was released");
    }
  }
}

void HandOverSimulator::CheckWeights(int server) {
  for (const std::string& tenant : kTenants) {
    const auto has = servers_[static_cast<size_t>(server)]->WeightsOf(tenant);
    const auto expected = weights_.find({server, tenant});
    if (!has.ok()) return Fail(absl::StrCat("weights: ", has.status().ToString()));
    if (*has != (expected == weights_.end() ? -1 : expected->second)) {
      return Fail(absl::StrCat("a model of ", tenant, " has other weights than it was given"));
    }
  }
}

void HandOverSimulator::Finish() {
  while (!late_.empty() && !failed()) RunLate(0);
  for (const auto& [id, text] : texts_) {
    if (!failed()) CheckRows(id, text);
  }
  // No client renews them any more.
  clock_.Advance((scheduler::testing::TinyLimits().sequence_lease_ms + 1) * 1'000'000);
  for (const auto& server : servers_) {
    if (failed()) return;
    if (!server->engine().AllSequences().empty()) Fail("a sequence outlives its lease");
    if (server->engine().Stats().page_groups_used != 0) Fail("page groups are left");
    if (const std::string broken = server->engine().CheckInvariants(); !broken.empty()) {
      Fail(broken);
    }
  }
}

}  // namespace mla::simulation
