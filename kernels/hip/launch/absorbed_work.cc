#include "kernels/hip/launch/absorbed_work.h"

#include <algorithm>
#include <cstddef>

#include "kernels/hip/launch/combine.h"

namespace mla::kernels::hip {
namespace {

constexpr uint32_t kThreads = 256;
constexpr int32_t kRowsOfBlock = 8;
constexpr int32_t kOnePage = 1 << 30;  // rows: a segment's lie one behind the other

int64_t KvRows(const AttentionParams& params) {
  int64_t rows = 0;
  for (const SegmentRecord& r : params.segments) rows += r.kv_rows;
  return rows;
}

int32_t MostPackedRows(const PlanView& plan) {
  int32_t most = 0;
  for (const WorkInfo& w : plan.work_info) {
    most = std::max(most, PackedRows(w.q_begin, w.q_end, w.heads));
  }
  return most;
}

struct BusyUnits {
  int32_t busy = 0;  // that have work
  int32_t last = 0;  // units up to the last of them
};
BusyUnits UnitsOf(const PlanView& plan) {
  BusyUnits units;
  for (size_t i = 0; i + 1 < plan.work_indptr.size(); ++i) {
    if (plan.work_indptr[i + 1] == plan.work_indptr[i]) continue;
    ++units.busy;
    units.last = static_cast<int32_t>(i) + 1;
  }
  return units;
}

}  // namespace

absl::Status AbsorbedWork::Add(LaunchSlot& slot, const AttentionParams& params,
                               const DevicePlan& plan) const {
  auto segments = PutSegments(slot, device_, params);
  if (!segments.ok()) return segments.status();
  const int64_t layer = params.segments[0].layer_offset;
  Rows rows{.segments = *segments,
            .format = params.desc.kv_format,
            .products = params.desc.products,
            .page_tables = device_.table_mirror.As<uint32_t>(),
            .pool = device_.pool.As<uint8_t>() + layer};
  const int32_t packed_rows = MostPackedRows(params.plan);
  if (Widens(params, rows, packed_rows)) {
    if (absl::Status s = AddWiden(slot, params, &rows); !s.ok()) return s;
  }
  const BusyUnits units = UnitsOf(params.plan);
  const int32_t device_units = device_.runtime->units();
  const size_t chosen = ChooseAttend(*device_.arch, rows.format, rows.products,
                                     params.desc.attention, packed_rows, units.busy, device_units);
  const AttendVariant& variant = device_.arch->attend[chosen];
  AttendArgs args = {};
  args.segments = rows.segments;
  if (!params.windows.empty()) {
    auto windows = slot.metadata().PutEach(params.windows, [layer](WindowRecord record) {
      record.layer_offset -= layer;
      return record;
    });
    if (!windows.ok()) return windows.status();
    args.windows = *windows;
  }
  args.page_tables = rows.page_tables;
  args.pool = rows.pool;
  args.work_indptr = plan.work_indptr;
  args.work_info = plan.work_info;
  args.partial_o = device_.partial_o.As<float>();
  args.partial_lse = device_.partial_lse.As<float>();
  args.granule_bytes = kPageGranuleBytes;
  args.blocks_per_unit = (packed_rows + variant.rows - 1) / variant.rows;
  args.o_is_f32 = params.desc.o_dtype == DType::kF32;
  args.blocks = units.last * args.blocks_per_unit;
  args.xcds = XcdsOf(*device_.arch, device_units);
  const LaunchShape shape{.grid_x = static_cast<uint32_t>(args.blocks),
                          .threads = static_cast<uint32_t>(variant.threads),
                          .shared_bytes = static_cast<uint32_t>(variant.shared_bytes),
                          .overlap_predecessor = true};
  absl::Status s = slot.AddKernel(device_.kernels.attend[chosen], shape, args);
  if (!s.ok()) return s;
  const Attended run{.segments = rows.segments,
                     .windows = args.windows,
                     .exchanged = variant.exchanged_partials,
                     .idle_units = std::max(0, device_units - units.busy * args.blocks_per_unit)};
  return AddCombine(slot, device_, params, plan, run);
}

bool AbsorbedWork::Widens(const AttentionParams& params, const Rows& rows,
                          int32_t packed_rows) const {
  if (params.desc.attention != AttentionKind::kSparse) return false;
  const int64_t kv_rows = KvRows(params);
  if (kv_rows == 0 || kv_rows * kWidenedRowBytes > widened_.bytes()) return false;
  int64_t places = 0;
  for (const WorkInfo& w : params.plan.work_info) places += w.kv_end - w.kv_begin;
  return WidensLists(*device_.arch, rows.format, packed_rows, places, kv_rows);
}

absl::Status AbsorbedWork::AddWiden(LaunchSlot& slot, const AttentionParams& params,
                                    Rows* rows) const {
  StagedRegion& metadata = slot.metadata();
  const auto count = static_cast<int64_t>(params.segments.size());
  // Rows before each segment, then the page table that all segments share: one page.
  auto first_rows = metadata.Take((count + 2) * int64_t{sizeof(int32_t)});
  if (!first_rows.ok()) return first_rows.status();
  const auto put = [&](int64_t i, int32_t x) {
    metadata.Write(*first_rows + i * int64_t{sizeof(x)}, &x, sizeof(x));
  };
  int32_t kv_rows = 0;
  int64_t at = 0;
  auto widened = metadata.PutEach(params.segments, [&](SegmentRecord record) {
    put(at++, kv_rows);
    record.weights_slot -= params.segments[0].weights_slot;
    record.page_table = count + 1;
    record.layer_offset = int64_t{kv_rows} * kWidenedRowBytes;
    record.row_stride = kWidenedRowBytes;
    record.page_size = kOnePage;
    kv_rows += record.kv_rows;
    return record;
  });
  if (!widened.ok()) return widened.status();
  put(count, kv_rows);
  put(count + 1, 0);
  WidenArgs args = {};
  args.segments = rows->segments;
  args.first_row = reinterpret_cast<const int32_t*>(metadata.device(*first_rows));
  args.page_tables = rows->page_tables;
  args.pool = rows->pool;
  args.rows = widened_.As<uint8_t>();
  args.count = static_cast<int32_t>(count);
  rows->segments = *widened;
  rows->format = KvFormat::kBf16;
  rows->products = DType::kBf16;
  rows->page_tables = reinterpret_cast<const uint32_t*>(args.first_row);
  rows->pool = args.rows;
  const LaunchShape shape{
      .grid_x = static_cast<uint32_t>((kv_rows + kRowsOfBlock - 1) / kRowsOfBlock),
      .threads = kThreads};
  return slot.AddKernel(device_.kernels.widen, shape, args);
}

}  // namespace mla::kernels::hip
