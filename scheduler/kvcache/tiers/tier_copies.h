// Books of the copies that slower tiers have of the prefix cache's nodes: where each lies, and
// which is the oldest. Bytes are moved by TierMoves.
//
// A layout's copies in a tier are ordered by the time when each was put there or last used. If a
// tier has no room, its oldest copy is dropped, or the oldest copy of the layout's owner once that
// owner has its share. A node that a move works on (Hold) keeps its rooms until the move ends
// (Release), even if the node itself is forgotten before.
//
// Ownership: borrows cache and store. Threading: owned by the engine role.
#ifndef MLA_SCHEDULER_KVCACHE_TIERS_TIER_COPIES_H_
#define MLA_SCHEDULER_KVCACHE_TIERS_TIER_COPIES_H_

#include <array>
#include <cstdint>
#include <vector>

#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/kvcache/tiers/tier_store.h"

namespace mla::kvcache {

enum class TierIndex : uint8_t { kHost, kFile };
inline constexpr size_t kTiers = 2;

class TierCopies final : public CopiesOutside {
 public:
  static constexpr uint32_t kNoRoom = TierRooms::kNone;
  static constexpr int32_t kNone = -1;
  // The most copies that are dropped to make room for one: dropping copies of other sizes may not
  // help.
  static constexpr int kMostDrops = 64;

  TierCopies(int32_t tenant_percent, KvCache* cache, TierStore* store)
      : tenant_percent_(tenant_percent), cache_(cache), store_(store) {}

  // --- By node. A node's index may be used again; each use of it is called a life.
  uint64_t Know(int32_t node);  // its life
  bool Lives(int32_t node, uint64_t life) const;
  uint32_t room(TierIndex tier, int32_t node) const;  // kNoRoom: no copy
  // Returns the digest of the node's copies.
  const GroupDigest& digest(int32_t node) const { return At(node).digest; }
  void set_digest(int32_t node, const GroupDigest& digest) { At(node).digest = digest; }
  // Seal of the copy in the file.
  const GroupSeal& seal(int32_t node) const { return At(node).seal; }
  void set_seal(int32_t node, const GroupSeal& seal) { At(node).seal = seal; }
  bool held(int32_t node) const;
  void Hold(int32_t node);
  // Notes that a move that held the node has ended.
  void Release(int32_t node, uint64_t life);
  // Notes that someone waits for the node's rows to come back. Each Want needs one Unwant.
  void Want(int32_t node) { ++At(node).wanted; }
  void Unwant(int32_t node, uint64_t life);

  // --- Copies
  void Add(TierIndex tier, int32_t node, uint32_t room);
  void Drop(TierIndex tier, int32_t node);
  // Becomes the youngest.
  void Use(TierIndex tier, int32_t node);
  // Drops the copy. If it was the node's last one and its rows are not in the pool, drops the node,
  // too.
  void GiveUp(TierIndex tier, int32_t node, EventKind why);
  // Returns a room for a group of the layout; the caller frees it with FreeRoom. Drops old copies
  // to make room; returns kNoRoom if that is not enough.
  uint32_t TakeRoom(TierIndex tier, LayoutId layout);
  void FreeRoom(TierIndex tier, uint32_t room, int64_t group_bytes);
  // Returns the node of the oldest copy that is not held, or kNone.
  int32_t Oldest(TierIndex tier) const { return OldestOf(tier, kNone); }
  uint64_t dropped(TierIndex tier) const { return dropped_[Index(tier)]; }

  // CopiesOutside
  bool Has(int32_t node) const override;
  bool Comes(int32_t node) const override;
  Tier Fastest(int32_t node) const override;
  void Forget(int32_t node) override;

 private:
  static size_t Index(TierIndex tier) { return static_cast<size_t>(tier); }

  struct Copy {
    uint32_t room = kNoRoom;
    uint64_t stamp = 0;
    // Links of the copies of one layout in one tier, the oldest first.
    int32_t prev = kNone, next = kNone;
  };
  struct Node {
    uint64_t life = 0;  // 0: not known
    LayoutId layout = kNone;
    int64_t bytes = 0;
    bool held = false;
    int32_t wanted = 0;
    GroupDigest digest;
    GroupSeal seal;
    std::array<Copy, kTiers> copies;
  };
  struct List {
    int32_t oldest = kNone, youngest = kNone;
    int64_t bytes = 0;
  };
  struct Orphan {  // the room of a node that was forgotten while a move still used the room
    uint64_t life = 0;
    TierIndex tier = TierIndex::kHost;
    uint32_t room = kNoRoom;
    int64_t bytes = 0;
  };

  Node& At(int32_t node) { return nodes_[static_cast<size_t>(node)]; }
  const Node& At(int32_t node) const { return nodes_[static_cast<size_t>(node)]; }
  TierRooms& Rooms(TierIndex tier) const {
    return tier == TierIndex::kHost ? store_->host() : *store_->file();
  }
  List& FindOrAddList(TierIndex tier, LayoutId layout);
  void Link(TierIndex tier, int32_t node);
  void Unlink(TierIndex tier, int32_t node);
  // Only copies of the layout's owner count, unless `layout` is kNone.
  int32_t OldestOf(TierIndex tier, LayoutId layout) const;
  int64_t BytesOfOwner(TierIndex tier, LayoutId layout) const;

  const int32_t tenant_percent_;
  KvCache* const cache_;
  TierStore* const store_;
  std::vector<Node> nodes_;                      // by the prefix cache's index
  std::array<std::vector<List>, kTiers> lists_;  // by layout
  std::vector<Orphan> orphans_;
  std::array<uint64_t, kTiers> dropped_ = {};
  uint64_t next_life_ = 1, next_stamp_ = 1;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_TIERS_TIER_COPIES_H_
