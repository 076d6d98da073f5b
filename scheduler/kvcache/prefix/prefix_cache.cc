#include "scheduler/kvcache/prefix/prefix_cache.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

bool StartsWith(std::span<const uint32_t> all, std::span<const uint32_t> first) {
  return all.size() >= first.size() && std::equal(first.begin(), first.end(), all.begin());
}

int32_t Agreeing(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  const size_t most = std::min(a.size(), b.size());
  const auto end = std::mismatch(a.begin(), a.begin() + static_cast<int64_t>(most), b.begin());
  return static_cast<int32_t>(end.first - a.begin());
}

}  // namespace

PrefixCache::PrefixCache(SlabPool* pool, PageWorkQueue* work)
    : pool_(pool), work_(work), evicted_(kEvictedKept) {}

PrefixCache::Found PrefixCache::Find(LayoutId layout, const PrefixChain& chain, int32_t page) {
  ++stats_.steps;
  const auto entry = whole_.find(chain.keys[static_cast<size_t>(page)]);
  if (entry == whole_.end()) return {};
  const Node& node = At(entry->second);
  // The key covers all rows up to here; available data is compared nevertheless.
  if (node.layout != layout || node.tokens.empty() != chain.opaque) return {};
  if (!chain.opaque && !StartsWith(chain.page_tokens(page, chain.page_size), node.tokens)) {
    return {};
  }
  return {node.entry, chain.page_size, entry->second};
}

PrefixCache::Found PrefixCache::FindRows(LayoutId layout, const PrefixChain& chain, int32_t page,
                                         int32_t rows, bool in_pool) {
  Found best;
  if (chain.opaque || rows < 1) return best;
  const auto wanted = chain.page_tokens(page, rows);
  const auto family = families_.find(chain.parent(page));
  int32_t node = family == families_.end() ? kNone : family->second;
  for (int32_t seen = 0; node != kNone && seen < kMostSiblings; ++seen, node = At(node).next) {
    ++stats_.steps;
    if (At(node).layout != layout || (in_pool && At(node).entry == SlabPool::kNoEntry)) continue;
    const int32_t agree = Agreeing(At(node).tokens, wanted);
    // Prefers a node in the pool among equal ones.
    const bool nearer = agree == best.rows && best.entry == SlabPool::kNoEntry;
    if (agree > best.rows || (agree > 0 && nearer)) best = {At(node).entry, agree, node};
  }
  return best;
}

MatchEnd PrefixCache::WhyAbsent(LayoutId layout, const PrefixChain& chain, int32_t page) const {
  const auto family = families_.find(chain.parent(page));
  if (family != families_.end() && At(family->second).layout == layout) return MatchEnd::kDiverged;
  if (static_cast<size_t>(page) >= chain.keys.size()) return MatchEnd::kAbsent;
  const uint64_t low = chain.keys[static_cast<size_t>(page)].low;
  return evicted_[low % kEvictedKept] == low ? MatchEnd::kEvicted : MatchEnd::kAbsent;
}

void PrefixCache::CountMatch(MatchEnd end, int32_t asked, int32_t matched) {
  ++stats_.ends[static_cast<size_t>(end)];
  stats_.hits += matched > 0;
  stats_.rows_asked += static_cast<uint64_t>(asked);
  stats_.rows_found += static_cast<uint64_t>(matched);
}

bool PrefixCache::ReplaceContainedSibling(LayoutId layout, const PrefixKey& parent,
                                          std::span<const uint32_t> tokens, int32_t* same) {
  const auto family = families_.find(parent);
  int32_t node = family == families_.end() ? kNone : family->second;
  for (int32_t seen = 0; node != kNone && seen < kMostSiblings; ++seen) {
    ++stats_.steps;
    const int32_t next = At(node).next;
    if (At(node).layout == layout) {
      if (StartsWith(At(node).tokens, tokens)) {
        if (At(node).entry != SlabPool::kNoEntry) return false;
        if (At(node).tokens.size() == tokens.size()) *same = node;
      } else if (StartsWith(tokens, At(node).tokens)) {
        ++stats_.superseded;
        Remove(node);
      }
    }
    node = next;
  }
  return true;
}

