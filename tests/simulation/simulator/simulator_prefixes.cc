// Simulator: sequences that declare their rows and take rows of others; hints, and tiers.
#include <algorithm>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "scheduler/kvcache/tiers/tier_file.h"
#include "tests/simulation/simulator/simulator.h"

namespace mla::simulation {
namespace {

constexpr size_t kHistories = 24;
constexpr size_t kPageKeyBytes = 32;
constexpr int kMoveRounds = 1000;                 // within which tiers must end their moves
constexpr int64_t kMovesPauseNs = 1'000'000'000;  // pause of the tiers after a launch that failed

}  // namespace

size_t Simulator::MostPages(int model) const {
  const int rows = oracle_limits_.max_sequence_rows / oracle_->models[model].shape.page;
  return static_cast<size_t>(std::min(rows, oracle_limits_.max_pages));
}

Simulator::DrawnPrefix Simulator::DrawPrefix(int model) {
  DrawnPrefix drawn;
  if (hinted_.model == model && Chance(50)) {
    hinted_.model = -1;
    return hinted_.prefix;
  }
  if (!histories_.empty() && Chance(80)) {
    // Usually of the same contents; otherwise nothing may be found.
    for (int tries = 0; tries < 6; ++tries) {
      const History& known = histories_[Pick(histories_.size())];
      drawn = known.prefix;
      if (known.model < 0) continue;
      if (oracle_->models[known.model].contents == oracle_->models[model].contents) break;
    }
    drawn.pages.resize(Pick(drawn.pages.size() + 1));
    if (Chance(10)) drawn.salt = absl::StrCat("salt-", Pick(3));
  }
  for (uint64_t more = Pick(3); more > 0; --more) drawn.pages.push_back(next_page_++);
  return drawn;
}

void Simulator::FillPrefix(const DrawnPrefix& drawn, v1::Prefix* message) {
  for (const uint64_t page : drawn.pages) {
    std::string key = absl::StrCat("page ", page);
    key.resize(kPageKeyBytes, '.');
    message->add_page_keys(key);
  }
  message->set_salt(drawn.salt);
}

size_t Simulator::CheckFound(const scheduler::SequenceInfo& info, const DrawnPrefix& drawn) {
  const OracleSequence& sequence = oracle_->sequences.at(info.id);
  const auto page = static_cast<size_t>(oracle_->models[sequence.model].shape.page);
  const auto before = static_cast<size_t>(sequence.length());
  const auto now = static_cast<size_t>(info.length);
  const size_t most = oracle_->MostFound(sequence.model, drawn.salt, drawn.pages);
  if (now < before || (now - before) % page != 0 || (now > before && now > most * page)) {
    Fail(absl::StrCat("a match of ", drawn.pages.size(), " pages, of which ", most,
                      " were published, leads from ", before, " rows to ", now));
    return 0;
  }
  const size_t page_count = (now - before) / page;
  counts_.pages_found += static_cast<int64_t>(page_count);
  const auto first = drawn.pages.begin() + static_cast<int64_t>(before / page);
  counts_.pages_of_equals += oracle_->OfEquals(
      sequence.model, std::vector(first, first + static_cast<int64_t>(page_count)));
  if (page_count > 0 || !drawn.pages.empty()) {
    oracle_->ApplyMatch(info.id, drawn.pages, drawn.salt, page_count);
  }
  return page_count;
}

void Simulator::RenameFrom(uint64_t id, size_t found, DrawnPrefix drawn) {
  if (found == drawn.pages.size()) return;
  for (size_t i = found; i < drawn.pages.size(); ++i) drawn.pages[i] = next_page_++;
  v1::MatchRequest message;
  message.set_sequence_id(id);
  message.set_expected_epoch(1);
  FillPrefix(drawn, message.mutable_prefix());
  scheduler::MatchArgs args;
  args.tenant = TenantName(oracle_->sequences.at(id).tenant);
  if (!server::ParseMatch(message, engine_->limits(), &args).ok()) Fail("ParseMatch");
  const auto info = engine_->MatchSequence(args);
  if (!info.ok()) return Fail(absl::StrCat("Match: ", info.status().ToString()));
  if (CheckFound(*info, drawn) != 0) Fail("Match: pages were found that are new");
}

bool Simulator::Match() {
  OracleSequence* sequence = AnySequence(0, /*free=*/Chance(90));
  if (sequence == nullptr) return false;
  const int tenant = Chance(95) ? sequence->tenant : 1 + static_cast<int>(Pick(tenants_));
  const uint64_t id = sequence->id;
  const uint64_t epoch = sequence->epoch + (Chance(95) ? 0 : 1);
  DrawnPrefix drawn{sequence->pages, sequence->salt};
  const int page = oracle_->models[sequence->model].shape.page;
  const size_t whole = static_cast<size_t>(sequence->length() / page) + Pick(3);
  const size_t room = MostPages(sequence->model);
  while (drawn.pages.size() < std::min(whole, room)) drawn.pages.push_back(next_page_++);
  if (drawn.pages.empty()) return false;
  v1::MatchRequest message;
  message.set_sequence_id(id);
  message.set_expected_epoch(epoch);
  FillPrefix(drawn, message.mutable_prefix());
  scheduler::MatchArgs args;
  args.tenant = TenantName(tenant);
  if (!server::ParseMatch(message, engine_->limits(), &args).ok()) Fail("ParseMatch");
  BeforeCall();
  const Reasons expect = oracle_->CheckMatch(tenant, id, epoch);
  const auto info = engine_->MatchSequence(args);
  bool deferred = false;
  if (Foretold("Match", info.status(), expect)) {
    CheckFound(*info, drawn);
    deferred = info->matched.end == kvcache::MatchEnd::kDeferred;
    oracle_->Renew(&oracle_->sequences.at(id), 0, Now());
    if (histories_.size() < kHistories) histories_.emplace_back();
    histories_[Pick(histories_.size())] = {oracle_->sequences.at(id).model, drawn};
  }
  AfterCall();
  if (deferred && !failed()) {
    AwaitTiers();
    BeforeCall();
    // The sequence may be gone by now.
    if (oracle_->Find(tenant, id) != nullptr && oracle_->CheckMatch(tenant, id, epoch).none()) {
      const auto again = engine_->MatchSequence(args);
      if (again.ok()) CheckFound(*again, drawn);
      if (again.ok()) oracle_->Renew(&oracle_->sequences.at(id), 0, Now());
      if (!again.ok()) Fail(absl::StrCat("second Match: ", again.status().ToString()));
    }
    AfterCall();
  }
  Trace(id, drawn.pages.size(), static_cast<uint64_t>(info.status().code()));
  return true;
}

void Simulator::AwaitTiers() {
  for (int round = 0; round < kMoveRounds && !failed(); ++round) {
    BeforeCall();
    const bool moving = engine_->Stats().tiers.moving > 0;
    AfterCall();
    if (!moving) return;
    if (Poll()) continue;
    const int64_t done_at = device_->NextDone();
    if (done_at > Now()) clock_.Advance(done_at - Now());
  }
}

void Simulator::DamageFile() {
  std::fstream file(tier_path_, std::ios::in | std::ios::out | std::ios::binary);
  for (int group = 0; group < file_groups_; ++group) {
    if (Chance(70)) continue;
    const int64_t at = kvcache::TierFile::kHeaderBytes + group * kvcache::kTierBlock;
    file.seekg(at);
    const auto byte = static_cast<char>(file.get() ^ 0x55);
    file.seekp(at);
    file.put(byte);
  }
}

bool Simulator::Damage() {
  if (tier_groups_ == 0) return false;
  if (file_groups_ > 0 && Chance(50)) {
    DamageFile();
    return true;
  }
  const auto bytes = static_cast<size_t>((tier_groups_ + 1) * kvcache::kTierBlock);
  const std::span<std::byte> memory = device_->OwnMemory(bytes);
  // Few groups are larger than a quarter of their room, so only a part of it matters.
  constexpr size_t kApart = 64;
  for (size_t at = Pick(kApart); at < memory.size(); at += kApart) {
    if (Chance(20)) memory[at] ^= std::byte{0x55};
  }
  return true;
}

bool Simulator::DrawHinted(History* hinted) {
  if (histories_.empty()) return false;
  const bool any = Chance(10);
  for (int tries = 0; tries < 16; ++tries) {
    *hinted = histories_[Pick(histories_.size())];
    auto& [pages, salt] = hinted->prefix;
    if (!oracle_->models[hinted->model].open || pages.empty()) continue;
    pages.resize(1 + Pick(pages.size()));
    if (any || oracle_->MostFound(hinted->model, salt, pages) > 0) return true;
  }
  return false;
}

void Simulator::ReleaseHolders(const History& hinted) {
  std::vector<uint64_t> holders;
  for (const auto& [id, sequence] : oracle_->sequences) {
    const bool holds = !sequence.pages.empty() && sequence.pages[0] == hinted.prefix.pages[0];
    if (sequence.model == hinted.model && holds && !sequence.busy()) holders.push_back(id);
  }
  for (const uint64_t id : holders) {
    const auto found = oracle_->sequences.find(id);  // time has passed
    if (found != oracle_->sequences.end()) ReleaseOne(found->second.tenant, id);
  }
}

bool Simulator::Hint() {
  History known;
  if (!DrawHinted(&known)) return false;
  const DrawnPrefix& drawn = known.prefix;
  hinted_ = known;
  const auto kind = static_cast<scheduler::HintKind>(1 + Pick(4));
  const int64_t faults = device_->faults();
  const bool demotes = kind == scheduler::HintKind::kDemote && tier_groups_ > 0;
  if (demotes && Chance(70)) ReleaseHolders(known);
  SendHint(kind, known.model, drawn);
  if (!demotes || failed()) return true;
  if (device_->faults() > faults && Chance(50)) {
    // Nothing moves until then.
    clock_.Advance(kMovesPauseNs);
    Poll();
  }
  // Uses the room of others, so that rows return to places where other tenants' rows were.
  History other;
  if (!failed() && Chance(50) && DrawHinted(&other)) {
    if (Chance(70)) ReleaseHolders(other);
    SendHint(kind, other.model, other.prefix);
    if (failed()) return true;
  }
  // Rows that have left come back, and opens check whether they are unchanged.
  if (Chance(30)) Damage();
  if (Chance(70)) SendHint(scheduler::HintKind::kPrefetch, known.model, drawn);
  return true;
}

void Simulator::SendHint(scheduler::HintKind kind, int model, const DrawnPrefix& drawn) {
  const OracleModel& known = oracle_->models[model];
  v1::HintRequest message;
  message.set_kind(static_cast<v1::HintKind>(kind));
  message.set_model_id(known.name);
  FillPrefix(drawn, message.mutable_prefix());
  if (kind == scheduler::HintKind::kPin) message.set_ttl_ms(static_cast<uint32_t>(Pick(400)));
  if (kind == scheduler::HintKind::kRetain) message.set_priority(static_cast<uint32_t>(Pick(4)));
  scheduler::HintArgs args;
  args.tenant = TenantName(known.tenant);
  if (!server::ParseHint(message, engine_->limits(), &args).ok()) Fail("ParseHint");
  BeforeCall();
  if (!known.open) return AfterCall();  // its lease has ended, and another model may have its name
  const size_t found_pages = oracle_->MostFound(model, drawn.salt, drawn.pages);
  const auto answer = engine_->Hint(args);
  if (Foretold("Hint", answer.status(), Reasons())) {
    const int64_t all = static_cast<int64_t>(drawn.pages.size()) * known.shape.page;
    const int64_t named = answer->rows_done + answer->rows_deferred;
    const bool done = answer->outcome == scheduler::HintOutcome::kAccepted;
    if (answer->rows != all || named > static_cast<int64_t>(found_pages) * known.shape.page ||
        done != (answer->rows_done == all)) {
      Fail(absl::StrCat("a hint for ", all, " rows, of which ", found_pages,
                        " pages were published, is ", "done for ", answer->rows_done,
                        " and deferred for ", answer->rows_deferred));
    }
    oracle_->TouchModel(model, Now());
  }
  AfterCall();
  Trace(static_cast<uint64_t>(model), drawn.pages.size(),
        static_cast<uint64_t>(answer.status().code()));
  // Usually of a launch that moves something.
  if (tier_groups_ > 0 && Chance(50)) ArmFault();
  if (tier_groups_ > 0) AwaitTiers();
  BeforeCall();
  CountPinned(engine_->Stats());
  AfterCall();
}

// Counts page groups that no step can evict.
void Simulator::CountPinned(const scheduler::EngineStats& stats) {
  pinned_ = stats.page_groups_pinned + stats.tiers.moving + stats.page_groups_kept +
            static_cast<int64_t>(moves_.size());  // their sequences may go at any time
  // After a failed launch, moves wait for a second, and then begin at any call.
  pinned_ += fault_percent_ > 0 && tier_groups_ > 0 ? 1 : 0;
  counts_.pages_pinned = std::max(counts_.pages_pinned, stats.page_groups_kept);
}

}  // namespace mla::simulation
