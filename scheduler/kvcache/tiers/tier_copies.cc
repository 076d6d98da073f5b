#include "scheduler/kvcache/tiers/tier_copies.h"

#include <algorithm>
#include <utility>

#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

constexpr TierIndex kAll[] = {TierIndex::kHost, TierIndex::kFile};

Tier TierOf(TierIndex tier) { return tier == TierIndex::kHost ? Tier::kHost : Tier::kFile; }

}  // namespace

uint64_t TierCopies::Know(int32_t node) {
  if (static_cast<size_t>(node) >= nodes_.size()) nodes_.resize(static_cast<size_t>(node) + 1);
  Node& known = At(node);
  if (known.life != 0) return known.life;
  known.life = next_life_++;
  known.layout = cache_->prefixes().about(node).layout;
  known.bytes = TierRooms::Rounded(cache_->pool().group_bytes(known.layout));
  return known.life;
}

bool TierCopies::Lives(int32_t node, uint64_t life) const {
  return static_cast<size_t>(node) < nodes_.size() && At(node).life == life;
}

uint32_t TierCopies::room(TierIndex tier, int32_t node) const {
  if (static_cast<size_t>(node) >= nodes_.size()) return kNoRoom;
  return At(node).copies[Index(tier)].room;
}

bool TierCopies::held(int32_t node) const {
  return static_cast<size_t>(node) < nodes_.size() && At(node).held;
}

void TierCopies::Hold(int32_t node) {
  Require(!At(node).held, "a page group moves twice at a time");
  At(node).held = true;
}

void TierCopies::Release(int32_t node, uint64_t life) {
  if (Lives(node, life)) {
    At(node).held = false;
    return;
  }
  for (const Orphan& orphan : orphans_) {
    if (orphan.life == life) FreeRoom(orphan.tier, orphan.room, orphan.bytes);
  }
  std::erase_if(orphans_, [life](const Orphan& orphan) { return orphan.life == life; });
}

void TierCopies::Unwant(int32_t node, uint64_t life) {
  if (Lives(node, life)) --At(node).wanted;
}

TierCopies::List& TierCopies::FindOrAddList(TierIndex tier, LayoutId layout) {
  std::vector<List>& lists = lists_[Index(tier)];
  if (static_cast<size_t>(layout) >= lists.size()) lists.resize(static_cast<size_t>(layout) + 1);
  return lists[static_cast<size_t>(layout)];
}

void TierCopies::Link(TierIndex tier, int32_t index) {
  Node& node = At(index);
  Copy& copy = node.copies[Index(tier)];
  List& list = FindOrAddList(tier, node.layout);
  copy.stamp = next_stamp_++;
  copy.prev = list.youngest;
  copy.next = kNone;
  (list.youngest == kNone ? list.oldest : At(list.youngest).copies[Index(tier)].next) = index;
  list.youngest = index;
  list.bytes += node.bytes;
}

void TierCopies::Unlink(TierIndex tier, int32_t index) {
  Node& node = At(index);
  const Copy& copy = node.copies[Index(tier)];
  List& list = FindOrAddList(tier, node.layout);
  (copy.prev == kNone ? list.oldest : At(copy.prev).copies[Index(tier)].next) = copy.next;
  (copy.next == kNone ? list.youngest : At(copy.next).copies[Index(tier)].prev) = copy.prev;
  list.bytes -= node.bytes;
}

void TierCopies::Add(TierIndex tier, int32_t node, uint32_t room) {
  Copy& copy = At(node).copies[Index(tier)];
  Require(copy.room == kNoRoom, "a page group has two copies in one tier");
  copy.room = room;
  Link(tier, node);
  cache_->prefixes().NoteCopies(node);
}

void TierCopies::Drop(TierIndex tier, int32_t node) {
  Unlink(tier, node);
  FreeRoom(tier, std::exchange(At(node).copies[Index(tier)].room, kNoRoom), At(node).bytes);
  cache_->prefixes().NoteCopies(node);
}

