// HipBackend: the choice of rows by the indexer (kernels/launch/select.h).
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/hip/hip_backend.h"

namespace mla::kernels::hip {
namespace {

// A launch that needs more goes in rounds.
constexpr int64_t kRanks = int64_t{16} << 20;
constexpr int32_t kRoundRows = 1024;

int64_t RanksOf(int32_t visible) {
  return (int64_t{visible} + kIndexRowAlignment - 1) / kIndexRowAlignment * kIndexRowAlignment;
}

int64_t KeysOf(std::span<const SelectRecord> records) {
  int64_t keys = 0;
  for (const SelectRecord& r : records) keys += int64_t{r.rows} * r.kv_rows;
  return keys;
}

int32_t LogitsSharedBytes(const ArchTraits& arch, std::span<const SelectRecord> records) {
  int32_t most = 0;
  for (const SelectRecord& r : records) {
    most = std::max(most, IndexLogitsSharedBytes(arch, r.indexer.heads, r.dtype));
  }
  return most;
}

}  // namespace

int64_t HipBackend::IndexWorkspaceBytes(const BackendLimits& l) const {
  if (!info_.selects || l.max_top_k == 0) return 0;
  return kRanks * int64_t{sizeof(uint32_t)} + int64_t{kRoundRows} * kIndexBins * sizeof(uint32_t);
}

int64_t HipBackend::IndexMetadataBytes(const BackendLimits& l) const {
  if (!info_.selects || l.max_top_k == 0) return 0;
  const int64_t rounds = l.launch_rows;  // at most, of which each has two arrays
  return l.launch_rows * static_cast<int64_t>(sizeof(IndexRow) + sizeof(int32_t)) +
         rounds * 2 * kRegionAlignment +
         l.launch_requests * static_cast<int64_t>(sizeof(SelectRecord)) + kRegionAlignment;
}

absl::Status HipBackend::AllocateIndex(const BackendLimits& limits) {
  if (IndexWorkspaceBytes(limits) == 0) return absl::OkStatus();
  auto ranks = DeviceBuffer::Create(runtime_.get(), "ranks of the indexer",
                                    kRanks * int64_t{sizeof(uint32_t)});
  if (!ranks.ok()) return ranks.status();
  auto bins = DeviceBuffer::Create(runtime_.get(), "counts of the indexer",
                                   int64_t{kRoundRows} * kIndexBins * sizeof(uint32_t));
  if (!bins.ok()) return bins.status();
  index_ranks_ = *std::move(ranks);
  index_bins_ = *std::move(bins);
  index_rows_.reserve(kRoundRows);
  index_blocks_.reserve(kRoundRows + 1);
  return runtime_->Fill(index_bins_.at(), 0, index_bins_.bytes(), streams_.compute);
}

absl::Status HipBackend::AddIndexRound(LaunchSlot& slot, const Indexing& all) {
  auto rows = slot.metadata().Put(std::span<const IndexRow>(index_rows_));
  if (!rows.ok()) return rows.status();
  auto blocks = slot.metadata().Put(std::span<const int32_t>(index_blocks_));
  if (!blocks.ok()) return blocks.status();
  IndexArgs args = {};
  args.records = all.records;
  args.rows = *rows;
  args.first_block = *blocks;
  args.page_tables = table_mirror_.As<uint32_t>();
  args.pool = pool_.As<uint8_t>() + all.layer_offset;
  args.ranks = index_ranks_.As<uint32_t>();
  args.bins = index_bins_.As<uint32_t>();
  args.count = static_cast<int32_t>(index_rows_.size());
  args.keys_per_block = all.keys_per_block;
  LaunchShape shape{.grid_x = static_cast<uint32_t>(index_blocks_.back()),
                    .threads = static_cast<uint32_t>(arch_->index_logits_threads),
                    .shared_bytes = static_cast<uint32_t>(all.logits_shared_bytes)};
  if (absl::Status s = slot.AddKernel(kernels_.index_logits, shape, args); !s.ok()) return s;
  shape.grid_x = static_cast<uint32_t>(args.count);
  shape.threads = kIndexSelectThreads;
  shape.shared_bytes = static_cast<uint32_t>(arch_->index_select_shared_bytes);
  return slot.AddKernel(kernels_.index_select, shape, args);
}

absl::Status HipBackend::AddSelects(LaunchSlot& slot, std::span<const SelectRecord> records) {
  if (records.empty()) return absl::OkStatus();
  if (index_ranks_.bytes() == 0) {
    return absl::UnimplementedError(absl::StrCat("an indexer; device: ", info_.device));
  }
  for (size_t i = 0; i < records.size(); ++i) {
    const SelectRecord& r = records[i];
    if (r.indexer.dim == kIndexDim && r.row_stride % 16 == 0 && r.layer_offset % 16 == 0 &&
        r.kv_rows <= kRanks) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("selects[", i, "]: index_dim ", r.indexer.dim, ", row_stride ", r.row_stride,
                     ", layer_offset ", r.layer_offset, ", ", r.kv_rows, " rows; want ", kIndexDim,
                     ", multiples of 16 bytes, at most ", kRanks, " rows"));
  }
  const int64_t layer = records[0].layer_offset;
  auto uploaded = slot.metadata().PutEach(records, [layer](SelectRecord record) {
    record.layer_offset -= layer;
    return record;
  });
  if (!uploaded.ok()) return uploaded.status();
  const Indexing all{*uploaded, layer, IndexKeysPerBlock(KeysOf(records), runtime_->units()),
                     LogitsSharedBytes(*arch_, records)};
  int64_t ranks = 0;
  const auto end_round = [&] {
    absl::Status s = AddIndexRound(slot, all);
    ranks = 0;
    index_rows_.clear();
    index_blocks_.assign(1, 0);
    return s;
  };
  index_rows_.clear();
  index_blocks_.assign(1, 0);
  for (size_t i = 0; i < records.size(); ++i) {
    for (int32_t row = 0; row < records[i].rows; ++row) {
      const int32_t visible = SelectVisible(records[i], row);
      if (index_rows_.size() == kRoundRows || ranks + RanksOf(visible) > kRanks) {
        if (absl::Status s = end_round(); !s.ok()) return s;
      }
      index_rows_.push_back({static_cast<int32_t>(i), row, visible, static_cast<int32_t>(ranks)});
      index_blocks_.push_back(index_blocks_.back() +
                              (visible + all.keys_per_block - 1) / all.keys_per_block);
      ranks += RanksOf(visible);
    }
  }
  return index_rows_.empty() ? absl::OkStatus() : end_round();
}

}  // namespace mla::kernels::hip
