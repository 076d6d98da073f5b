#include "scheduler/moves/page_mover.h"

#include <algorithm>
#include <utility>

namespace mla::scheduler {
namespace {

// Digest parts of all moves of a launch; each move has at most one short part, at its end.
static_assert(PageMover::kLaunchBytes / kernels::kDigestPartBytes + kPageRanges <=
              kernels::BackendLimits().digest_parts);

bool Names(const Batch& batch, uint32_t entry) {
  return std::any_of(batch.moves.begin(), batch.moves.end(),
                     [entry](const PageMove* move) { return move->engine.entry == entry; });
}

}  // namespace

void PageMover::Add(PageMove* move) {
  PageMove::EngineFields& note = move->engine;
  note.transfers_taken = 0;
  note.bytes_taken = note.bytes_running = 0;
  cache_->PinGroup(note.entry);
  waiting_.push_back(move);
}

bool PageMover::AddPart(PageMove* move, kvcache::WorkRoom* room, Batch* batch) {
  PageMove::EngineFields& note = move->engine;
  auto& transfers = move->in ? batch->page_writes : batch->page_reads;
  note.bytes_running = 0;
  const size_t before = transfers.size();
  while (note.transfers_taken < note.transfers.size() && room->bytes > 0 && room->places > 0) {
    kernels::PageTransfer part = note.transfers[note.transfers_taken];
    const int64_t bytes_left = part.bytes - note.bytes_taken;
    part.pool_offset += note.bytes_taken;
    part.host += note.bytes_taken;
    part.bytes = std::min(bytes_left, room->bytes);
    if (part.digests != nullptr) {
      part.digests += note.bytes_taken / kernels::kDigestPartBytes;
      if (part.bytes < bytes_left) part.bytes -= part.bytes % kernels::kDigestPartBytes;
    }
    if (part.bytes == 0 && bytes_left > 0) break;
    transfers.push_back(part);
    room->bytes -= part.bytes;
    --room->places;
    note.bytes_running += part.bytes;
    note.bytes_taken += part.bytes;
    if (part.bytes < bytes_left) break;
    ++note.transfers_taken;
    note.bytes_taken = 0;
  }
  if (transfers.size() == before) return false;
  batch->moves.push_back(move);
  return true;
}

void PageMover::Take(const BatchPolicy& policy, Batch* batch) {
  kvcache::WorkRoom room{kPageRanges, kLaunchBytes};
  std::deque<PageMove*> unfinished;
  for (PageMove* const move : waiting_) {
    const PageMove::EngineFields& note = move->engine;
    if (cache_->work().Waits(note.tenant, note.ticket)) {
      policy.TakePages(cache_->work(), note.tenant, note.ticket, *batch);
    } else if (move->in && cache_->work().Fills(batch->pages, note.entry)) {
      // This launch already carries page work that fills the group, for a request or another move,
      // so the move waits.
    } else if (room.bytes > 0 && room.places > 0 && !Names(*batch, note.entry) &&
               AddPart(move, &room, batch)) {
      // A launch may transfer each byte only once, hence Names.
      continue;
    }
    unfinished.push_back(move);
  }
  waiting_ = std::move(unfinished);
  batch->units.pages += kLaunchBytes - room.bytes;
}

void PageMover::Answer(PageMove* move, const absl::Status& status) {
  cache_->UnpinGroup(move->engine.entry);
  move->done(status);
}

void PageMover::Finish(Batch* batch, const absl::Status& status) {
  for (PageMove* const move : batch->moves) {
    const PageMove::EngineFields& note = move->engine;
    if (status.ok()) {
      (move->in ? bytes_in_ : bytes_out_) += static_cast<uint64_t>(note.bytes_running);
    }
    if (status.ok() && note.transfers_taken < note.transfers.size()) {
      waiting_.push_front(move);
    } else {
      Answer(move, status);
    }
  }
  batch->moves.clear();
}

void PageMover::FailBehind(const kvcache::LaunchWork& lost, const absl::Status& status) {
  for (PageMove* const move : std::exchange(waiting_, {})) {
    if (cache_->work().Carries(lost, move->engine.tenant, move->engine.ticket)) {
      Answer(move, status);
    } else {
      waiting_.push_back(move);
    }
  }
}

void PageMover::Fail(const absl::Status& status) {
  for (PageMove* const move : std::exchange(waiting_, {})) Answer(move, status);
}

}  // namespace mla::scheduler
