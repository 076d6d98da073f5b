// Simulator: sequences that say what their rows are, and take rows of others.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "tests/simulation/simulator/simulator.h"

namespace mla::simulation {
namespace {

constexpr size_t kHistories = 24;
constexpr size_t kPageKeyBytes = 32;

}  // namespace

size_t Simulator::MostPages(int model) const {
  const int rows = oracle_limits_.max_sequence_rows / oracle_->models[model].shape.page;
  return static_cast<size_t>(std::min(rows, oracle_limits_.max_pages));
}

Simulator::DrawnPrefix Simulator::DrawPrefix(int model) {
  DrawnPrefix drawn;
  if (!histories_.empty() && Chance(80)) {
    // Mostly of the same model; else nothing may be found.
    for (int tries = 0; tries < 6; ++tries) {
      const History& known = histories_[Pick(histories_.size())];
      drawn = known.prefix;
      if (known.model == model) break;
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
  const size_t found = (now - before) / page;
  counts_.pages_found += static_cast<int64_t>(found);
  if (found > 0 || !drawn.pages.empty()) {
    oracle_->ApplyMatch(info.id, drawn.pages, drawn.salt, found);
  }
  return found;
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
  if (Foretold("Match", info.status(), expect)) {
    CheckFound(*info, drawn);
    oracle_->Renew(&oracle_->sequences.at(id), 0, Now());
    if (histories_.size() < kHistories) histories_.emplace_back();
    histories_[Pick(histories_.size())] = {oracle_->sequences.at(id).model, drawn};
  }
  AfterCall();
  Trace(id, drawn.pages.size(), static_cast<uint64_t>(info.status().code()));
  return true;
}

}  // namespace mla::simulation