bool PrefixCache::Publish(LayoutId layout, const PrefixChain& chain, int32_t page, int32_t rows,
                          uint32_t entry) {
  ++stats_.steps;
  // Work that would fill the group is still queued, so its step was aborted and the rows do not
  // exist.
  if (pool_->cached(entry) != kNone || pool_->work(entry) != kNone) return false;
  const bool whole = rows == chain.page_size;
  Require(rows > 0 && (whole || !chain.opaque), "a part of a page is published without tokens");
  const PrefixKey& parent = chain.parent(page);
  const PrefixKey key = whole ? chain.keys[static_cast<size_t>(page)] : PrefixKey();
  if (const auto known = whole_.find(key); whole && known != whole_.end()) {
    return At(known->second).entry == SlabPool::kNoEntry && PublishAgain(known->second, entry);
  }
  std::span<const uint32_t> tokens;
  if (!chain.opaque) {
    tokens = chain.page_tokens(page, rows);
    int32_t same = kNone;
    if (!ReplaceContainedSibling(layout, parent, tokens, &same)) return false;
    if (same != kNone) return PublishAgain(same, entry);
  }
  int32_t index = free_;
  if (index != kNone) {
    free_ = At(index).next;
  } else {
    index = static_cast<int32_t>(nodes_.size());
    nodes_.emplace_back();
  }
  Node& node = At(index);
  node.layout = layout;
  node.entry = entry;
  node.key = key;
  node.parent = parent;
  node.tenant = pool_->tenant(entry);
  node.whole = whole;
  node.rows = rows;
  node.uses = 0;
  node.priority = 0;
  node.pin = 0;
  node.tokens.assign(tokens.begin(), tokens.end());
  node.next = kNone;
  if (whole) whole_.emplace(key, index);
  if (!chain.opaque) Link(index);
  pool_->Cache(entry, index);
  List(index);
  ++stats_.published;
  ++stats_.nodes;
  if (static_cast<size_t>(layout) >= of_layout_.size()) {
    of_layout_.resize(static_cast<size_t>(layout) + 1);
  }
  ++of_layout_[static_cast<size_t>(layout)];
  return true;
}

bool PrefixCache::PublishAgain(int32_t index, uint32_t entry) {
  At(index).entry = entry;
  pool_->Cache(entry, index);
  List(index);
  return true;
}

void PrefixCache::List(int32_t index) {
  const Node& node = At(index);
  if (!node.whole) return;
  if (node.entry != SlabPool::kNoEntry) {
    directory_.Put(node.key, Tier::kPool);
  } else if (outside_ != nullptr && outside_->Has(index)) {
    directory_.Put(node.key, outside_->Fastest(index));
  } else {
    directory_.Erase(node.key);
  }
}

void PrefixCache::Link(int32_t index) {
  Node& node = At(index);
  const auto [family, first] = families_.try_emplace(node.parent, index);
  node.prev = kNone;
  node.next = first ? kNone : family->second;
  if (!first) At(node.next).prev = index;
  family->second = index;
}

void PrefixCache::Remove(int32_t index) {
  Node& node = At(index);
  if (node.whole) {
    whole_.erase(node.key);
    directory_.Erase(node.key);
    node.whole = false;  // what becomes of its copies is not listed any more
  }
  if (!node.tokens.empty()) {
    if (node.next != kNone) At(node.next).prev = node.prev;
    if (node.prev != kNone) {
      At(node.prev).next = node.next;
    } else if (node.next != kNone) {
      families_[node.parent] = node.next;
    } else {
      families_.erase(node.parent);
    }
  }
  if (node.entry != SlabPool::kNoEntry) ReturnGroup(&node);
  if (outside_ != nullptr) outside_->Forget(index);
  --stats_.nodes;
  --of_layout_[static_cast<size_t>(node.layout)];
  node.layout = kNone;
  node.tokens.clear();
  node.next = free_;
  free_ = index;
}

void PrefixCache::ReturnGroup(Node* node) {
  if (std::exchange(node->pin, 0) != 0) {
    CountPinned(*node, -1);
    pool_->Unpin(node->entry);
  }
  const uint32_t entry = std::exchange(node->entry, SlabPool::kNoEntry);
  if (pool_->references(entry) == 1) work_->Cancel(entry);
  stats_.freed += pool_->Uncache(entry);
}

