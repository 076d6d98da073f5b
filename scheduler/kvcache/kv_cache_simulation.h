// State that the model test of KvCache keeps of sequences, and the device that it simulates.
#ifndef MLA_SCHEDULER_KVCACHE_KV_CACHE_SIMULATION_H_
#define MLA_SCHEDULER_KVCACHE_KV_CACHE_SIMULATION_H_

#include <algorithm>
#include <array>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "scheduler/kvcache/kv_cache.h"

namespace mla::kvcache {

inline constexpr int kOperations = 2'100;  // operations of a run; two million in all runs
inline constexpr int32_t kSequences = 14, kTablePages = 24, kMostLayers = 3;
inline constexpr TenantKey kTenants = 3;
inline constexpr uint32_t kUnpublished = 0x0badcafe;

inline const GroupLayout kLayouts[] = {
    MakeLayout({.row_bytes = 16, .page_size = 3, .layers = 2}),  // 1 granule
    MakeLayout({.row_bytes = 8, .page_size = 1, .layers = 1}),   // 1 granule, one row a page
    MakeLayout({.row_bytes = 40, .page_size = 7, .layers = 3}),  // 4 granules
    MakeLayout(
        {.row_bytes = 64, .page_size = 16, .layers = 3}),  // 12 granules: more than some slabs
};

struct ModelSequence {
  bool open = false;
  int layout = 0;
  TenantKey tenant = 0;
  std::vector<uint64_t> rows = {};     // committed
  std::vector<uint64_t> written = {};  // words written under the open reservation so far
  // The tokens of its committed rows and of some future ones.
  std::vector<uint32_t> tokens = {};
  int32_t reserved = -1;  // rows of it, or -1
  WorkTicket ticket = 0;  // of its page work
  // In the open reservation: layers that may be read and written because their copies have been
  // made; and whether some rows were written in some layers only, so that none may be kept.
  std::array<bool, kMostLayers> layers = {};
  bool torn = false;
};

inline int32_t Pages(const ModelSequence& m, size_t rows) {
  const auto page = static_cast<size_t>(kLayouts[m.layout].page_size);
  return static_cast<int32_t>((rows + page - 1) / page);
}

// Returns the word that fills a row of the layer.
inline uint64_t WordFor(TenantKey tenant, uint64_t row, size_t layer) {
  return (uint64_t{tenant} + 1) << 56 | row << 8 | static_cast<uint64_t>(layer);
}

// Simulates the pool's bytes, the page tables as published, and launches that carry page work. At
// most two launches run at a time, and any may fail.
class SimulatedDevice {
 public:
  struct Row {
    const KvPlane* plane = nullptr;  // of a page group
    size_t page_size = 0;
    int64_t page_table = 0;  // index of the first entry
    size_t position = 0;
  };

  std::vector<uint64_t>& words() { return words_; }  // the pool
  std::vector<uint32_t>& tables() { return tables_; }
  int64_t failed() const { return failed_; }

  // Copies the changes of the sequence's page table from the host's tables.
  void Publish(KvCache& cache, SeqSlot sequence, const std::vector<uint32_t>& host_tables) {
    changes_.clear();
    cache.TakeTableChanges(sequence, &changes_);
    for (const kernels::TableRange& range : changes_) {
      std::copy_n(host_tables.begin() + range.first, range.count, tables_.begin() + range.first);
    }
  }

  // Fills the row with the word, at the place that the tables give; returns false if that is
  // outside the pool.
  bool Write(const Row& row, uint64_t word) {
    const size_t first = FirstWord(row), count = Words(row);
    if (first + count > words_.size()) return false;
    std::fill_n(words_.begin() + static_cast<int64_t>(first), count, word);
    return true;
  }

  bool Holds(const Row& row, uint64_t word) const {
    const auto first = words_.begin() + static_cast<int64_t>(FirstWord(row));
    return std::all_of(first, first + static_cast<int64_t>(Words(row)),
                       [word](uint64_t held) { return held == word; });
  }

