#include "scheduler/moves/tier_moves.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"

namespace mla::scheduler {

namespace {

// Pages stay wanted for this many times the wait of a call: the caller is told that they come, and
// may ask one more time.
constexpr int64_t kAsksAgain = 2;

}  // namespace

using kvcache::EventKind;
using kvcache::LayoutId;
using kvcache::PrefixCache;
using kvcache::SlabPool;
using kvcache::Tier;
using kvcache::TierCopies;
using kvcache::TierIndex;
using kvcache::TierJob;

TierMoves::TierMoves(const Limits& limits, kvcache::KvCache* cache, PageMover* mover,
                     const Clock* clock, std::unique_ptr<kvcache::TierStore> store)
    : limits_(limits),
      cache_(cache),
      mover_(mover),
      clock_(clock),
      store_(std::move(store)),
      copies_(limits.tier_tenant_percent, cache, store_.get()) {
  cache_->prefixes().set_outside(&copies_);
}

TierMoves::~TierMoves() { cache_->prefixes().set_outside(nullptr); }

bool TierMoves::ready() const {
  if (store_->has_ended() || !parts_done_.empty()) return true;
  // Restores start again when a pause is over; without a pause they go on as moves end.
  if (!wanted_.empty() && moves_.empty() && !Pauses()) return true;
  if (cache_->steps() == looked_at_) return false;
  const auto layouts = static_cast<LayoutId>(cache_->pool().layouts());
  for (LayoutId layout = 0; layout < layouts; ++layout) {
    if (WantsRoom(layout)) return true;
  }
  return false;
}

bool TierMoves::Pump() {
  if (!ready()) return false;
  bool did = store_->has_ended() || !parts_done_.empty();
  for (TierJob* const job : store_->Collect()) {
    const auto move = std::find_if(moves_.begin(), moves_.end(),
                                   [job](const auto& one) { return &one->job == job; });
    OnJob(move->get());
  }
  for (Move* const move : std::exchange(parts_done_, {})) OnPart(move);
  while (RestoreOne()) did = true;
  while (DemoteWanted()) did = true;
  int remaining = kMostAtOnce;
  while (remaining > 0 && (StoreOne() || DemoteOne())) --remaining;
  looked_at_ = remaining > 0 ? cache_->steps() : ~uint64_t{0};
  return did || remaining < kMostAtOnce;
}

int64_t TierMoves::KeepNanos() const {
  return std::max<int64_t>(limits_.tier_wait_ms, kLeastKeptMs) * kNanosPerMilli;
}

void TierMoves::Keep(int32_t node) {
  const MonotonicNanos now = clock_->Now();
  if (now >= drop_kept_at_) {
    absl::erase_if(kept_, [&](const auto& one) { return one.second.until <= now; });
    drop_kept_at_ = now + KeepNanos();
  }
  kept_[node] = {copies_.Know(node), now + KeepNanos()};
}

bool TierMoves::Kept(int32_t node) const {
  const auto found = kept_.find(node);
  return found != kept_.end() && copies_.Lives(node, found->second.life) &&
         clock_->Now() < found->second.until;
}

bool TierMoves::MayBegin(int64_t bytes) const {
  return moves_.empty() || (moves_.size() < kMostMoves && moving_bytes_ + bytes <= kMovingBytes);
}

TierMoves::Move* TierMoves::Begin(Kind kind, int32_t node) {
  const PrefixCache::About about = cache_->prefixes().about(node);
  auto move = std::make_unique<Move>();
  move->kind = kind;
  move->node = node;
  move->life = copies_.Know(node);
  move->layout = about.layout;
  move->tenant = about.tenant;
  move->bytes = cache_->pool().group_bytes(about.layout);
  move->began = clock_->Now();
  copies_.Hold(node);
  moving_bytes_ += move->bytes;
  if (kind == Kind::kDemote) leaving_bytes_ += move->bytes;
  moves_.push_back(std::move(move));
  return moves_.back().get();
}

TierMoves::Move* TierMoves::Find(int32_t node) const {
  for (const auto& move : moves_) {
    if (move->node == node && Lives(*move)) return move.get();
  }
  return nullptr;
}

void TierMoves::End(Move* move) {
  if (move->room != TierCopies::kNoRoom) {
    const TierIndex tier = move->kind == Kind::kStore ? TierIndex::kFile : TierIndex::kHost;
    copies_.FreeRoom(tier, move->room, move->bytes);
  }
  copies_.Release(move->node, move->life);
  moving_bytes_ -= move->bytes;
  if (move->kind == Kind::kDemote) leaving_bytes_ -= move->bytes;
  for (WaitingPage& page : move->wanted) {
    if (move->kind == Kind::kRestore) {
      Answer(page);
    } else {  // now it can come back
      wanted_.AddFirst(std::move(page));
    }
  }
  std::erase_if(moves_, [move](const auto& one) { return one.get() == move; });
}

// The host memory of the move's own room, or else of the node's copy.
std::span<std::byte> TierMoves::HostBytes(const Move& move) const {
  const bool own = move.room != TierCopies::kNoRoom && move.kind != Kind::kStore;
  const uint32_t room = own ? move.room : copies_.room(TierIndex::kHost, move.node);
  return store_->host_bytes(room, move.bytes);
}

void TierMoves::StartJob(Move* move, TierJob::Kind kind) {
  TierJob& job = move->job;
  job.kind = kind;
  job.host = HostBytes(*move);
  job.bytes = static_cast<size_t>(move->bytes);
  job.digest = copies_.digest(move->node);
  if (kind == TierJob::Kind::kRead) job.seal = copies_.seal(move->node);
  if (kind == TierJob::Kind::kWrite) job.at = store_->file_offset(move->room);
  if (kind == TierJob::Kind::kRead) {
    job.at = store_->file_offset(copies_.room(TierIndex::kFile, move->node));
  }
  store_->Start(&job);
}

void TierMoves::StartPart(Move* move, uint32_t entry, bool in) {
  PageMove& part = move->part;
  part.in = in;
  part.bytes = HostBytes(*move).first(static_cast<size_t>(move->bytes));
  part.engine.entry = entry;
  part.engine.tenant = move->tenant;
  part.engine.ticket = cache_->work().last();
  move->digests.resize(static_cast<size_t>(kernels::DigestParts(move->bytes)));
  part.engine.transfers = {
      {cache_->group_offset(entry), move->bytes, part.bytes.data(), move->digests.data()}};
  part.done = [this, move](const absl::Status& status) {
    move->part_status = status;
    parts_done_.push_back(move);
  };
  mover_->Add(&part);
}

void TierMoves::OnJob(Move* move) {
  return move->kind == Kind::kStore ? OnWritten(move) : OnRead(move);
}

void TierMoves::OnPart(Move* move) {
  if (!move->part_status.ok()) retry_at_ = clock_->Now() + kRetryMs * kNanosPerMilli;
  if (move->kind == Kind::kRestore) return OnRestored(move);
  if (!move->part_status.ok() || !Lives(*move)) return End(move);
  OnCopied(move, kvcache::DigestOfParts(move->digests));
}

void TierMoves::Fault(TierIndex tier, int32_t node, bool damaged) {
  (damaged ? Figures(tier).damaged : Figures(tier).failed) += 1;
  copies_.GiveUp(tier, node, EventKind::kDamaged);
}

int64_t TierMoves::MarkOf(LayoutId layout, int32_t percent) const {
  const SlabPool& pool = cache_->pool();
  return std::min(pool.stats().bytes_total, pool.GroupBound(layout)) / 100 * percent;
}

int64_t TierMoves::FreeOf(LayoutId layout) const {
  const SlabPool& pool = cache_->pool();
  return std::min(pool.BytesLeft(layout), pool.GroupRoom(layout)) + leaving_bytes_;
}

bool TierMoves::WantsRoom(LayoutId layout) const {
  const SlabPool& pool = cache_->pool();
  if (!pool.Has(layout) || pool.idle_groups(layout) == 0) return false;
  const bool again = demoting_ == layout;
  return FreeOf(layout) <
         MarkOf(layout, again ? limits_.tier_high_percent : limits_.tier_low_percent);
}

bool TierMoves::Leave(int32_t node) {
  const PrefixCache::About about = cache_->prefixes().about(node);
  const WaitingPage page{.node = node, .life = copies_.Know(node), .tenant = about.tenant};
  if (Pauses() || !leaving_.Add(page)) return false;
  kept_.erase(node);
  while (DemoteWanted()) {
  }
  return true;
}

bool TierMoves::DemoteWanted() {
  if (leaving_.empty()) return false;
  const WaitingPage& next = leaving_.front();
  const PrefixCache::About about = cache_->prefixes().about(next.node);
  const bool goes = copies_.Lives(next.node, next.life) && !copies_.held(next.node) &&
                    !about.demoted() && cache_->pool().idle(about.entry) && !Pauses();
  if (goes && !copies_.Has(next.node) && !MayBegin(cache_->pool().group_bytes(about.layout))) {
    return false;
  }
  leaving_.Take();
  if (goes) DemoteGroup(about.layout, about.entry);
  return true;
}

bool TierMoves::DemoteOne() {
  if (Pauses()) return false;
  const auto layouts = static_cast<LayoutId>(cache_->pool().layouts());
  const LayoutId first = std::max<LayoutId>(demoting_, 0);
  for (LayoutId i = 0; i < layouts; ++i) {
    const LayoutId layout = (first + i) % layouts;
    if (!WantsRoom(layout)) {
      if (demoting_ == layout) demoting_ = -1;
      continue;
    }
    demoting_ = layout;
    if (DemoteGroup(layout, cache_->prefixes().OldestIdle(layout))) return true;
  }
  return false;
}

bool TierMoves::DemoteGroup(LayoutId layout, uint32_t entry) {
  const SlabPool& pool = cache_->pool();
  const int32_t node = pool.cached(entry);
  if (Kept(node)) return false;
  if (copies_.Has(node)) {
    cache_->prefixes().Demote(node);
    copies_.Use(TierIndex::kHost, node);
    return true;
  }
  // Another move that has just begun or failed holds the node; its turn comes again.
  if (copies_.held(node) || !MayBegin(pool.group_bytes(layout))) return false;
  const kvcache::TierRooms& host = store_->host();
  const bool full = host.bytes_total() - host.bytes_used() < pool.group_bytes(layout);
  const bool storing = std::any_of(moves_.begin(), moves_.end(),
                                   [](const auto& move) { return move->kind == Kind::kStore; });
  // Moves to the file will soon free room; without waiting for them, the oldest copies would be
  // dropped.
  if (full && storing) return false;
  const uint32_t room = copies_.TakeRoom(TierIndex::kHost, layout);
  if (room == TierCopies::kNoRoom) return false;
  Move* const move = Begin(Kind::kDemote, node);
  move->room = room;
  StartPart(move, entry, false);
  return true;
}

void TierMoves::OnCopied(Move* move, const kvcache::GroupDigest& digest) {
  if (!Lives(*move)) return End(move);
  const int32_t node = move->node;
  copies_.set_digest(node, digest);
  copies_.Add(TierIndex::kHost, node, std::exchange(move->room, TierCopies::kNoRoom));
  TierFigures& host = stats_.host;
  ++host.groups_in;
  host.bytes_in += static_cast<uint64_t>(move->bytes);
  host.ns_in += clock_->Now() - move->began;
  End(move);
  const PrefixCache::About about = cache_->prefixes().about(node);
  if (!about.demoted() && cache_->pool().idle(about.entry) && !Kept(node)) {
    cache_->prefixes().Demote(node);
  }
}

bool TierMoves::StoreOne() {
  if (store_->file() == nullptr) return false;
  const int64_t total = store_->host().bytes_total();
  const int64_t free = total - store_->host().bytes_used();
  storing_ = free < total / 100 * (storing_ ? limits_.tier_high_percent : limits_.tier_low_percent);
  if (!storing_) return false;
  const int32_t node = copies_.Oldest(TierIndex::kHost);
  if (node < 0) return false;
  const PrefixCache::About about = cache_->prefixes().about(node);
  const bool elsewhere =
      !about.demoted() || copies_.room(TierIndex::kFile, node) != TierCopies::kNoRoom;
  if (elsewhere) {
    copies_.Drop(TierIndex::kHost, node);
    return true;
  }
  if (!MayBegin(cache_->pool().group_bytes(about.layout))) return false;
  uint32_t room = TierCopies::kNoRoom;
  if (about.uses >= limits_.tier_file_hits) room = copies_.TakeRoom(TierIndex::kFile, about.layout);
  if (room == TierCopies::kNoRoom) {
    copies_.GiveUp(TierIndex::kHost, node, EventKind::kEvicted);
    return true;
  }
  Move* const move = Begin(Kind::kStore, node);
  move->room = room;
  StartJob(move, TierJob::Kind::kWrite);
  return true;
}

void TierMoves::OnWritten(Move* move) {
  if (!Lives(*move)) return End(move);
  const int32_t node = move->node;
  const absl::Status& status = move->job.status;
  if (status.ok()) {
    copies_.set_seal(node, move->job.seal);
    copies_.Add(TierIndex::kFile, node, std::exchange(move->room, TierCopies::kNoRoom));
    TierFigures& file = stats_.file;
    ++file.groups_in;
    file.bytes_in += static_cast<uint64_t>(move->bytes);
    file.ns_in += clock_->Now() - move->began;
    copies_.Drop(TierIndex::kHost, node);
  } else if (status.code() == absl::StatusCode::kDataLoss) {
    Fault(TierIndex::kHost, node, true);
  } else {
    ++stats_.file.failed;
    copies_.GiveUp(TierIndex::kHost, node, EventKind::kEvicted);
  }
  End(move);
}

TierStats TierMoves::stats() const {
  TierStats stats = stats_;
  const auto fill = [](const kvcache::TierRooms& rooms, TierFigures* figures) {
    figures->bytes_total = rooms.bytes_total();
    figures->bytes_used = rooms.bytes_used();
    figures->groups = rooms.groups_used();
  };
  fill(store_->host(), &stats.host);
  stats.host.dropped = copies_.dropped(TierIndex::kHost);
  if (store_->file() != nullptr) fill(*store_->file(), &stats.file);
  stats.file.dropped = copies_.dropped(TierIndex::kFile);
  stats.moving = static_cast<int32_t>(moves_.size());
  return stats;
}

// ----------------------------------------------------------------------------------- Into the pool

std::shared_ptr<TierWait> TierMoves::Restore(LayoutId layout, const kvcache::PrefixChain& chain,
                                             int64_t first_row, int64_t most_rows, bool waits) {
  DropUnwanted();
  const int32_t page_size = chain.page_size;
  const int64_t end = std::min<int64_t>(most_rows, chain.rows());
  PrefixCache& prefixes = cache_->prefixes();
  const SlabPool& pool = cache_->pool();
  int64_t room = pool.free_groups(layout) + pool.idle_groups(layout);
  size_t queue_room = 0;
  std::vector<int32_t> nodes, present;
  for (int64_t row = first_row; row < end; row += page_size) {
    const auto page = static_cast<int32_t>(row / page_size);
    const auto remaining = static_cast<int32_t>(std::min<int64_t>(end - row, page_size));
    PrefixCache::Found cached;
    if (remaining == page_size) cached = prefixes.Find(layout, chain, page);
    if (cached.rows == 0) cached = prefixes.FindRows(layout, chain, page, remaining);
    if (cached.rows == 0) break;
    if (cached.entry == SlabPool::kNoEntry) {
      if (nodes.empty()) queue_room = wanted_.room(prefixes.about(cached.node).tenant);
      if (room-- <= 0 || nodes.size() >= queue_room) break;
      if (waits || !copies_.Comes(cached.node)) nodes.push_back(cached.node);
    } else {
      room -= pool.idle(cached.entry);
      cache_->Touch(cached.entry);
      present.push_back(cached.node);
    }
    if (cached.rows < page_size) break;
  }
  if (nodes.empty()) return nullptr;
  for (const int32_t node : present) Keep(node);
  std::shared_ptr<TierWait> wait;
  if (waits) wait = std::make_shared<TierWait>(static_cast<int32_t>(nodes.size()));
  for (const int32_t node : nodes) {
    Want({.node = node,
          .life = copies_.Know(node),
          .tenant = prefixes.about(node).tenant,
          .until = waits ? clock_->Now() + kAsksAgain * KeepNanos() : WaitingPage::kAlways,
          .wait = wait});
  }
  while (RestoreOne()) {
  }
  return wait;
}

void TierMoves::Want(const WaitingPage& page) {
  copies_.Want(page.node);
  if (!wanted_.Add(page)) Answer(page);
}

void TierMoves::Answer(const WaitingPage& page) {
  copies_.Unwant(page.node, page.life);
  if (page.wait != nullptr) page.wait->CountDown();
}

void TierMoves::DropUnwanted() {
  const MonotonicNanos now = clock_->Now();
  if (now < drop_unwanted_at_) return;
  drop_unwanted_at_ = now + KeepNanos();
  const auto unwanted = [&](const WaitingPage& page) {
    return page.until <= now || !copies_.Lives(page.node, page.life);
  };
  for (const WaitingPage& page : wanted_.TakeIf(unwanted)) Answer(page);
}

bool TierMoves::RestoreOne() {
  if (wanted_.empty() || Pauses()) return false;
  const int32_t node = wanted_.front().node;
  const bool lives = copies_.Lives(node, wanted_.front().life);
  const PrefixCache::About about = cache_->prefixes().about(node);
  if (!lives || wanted_.front().until <= clock_->Now() || !about.demoted() || !copies_.Has(node)) {
    Answer(wanted_.Take());
    return true;
  }
  if (copies_.held(node)) {
    Find(node)->wanted.push_back(wanted_.Take());
    return true;
  }
  if (!MayBegin(cache_->pool().group_bytes(about.layout))) return false;
  const bool in_host = copies_.room(TierIndex::kHost, node) != TierCopies::kNoRoom;
  Move* const move = Begin(Kind::kRestore, node);
  move->wanted.push_back(wanted_.Take());
  if (in_host) {
    WriteToPool(move);
    return true;
  }
  move->from = TierIndex::kFile;
  move->room = copies_.TakeRoom(TierIndex::kHost, about.layout);
  if (move->room == TierCopies::kNoRoom) {
    End(move);
  } else {
    StartJob(move, TierJob::Kind::kRead);
  }
  return true;
}

void TierMoves::OnRead(Move* move) {
  if (!Lives(*move)) return End(move);
  if (!move->job.status.ok()) {
    return EndFaulty(move, move->from, move->job.status.code() == absl::StatusCode::kDataLoss);
  }
  if (move->room != TierCopies::kNoRoom) {
    copies_.Add(TierIndex::kHost, move->node, std::exchange(move->room, TierCopies::kNoRoom));
  }
  WriteToPool(move);
}

void TierMoves::EndFaulty(Move* move, TierIndex tier, bool damaged) {
  const bool other =
      tier == TierIndex::kHost && copies_.room(TierIndex::kFile, move->node) != TierCopies::kNoRoom;
  if (other) {
    for (WaitingPage& page : std::exchange(move->wanted, {})) wanted_.AddFirst(std::move(page));
  }
  Fault(tier, move->node, damaged);
  End(move);
}

void TierMoves::WriteToPool(Move* move) {
  if (!cache_->prefixes().about(move->node).demoted()) return End(move);
  move->restore = cache_->TakeToRestore(move->layout, move->tenant);
  if (move->restore.id == 0) return End(move);
  StartPart(move, move->restore.entry, true);
}

void TierMoves::OnRestored(Move* move) {
  const bool wanted =
      move->part_status.ok() && Lives(*move) && cache_->prefixes().about(move->node).demoted();
  if (!wanted) {
    cache_->DropRestore(move->restore.id);
    return End(move);
  }
  // The seal of bytes from the file has been checked before; these digests are of the bytes in the
  // pool.
  if (kvcache::DigestOfParts(move->digests) != copies_.digest(move->node)) {
    cache_->DropRestore(move->restore.id);
    return EndFaulty(move, TierIndex::kHost, true);
  }
  TierFigures& from = Figures(move->from);
  ++from.groups_out;
  from.bytes_out += static_cast<uint64_t>(move->bytes);
  from.ns_out += clock_->Now() - move->began;
  cache_->Restore(move->node, move->restore.id,
                  move->from == TierIndex::kHost ? Tier::kHost : Tier::kFile);
  Keep(move->node);
  copies_.Use(TierIndex::kHost, move->node);
  copies_.Use(TierIndex::kFile, move->node);
  End(move);
}

}  // namespace mla::scheduler
