// KvCache: declared contents of rows, and the room that the prefix cache gives up.
#include <algorithm>
#include <utility>

#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {

void KvCache::Declare(SeqSlot slot, std::shared_ptr<const PrefixChain> chain, int32_t rows) {
  Sequence& sequence = At(slot);
  Require(chain != nullptr && rows >= 0 && rows <= chain->rows() &&
              chain->page_size == pool_.layout(sequence.layout).page_size,
          "rows are declared that the chain does not have");
  sequence.chain = std::move(chain);
  sequence.declared = rows;
  PublishPages(slot);
  CheckAfterMutation();
}

void KvCache::Undeclare(SeqSlot slot, int32_t from) {
  Sequence& sequence = At(slot);
  const int32_t page_size = pool_.layout(sequence.layout).page_size;
  sequence.pages_cached = std::min(sequence.pages_cached, from / page_size);
  if (sequence.declared <= from) return;
  // A key stands for a whole page, so a part of a page cannot stay declared.
  const bool opaque = sequence.chain != nullptr && sequence.chain->opaque;
  sequence.declared = opaque ? from / page_size * page_size : from;
  if (sequence.declared == 0) sequence.chain.reset();
}

void KvCache::DropCached(LayoutId layout) {
  const int64_t nodes = prefixes_.stats().nodes;
  prefixes_.Drop(layout);
  if (events_ == nullptr || prefixes_.stats().nodes == nodes) return;
  Event event;
  event.kind = EventKind::kDropped;
  events_->Add(layout, std::move(event));
}

void KvCache::Note(SeqSlot slot, EventKind kind) {
  if (events_ == nullptr) return;
  const Sequence& sequence = At(slot);
  Event event;
  event.kind = kind;
  if (kind == EventKind::kRestored) event.tier = Tier::kCheckpoint;
  event.sequence = sequence.name;
  event.model = sequence.model;
  event.rows = sequence.length;
  events_->Add(sequence.layout, std::move(event));
}

void KvCache::Publish(SeqSlot slot, int32_t page, int32_t rows) {
  const Sequence& sequence = At(slot);
  const PrefixChain& chain = *sequence.chain;
  const uint32_t entry = TableOf(slot)[static_cast<size_t>(page)];
  if (!prefixes_.Publish(sequence.layout, chain, page, rows, entry) || events_ == nullptr) return;
  Event event;
  event.kind = EventKind::kStored;
  event.sequence = sequence.name;
  event.model = sequence.model;
  event.first_row = int64_t{page} * chain.page_size;
  event.rows = rows;
  if (rows == chain.page_size) event.key = chain.keys[static_cast<size_t>(page)];
  event.parent = chain.parent(page);
  events_->Add(sequence.layout, std::move(event));
}

void KvCache::PublishPages(SeqSlot slot) {
  Sequence& sequence = At(slot);
  const int32_t page_size = pool_.layout(sequence.layout).page_size;
  const int32_t whole = std::min(sequence.length, sequence.declared) / page_size;
  for (; sequence.pages_cached < whole; ++sequence.pages_cached) {
    Publish(slot, sequence.pages_cached, page_size);
  }
}

// The sequence is about to end: other sequences may also find the rows of its last page.
void KvCache::PublishRest(SeqSlot slot) {
  const Sequence& sequence = At(slot);
  if (sequence.chain == nullptr || sequence.chain->opaque) return;
  const int32_t page_size = pool_.layout(sequence.layout).page_size;
  const int32_t rest =
      std::min(sequence.length, sequence.declared) - sequence.pages_cached * page_size;
  if (rest <= 0) return;
  Publish(slot, sequence.pages_cached, rest);
}

