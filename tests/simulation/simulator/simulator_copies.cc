// Simulator: export and import of rows, and sequences that are restored from them. Other operations
// run in between, among them steps and copies of the same tenant. A launch then has moves of
// several imports, and page work that was queued after theirs.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "scheduler/kvcache/pool/group_pieces.h"
#include "tests/simulation/simulator/simulator.h"

namespace mla::simulation {
namespace {

constexpr int kMoveRounds = 1000;                       // within which a part must have been moved
constexpr uint64_t kRestoredEpoch = uint64_t{1} << 32;  // the least epoch of a restored sequence
constexpr int kMostInside = 2;                          // copies within a copy
constexpr size_t kMostHanded = 3;                       // parts of one copy in progress

}  // namespace

// Operations between two parts of a copy.
void Simulator::Interlude() {
  if (inside_ == kMostInside || Chance(50)) return;
  const Op outer = op_;
  ++inside_;
  for (uint64_t left = 1 + Pick(6); left > 0 && !failed(); --left) {
    const Op op = DrawOp();
    // These two look at all waiting requests, or end them.
    if (op != Op::kFlood && op != Op::kDrain) Operate(op);
  }
  --inside_;
  op_ = outer;
  if (late_ && !requests_.empty()) Poll();
}

// Returns true if exported rows are still there, or imported rows are still expected.
bool Simulator::HasRows(const OracleSequence* sequence, const scheduler::PageMove& part) const {
  if (sequence == nullptr || part.in) return sequence != nullptr && sequence->imports;
  const int64_t page = oracle_->models[sequence->model].shape.page;
  return part.page * page + part.rows <= sequence->length();
}

bool Simulator::HandOver(int tenant, const scheduler::PageMove& part,
                         std::vector<SimMove*>* moves) {
  SimMove* const move = moves_.emplace_back(std::make_unique<SimMove>()).get();
  move->target = part.bytes;
  move->part = part;
  move->part.tenant = TenantName(tenant);
  move->memory.assign(part.bytes.begin(), part.bytes.end());
  move->part.bytes = move->memory;
  move->part.done = [move](const absl::Status& status) {
    move->done = true;
    move->answer = status;
  };
  BeforeCall();
  OracleSequence* const sequence = oracle_->Find(tenant, move->part.id);
  const absl::Status status = engine_->StartMove(&move->part);
  if (status.ok() != HasRows(sequence, part)) {
    Fail(absl::StrCat("rows of a sequence that ", status.ok() ? "has gone" : "is there", ": ",
                      status.ToString()));
  }
  if (status.ok()) oracle_->Renew(sequence, 0, Now());
  AfterCall();
  if (status.ok()) {
    moves->push_back(move);
  } else {
    std::erase_if(moves_, [move](const auto& one) { return one.get() == move; });
  }
  return status.ok();
}

bool Simulator::AwaitMoves(std::vector<SimMove*>* moves) {
  bool good = true;
  for (SimMove* const move : *moves) {
    for (int round = 0; round < kMoveRounds && !move->done && !failed(); ++round) {
      if (Poll()) continue;
      const int64_t done_at = device_->NextDone();
      if (done_at > Now()) clock_.Advance(done_at - Now());
    }
    if (!move->done && !failed()) Fail("rows that move are never carried");
    if (failed()) return false;  // the engine may still have it
    if (!move->answer.ok() && fault_percent_ == 0) Fail(move->answer.ToString());
    if (!move->part.in) std::copy(move->memory.begin(), move->memory.end(), move->target.begin());
    good &= move->answer.ok();
    std::erase_if(moves_, [move](const auto& one) { return one.get() == move; });
  }
  moves->clear();
  return good;
}

bool Simulator::MoveParts(int tenant, const scheduler::MovingPages& pages, bool in,
                          std::vector<std::vector<std::byte>>* payloads) {
  const int64_t page = pages.tags.page_size;
  payloads->resize(static_cast<size_t>((pages.tags.rows + page - 1) / page));
  std::vector<SimMove*> moves;
  bool good = true;
  for (size_t group = 0; group < payloads->size(); ++group) {
    scheduler::PageMove part;
    part.id = pages.id;
    part.in = in;
    part.page = pages.tags.first_row / page + static_cast<int64_t>(group);
    part.rows =
        static_cast<int32_t>(std::min(page, pages.tags.rows - static_cast<int64_t>(group) * page));
    const auto pieces = kvcache::GroupPieces(pages.layout, part.rows);
    std::vector<std::byte>& payload = (*payloads)[group];
    payload.resize(static_cast<size_t>(kvcache::PayloadBytes(pieces)));
    const auto all = static_cast<int64_t>(payload.size());
    for (int64_t end = 0; part.offset < all; part.offset = end) {
      end = kvcache::PartEnd(pieces, part.offset, 1 + static_cast<int64_t>(Pick(2 * all)));
      part.bytes = std::span(payload).subspan(static_cast<size_t>(part.offset),
                                              static_cast<size_t>(end - part.offset));
      Interlude();
      good = good && !failed() && HandOver(tenant, part, &moves);
      if (!good) break;
      Interlude();
      if (moves.size() == kMostHanded || Chance(50)) good = AwaitMoves(&moves);
      if (!good) break;
    }
    if (!good) break;
  }
  return AwaitMoves(&moves) && good && !failed();
}

bool Simulator::ExportRows(const OracleSequence& source, int64_t first, int64_t end,
                           CopiedRows* rows) {
  const int tenant = Chance(95) ? source.tenant : AnyTenant();
  const uint64_t epoch = source.epoch + (Chance(95) ? 0 : 1);
  const uint64_t id = source.id;
  BeforeCall();
  const Reasons expect = oracle_->CheckExport(tenant, id, epoch, first, end);
  const auto pages = engine_->BeginExport({TenantName(tenant), id, epoch, first, end});
  const bool granted = Foretold("Export", pages.status(), expect);
  if (granted) {
    oracle_->ApplyFork(pages->id, id, end, 0, Now());
    OracleSequence& held = oracle_->sequences.at(pages->id);
    held.of_export = true;
    rows->tenant = tenant;
    rows->model = held.model;
    rows->pages = *pages;
    for (const auto& layer : held.layers)
      rows->keys.emplace_back(layer.begin() + first, layer.end());
  }
  AfterCall();
  if (!granted) return false;
  const bool whole = MoveParts(tenant, rows->pages, false, &rows->payloads);
  ReleaseOne(tenant, pages->id);
  return whole && !failed();
}

void Simulator::ReleaseOne(int tenant, uint64_t id) {
  std::vector<scheduler::SequenceId> absent;
  BeforeCall();
  const OracleSequence* const sequence = oracle_->Find(tenant, id);
  const bool there = sequence != nullptr;
  if (OracleStep* const step = there ? oracle_->StepOf(sequence->step) : nullptr) {
    step->aborting = true;
  }
  engine_->ReleaseSequences(TenantName(tenant), std::vector{id}, &absent);
  CheckAnswers();
  FinishAborts();
  if (there) oracle_->ApplyRelease(id, Now());
  if (absent.empty() != there) Fail("Release: a sequence that moves is there or not");
  AfterCall();
}

// Opens or takes the sequence and reserves pages, as predicted.
bool Simulator::ReserveImport(const CopiedRows& rows, int model, uint64_t behind, uint64_t restored,
                              scheduler::MovingPages* to) {
  const scheduler::PageTags& tags = rows.pages.tags;
  const OracleSequence* before = oracle_->Find(rows.tenant, behind);
  scheduler::ImportArgs args;
  args.tenant = TenantName(rows.tenant);
  args.model_id = oracle_->models[model].name;
  args.client_id = absl::StrCat("client-", rows.tenant);
  args.id = behind;
  args.expected_epoch = before == nullptr ? 1 : before->epoch;
  args.tags = tags;
  args.restored_id = restored;
  BeforeCall();
  Reasons expect = oracle_->CheckImport(rows.tenant, model, oracle_->models[rows.model].shape,
                                        behind, args.expected_epoch, tags.first_row, tags.rows);
  expect.AddIf(oracle_->sequences.contains(restored), "sequence_open");
  const auto pages = engine_->BeginImport(args);
  // Page limits are checked as for a step with these rows.
  uint64_t id = behind;
  const bool opens = behind == 0 && expect.none();
  if (opens) {
    id = pages.ok() ? pages->id : ~uint64_t{0};
    oracle_->ApplyOpen(id, model, 0, Now());
    if (pages.ok() && restored != 0) {
      if (id != restored || pages->state.epoch < kRestoredEpoch) {
        Fail("Restore: another id, or an epoch of before");
      }
      oracle_->sequences.at(id).epoch = pages->state.epoch;
    }
  }
  bool in_doubt = false;
  if (expect.none()) {
    OracleBegin begin;
    begin.tenant = rows.tenant;
    begin.model = model;
    begin.sequences = {id};
    begin.rows = {static_cast<int>(tags.rows)};
    oracle_->CheckPages(begin, &expect);
    in_doubt = DetailOf(pages.status()).reason == "pages_exhausted" &&
               oracle_->PagesInDoubt(begin, pinned_);
  }
  const bool granted = !(in_doubt && !pages.ok()) && Foretold("Import", pages.status(), expect);
  if (opens && !granted) oracle_->ApplyRelease(id, Now());
  if (granted) {
    oracle_->ApplyImport(id, tags.rows, Now());
    *to = *pages;
  }
  oracle_->TouchModel(model, Now());
  AfterCall();
  return granted;
}

void Simulator::ImportRows(const CopiedRows& rows, uint64_t behind, uint64_t restored) {
  const int other = AnyModel(rows.tenant);
  const int model = other >= 0 && Chance(10) ? other : rows.model;
  scheduler::MovingPages to;
  if (!ReserveImport(rows, model, behind, restored, &to)) return;
  std::vector<std::vector<std::byte>> payloads = rows.payloads;
  const bool whole = MoveParts(rows.tenant, to, true, &payloads) && Chance(90);
  if (failed()) return;
  BeforeCall();
  const OracleSequence* const sequence = oracle_->Find(rows.tenant, to.id);
  const bool there = sequence != nullptr && sequence->imports;
  if (!whole) {
    engine_->AbortImport(TenantName(rows.tenant), to);
    if (there && to.opened) oracle_->ApplyRelease(to.id, Now());
    if (there && !to.opened) oracle_->AbortImport(to.id);
  } else {
    const auto info =
        engine_->EndImport(TenantName(rows.tenant), to.id, scheduler::Engine::kAllFinite);
    if (info.ok() != there) Fail(absl::StrCat("EndImport: ", info.status().ToString()));
    if (there) oracle_->EndImport(to.id, rows.keys, Now());
    if (info.ok() && info->length != oracle_->sequences.at(to.id).length()) {
      Fail("Import: the sequence has another length");
    }
    counts_.rows_imported += rows.pages.tags.rows;
  }
  AfterCall();
}

bool Simulator::Copy() {
  const OracleSequence* source = AnySequence(0, /*free=*/Chance(90));
  if (source == nullptr) return false;
  const uint64_t id = source->id;
  const int page = oracle_->models[source->model].shape.page;
  const auto end = static_cast<int64_t>(Pick(static_cast<uint64_t>(source->length()) + 1));
  int64_t first = Chance(30) ? static_cast<int64_t>(Pick(static_cast<uint64_t>(end) + 1)) : 0;
  if (Chance(90)) first -= first % page;
  // Rows from the middle are added to a fork that has the rows before them.
  uint64_t behind = 0;
  if (first > 0 && !source->busy()) {
    behind = SendFork(source->tenant, *source, source->epoch, first);
    source =
        oracle_->Find(oracle_->sequences.contains(id) ? oracle_->sequences.at(id).tenant : 0, id);
    if (source == nullptr || failed()) return true;
  }
  CopiedRows rows;
  const bool restores = first == 0 && behind == 0 && !source->busy() && Chance(30);
  if (ExportRows(*source, first, end, &rows)) {
    // Usually the sequence is gone, as after a crash; some restores find it there and are refused.
    if (restores && Chance(90)) ReleaseOne(rows.tenant, id);
    ImportRows(rows, behind, restores ? id : 0);
  }
  Trace(id, static_cast<uint64_t>(end), rows.payloads.size());
  return true;
}

}  // namespace mla::simulation
