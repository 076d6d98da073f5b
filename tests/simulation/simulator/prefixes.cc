#include "tests/simulation/simulator/prefixes.h"

#include <algorithm>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "scheduler/kvcache/tiers/tier_file.h"
#include "tests/simulation/simulator/control.h"
#include "tests/simulation/simulator/copies.h"
#include "tests/simulation/simulator/transport.h"

namespace mla::simulation {
namespace {

constexpr size_t kHistories = 24;
constexpr size_t kPageKeyBytes = 32;
constexpr int kMoveRounds = 1000;                 // within which tiers must end their moves
constexpr int64_t kMovesPauseNs = 1'000'000'000;  // pause of the tiers after a launch that failed

}  // namespace

size_t Prefixes::MostPages(int model) const {
  const int rows = w_.oracle_limits.max_sequence_rows / w_.oracle->models[model].shape.page;
  return static_cast<size_t>(std::min(rows, w_.oracle_limits.max_pages));
}

DrawnPrefix Prefixes::DrawPrefix(int model) {
  DrawnPrefix drawn;
  if (hinted_.model == model && w_.Chance(50)) {
    hinted_.model = -1;
    return hinted_.prefix;
  }
  if (!histories_.empty() && w_.Chance(80)) {
    // Usually of the same contents; otherwise nothing may be found.
    for (int tries = 0; tries < 6; ++tries) {
      const History& known = histories_[w_.Pick(histories_.size())];
      drawn = known.prefix;
      if (known.model < 0) continue;
      if (w_.oracle->models[known.model].contents == w_.oracle->models[model].contents) break;
    }
    drawn.pages.resize(w_.Pick(drawn.pages.size() + 1));
    if (w_.Chance(10)) drawn.salt = absl::StrCat("salt-", w_.Pick(3));
  }
  for (uint64_t more = w_.Pick(3); more > 0; --more) drawn.pages.push_back(w_.next_page++);
  return drawn;
}

void Prefixes::FillPrefix(const DrawnPrefix& drawn, v1::Prefix* message) {
  for (const uint64_t page : drawn.pages) {
    std::string key = absl::StrCat("page ", page);
    key.resize(kPageKeyBytes, '.');
    message->add_page_keys(key);
  }
  message->set_salt(drawn.salt);
}

size_t Prefixes::CheckFound(const scheduler::SequenceInfo& info, const DrawnPrefix& drawn) {
  const OracleSequence& sequence = w_.oracle->sequences.at(info.id);
  const auto page = static_cast<size_t>(w_.oracle->models[sequence.model].shape.page);
  const auto before = static_cast<size_t>(sequence.length());
  const auto now = static_cast<size_t>(info.length);
  const size_t most = w_.oracle->MostFound(sequence.model, drawn.salt, drawn.pages);
  if (now < before || (now - before) % page != 0 || (now > before && now > most * page)) {
    w_.Fail(absl::StrCat("a match of ", drawn.pages.size(), " pages, of which ", most,
                         " were published, leads from ", before, " rows to ", now));
    return 0;
  }
  const size_t page_count = (now - before) / page;
  w_.counts.pages_found += static_cast<int64_t>(page_count);
  const auto first = drawn.pages.begin() + static_cast<int64_t>(before / page);
  w_.counts.pages_of_equals += w_.oracle->OfEquals(
      sequence.model, std::vector(first, first + static_cast<int64_t>(page_count)));
  if (page_count > 0 || !drawn.pages.empty()) {
    w_.oracle->ApplyMatch(info.id, drawn.pages, drawn.salt, page_count);
  }
  return page_count;
}

void Prefixes::RenameFrom(uint64_t id, size_t found, DrawnPrefix drawn) {
  if (found == drawn.pages.size()) return;
  for (size_t i = found; i < drawn.pages.size(); ++i) drawn.pages[i] = w_.next_page++;
  v1::MatchRequest message;
  message.set_sequence_id(id);
  message.set_expected_epoch(1);
  FillPrefix(drawn, message.mutable_prefix());
  scheduler::MatchArgs args;
  args.tenant = w_.TenantName(w_.oracle->sequences.at(id).tenant);
  if (!server::ParseMatch(message, w_.engine->limits(), &args).ok()) w_.Fail("ParseMatch");
  const auto info = w_.engine->MatchSequence(args);
  if (!info.ok()) return w_.Fail(absl::StrCat("Match: ", info.status().ToString()));
  if (CheckFound(*info, drawn) != 0) w_.Fail("Match: pages were found that are new");
}

bool Prefixes::Match() {
  OracleSequence* sequence = w_.AnySequence(0, /*free=*/w_.Chance(90));
  if (sequence == nullptr) return false;
  const int tenant = w_.Chance(95) ? sequence->tenant : 1 + static_cast<int>(w_.Pick(w_.tenants));
  const uint64_t id = sequence->id;
  const uint64_t epoch = sequence->epoch + (w_.Chance(95) ? 0 : 1);
  DrawnPrefix drawn{sequence->pages, sequence->salt};
  const int page = w_.oracle->models[sequence->model].shape.page;
  const size_t whole = static_cast<size_t>(sequence->length() / page) + w_.Pick(3);
  const size_t room = MostPages(sequence->model);
  while (drawn.pages.size() < std::min(whole, room)) drawn.pages.push_back(w_.next_page++);
  if (drawn.pages.empty()) return false;
  v1::MatchRequest message;
  message.set_sequence_id(id);
  message.set_expected_epoch(epoch);
  FillPrefix(drawn, message.mutable_prefix());
  scheduler::MatchArgs args;
  args.tenant = w_.TenantName(tenant);
  if (!server::ParseMatch(message, w_.engine->limits(), &args).ok()) w_.Fail("ParseMatch");
  w_.transport->BeforeCall();
  const Reasons expect = w_.oracle->CheckMatch(tenant, id, epoch);
  const auto info = w_.engine->MatchSequence(args);
  bool deferred = false;
  if (w_.Foretold("Match", info.status(), expect)) {
    CheckFound(*info, drawn);
    deferred = info->matched.end == kvcache::MatchEnd::kDeferred;
    w_.oracle->Renew(&w_.oracle->sequences.at(id), 0, w_.Now());
    if (histories_.size() < kHistories) histories_.emplace_back();
    histories_[w_.Pick(histories_.size())] = {w_.oracle->sequences.at(id).model, drawn};
  }
  w_.transport->AfterCall();
  if (deferred && !w_.failed()) {
    AwaitTiers();
    w_.transport->BeforeCall();
    // The sequence may be gone by now.
    if (w_.oracle->Find(tenant, id) != nullptr && w_.oracle->CheckMatch(tenant, id, epoch).none()) {
      const auto again = w_.engine->MatchSequence(args);
      if (again.ok()) CheckFound(*again, drawn);
      if (again.ok()) w_.oracle->Renew(&w_.oracle->sequences.at(id), 0, w_.Now());
      if (!again.ok()) w_.Fail(absl::StrCat("second Match: ", again.status().ToString()));
    }
    w_.transport->AfterCall();
  }
  w_.Trace(id, drawn.pages.size(), static_cast<uint64_t>(info.status().code()));
  return true;
}

void Prefixes::AwaitTiers() {
  for (int round = 0; round < kMoveRounds && !w_.failed(); ++round) {
    w_.transport->BeforeCall();
    const bool moving = w_.engine->Stats().tiers.moving > 0;
    w_.transport->AfterCall();
    if (!moving) return;
    if (w_.transport->Poll()) continue;
    const int64_t done_at = w_.device->NextDone();
    if (done_at > w_.Now()) w_.clock.Advance(done_at - w_.Now());
  }
}

void Prefixes::DamageFile() {
  std::fstream file(w_.tier_path, std::ios::in | std::ios::out | std::ios::binary);
  for (int group = 0; group < w_.file_groups; ++group) {
    if (w_.Chance(70)) continue;
    const int64_t at = kvcache::TierFile::kHeaderBytes + group * kvcache::kTierBlock;
    file.seekg(at);
    const auto byte = static_cast<char>(file.get() ^ 0x55);
    file.seekp(at);
    file.put(byte);
  }
}

bool Prefixes::Damage() {
  if (w_.tier_groups == 0) return false;
  if (w_.file_groups > 0 && w_.Chance(50)) {
    DamageFile();
    return true;
  }
  const auto bytes = static_cast<size_t>((w_.tier_groups + 1) * kvcache::kTierBlock);
  const std::span<std::byte> memory = w_.device->OwnMemory(bytes);
  // Few groups are larger than a quarter of their room, so only a part of it matters.
  constexpr size_t kApart = 64;
  for (size_t at = w_.Pick(kApart); at < memory.size(); at += kApart) {
    if (w_.Chance(20)) memory[at] ^= std::byte{0x55};
  }
  return true;
}

bool Prefixes::DrawHinted(History* hinted) {
  if (histories_.empty()) return false;
  const bool any = w_.Chance(10);
  for (int tries = 0; tries < 16; ++tries) {
    *hinted = histories_[w_.Pick(histories_.size())];
    auto& [pages, salt] = hinted->prefix;
    if (!w_.oracle->models[hinted->model].open || pages.empty()) continue;
    pages.resize(1 + w_.Pick(pages.size()));
    if (any || w_.oracle->MostFound(hinted->model, salt, pages) > 0) return true;
  }
  return false;
}

void Prefixes::ReleaseHolders(const History& hinted) {
  std::vector<uint64_t> holders;
  for (const auto& [id, sequence] : w_.oracle->sequences) {
    const bool holds = !sequence.pages.empty() && sequence.pages[0] == hinted.prefix.pages[0];
    if (sequence.model == hinted.model && holds && !sequence.busy()) holders.push_back(id);
  }
  for (const uint64_t id : holders) {
    const auto found = w_.oracle->sequences.find(id);  // time has passed
    if (found != w_.oracle->sequences.end()) w_.copies->ReleaseOne(found->second.tenant, id);
  }
}

bool Prefixes::Hint() {
  History known;
  if (!DrawHinted(&known)) return false;
  const DrawnPrefix& drawn = known.prefix;
  hinted_ = known;
  const auto kind = static_cast<scheduler::HintKind>(1 + w_.Pick(4));
  const int64_t faults = w_.device->faults();
  const bool demotes = kind == scheduler::HintKind::kDemote && w_.tier_groups > 0;
  if (demotes && w_.Chance(70)) ReleaseHolders(known);
  SendHint(kind, known.model, drawn);
  if (!demotes || w_.failed()) return true;
  if (w_.device->faults() > faults && w_.Chance(50)) {
    // Nothing moves until then.
    w_.clock.Advance(kMovesPauseNs);
    w_.transport->Poll();
  }
  // Uses the room of others, so that rows return to places where other tenants' rows were.
  History other;
  if (!w_.failed() && w_.Chance(50) && DrawHinted(&other)) {
    if (w_.Chance(70)) ReleaseHolders(other);
    SendHint(kind, other.model, other.prefix);
    if (w_.failed()) return true;
  }
  // Rows that have left come back, and opens check whether they are unchanged.
  if (w_.Chance(30)) Damage();
  if (w_.Chance(70)) SendHint(scheduler::HintKind::kPrefetch, known.model, drawn);
  return true;
}

void Prefixes::SendHint(scheduler::HintKind kind, int model, const DrawnPrefix& drawn) {
  const OracleModel& known = w_.oracle->models[model];
  v1::HintRequest message;
  message.set_kind(static_cast<v1::HintKind>(kind));
  message.set_model_id(known.name);
  FillPrefix(drawn, message.mutable_prefix());
  if (kind == scheduler::HintKind::kPin) message.set_ttl_ms(static_cast<uint32_t>(w_.Pick(400)));
  if (kind == scheduler::HintKind::kRetain) message.set_priority(static_cast<uint32_t>(w_.Pick(4)));
  scheduler::HintArgs args;
  args.tenant = w_.TenantName(known.tenant);
  if (!server::ParseHint(message, w_.engine->limits(), &args).ok()) w_.Fail("ParseHint");
  w_.transport->BeforeCall();
  if (!known.open)
    return w_.transport->AfterCall();  // its lease has ended, and another model may have its name
  const size_t found_pages = w_.oracle->MostFound(model, drawn.salt, drawn.pages);
  const auto answer = w_.engine->Hint(args);
  if (w_.Foretold("Hint", answer.status(), Reasons())) {
    const int64_t all = static_cast<int64_t>(drawn.pages.size()) * known.shape.page;
    const int64_t named = answer->rows_done + answer->rows_deferred;
    const bool done = answer->outcome == scheduler::HintOutcome::kAccepted;
    if (answer->rows != all || named > static_cast<int64_t>(found_pages) * known.shape.page ||
        done != (answer->rows_done == all)) {
      w_.Fail(absl::StrCat("a hint for ", all, " rows, of which ", found_pages,
                           " pages were published, is ", "done for ", answer->rows_done,
                           " and deferred for ", answer->rows_deferred));
    }
    w_.oracle->TouchModel(model, w_.Now());
  }
  w_.transport->AfterCall();
  w_.Trace(static_cast<uint64_t>(model), drawn.pages.size(),
           static_cast<uint64_t>(answer.status().code()));
  // Usually of a launch that moves something.
  if (w_.tier_groups > 0 && w_.Chance(50)) w_.control->ArmFault();
  if (w_.tier_groups > 0) AwaitTiers();
  w_.transport->BeforeCall();
  CountPinned(w_.engine->Stats());
  w_.transport->AfterCall();
}

// Counts page groups that no step can evict.
void Prefixes::CountPinned(const scheduler::EngineStats& stats) {
  w_.pinned = stats.page_groups_pinned + stats.tiers.moving + stats.page_groups_kept +
              static_cast<int64_t>(w_.moves.size());  // their sequences may go at any time
  // After a failed launch, moves wait for a second, and then begin at any call.
  w_.pinned += w_.fault_percent > 0 && w_.tier_groups > 0 ? 1 : 0;
  w_.counts.pages_pinned = std::max(w_.counts.pages_pinned, stats.page_groups_kept);
}

}  // namespace mla::simulation