PrefixMatch KvCache::Match(SeqSlot slot, int32_t most_rows) {
  Sequence& sequence = At(slot);
  Require(sequence.rows_reserved == kNone, "a match for a sequence in a step");
  PrefixMatch match;
  const int32_t page_size = pool_.layout(sequence.layout).page_size;
  const int32_t before = sequence.length;
  const int32_t row_limit = std::min({most_rows, sequence.declared, max_rows(slot)});
  if (row_limit <= before || before % page_size != 0) return match;
  const auto table = TableOf(slot);
  const auto take = [&](const PrefixCache::Found& page_found) {
    pool_.Share(page_found.entry);
    table[static_cast<size_t>(sequence.pages++)] = page_found.entry;
    sequence.length += page_found.rows;
    prefixes_.CountUse(page_found.node);
  };
  match.end = MatchEnd::kAll;
  while (sequence.length < row_limit) {
    const int32_t page = sequence.pages;
    const int32_t rows_left = std::min(row_limit - sequence.length, page_size);
    const bool whole = rows_left == page_size;
    PrefixCache::Found cached;
    if (whole) cached = prefixes_.Find(sequence.layout, *sequence.chain, page);
    if (cached.rows == 0)
      cached = prefixes_.FindRows(sequence.layout, *sequence.chain, page, rows_left);
    const bool away = cached.rows > 0 && cached.entry == SlabPool::kNoEntry;
    if (away && prefixes_.Comes(cached.node)) {
      // The match ends at a page border, so that a later match can go on here.
      match.end = MatchEnd::kDeferred;
      break;
    }
    if (away) {
      cached =
          prefixes_.FindRows(sequence.layout, *sequence.chain, page, rows_left, /*in_pool=*/true);
    }
    if (cached.rows > 0) take(cached);
    if (cached.rows == page_size) {
      sequence.pages_cached = sequence.pages;
    } else if (cached.rows < rows_left) {
      match.end =
          away ? MatchEnd::kEvicted : prefixes_.WhyAbsent(sequence.layout, *sequence.chain, page);
      break;
    }
  }
  match.rows = sequence.length - before;
  prefixes_.CountMatch(match.end, row_limit - before, match.rows);
  if (events_ != nullptr && match.end != MatchEnd::kAll) {
    Miss miss;
    miss.sequence = sequence.name;
    miss.model = sequence.model;
    miss.first_row = before;
    miss.rows_asked = row_limit - before;
    miss.rows_found = match.rows;
    miss.end = match.end;
    events_->Add(sequence.layout, std::move(miss));
  }
  CheckAfterMutation();
  return match;
}

const std::shared_ptr<const PrefixChain>& KvCache::chain(SeqSlot slot) const {
  return At(slot).chain;
}

int32_t KvCache::declared(SeqSlot slot) const { return At(slot).declared; }

// Evicts idle groups if that gives enough room. Otherwise evicts none, because a refused step must
// leave the cache as it is.
bool KvCache::MakeRoom(std::span<const StepRows> rows) {
  const LayoutId layout = At(rows[0].sequence).layout;
  int64_t wanted = 0;
  for (const StepRows& row : rows) {
    const Sequence& sequence = At(row.sequence);
    if (sequence.layout != layout) return false;  // steps are of one model
    wanted += PagesFor(sequence, int64_t{sequence.length} + row.rows) - sequence.pages;
    const int32_t inside = sequence.length % pool_.layout(layout).page_size;
    if (row.rows == 0 || inside == 0) continue;
    const uint32_t last = TableOf(row.sequence)[static_cast<size_t>(sequence.pages) - 1];
    // All but one of the sequences that share a page need a copy; counting all of them is on the
    // safe side.
    wanted += pool_.references(last) > 1 || inside < pool_.pinned_rows(last);
  }
  return prefixes_.MakeRoom(layout, wanted, pool_.refusal());
}

KvCache::RestoreRoom KvCache::TakeToRestore(LayoutId layout, TenantKey tenant) {
  SlabPool::Taken group = pool_.Take(layout, tenant);
  // As for a step: another bound may refuse once the first one allows it.
  for (int bound = 0; bound < 3 && group.entry == SlabPool::kNoEntry; ++bound) {
    if (!prefixes_.MakeRoom(layout, 1, pool_.refusal())) break;
    group = pool_.Take(layout, tenant);
  }
  if (group.entry == SlabPool::kNoEntry) return {};
  const RestoreRoom room = {next_restore_++, group.entry};
  restoring_.push_back({room, layout});
  restoring_bytes_ += pool_.group_bytes(layout);
  CheckAfterMutation();
  return room;
}

KvCache::RestoreRoom KvCache::TakeRestoring(uint64_t id) {
  const auto restoring = std::find_if(restoring_.begin(), restoring_.end(),
                                      [id](const Restoring& one) { return one.room.id == id; });
  if (restoring == restoring_.end()) return {};
  const Restoring one = *restoring;
  restoring_.erase(restoring);
  restoring_bytes_ -= pool_.group_bytes(one.layout);
  return one.room;
}

void KvCache::Restore(int32_t node, uint64_t id, Tier from) {
  const RestoreRoom room = TakeRestoring(id);
  Require(room.id != 0, "a group is restored that was not taken for it");
  ++allocations_;
  prefixes_.Restore(node, room.entry, from);
  CheckAfterMutation();
}

void KvCache::DropRestore(uint64_t id) {
  const RestoreRoom room = TakeRestoring(id);
  if (room.id == 0) return;
  // The group may still hold bytes of the tenant that had it before.
  pool_.MarkMixed(room.entry);
  pool_.Drop(room.entry);
  CheckAfterMutation();
}

}  // namespace mla::kvcache
