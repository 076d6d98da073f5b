#include "scheduler/moves/page_mover.h"

#include <algorithm>
#include <utility>

namespace mla::scheduler {
namespace {

bool Names(const Batch& batch, uint32_t entry) {
  return std::any_of(batch.moves.begin(), batch.moves.end(),
                     [entry](const PageMove* move) { return move->engine.entry == entry; });
}

}  // namespace

void PageMover::Add(PageMove* move) {
  cache_->PinGroup(move->engine.entry);
  waiting_.push_back(move);
}

void PageMover::Take(const BatchPolicy& policy, Batch* batch) {
  if (waiting_.empty()) return;
  int64_t bytes = 0;
  size_t places = 0;
  std::deque<PageMove*> left;
  for (PageMove* const move : waiting_) {
    const PageMove::EngineFields& note = move->engine;
    const auto size = static_cast<int64_t>(move->bytes.size());
    const bool fits = batch->moves.empty() || (bytes + size <= kLaunchBytes &&
                                               places + note.transfers.size() <= kPageRanges);
    if (cache_->work().Waits(note.tenant, note.ticket)) {
      policy.TakePages(cache_->work(), note.tenant, note.ticket, *batch);
    } else if (fits && !Names(*batch, note.entry)) {
      // Transfers of one launch name no byte twice.
      bytes += size;
      places += note.transfers.size();
      auto& to = move->in ? batch->page_writes : batch->page_reads;
      to.insert(to.end(), note.transfers.begin(), note.transfers.end());
      batch->moves.push_back(move);
      continue;
    }
    left.push_back(move);
  }
  waiting_ = std::move(left);
  batch->units.pages += bytes;
}

void PageMover::Answer(PageMove* move, const absl::Status& status) {
  cache_->UnpinGroup(move->engine.entry);
  move->done(status);
}

void PageMover::Finish(Batch* batch, const absl::Status& status) {
  for (PageMove* const move : batch->moves) {
    if (status.ok()) (move->in ? bytes_in_ : bytes_out_) += move->bytes.size();
    Answer(move, status);
  }
  batch->moves.clear();
}

void PageMover::Fail(const absl::Status& status) {
  for (PageMove* const move : std::exchange(waiting_, {})) Answer(move, status);
}

}  // namespace mla::scheduler
