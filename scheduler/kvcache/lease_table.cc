#include "scheduler/kvcache/lease_table.h"

#include <algorithm>

#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {

LeaseTable::LeaseTable(int32_t max_leases) : positions_(static_cast<size_t>(max_leases), kNone) {
  heap_.reserve(positions_.size());
}

void LeaseTable::Grant(int32_t id, int64_t deadline_ns) {
  Require(id >= 0 && static_cast<size_t>(id) < positions_.size(), "lease id out of range");
  if (Has(id)) {
    const auto position = static_cast<size_t>(positions_[static_cast<size_t>(id)]);
    heap_[position].deadline_ns = deadline_ns;
    SiftUp(position);
    SiftDown(static_cast<size_t>(positions_[static_cast<size_t>(id)]));
    return;
  }
  heap_.push_back({deadline_ns, id});
  Place(heap_.size() - 1, heap_.back());
  SiftUp(heap_.size() - 1);
}

bool LeaseTable::Renew(int32_t id, int64_t now_ns, int64_t duration_ns) {
  const int64_t left = left_ns(id, now_ns);
  if (left == 0) return false;
  if (duration_ns <= left) return true;
  Grant(id, duration_ns > kNever - now_ns ? kNever : now_ns + duration_ns);
  return true;
}

void LeaseTable::Drop(int32_t id) {
  if (!Has(id)) return;
  const auto position = static_cast<size_t>(positions_[static_cast<size_t>(id)]);
  const Lease last = heap_.back();
  heap_.pop_back();
  positions_[static_cast<size_t>(id)] = kNone;
  if (last.id == id) return;
  Place(position, last);
  SiftUp(position);
  SiftDown(static_cast<size_t>(positions_[static_cast<size_t>(last.id)]));
}

bool LeaseTable::Has(int32_t id) const {
  return id >= 0 && static_cast<size_t>(id) < positions_.size() &&
         positions_[static_cast<size_t>(id)] != kNone;
}

int64_t LeaseTable::left_ns(int32_t id, int64_t now_ns) const {
  if (!Has(id)) return 0;
  const auto position = static_cast<size_t>(positions_[static_cast<size_t>(id)]);
  return std::max<int64_t>(0, heap_[position].deadline_ns - now_ns);
}

int64_t LeaseTable::next_deadline_ns() const {
  return heap_.empty() ? kNever : heap_.front().deadline_ns;
}

void LeaseTable::Postpone(int64_t nanos) {
  for (Lease& lease : heap_) lease.deadline_ns += nanos;
}

int32_t LeaseTable::PopExpired(int64_t now_ns) {
  if (heap_.empty() || heap_.front().deadline_ns > now_ns) return kNone;
  const int32_t id = heap_.front().id;
  Drop(id);
  return id;
}

void LeaseTable::Place(size_t position, const Lease& lease) {
  heap_[position] = lease;
  positions_[static_cast<size_t>(lease.id)] = static_cast<int32_t>(position);
}

void LeaseTable::SiftUp(size_t position) {
  const Lease lease = heap_[position];
  while (position > 0 && lease < heap_[(position - 1) / 2]) {
    Place(position, heap_[(position - 1) / 2]);
    position = (position - 1) / 2;
  }
  Place(position, lease);
}

void LeaseTable::SiftDown(size_t position) {
  const Lease lease = heap_[position];
  for (size_t child = 2 * position + 1; child < heap_.size(); child = 2 * position + 1) {
    if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
    if (lease <= heap_[child]) break;
    Place(position, heap_[child]);
    position = child;
  }
  Place(position, lease);
}

std::string LeaseTable::CheckInvariants() const {
  for (size_t i = 1; i < heap_.size(); ++i) {
    if (heap_[i] < heap_[(i - 1) / 2]) return "heap order broken at " + std::to_string(i);
  }
  size_t running = 0;
  for (size_t id = 0; id < positions_.size(); ++id) {
    if (positions_[id] == kNone) continue;
    ++running;
    const auto position = static_cast<size_t>(positions_[id]);
    if (position >= heap_.size() || heap_[position].id != static_cast<int32_t>(id)) {
      return "lease " + std::to_string(id) + " is not at its position";
    }
  }
  return running == heap_.size() ? "" : "leases miscounted";
}

}  // namespace mla::kvcache
