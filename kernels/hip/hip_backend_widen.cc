// HipBackend: rows that are widened once for all lists that name them.
#include "kernels/hip/hip_backend.h"

namespace mla::kernels::hip {
namespace {

constexpr int32_t kRowsOfBlock = 8;
constexpr int32_t kOnePage = 1 << 30;  // rows: a segment's lie one behind the other

int64_t KvRows(const AttentionParams& params) {
  int64_t rows = 0;
  for (const SegmentRecord& r : params.segments) rows += r.kv_rows;
  return rows;
}

}  // namespace

bool HipBackend::Widens(const AttentionParams& params, const Attended& run, int32_t rows) const {
  if (params.desc.attention != AttentionKind::kSparse) return false;
  const int64_t kv_rows = KvRows(params);
  if (kv_rows == 0 || kv_rows * kWidenedRowBytes > index_ranks_.bytes()) return false;
  int64_t places = 0;
  for (const WorkInfo& w : params.plan.work_info) places += w.kv_end - w.kv_begin;
  return WidensLists(*arch_, run.format, rows, places, kv_rows);
}

absl::Status HipBackend::AddWiden(LaunchSlot& slot, const AttentionParams& params, Attended* run) {
  StagedRegion& metadata = slot.metadata();
  const auto count = static_cast<int64_t>(params.segments.size());
  // Rows before each segment, then the page table that all segments share: one page.
  auto first_rows = metadata.Take((count + 2) * int64_t{sizeof(int32_t)});
  if (!first_rows.ok()) return first_rows.status();
  const auto put = [&](int64_t i, int32_t x) {
    metadata.Write(*first_rows + i * int64_t{sizeof(x)}, &x, sizeof(x));
  };
  int32_t rows = 0;
  int64_t at = 0;
  auto widened = metadata.PutEach(params.segments, [&](SegmentRecord record) {
    put(at++, rows);
    record.weights_slot -= params.segments[0].weights_slot;
    record.page_table = count + 1;
    record.layer_offset = int64_t{rows} * kWidenedRowBytes;
    record.row_stride = kWidenedRowBytes;
    record.page_size = kOnePage;
    rows += record.kv_rows;
    return record;
  });
  if (!widened.ok()) return widened.status();
  put(count, rows);
  put(count + 1, 0);
  WidenArgs args = {};
  args.segments = run->segments;
  args.first_row = reinterpret_cast<const int32_t*>(metadata.device(*first_rows));
  args.page_tables = run->page_tables;
  args.pool = run->pool;
  args.rows = index_ranks_.As<uint8_t>();
  args.count = static_cast<int32_t>(count);
  run->segments = *widened;
  run->format = KvFormat::kBf16;
  run->products = DType::kBf16;
  run->page_tables = reinterpret_cast<const uint32_t*>(args.first_row);
  run->pool = args.rows;
  const LaunchShape shape{.grid_x = static_cast<uint32_t>((rows + kRowsOfBlock - 1) / kRowsOfBlock),
                          .threads = 256};
  return slot.AddKernel(kernels_.widen, shape, args);
}

}  // namespace mla::kernels::hip
