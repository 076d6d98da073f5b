#include "tests/simulation/simulator/copies.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "scheduler/kvcache/pool/group_pieces.h"
#include "tests/simulation/simulator/checks.h"
#include "tests/simulation/simulator/control.h"
#include "tests/simulation/simulator/simulator.h"
#include "tests/simulation/simulator/transport.h"

namespace mla::simulation {
namespace {

constexpr int kMoveRounds = 1000;                       // within which a part must have been moved
constexpr uint64_t kRestoredEpoch = uint64_t{1} << 32;  // the least epoch of a restored sequence
constexpr int kMostInside = 2;                          // copies within a copy
constexpr size_t kMostHanded = 3;                       // parts of one copy in progress

}  // namespace

// Operations between two parts of a copy.
void Copies::Interlude() {
  if (inside_ == kMostInside || w_.Chance(50)) return;
  const Op outer = w_.op;
  ++inside_;
  for (uint64_t left = 1 + w_.Pick(6); left > 0 && !w_.failed(); --left) {
    const Op op = w_.simulator->DrawOp();
    // These two look at all waiting requests, or end them.
    if (op != Op::kFlood && op != Op::kDrain) w_.simulator->Operate(op);
  }
  --inside_;
  w_.op = outer;
  if (w_.late && !w_.requests.empty()) w_.transport->Poll();
}

// Returns true if exported rows are still there, or imported rows are still expected.
bool Copies::HasRows(const OracleSequence* sequence, const scheduler::PageMove& part) const {
  if (sequence == nullptr || part.in) return sequence != nullptr && sequence->imports;
  const int64_t page = w_.oracle->models[sequence->model].shape.page;
  return part.page * page + part.rows <= sequence->length();
}

bool Copies::HandOver(int tenant, const scheduler::PageMove& part, std::vector<SimMove*>* moves) {
  SimMove* const move = w_.moves.emplace_back(std::make_unique<SimMove>()).get();
  move->target = part.bytes;
  move->part = part;
  move->part.tenant = w_.TenantName(tenant);
  move->memory.assign(part.bytes.begin(), part.bytes.end());
  move->part.bytes = move->memory;
  move->part.done = [move](const absl::Status& status) {
    move->done = true;
    move->answer = status;
  };
  w_.transport->BeforeCall();
  OracleSequence* const sequence = w_.oracle->Find(tenant, move->part.id);
  const absl::Status status = w_.engine->StartMove(&move->part);
  if (status.ok() != HasRows(sequence, part)) {
    w_.Fail(absl::StrCat("rows of a sequence that ", status.ok() ? "has gone" : "is there", ": ",
                         status.ToString()));
  }
  if (status.ok()) w_.oracle->Renew(sequence, 0, w_.Now());
  w_.transport->AfterCall();
  if (status.ok()) {
    moves->push_back(move);
  } else {
    std::erase_if(w_.moves, [move](const auto& one) { return one.get() == move; });
  }
  return status.ok();
}

bool Copies::AwaitMoves(std::vector<SimMove*>* moves) {
  bool good = true;
  for (SimMove* const move : *moves) {
    for (int round = 0; round < kMoveRounds && !move->done && !w_.failed(); ++round) {
      if (w_.transport->Poll()) continue;
      const int64_t done_at = w_.device->NextDone();
      if (done_at > w_.Now()) w_.clock.Advance(done_at - w_.Now());
    }
    if (!move->done && !w_.failed()) w_.Fail("rows that move are never carried");
    if (w_.failed()) return false;  // the engine may still have it
    if (!move->answer.ok() && w_.fault_percent == 0) w_.Fail(move->answer.ToString());
    if (!move->part.in) std::copy(move->memory.begin(), move->memory.end(), move->target.begin());
    good &= move->answer.ok();
    std::erase_if(w_.moves, [move](const auto& one) { return one.get() == move; });
  }
  moves->clear();
  return good;
}

bool Copies::MoveParts(int tenant, const scheduler::MovingPages& pages, bool in,
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
      end = kvcache::PartEnd(pieces, part.offset, 1 + static_cast<int64_t>(w_.Pick(2 * all)));
      part.bytes = std::span(payload).subspan(static_cast<size_t>(part.offset),
                                              static_cast<size_t>(end - part.offset));
      Interlude();
      good = good && !w_.failed() && HandOver(tenant, part, &moves);
      if (!good) break;
      Interlude();
      if (moves.size() == kMostHanded || w_.Chance(50)) good = AwaitMoves(&moves);
      if (!good) break;
    }
    if (!good) break;
  }
  return AwaitMoves(&moves) && good && !w_.failed();
}

