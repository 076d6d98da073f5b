#include "scheduler/kvcache/pool/page_work.h"

#include <algorithm>

#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {

void PageWorkQueue::AddZeroing(TenantKey tenant, uint32_t target, int64_t bytes) {
  Piece piece;
  piece.tenant = tenant;
  piece.target = target;
  piece.bytes = bytes;
  Add(piece);
}

void PageWorkQueue::AddCopy(TenantKey tenant, LayoutId layout, uint32_t target, uint32_t source,
                            int32_t rows, bool whole) {
  Piece piece;
  piece.tenant = tenant;
  piece.target = target;
  piece.source = source;
  int64_t bytes = 0, places = 0;
  for (const PlaneRun& run : pool_->plane_runs(layout)) {
    bytes += run.bytes_of(rows) * run.pages;
    places += run.pages;
  }
  if (whole || places == 0 || places > kMostPlaces) {
    piece.bytes = pool_->group_bytes(layout);
  } else {
    piece.bytes = bytes;
    piece.places = places;
    piece.layout = layout;
    piece.rows = rows;
  }
  Add(piece);
  pool_->PinSource(source, rows);
}

void PageWorkQueue::Add(const Piece& piece) {
  int32_t index = free_;
  if (index != kNone) {
    free_ = At(index).next;
  } else {
    index = static_cast<int32_t>(pieces_.size());
    pieces_.emplace_back();
  }
  At(index) = piece;
  At(index).ticket = ++last_;
  Require(pool_->work(piece.target) == kNone, "a page group is filled twice");
  pool_->set_work(piece.target, index);
  pool_->Pin(piece.target);
  Link(index, /*front=*/false);
}

void PageWorkQueue::Link(int32_t index, bool front) {
  Piece& piece = At(index);
  Queue& queue = queues_[piece.tenant];
  piece.prev = front ? kNone : queue.tail;
  piece.next = front ? queue.head : kNone;
  (piece.prev == kNone ? queue.head : At(piece.prev).next) = index;
  (piece.next == kNone ? queue.tail : At(piece.next).prev) = index;
  piece.queued = true;
  ++queued_;
}

void PageWorkQueue::Unlink(int32_t index) {
  Piece& piece = At(index);
  const auto queue = queues_.find(piece.tenant);
  (piece.prev == kNone ? queue->second.head : At(piece.prev).next) = piece.next;
  (piece.next == kNone ? queue->second.tail : At(piece.next).prev) = piece.prev;
  if (queue->second.head == kNone) queues_.erase(queue);
  piece.queued = false;
  --queued_;
}

void PageWorkQueue::Forget(int32_t index) {
  Piece& piece = At(index);
  const uint32_t source = piece.source;
  pool_->set_work(piece.target, kNone);
  pool_->Unpin(piece.target);
  piece = Piece();
  piece.next = free_;
  free_ = index;
  // A source that only this copy wanted needs its own work no more.
  if (source != SlabPool::kNoEntry && pool_->UnpinSource(source)) Cancel(source);
}

void PageWorkQueue::Cancel(uint32_t target) {
  const int32_t index = pool_->work(target);
  if (index == kNone || !At(index).queued || pool_->pinned_rows(target) > 0) return;
  // Others keep the group, too, for bytes that are on their way into it, behind this work.
  if (pool_->pins(target) > 1) return;
  Unlink(index);
  // Nothing has been written to the group since Take, as nothing may be before its work.
  if (At(index).tried) {
    pool_->MarkMixed(target);
  } else {
    pool_->RestoreMark(target);
  }
  Forget(index);
}

void PageWorkQueue::AddRanges(const Piece& piece, std::vector<kernels::PageRange>* ranges) const {
  const int64_t target = pool_->offset(piece.target);
  if (piece.source == SlabPool::kNoEntry) {
    ranges->push_back({target, piece.bytes});
    return;
  }
  const int64_t source = pool_->offset(piece.source);
  if (piece.layout == kNone) {
    ranges->push_back({target, piece.bytes, source});
    return;
  }
  for (const PlaneRun& run : pool_->plane_runs(piece.layout)) {
    const int64_t at = run.plane.offset;
    ranges->push_back({target + at, run.bytes_of(piece.rows), source + at, run.pages, run.stride});
  }
}

bool PageWorkQueue::Waits(TenantKey tenant, WorkTicket until) const {
  if (queued_ == 0) return false;
  const auto queue = queues_.find(tenant);
  return queue != queues_.end() && At(queue->second.head).ticket <= until;
}

bool PageWorkQueue::Take(TenantKey tenant, WorkTicket until, WorkRoom* room, LaunchWork* work) {
  while (Waits(tenant, until)) {
    const int32_t index = queues_.find(tenant)->second.head;
    const Piece& piece = At(index);
    if (room->places < piece.places || (!room->any && room->bytes < piece.bytes)) return false;
    room->any = false;
    AddRanges(piece, &work->ranges_);
    work->pieces_.push_back(index);
    work->places_ += piece.places;
    work->bytes_ += piece.bytes;
    room->places -= piece.places;
    room->bytes -= piece.bytes;
    Unlink(index);
  }
  return true;
}

void PageWorkQueue::TakeAny(WorkRoom* room, LaunchWork* work) {
  while (!queues_.empty()) {
    if (!Take(queues_.begin()->first, last_, room, work)) return;
  }
}

void PageWorkQueue::Acknowledge(LaunchWork* work) {
  for (const int32_t index : work->pieces_) {
    if (At(index).source != SlabPool::kNoEntry) {
      bytes_copied_ += static_cast<uint64_t>(At(index).bytes);
    }
    Forget(index);
  }
  work->Clear();
}

bool PageWorkQueue::Carries(const LaunchWork& work, TenantKey tenant, WorkTicket until) const {
  return std::any_of(work.pieces_.begin(), work.pieces_.end(), [&](int32_t piece) {
    return At(piece).tenant == tenant && At(piece).ticket <= until;
  });
}

void PageWorkQueue::Requeue(LaunchWork* work) {
  for (size_t i = work->pieces_.size(); i-- > 0;) {
    const int32_t index = work->pieces_[i];
    const uint32_t target = At(index).target;
    if (pool_->references(target) > 0 || pool_->pinned_rows(target) > 0) {
      At(index).tried = true;
      Link(index, /*front=*/true);
    } else {
      // The group is not wanted any more, and what the launch has left in it is not known.
      pool_->MarkMixed(target);
      Forget(index);
    }
  }
  work->Clear();
}

}  // namespace mla::kvcache