void TierCopies::Use(TierIndex tier, int32_t node) {
  if (room(tier, node) == kNoRoom) return;
  Unlink(tier, node);
  Link(tier, node);
}

void TierCopies::GiveUp(TierIndex tier, int32_t node, EventKind why) {
  Drop(tier, node);
  dropped_[Index(tier)] += why == EventKind::kEvicted;
  if (!Has(node) && cache_->prefixes().about(node).demoted()) {
    cache_->prefixes().Lose(node, why, TierOf(tier));
  } else if (why == EventKind::kDamaged) {
    cache_->prefixes().Note(node, why, TierOf(tier));
  }
}

int64_t TierCopies::BytesOfOwner(TierIndex tier, LayoutId layout) const {
  const std::vector<List>& lists = lists_[Index(tier)];
  int64_t bytes = 0;
  for (size_t i = 0; i < lists.size(); ++i) {
    const auto other = static_cast<LayoutId>(i);
    if (lists[i].bytes > 0 && cache_->pool().SameOwner(layout, other)) bytes += lists[i].bytes;
  }
  return bytes;
}

int32_t TierCopies::OldestOf(TierIndex tier, LayoutId layout) const {
  const std::vector<List>& lists = lists_[Index(tier)];
  int32_t oldest = kNone;
  for (size_t i = 0; i < lists.size(); ++i) {
    int32_t node = lists[i].oldest;
    if (node == kNone) continue;
    if (layout != kNone && !cache_->pool().SameOwner(layout, static_cast<LayoutId>(i))) continue;
    // Few copies are held at a time, so the walk is short.
    while (node != kNone && At(node).held) node = At(node).copies[Index(tier)].next;
    if (node == kNone) continue;
    const uint64_t stamp = At(node).copies[Index(tier)].stamp;
    if (oldest == kNone || stamp < At(oldest).copies[Index(tier)].stamp) oldest = node;
  }
  return oldest;
}

uint32_t TierCopies::TakeRoom(TierIndex tier, LayoutId layout) {
  TierRooms& rooms = Rooms(tier);
  const int64_t bytes = TierRooms::Rounded(cache_->pool().group_bytes(layout));
  const int64_t share = rooms.bytes_total() / 100 * tenant_percent_;
  if (bytes > share) return kNoRoom;
  for (int drops = 0; drops <= kMostDrops; ++drops) {
    const bool over = BytesOfOwner(tier, layout) + bytes > share;
    const uint32_t room = over ? kNoRoom : rooms.Take(bytes);
    if (room != kNoRoom) return room;
    const int32_t oldest = OldestOf(tier, over ? layout : kNone);
    if (oldest == kNone) return kNoRoom;
    GiveUp(tier, oldest, EventKind::kEvicted);
  }
  return kNoRoom;
}

void TierCopies::FreeRoom(TierIndex tier, uint32_t room, int64_t group_bytes) {
  Rooms(tier).Free(room, group_bytes);
}

bool TierCopies::Has(int32_t node) const {
  return room(TierIndex::kHost, node) != kNoRoom || room(TierIndex::kFile, node) != kNoRoom;
}

Tier TierCopies::Fastest(int32_t node) const {
  return TierOf(room(TierIndex::kHost, node) != kNoRoom ? TierIndex::kHost : TierIndex::kFile);
}

bool TierCopies::Comes(int32_t node) const {
  return static_cast<size_t>(node) < nodes_.size() && At(node).wanted > 0;
}

void TierCopies::Forget(int32_t index) {
  if (static_cast<size_t>(index) >= nodes_.size() || At(index).life == 0) return;
  Node& node = At(index);
  for (const TierIndex tier : kAll) {
    Copy& copy = node.copies[Index(tier)];
    if (copy.room == kNoRoom) continue;
    if (!node.held) {
      Drop(tier, index);
      continue;
    }
    Unlink(tier, index);
    orphans_.push_back({node.life, tier, std::exchange(copy.room, kNoRoom), node.bytes});
  }
  node = Node();
}

}  // namespace mla::kvcache