bool Copies::ExportRows(const OracleSequence& source, int64_t first, int64_t end,
                        CopiedRows* rows) {
  const int tenant = w_.Chance(95) ? source.tenant : w_.AnyTenant();
  const uint64_t epoch = source.epoch + (w_.Chance(95) ? 0 : 1);
  const uint64_t id = source.id;
  w_.transport->BeforeCall();
  const Reasons expect = w_.oracle->CheckExport(tenant, id, epoch, first, end);
  const auto pages = w_.engine->BeginExport({w_.TenantName(tenant), id, epoch, first, end});
  const bool granted = w_.Foretold("Export", pages.status(), expect);
  if (granted) {
    w_.oracle->ApplyFork(pages->id, id, end, 0, w_.Now());
    OracleSequence& held = w_.oracle->sequences.at(pages->id);
    held.of_export = true;
    rows->tenant = tenant;
    rows->model = held.model;
    rows->pages = *pages;
    for (const auto& layer : held.layers)
      rows->keys.emplace_back(layer.begin() + first, layer.end());
  }
  w_.transport->AfterCall();
  if (!granted) return false;
  const bool whole = MoveParts(tenant, rows->pages, false, &rows->payloads);
  ReleaseOne(tenant, pages->id);
  return whole && !w_.failed();
}

void Copies::ReleaseOne(int tenant, uint64_t id) {
  std::vector<scheduler::SequenceId> absent;
  w_.transport->BeforeCall();
  const OracleSequence* const sequence = w_.oracle->Find(tenant, id);
  const bool there = sequence != nullptr;
  if (OracleStep* const step = there ? w_.oracle->StepOf(sequence->step) : nullptr) {
    step->aborting = true;
  }
  w_.engine->ReleaseSequences(w_.TenantName(tenant), std::vector{id}, &absent);
  w_.checks->CheckAnswers();
  w_.checks->FinishAborts();
  if (there) w_.oracle->ApplyRelease(id, w_.Now());
  if (absent.empty() != there) w_.Fail("Release: a sequence that moves is there or not");
  w_.transport->AfterCall();
}

// Opens or takes the sequence and reserves pages, as predicted.
bool Copies::ReserveImport(const CopiedRows& rows, int model, uint64_t behind, uint64_t restored,
                           scheduler::MovingPages* to) {
  const scheduler::PageTags& tags = rows.pages.tags;
  const OracleSequence* before = w_.oracle->Find(rows.tenant, behind);
  scheduler::ImportArgs args;
  args.tenant = w_.TenantName(rows.tenant);
  args.model_id = w_.oracle->models[model].name;
  args.client_id = absl::StrCat("client-", rows.tenant);
  args.id = behind;
  args.expected_epoch = before == nullptr ? 1 : before->epoch;
  args.tags = tags;
  args.restored_id = restored;
  w_.transport->BeforeCall();
  Reasons expect = w_.oracle->CheckImport(rows.tenant, model, w_.oracle->models[rows.model].shape,
                                          behind, args.expected_epoch, tags.first_row, tags.rows);
  expect.AddIf(w_.oracle->sequences.contains(restored), "sequence_open");
  const auto pages = w_.engine->BeginImport(args);
  // Page limits are checked as for a step with these rows.
  uint64_t id = behind;
  const bool opens = behind == 0 && expect.none();
  if (opens) {
    id = pages.ok() ? pages->id : ~uint64_t{0};
    w_.oracle->ApplyOpen(id, model, 0, w_.Now());
    if (pages.ok() && restored != 0) {
      if (id != restored || pages->state.epoch < kRestoredEpoch) {
        w_.Fail("Restore: another id, or an epoch of before");
      }
      w_.oracle->sequences.at(id).epoch = pages->state.epoch;
    }
  }
  bool in_doubt = false;
  if (expect.none()) {
    OracleBegin begin;
    begin.tenant = rows.tenant;
    begin.model = model;
    begin.sequences = {id};
    begin.rows = {static_cast<int>(tags.rows)};
    w_.oracle->CheckPages(begin, &expect);
    in_doubt = DetailOf(pages.status()).reason == "pages_exhausted" &&
               w_.oracle->PagesInDoubt(begin, w_.pinned);
  }
  const bool granted = !(in_doubt && !pages.ok()) && w_.Foretold("Import", pages.status(), expect);
  if (opens && !granted) w_.oracle->ApplyRelease(id, w_.Now());
  if (granted) {
    w_.oracle->ApplyImport(id, tags.rows, w_.Now());
    *to = *pages;
  }
  w_.oracle->TouchModel(model, w_.Now());
  w_.transport->AfterCall();
  return granted;
}

