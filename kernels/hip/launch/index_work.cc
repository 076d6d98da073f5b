#include "kernels/hip/launch/index_work.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

// Bounds of a round; a launch that needs more takes several rounds.
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
  int32_t largest = 0;
  for (const SelectRecord& r : records) {
    largest = std::max(largest, IndexLogitsSharedBytes(arch, r.indexer.heads, r.dtype));
  }
  return largest;
}

}  // namespace

int64_t IndexWork::WorkspaceBytes(const BackendLimits& l, const BackendInfo& info) {
  if (!info.selects || l.max_top_k == 0) return 0;
  return kRanks * int64_t{sizeof(uint32_t)} + int64_t{kRoundRows} * kIndexBins * sizeof(uint32_t);
}

int64_t IndexWork::MetadataBytes(const BackendLimits& l, const BackendInfo& info) {
  if (!info.selects || l.max_top_k == 0) return 0;
  const int64_t rounds = l.launch_rows;  // upper bound; each round has two arrays
  return l.launch_rows * static_cast<int64_t>(sizeof(IndexRow) + sizeof(int32_t)) +
         rounds * 2 * kRegionAlignment +
         l.launch_requests * static_cast<int64_t>(sizeof(SelectRecord)) + kRegionAlignment;
}

absl::Status IndexWork::Allocate(const BackendLimits& limits, Stream stream) {
  if (WorkspaceBytes(limits, device_.info) == 0) return absl::OkStatus();
  MLA_ASSIGN_OR_RETURN(auto ranks, DeviceBuffer::Create(device_.runtime, "ranks of the indexer",
                                                        kRanks * int64_t{sizeof(uint32_t)}));
  MLA_ASSIGN_OR_RETURN(auto bins,
                       DeviceBuffer::Create(device_.runtime, "counts of the indexer",
                                            int64_t{kRoundRows} * kIndexBins * sizeof(uint32_t)));
  ranks_ = std::move(ranks);
  bins_ = std::move(bins);
  rows_.reserve(kRoundRows);
  first_blocks_.reserve(kRoundRows + 1);
  return device_.runtime->Fill(bins_.at(), 0, bins_.bytes(), stream);
}

absl::Status IndexWork::AddRound(LaunchRecording& recording, const Indexing& all) {
  MLA_ASSIGN_OR_RETURN(auto rows, recording.metadata().Put(std::span<const IndexRow>(rows_)));
  MLA_ASSIGN_OR_RETURN(auto blocks,
                       recording.metadata().Put(std::span<const int32_t>(first_blocks_)));
  IndexArgs args = {};
  args.records = all.records;
  args.rows = rows;
  args.first_block = blocks;
  args.page_tables = device_.table_mirror.As<uint32_t>();
  args.pool = device_.pool.As<uint8_t>() + all.layer_offset;
  args.ranks = ranks_.As<uint32_t>();
  args.bins = bins_.As<uint32_t>();
  args.count = static_cast<int32_t>(rows_.size());
  args.keys_per_block = all.keys_per_block;
  LaunchShape shape{.grid_x = static_cast<uint32_t>(first_blocks_.back()),
                    .threads = static_cast<uint32_t>(device_.arch->index_logits_threads),
                    .shared_bytes = static_cast<uint32_t>(all.logits_shared_bytes)};
  MLA_RETURN_IF_ERROR(recording.AddKernel(device_.kernels.index_logits, shape, args));
  shape.grid_x = static_cast<uint32_t>(args.count);
  shape.threads = kIndexSelectThreads;
  shape.overlap_predecessor = true;
  shape.shared_bytes = static_cast<uint32_t>(device_.arch->index_select_shared_bytes);
  return recording.AddKernel(device_.kernels.index_select, shape, args);
}

absl::Status IndexWork::Add(LaunchRecording& recording, std::span<const SelectRecord> records) {
  if (records.empty()) return absl::OkStatus();
  if (ranks_.bytes() == 0) {
    return absl::UnimplementedError(absl::StrCat("an indexer; device: ", device_.info.device));
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
  MLA_ASSIGN_OR_RETURN(auto uploaded,
                       recording.metadata().PutEach(records, [layer](SelectRecord record) {
                         record.layer_offset -= layer;
                         return record;
                       }));
  const Indexing all{uploaded, layer,
                     IndexKeysPerBlock(*device_.arch, KeysOf(records), device_.runtime->units()),
                     LogitsSharedBytes(*device_.arch, records)};
  int64_t ranks = 0;
  const auto end_round = [&] {
    absl::Status s = AddRound(recording, all);
    ranks = 0;
    rows_.clear();
    first_blocks_.assign(1, 0);
    return s;
  };
  rows_.clear();
  first_blocks_.assign(1, 0);
  for (size_t i = 0; i < records.size(); ++i) {
    for (int32_t row = 0; row < records[i].rows; ++row) {
      const int32_t visible = SelectVisible(records[i], row);
      if (rows_.size() == kRoundRows || ranks + RanksOf(visible) > kRanks) {
        MLA_RETURN_IF_ERROR(end_round());
      }
      rows_.push_back({static_cast<int32_t>(i), row, visible, static_cast<int32_t>(ranks)});
      first_blocks_.push_back(first_blocks_.back() +
                              (visible + all.keys_per_block - 1) / all.keys_per_block);
      ranks += RanksOf(visible);
    }
  }
  return rows_.empty() ? absl::OkStatus() : end_round();
}

}  // namespace mla::kernels::hip
