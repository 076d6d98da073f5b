// The fixture of the cache's tests: a small pool, one layout, and launches that carry all page work
// at once.
#ifndef MLA_SCHEDULER_KVCACHE_KV_CACHE_FIXTURE_H_
#define MLA_SCHEDULER_KVCACHE_KV_CACHE_FIXTURE_H_

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <vector>

#include "scheduler/kvcache/kv_cache.h"

namespace mla::kvcache {

// Its pages have four rows, and its groups one granule.
inline const GroupLayout kSmall = MakeLayout({.row_bytes = 32, .page_size = 4, .layers = 2});

class KvCacheTest : public ::testing::Test {
 protected:
  void Make(int64_t groups, int64_t slab_groups = 0) {
    const KvCacheOptions options{.bytes = groups * kSmall.group_bytes(),
                                 .slab_bytes = slab_groups * kSmall.group_bytes(),
                                 .max_sequences = 8,
                                 .max_pages_per_sequence = 16};
    tables_.assign(8 * 16, 0xdeadbeefu);
    cache_ = KvCache::Create(options, tables_).value();
    layout_ = cache_->AddLayout(kSmall).value();
  }

  SeqSlot Open(TenantKey tenant = 1) { return cache_->Open(layout_, tenant).value(); }

  absl::Status Reserve(SeqSlot sequence, int32_t rows) {
    const StepRows step[] = {{sequence, rows}};
    return ReserveStep(step);
  }

  // Reserves the rows, and lets one launch carry all waiting work.
  absl::Status ReserveStep(std::span<const StepRows> step) {
    carried_ = Carried();
    const absl::Status status = cache_->Reserve(step);
    if (!status.ok()) {
      EXPECT_EQ(cache_->work().queued(), 0);
      EXPECT_EQ(cache_->work().copies_open(), 0);
      return status;
    }
    for (const StepRows& row : step) TakeLayers(row.sequence);
    Carry();
    for (const StepRows& row : step) {
      cache_->TakeTableChanges(row.sequence, &carried_.tables);
    }
    return status;
  }

  // Takes the copies of all layers, as launches do that write the first rows of each layer.
  void TakeLayers(SeqSlot sequence) {
    WorkRoom room{.places = 1 << 20, .bytes = INT64_MAX};
    const auto layers = static_cast<int32_t>(cache_->pool().layout(layout_).layers.size());
    for (const uint32_t group : cache_->copied_groups(sequence).by_list) {
      for (int32_t layer = 0; layer < layers; ++layer) {
        cache_->work().TakeLayer(group, layer, &room, &work_);
      }
    }
  }

  void Carry() {
    WorkRoom room{.places = 1 << 20, .bytes = INT64_MAX};
    cache_->work().TakeAny(&room, &work_);
    for (const kernels::PageRange& range : work_.ranges()) {
      (range.zeroes() ? carried_.scrubs : carried_.copies).push_back(range);
    }
    cache_->work().Acknowledge(&work_);
  }

  void Append(SeqSlot sequence, int32_t rows) {
    ASSERT_TRUE(Reserve(sequence, rows).ok());
    cache_->Commit(sequence, rows);
  }

  std::vector<kernels::TableRange> TableChanges(SeqSlot sequence) {
    std::vector<kernels::TableRange> changes;
    cache_->TakeTableChanges(sequence, &changes);
    return changes;
  }

  std::vector<uint32_t> Table(SeqSlot sequence, size_t pages) {
    const auto first = tables_.begin() + cache_->page_table(sequence);
    return {first, first + static_cast<int64_t>(pages)};
  }

  void TearDown() override {
    if (cache_ == nullptr) return;
    EXPECT_EQ(cache_->CheckInvariants(), "");
  }

  std::vector<uint32_t> tables_;
  std::unique_ptr<KvCache> cache_;
  LayoutId layout_ = -1;
  LaunchWork work_;
  struct Carried {
    std::vector<kernels::PageRange> copies, scrubs;
    std::vector<kernels::TableRange> tables;
  };
  Carried carried_;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_KV_CACHE_FIXTURE_H_