void Copies::ImportRows(const CopiedRows& rows, uint64_t behind, uint64_t restored) {
  const int other = w_.AnyModel(rows.tenant);
  const int model = other >= 0 && w_.Chance(10) ? other : rows.model;
  scheduler::MovingPages to;
  if (!ReserveImport(rows, model, behind, restored, &to)) return;
  std::vector<std::vector<std::byte>> payloads = rows.payloads;
  const bool whole = MoveParts(rows.tenant, to, true, &payloads) && w_.Chance(90);
  if (w_.failed()) return;
  w_.transport->BeforeCall();
  const OracleSequence* const sequence = w_.oracle->Find(rows.tenant, to.id);
  const bool there = sequence != nullptr && sequence->imports;
  if (!whole) {
    w_.engine->AbortImport(w_.TenantName(rows.tenant), to);
    if (there && to.opened) w_.oracle->ApplyRelease(to.id, w_.Now());
    if (there && !to.opened) w_.oracle->AbortImport(to.id);
  } else {
    const auto info =
        w_.engine->EndImport(w_.TenantName(rows.tenant), to.id, scheduler::Engine::kAllFinite);
    if (info.ok() != there) w_.Fail(absl::StrCat("EndImport: ", info.status().ToString()));
    if (there) w_.oracle->EndImport(to.id, rows.keys, w_.Now());
    if (info.ok() && info->length != w_.oracle->sequences.at(to.id).length()) {
      w_.Fail("Import: the sequence has another length");
    }
    w_.counts.rows_imported += rows.pages.tags.rows;
  }
  w_.transport->AfterCall();
}

bool Copies::Copy() {
  const OracleSequence* source = w_.AnySequence(0, /*free=*/w_.Chance(90));
  if (source == nullptr) return false;
  const uint64_t id = source->id;
  const int page = w_.oracle->models[source->model].shape.page;
  const auto end = static_cast<int64_t>(w_.Pick(static_cast<uint64_t>(source->length()) + 1));
  int64_t first = w_.Chance(30) ? static_cast<int64_t>(w_.Pick(static_cast<uint64_t>(end) + 1)) : 0;
  if (w_.Chance(90)) first -= first % page;
  // Rows from the middle are added to a fork that has the rows before them.
  uint64_t behind = 0;
  if (first > 0 && !source->busy()) {
    behind = w_.control->SendFork(source->tenant, *source, source->epoch, first);
    source = w_.oracle->Find(
        w_.oracle->sequences.contains(id) ? w_.oracle->sequences.at(id).tenant : 0, id);
    if (source == nullptr || w_.failed()) return true;
  }
  CopiedRows rows;
  const bool restores = first == 0 && behind == 0 && !source->busy() && w_.Chance(30);
  if (ExportRows(*source, first, end, &rows)) {
    // Usually the sequence is gone, as after a crash; some restores find it there and are refused.
    if (restores && w_.Chance(90)) ReleaseOne(rows.tenant, id);
    ImportRows(rows, behind, restores ? id : 0);
  }
  w_.Trace(id, static_cast<uint64_t>(end), rows.payloads.size());
  return true;
}

}  // namespace mla::simulation
