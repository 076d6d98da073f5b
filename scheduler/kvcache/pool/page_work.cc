#include "scheduler/kvcache/pool/page_work.h"

#include <algorithm>
#include <utility>

#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {

void PageWorkQueue::AddZeroing(TenantKey tenant, uint32_t target, int64_t bytes) {
  Piece piece;
  piece.tenant = tenant;
  piece.target = target;
  piece.bytes = bytes;
  piece.ticket = ++last_;
  Link(Add(piece), /*front=*/false);
}

void PageWorkQueue::AddCopy(TenantKey tenant, LayoutId layout, uint32_t target, uint32_t source,
                            int32_t rows, bool whole) {
  Require(pool_->work(source) == kNone, "a page group is copied before it is filled");
  const auto& layers = pool_->layout(layout).layers;
  Piece piece;
  piece.tenant = tenant;
  piece.target = target;
  piece.source = source;
  piece.bytes = pool_->group_bytes(layout);
  if (whole || !pool_->rows_lead(layout) || layers.size() > kMostLayers) {
    piece.left.set(0);
  } else {
    piece.layout = layout;
    piece.rows = rows;
    for (size_t layer = 0; layer < layers.size(); ++layer) {
      piece.left.set(layer, !layers[layer].empty());
    }
  }
  Add(piece);
  ++copies_open_;
  pool_->PinSource(source, rows);
}

int32_t PageWorkQueue::Add(const Piece& piece) {
  int32_t index = free_;
  if (index != kNone) {
    free_ = At(index).next;
  } else {
    index = static_cast<int32_t>(pieces_.size());
    pieces_.emplace_back();
  }
  At(index) = piece;
  Require(pool_->work(piece.target) == kNone, "a page group is filled twice");
  pool_->set_work(piece.target, index);
  pool_->Pin(piece.target);
  return index;
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
  if (source == SlabPool::kNoEntry) return;
  --copies_open_;
  pool_->UnpinSource(source);
}

void PageWorkQueue::Cancel(uint32_t target) {
  const int32_t index = pool_->work(target);
  if (index == kNone || At(index).running > 0) return;
  // The group also has to stay for bytes that will be moved into it after this work.
  if (pool_->pins(target) > 1) return;
  const Piece& piece = At(index);
  if (piece.queued) Unlink(index);
  if (piece.tried) {
    pool_->MarkMixed(target);
  } else if (!piece.begun) {
    // Nothing has been written to the group since Take, because nothing may be written before its
    // work.
    pool_->RestoreMark(target);
  }
  Forget(index);
}

void PageWorkQueue::EndCopy(uint32_t target) {
  const int32_t index = pool_->work(target);
  Require(index != kNone && At(index).copies(), "a copy ends that there is not");
  Require(At(index).left.none() && At(index).running == 0, "rows are kept before they are copied");
  Forget(index);
}

bool PageWorkQueue::AddPart(int32_t index, int32_t layer, int64_t places, int64_t bytes,
                            WorkRoom* room, LaunchWork* work) {
  if (room->places < places || (!room->any && room->bytes < bytes)) return false;
  room->any = false;
  room->places -= places;
  room->bytes -= bytes;
  work->parts_.push_back({index, layer, bytes});
  work->places_ += places;
  work->bytes_ += bytes;
  At(index).begun = true;
  ++At(index).running;
  return true;
}

bool PageWorkQueue::AddLayer(int32_t index, int32_t layer, WorkRoom* room, LaunchWork* work) {
  Piece& piece = At(index);
  if (!piece.left.test(static_cast<size_t>(layer))) return true;
  const int64_t target_offset = pool_->offset(piece.target), from = pool_->offset(piece.source);
  const auto& planes = pool_->layout(piece.layout).layers[static_cast<size_t>(layer)];
  int64_t bytes = 0;
  for (const KvPlane& plane : planes) bytes += plane.bytes_of(piece.rows);
  if (!AddPart(index, layer, static_cast<int64_t>(planes.size()), bytes, room, work)) return false;
  for (const KvPlane& plane : planes) {
    work->ranges_.push_back(
        {target_offset + plane.offset, plane.bytes_of(piece.rows), from + plane.offset});
  }
  piece.left.reset(static_cast<size_t>(layer));
  return true;
}

bool PageWorkQueue::TakeLayer(uint32_t target, int32_t layer, WorkRoom* room, LaunchWork* work) {
  const int32_t index = target == SlabPool::kNoEntry ? kNone : pool_->work(target);
  if (index == kNone || !At(index).copies()) return true;
  Piece& piece = At(index);
  if (piece.layout == kNone) {
    if (!piece.left.test(0)) return true;
    if (!AddPart(index, 0, 1, piece.bytes, room, work)) return false;
    work->ranges_.push_back({pool_->offset(target), piece.bytes, pool_->offset(piece.source)});
    piece.left.reset(0);
    return true;
  }
  if (!piece.left.test(static_cast<size_t>(layer))) return true;
  if (!AddLayer(index, layer, room, work)) return false;
  for (int32_t before = 0; before < layer; ++before) {
    if (piece.left.test(static_cast<size_t>(before))) return true;  // not in order
  }
  const auto layers = static_cast<int32_t>(pool_->layout(piece.layout).layers.size());
  const int32_t end = std::min(layers, 2 * (layer + 1));
  for (int32_t next = layer + 1; next < end && AddLayer(index, next, room, work); ++next) {
  }
  return true;
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
    if (!AddPart(index, 0, 1, piece.bytes, room, work)) return false;
    work->ranges_.push_back({pool_->offset(piece.target), piece.bytes});
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
  for (const LaunchWork::Part& part : work->parts_) {
    Piece& piece = At(part.piece);
    --piece.running;
    if (!piece.copies()) {
      Forget(part.piece);
      continue;
    }
    bytes_copied_ += static_cast<uint64_t>(part.bytes);
    if (!std::exchange(piece.copied, true)) ++groups_copied_;
    if (piece.running > 0 || pool_->references(piece.target) > 0) continue;
    // The copy was cancelled while it ran.
    if (piece.tried) pool_->MarkMixed(piece.target);
    Forget(part.piece);
  }
  work->Clear();
}

bool PageWorkQueue::Fills(const LaunchWork& work, uint32_t target) const {
  const int32_t index = pool_->work(target);
  return index != kNone &&
         std::any_of(work.parts_.begin(), work.parts_.end(),
                     [index](const LaunchWork::Part& part) { return part.piece == index; });
}

bool PageWorkQueue::Carries(const LaunchWork& work, TenantKey tenant, WorkTicket until) const {
  return std::any_of(work.parts_.begin(), work.parts_.end(), [&](const LaunchWork::Part& part) {
    const Piece& piece = At(part.piece);
    return !piece.copies() && piece.tenant == tenant && piece.ticket <= until;
  });
}

void PageWorkQueue::Requeue(LaunchWork* work) {
  for (size_t i = work->parts_.size(); i-- > 0;) {
    const LaunchWork::Part& part = work->parts_[i];
    Piece& piece = At(part.piece);
    --piece.running;
    piece.tried = true;
    if (piece.copies()) piece.left.set(static_cast<size_t>(part.layer));
    if (pool_->references(piece.target) > 0) {
      if (!piece.copies()) Link(part.piece, /*front=*/true);
    } else if (piece.running == 0) {
      // The group is not needed any more, and its contents after the failed launch are unknown.
      pool_->MarkMixed(piece.target);
      Forget(part.piece);
    }
  }
  work->Clear();
}

}  // namespace mla::kvcache