void PrefixCache::Note(int32_t index, EventKind kind, Tier tier) {
  if (events_ == nullptr) return;
  const Node& node = At(index);
  Event event;
  event.kind = kind;
  event.tier = tier;
  event.rows = node.rows;
  if (node.whole) event.key = node.key;
  event.parent = node.parent;
  events_->Add(node.layout, std::move(event));
}

void PrefixCache::Evict(uint32_t entry) {
  const int32_t index = pool_->cached(entry);
  if (outside_ != nullptr && outside_->Has(index)) return Demote(index);
  Lose(index, EventKind::kEvicted, Tier::kPool);
}

void PrefixCache::Lose(int32_t index, EventKind why, Tier tier) {
  const Node& node = At(index);
  if (node.whole) evicted_[node.key.low % kEvictedKept] = node.key.low;
  Note(index, why, tier);
  stats_.evicted += why == EventKind::kEvicted;
  ++stats_.steps;
  Remove(index);
}

PrefixCache::About PrefixCache::about(int32_t index) const {
  const Node& node = At(index);
  return {node.layout, node.entry, node.tenant, node.uses};
}

void PrefixCache::Demote(int32_t index) {
  Note(index, EventKind::kDemoted, Tier::kPool);
  ++stats_.demoted;
  ++stats_.steps;
  ReturnGroup(&At(index));
  List(index);
}

void PrefixCache::Restore(int32_t index, uint32_t entry, Tier from) {
  Node& node = At(index);
  Require(node.entry == SlabPool::kNoEntry, "rows are restored that are in the pool");
  node.entry = entry;
  pool_->Cache(entry, index);
  pool_->Drop(entry);
  List(index);
  ++stats_.restored;
  Note(index, EventKind::kRestored, from);
}

void PrefixCache::CountPinned(const Node& node, int32_t change) {
  const int64_t bytes = change * pool_->group_bytes(node.layout);
  pinned_groups_ += change;
  pinned_bytes_ += bytes;
  int64_t& of_tenant = pinned_of_[node.tenant];
  of_tenant += bytes;
  if (of_tenant == 0) pinned_of_.erase(node.tenant);
}

uint64_t PrefixCache::Pin(int32_t index) {
  Node& node = At(index);
  Require(node.entry != SlabPool::kNoEntry, "rows are pinned that are not in the pool");
  if (node.pin == 0) {
    CountPinned(node, 1);
    pool_->Pin(node.entry);
  }
  return node.pin = next_pin_++;
}

void PrefixCache::Unpin(int32_t index, uint64_t id) {
  Node& node = At(index);
  if (node.layout == kNone || node.pin == 0 || (id != 0 && node.pin != id)) return;
  node.pin = 0;
  CountPinned(node, -1);
  pool_->Unpin(node.entry);
}

int64_t PrefixCache::pinned_bytes(TenantKey tenant) const {
  const auto found = pinned_of_.find(tenant);
  return found == pinned_of_.end() ? 0 : found->second;
}

uint32_t PrefixCache::OldestIdle(LayoutId layout) {
  for (int32_t passed = 0; passed < kMostPassedOver; ++passed) {
    const uint32_t entry = pool_->oldest_idle(layout);
    Node& node = At(pool_->cached(entry));
    if (node.priority == 0) return entry;
    --node.priority;
    ++stats_.steps;
    pool_->Touch(entry);
  }
  return pool_->oldest_idle(layout);
}

void PrefixCache::EvictOldest(LayoutId layout, int64_t groups) {
  for (; groups > 0; --groups) Evict(OldestIdle(layout));
}

bool PrefixCache::DropSlabs(LayoutId layout, int64_t groups, bool own_only) {
  if (pool_->FreeWithoutIdle(layout, own_only) < groups) return false;
  EvictOldest(layout, pool_->idle_groups(layout));
  while (pool_->free_groups(layout) < groups) {
    const std::vector<uint32_t> slab = pool_->IdleSlab(layout, own_only);
    if (slab.empty()) break;
    for (const uint32_t entry : slab) Evict(entry);
  }
  return true;
}