  // Returns true if the group lies in the pool and the top bytes of all its words are 0 or `owner`.
  bool OnlyOf(uint32_t entry, int64_t bytes, uint64_t owner) const {
    const int64_t first = int64_t{entry} * kernels::kPageGranuleBytes / 8;
    if (first + bytes / 8 > static_cast<int64_t>(words_.size())) return false;
    return std::all_of(words_.begin() + first, words_.begin() + first + bytes / 8,
                       [owner](uint64_t word) { return word >> 56 == 0 || word >> 56 == owner; });
  }

  // Call it before work is taken for a launch: only two may run at a time.
  void AwaitSlot(std::mt19937& random, KvCache& cache) {
    if (running_.size() == 2) Finish(random, cache);
  }

  // Does nothing if the launch carries no work.
  void Begin(LaunchWork work) {
    if (!work.empty()) running_.push_back(std::move(work));
  }

  void FinishAll(std::mt19937& random, KvCache& cache) {
    while (!running_.empty()) Finish(random, cache);
  }

  // Ends the oldest launch. If it fails, the later ones fail too, with some of their work done.
  void Finish(std::mt19937& random, KvCache& cache) {
    if (running_.empty()) return;
    if (random() % 5 != 0) {
      for (const kernels::PageRange& range : running_.front().ranges()) CarryOut(range);
      cache.work().Acknowledge(&running_.front());
      running_.pop_front();
      return;
    }
    ++failed_;
    for (const LaunchWork& work : running_) {
      for (const kernels::PageRange& range : work.ranges()) {
        if (random() % 3 != 0) CarryOut(range);
      }
    }
    for (; !running_.empty(); running_.pop_back()) cache.work().Requeue(&running_.back());
  }

  // Runs launches until they have done the tenant's work up to the ticket, however often they fail.
  void DoQueued(std::mt19937& random, KvCache& cache, TenantKey tenant, WorkTicket until) {
    FinishAll(random, cache);
    while (cache.work().Waits(tenant, until)) {
      LaunchWork work;
      WorkRoom room{.places = 1 + static_cast<int64_t>(random() % 4), .bytes = 1 << 20};
      cache.work().Take(tenant, until, &room, &work);
      Begin(std::move(work));
      FinishAll(random, cache);
    }
  }

  // Does what DoQueued does, for the layer's copy into the group. Returns false if even a launch
  // with no other work lacks room.
  bool CopyLayer(std::mt19937& random, KvCache& cache, uint32_t group, int32_t layer) {
    while (true) {
      FinishAll(random, cache);
      LaunchWork work;
      WorkRoom room{.places = 1 + static_cast<int64_t>(random() % 3),
                    .bytes = static_cast<int64_t>(random() % 512)};
      if (!cache.work().TakeLayer(group, layer, &room, &work)) return false;
      if (work.empty()) return true;
      Begin(std::move(work));
    }
  }

 private:
  static size_t Words(const Row& row) { return static_cast<size_t>(row.plane->row_stride / 8); }
  size_t FirstWord(const Row& row) const {
    const size_t page = row.position / row.page_size, inside = row.position % row.page_size;
    const uint32_t entry = tables_[static_cast<size_t>(row.page_table) + page];
    const size_t group = size_t{entry} * kernels::kPageGranuleBytes;
    return (group + static_cast<size_t>(row.plane->offset)) / 8 + inside * Words(row);
  }

  void CarryOut(const kernels::PageRange& range) {
    const auto target = words_.begin() + range.target_offset / 8;
    if (range.zeroes()) {
      std::fill_n(target, range.bytes / 8, 0);
    } else {
      std::copy_n(words_.begin() + range.source_offset / 8, range.bytes / 8, target);
    }
  }

  std::vector<uint64_t> words_;
  std::vector<uint32_t> tables_;
  std::vector<kernels::TableRange> changes_;  // scratch of Publish
  std::deque<LaunchWork> running_;            // oldest first
  int64_t failed_ = 0;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_KV_CACHE_SIMULATION_H_
