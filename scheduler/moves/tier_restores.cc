// The part of TierMoves that brings groups back into the pool.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "scheduler/moves/tier_moves.h"

namespace mla::scheduler {

namespace {

// Pages stay wanted for this many times the wait of a call: the caller is told that they come, and
// may ask one more time.
constexpr int64_t kAsksAgain = 2;

}  // namespace

using kvcache::LayoutId;
using kvcache::PrefixCache;
using kvcache::SlabPool;
using kvcache::Tier;
using kvcache::TierCopies;
using kvcache::TierIndex;
using kvcache::TierJob;

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
    const auto left = static_cast<int32_t>(std::min<int64_t>(end - row, page_size));
    PrefixCache::Found cached;
    if (left == page_size) cached = prefixes.Find(layout, chain, page);
    if (cached.rows == 0) cached = prefixes.FindRows(layout, chain, page, left);
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