bool PrefixCache::EvictOfOwner(LayoutId layout, int64_t bytes) {
  int64_t idle = 0;
  const auto layouts = static_cast<LayoutId>(pool_->layouts());
  const auto counts = [&](LayoutId other) {
    return pool_->Has(other) && pool_->SameOwner(layout, other);
  };
  for (LayoutId other = 0; other < layouts; ++other) {
    if (counts(other)) idle += pool_->idle_groups(other) * pool_->group_bytes(other);
  }
  if (idle < bytes) return false;
  // The layout itself gives up groups first.
  for (LayoutId i = -1; i < layouts && bytes > 0; ++i) {
    const LayoutId other = i < 0 ? layout : i;
    if (!counts(other)) continue;
    const int64_t size = pool_->group_bytes(other);
    const int64_t groups = std::min(pool_->idle_groups(other), (bytes + size - 1) / size);
    EvictOldest(other, groups);
    bytes -= groups * size;
  }
  return true;
}

bool PrefixCache::MakeRoom(LayoutId layout, int64_t groups, TakeRefusal why) {
  if (stats_.nodes == 0) return false;
  if (why == TakeRefusal::kGroupBound) {
    const int64_t size = pool_->group_bytes(layout);
    const int64_t bytes = groups * size - pool_->GroupRoom(layout);
    if (bytes > 0) return EvictOfOwner(layout, bytes);
    // The owner is within its own bound, but all owners together have reached the pool's size.
  }
  const bool own_only = why == TakeRefusal::kSlabBound;
  const int64_t free = own_only ? pool_->free_in_slabs(layout) : pool_->free_groups(layout);
  if (const int64_t missing = groups - free; missing <= pool_->idle_groups(layout)) {
    EvictOldest(layout, missing);
    return missing > 0;
  }
  return DropSlabs(layout, groups, own_only);
}

void PrefixCache::Drop(LayoutId layout) {
  while (pool_->idle_groups(layout) > 0) {
    ++stats_.steps;
    Remove(pool_->cached(pool_->oldest_idle(layout)));
  }
  // Next come the nodes whose groups page work or sequences still hold.
  const auto index = static_cast<size_t>(layout);
  for (size_t i = 0; index < of_layout_.size() && of_layout_[index] > 0; ++i) {
    ++stats_.steps;
    if (nodes_[i].layout == layout) Remove(static_cast<int32_t>(i));
  }
}

void PrefixCache::AddReferences(std::unordered_map<uint32_t, int32_t>* references) const {
  for (const Node& node : nodes_) {
    if (node.layout == kNone || node.entry == SlabPool::kNoEntry) continue;
    ++(*references)[node.entry];
  }
}

std::string PrefixCache::CheckInvariants() const {
  int64_t used = 0, whole = 0, linked = 0;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    if (node.layout == kNone) continue;
    ++used;
    if (node.entry == SlabPool::kNoEntry) {
      if (outside_ == nullptr || !outside_->Has(static_cast<int32_t>(i))) {
        return absl::StrCat("node ", i, " has its rows nowhere");
      }
    } else if (pool_->cached(node.entry) != static_cast<int32_t>(i)) {
      return absl::StrCat("node ", i, ": its group is cached as ", pool_->cached(node.entry));
    }
    if (!node.whole) continue;
    ++whole;
    const auto found = whole_.find(node.key);
    if (found == whole_.end() || found->second != static_cast<int32_t>(i)) {
      return absl::StrCat("node ", i, " is not found by its key");
    }
    const Tier tier =
        node.entry != SlabPool::kNoEntry ? Tier::kPool : outside_->Fastest(static_cast<int32_t>(i));
    if (directory_.Find(node.key) != tier) {
      return absl::StrCat("node ", i, " is listed where its rows are not");
    }
  }
  for (const auto& [parent, first] : families_) {
    int32_t before = kNone;
    for (int32_t node = first; node != kNone; before = node, node = At(node).next) {
      ++linked;
      if (At(node).parent != parent || At(node).prev != before || linked > used) {
        return absl::StrCat("node ", node, " is not linked to its siblings");
      }
    }
  }
  const auto with_tokens = std::count_if(nodes_.begin(), nodes_.end(), [](const Node& node) {
    return node.layout != kNone && !node.tokens.empty();
  });
  if (linked != with_tokens) return "nodes without siblings";
  if (used != stats_.nodes || whole != static_cast<int64_t>(whole_.size()))
    return "nodes miscounted";
  return "";
}

}  // namespace mla::kvcache
