#include "kernels/cpu/items/launch_selects.h"

#include "base/status_macros.h"

namespace mla::kernels::cpu {
namespace {

// Returns the largest number of candidate lists of a launch that cuts rows into shares.
int64_t MostShares(int32_t threads) { return int64_t{2} * threads; }

struct RowOfRecord {
  const SelectRecord& record;
  int32_t row;
};

RowOfRecord Find(std::span<const SelectRecord> selects, int64_t row) {
  size_t index = 0;
  while (row >= selects[index].rows) row -= selects[index++].rows;
  return {selects[index], static_cast<int32_t>(row)};
}

}  // namespace

int64_t LaunchSelects::Bytes(int32_t threads, int32_t top_k) {
  return MostShares(threads) *
         (top_k * int64_t{sizeof(uint64_t)} + int64_t{sizeof(SelectCandidates)});
}

absl::Status LaunchSelects::Configure(const KernelSet& kernels, int32_t threads, int32_t top_k) {
  const int64_t shares = MostShares(threads);
  MLA_ASSIGN_OR_RETURN(ranks_,
                       MappedMemory::Create("candidates of the indexer",
                                            shares * top_k * int64_t{sizeof(uint64_t)}, false));
  for (int64_t share = 0; share < shares; ++share) {
    candidates_.push_back({ranks_.As<uint64_t>() + share * top_k});
  }
  kernels_ = &kernels;
  layout_ = MakeSelectLayout(kernels, top_k);
  threads_ = threads;
  return absl::OkStatus();
}

int64_t LaunchSelects::Rows(std::span<const SelectRecord> selects) {
  int64_t rows = 0;
  for (const SelectRecord& record : selects) rows += record.rows;
  return rows;
}

int32_t LaunchSelects::Shares(int64_t rows) const {
  return rows >= threads_ ? 1 : static_cast<int32_t>((threads_ + rows - 1) / rows);
}

void LaunchSelects::Run(const PoolView& pool, std::span<const SelectRecord> selects, int32_t shares,
                        int64_t item, std::byte* scratch) {
  const auto [record, row] = Find(selects, item / shares);
  if (shares == 1) return SelectRow(*kernels_, pool, record, row, layout_, scratch);
  SelectShare(*kernels_, pool, record, row, static_cast<int32_t>(item % shares), shares, layout_,
              scratch, &candidates_[static_cast<size_t>(item)]);
}

void LaunchSelects::Merge(std::span<const SelectRecord> selects, int32_t shares, int64_t item) {
  const auto [record, row] = Find(selects, item);
  const auto count = static_cast<size_t>(shares);
  MergeSelected(record, row, std::span(candidates_).subspan(item * count, count));
}

}  // namespace mla::kernels::cpu
