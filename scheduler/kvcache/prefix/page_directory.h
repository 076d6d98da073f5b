// Finds whole pages and the places of their rows by key: a copy of what the prefix cache knows, for
// calls that must not wait for its owner. A look leaves no trace: nothing is pinned, counted or
// made younger. A page that a look has found may be gone a moment later.
//
// Costs: an operation locks one of kShards locks for a look at one hash table. Memory: an entry
// for each whole page that the cache knows.
// Threading: any thread. The prefix cache alone changes it.
#ifndef MLA_SCHEDULER_KVCACHE_PREFIX_PAGE_DIRECTORY_H_
#define MLA_SCHEDULER_KVCACHE_PREFIX_PAGE_DIRECTORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "base/mutex.h"
#include "scheduler/kvcache/prefix/event_log.h"
#include "scheduler/kvcache/prefix/prefix_chain.h"

namespace mla::kvcache {

// Counts pages of a prefix by the place of their rows.
struct HeldPages {
  int32_t pool = 0, host = 0, file = 0;
  int32_t sum() const { return pool + host + file; }
};

class PageDirectory final {
 public:
  static constexpr size_t kShards = 64;

  // Notes that the page lies in `tier` from now on. REQUIRES: the tier is the pool, the host's
  // memory or the file.
  void Put(const PrefixKey& key, Tier tier) {
    Shard& shard = ShardOf(key);
    const MutexLock lock(shard.mutex);
    shard.pages[key] = tier;
  }
  void Erase(const PrefixKey& key) {
    Shard& shard = ShardOf(key);
    const MutexLock lock(shard.mutex);
    shard.pages.erase(key);
  }
  std::optional<Tier> Find(const PrefixKey& key) const {
    const Shard& shard = ShardOf(key);
    const MutexLock lock(shard.mutex);
    const auto found = shard.pages.find(key);
    if (found == shard.pages.end()) return std::nullopt;
    return found->second;
  }

  // Adds the leading pages of `keys` that are found to `held`. Returns true if all are.
  bool Count(std::span<const PrefixKey> keys, HeldPages* held) const {
    for (const PrefixKey& key : keys) {
      const std::optional<Tier> tier = Find(key);
      if (!tier) return false;
      ++(*tier == Tier::kPool ? held->pool : *tier == Tier::kHost ? held->host : held->file);
    }
    return true;
  }

 private:
  struct alignas(64) Shard {  // lines of the processor's caches of its own
    mutable Mutex mutex;
    absl::flat_hash_map<PrefixKey, Tier> pages ABSL_GUARDED_BY(mutex);
  };

  // Keys are outputs of a keyed hash: any bits of them are spread evenly.
  Shard& ShardOf(const PrefixKey& key) { return shards_[key.high % kShards]; }
  const Shard& ShardOf(const PrefixKey& key) const { return shards_[key.high % kShards]; }

  std::array<Shard, kShards> shards_;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PREFIX_PAGE_DIRECTORY_H_
