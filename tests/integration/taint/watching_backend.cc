#include "tests/integration/taint/watching_backend.h"

#include <algorithm>
#include <iterator>
#include <thread>

#include "kernels/testing/launch_clashes.h"

namespace mla::integration {
namespace {

// NaN as fp32 and as bf16, so that a result computed from it shows.
constexpr std::byte kLeftBehind{0xff};

}  // namespace

// Adds reads of the pages, at the record's layer, that contain its rows; each page once.
void WatchingBackend::AddReads(const kernels::AppendRecord& record, Slot* slot) const {
  const int32_t first = record.first_position / record.page_size;
  const int32_t last = (record.first_position + record.rows - 1) / record.page_size;
  for (int32_t page = first; page <= last; ++page) {
    const auto at = static_cast<size_t>(record.page_table + page);
    const int64_t offset =
        slot->launch.page_tables[at] * kernels::kPageGranuleBytes + record.layer_offset;
    const bool known = std::any_of(slot->reads.begin(), slot->reads.end(),
                                   [&](const auto& read) { return read.pool_offset == offset; });
    if (!known) slot->reads.push_back({offset, record.page_size * record.row_stride, nullptr});
  }
}

absl::Status WatchingBackend::Submit(int32_t index, const kernels::Launch& launch) {
  const std::string clash = kernels::testing::LaunchClash(launch);
  if (!clash.empty()) options_.clash(clash);
  Slot& slot = slots_[static_cast<size_t>(index)];
  slot.launch = launch;
  slot.reads.assign(launch.page_reads.begin(), launch.page_reads.end());
  slot.own_reads = slot.reads.size();
  // Reads of a launch may not overlap, so a launch that exports rows is left alone.
  for (const kernels::AppendRecord& record : launch.appends) {
    if (slot.own_reads == 0 && record.differs == nullptr && record.rows > 0) {
      AddReads(record, &slot);
    }
  }
  int64_t bytes = 0;
  for (size_t i = slot.own_reads; i < slot.reads.size(); ++i) bytes += slot.reads[i].bytes;
  slot.words.assign(static_cast<size_t>(bytes / 2), 0);
  auto* to = reinterpret_cast<std::byte*>(slot.words.data());
  for (size_t i = slot.own_reads; i < slot.reads.size(); ++i) {
    slot.reads[i].host = to;
    to += slot.reads[i].bytes;
  }
  slot.launch.page_reads = slot.reads;
  if (!options_.zeroes) {
    slot.pages.clear();
    std::copy_if(launch.pages.begin(), launch.pages.end(), std::back_inserter(slot.pages),
                 [](const kernels::PageRange& range) { return !range.zeroes(); });
    slot.launch.pages = slot.pages;
  }
  return inner_->Submit(index, slot.launch);
}

absl::StatusOr<int64_t> WatchingBackend::Wait(int32_t index) {
  // Delays by different parts of the longest time, so that the waiting calls differ between
  // launches.
  std::this_thread::sleep_for(options_.takes_most * (launches_++ % 4) / 3);
  absl::StatusOr<int64_t> waited = inner_->Wait(index);
  Slot& slot = slots_[static_cast<size_t>(index)];
  const auto* from = slot.words.data();
  for (size_t i = slot.own_reads; i < slot.reads.size(); ++i) {
    const auto words = static_cast<size_t>(slot.reads[i].bytes / 2);
    options_.look({from, words});
    from += words;
  }
  std::ranges::fill(inner_->Memory(index).workspace, kLeftBehind);
  return waited;
}

}  // namespace mla::integration
