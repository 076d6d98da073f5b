#include "kernels/testing/launch_clashes.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"

namespace mla::kernels::testing {
namespace {

struct Bytes {
  int64_t begin, end;
};
using Ranges = std::vector<Bytes>;

Ranges Of(std::span<const PageTransfer> transfers) {
  Ranges ranges;
  for (const PageTransfer& t : transfers)
    ranges.push_back({t.pool_offset, t.pool_offset + t.bytes});
  return ranges;
}

void AddRows(const Launch& launch, const auto& record, int64_t first, int64_t end, Ranges* ranges) {
  for (int64_t row = first; row < end; ++row) {
    const auto entry = static_cast<size_t>(record.page_table + row / record.page_size);
    if (entry >= launch.page_tables.size()) continue;
    const int64_t at = launch.page_tables[entry] * kPageGranuleBytes + record.layer_offset +
                       row % record.page_size * record.row_stride;
    ranges->push_back({at, at + record.row_stride});
  }
}

// Returns true if a byte is in both.
bool Meet(Ranges* a, Ranges* b) {
  const auto by_begin = [](const Bytes& x, const Bytes& y) { return x.begin < y.begin; };
  std::sort(a->begin(), a->end(), by_begin);
  std::sort(b->begin(), b->end(), by_begin);
  for (size_t i = 0, j = 0; i < a->size() && j < b->size();) {
    const Bytes& x = (*a)[i];
    const Bytes& y = (*b)[j];
    if (std::max(x.begin, y.begin) < std::min(x.end, y.end)) return true;
    (x.end <= y.end ? i : j) += 1;
  }
  return false;
}

}  // namespace

std::string LaunchClash(const Launch& launch) {
  if (launch.page_writes.empty() && launch.page_reads.empty()) return "";
  Ranges moved_in = Of(launch.page_writes), moved_out = Of(launch.page_reads);
  Ranges filled, sources, appended, attended;
  for (const PageRange& range : launch.pages) {
    for (int32_t i = 0; i < range.count; ++i) {
      const PageRange at = range.place(i);
      filled.push_back({at.target_offset, at.target_offset + at.bytes});
      if (!at.zeroes()) sources.push_back({at.source_offset, at.source_offset + at.bytes});
    }
  }
  for (const AppendRecord& record : launch.appends) {
    if (record.first_position < 0) continue;
    AddRows(launch, record, record.first_position, int64_t{record.first_position} + record.rows,
            &appended);
  }
  for (const AttentionParams* params : {&launch.absorbed, &launch.expanded}) {
    if (params->desc.attention == AttentionKind::kWindow) continue;
    for (const SegmentRecord& record : params->segments) {
      if (record.q_rows > 0) AddRows(launch, record, 0, record.kv_rows, &attended);
    }
  }
  const struct {
    Ranges* moved;
    Ranges* with;
    const char* what;
  } pairs[] = {
      {&moved_in, &filled, "moves rows into a page that its page work fills"},
      {&moved_in, &sources, "moves rows into a page that its page work copies"},
      {&moved_in, &appended, "moves rows to where it appends some"},
      {&moved_in, &attended, "attends to rows that it moves in"},
      {&moved_in, &moved_out, "moves rows in and out at one place"},
      {&moved_out, &filled, "moves rows out of a page that its page work fills"},
      {&moved_out, &appended, "moves rows out that it appends"},
  };
  for (const auto& pair : pairs) {
    if (Meet(pair.moved, pair.with)) return absl::StrCat("a launch ", pair.what);
  }
  return "";
}

}  // namespace mla::kernels::testing
