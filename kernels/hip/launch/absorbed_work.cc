#include "kernels/hip/launch/absorbed_work.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

#include "base/status_macros.h"
#include "kernels/hip/launch/combine.h"

namespace mla::kernels::hip {
namespace {

constexpr int32_t kRowsOfBlock = 8;
constexpr int64_t kMostGranules = int64_t{1} << 31;  // coordinates in a tensor map are signed
constexpr int32_t kOnePage = 1 << 30;                // rows a page: a segment's rows are contiguous

int64_t KvRows(const AttentionParams& params) {
  int64_t rows = 0;
  for (const SegmentRecord& r : params.segments) rows += r.kv_rows;
  return rows;
}

// Returns the KV rows of all work items, or the places of their lists.
int64_t PlacesOf(const PlanView& plan) {
  int64_t places = 0;
  for (const WorkInfo& w : plan.work_info) places += w.kv_end - w.kv_begin;
  return places;
}

int32_t MostPackedRows(const PlanView& plan) {
  int32_t largest = 0;
  for (const WorkInfo& w : plan.work_info) {
    largest = std::max(largest, PackedRows(w.q_begin, w.q_end, w.heads));
  }
  return largest;
}

struct BusyUnits {
  int32_t busy = 0;               // units that have work
  int32_t last = 0;               // one past the last unit that has work
  bool one_item_per_unit = true;  // each of these has one item
};
BusyUnits UnitsOf(const PlanView& plan) {
  BusyUnits units;
  for (size_t i = 0; i + 1 < plan.work_indptr.size(); ++i) {
    if (plan.work_indptr[i + 1] == plan.work_indptr[i]) continue;
    ++units.busy;
    units.last = static_cast<int32_t>(i) + 1;
    if (plan.work_indptr[i] != units.last - 1 || plan.work_indptr[i + 1] != units.last) {
      units.one_item_per_unit = false;
    }
  }
  return units;
}

// KV rows a piece, if the plan has only one tile, cut into equal pieces, one a unit; 0 for any
// other plan.
int32_t EqualPieces(const PlanView& plan, int32_t packed_rows) {
  const auto pieces = static_cast<int32_t>(plan.work_info.size());
  if (pieces < 2 || plan.reduce_final_map.size() != 1 ||
      plan.reduce_partial_map.size() != plan.work_info.size()) {
    return 0;
  }
  const WorkInfo& first = plan.work_info[0];
  const int32_t rows = first.kv_end;
  for (int32_t u = 0; u < pieces; ++u) {
    const WorkInfo& w = plan.work_info[static_cast<size_t>(u)];
    const bool last = u + 1 == pieces;
    const WorkInfo want = {first.segment, u * packed_rows, 0,
                           first.q_end,   u * rows,        last ? w.kv_end : (u + 1) * rows,
                           w.kv_after,    first.heads};
    if (plan.work_indptr[static_cast<size_t>(u)] != u ||
        plan.work_indptr[static_cast<size_t>(u) + 1] != u + 1 ||
        std::memcmp(&w, &want, sizeof(w)) != 0) {
      return 0;
    }
  }
  return rows;
}

// Returns one of the segments that read rows, if all of them have its page size, its row stride and
// the layer of the first segment, where the launch's pool begins; else null.
const SegmentRecord* CommonLayout(std::span<const SegmentRecord> segments) {
  const SegmentRecord* common = nullptr;
  for (const SegmentRecord& r : segments) {
    if (r.q_rows == 0 || r.kv_rows == 0) continue;
    if (common == nullptr) common = &r;
    if (r.page_size != common->page_size || r.row_stride != common->row_stride ||
        r.layer_offset != segments[0].layer_offset) {
      return nullptr;
    }
  }
  return common;
}

// Returns the most rows of a box that divide a tile, a page, and the begins of all items.
int32_t BoxRowsOf(int32_t page_size, const PlanView& plan) {
  int32_t bits = page_size | kMostBoxRows;
  for (const WorkInfo& w : plan.work_info) bits |= w.kv_begin;
  return bits & -bits;  // the lowest bit
}

}  // namespace

std::optional<AbsorbedWork::Split> AbsorbedWork::SplitOf(const AttentionParams& params) const {
  const PlanView& plan = params.plan;
  const ArchTraits& arch = *device_.arch;
  const auto pieces = static_cast<int32_t>(plan.work_info.size());
  if (arch.split.empty() || pieces > kMostSplitPieces) return std::nullopt;
  const int32_t packed_rows = MostPackedRows(plan);
  const int32_t units = device_.runtime->units();
  const size_t chosen = ChooseAttend(arch, params.desc.kv_format, params.desc.products,
                                     params.desc.attention, packed_rows, pieces, units);
  const AttendVariant& variant = arch.attend[chosen];
  const Split split{FindReplacement(arch.split, variant), EqualPieces(plan, packed_rows),
                    packed_rows, (packed_rows + variant.rows - 1) / variant.rows};
  const bool fits = split.kernel < arch.split.size() && split.piece_rows > 0 &&
                    split.blocks_per_unit <= kMostSplitShares &&
                    pieces * split.blocks_per_unit <= units;
  return fits ? std::optional(split) : std::nullopt;
}

absl::Status AbsorbedWork::AddSplit(LaunchRecording& recording, const AttentionParams& params,
                                    const Split& split) const {
  const FormatVariant& variant = device_.arch->split[split.kernel];
  const PlanView& plan = params.plan;
  const WorkInfo& last = plan.work_info.back();
  const int64_t layer = params.segments[0].layer_offset;
  SplitArgs args = {};
  args.segment = ForDevice(device_, params, params.segments[static_cast<size_t>(last.segment)]);
  args.page_tables = device_.table_mirror.As<uint32_t>();
  args.pool = device_.pool.As<uint8_t>() + layer;
  args.partial_o = device_.partial_o.As<float>();
  args.partial_lse = device_.partial_lse.As<float>();
  args.meetings = device_.meetings.As<uint32_t>();
  args.granule_bytes = kPageGranuleBytes;
  args.pieces = static_cast<int32_t>(plan.work_info.size());
  args.piece_rows = split.piece_rows;
  args.kv_end = last.kv_end;
  args.heads = last.heads;
  args.q_rows = last.q_end;
  args.packed_rows = split.packed_rows;
  args.blocks_per_unit = split.blocks_per_unit;
  args.o_is_f32 = params.desc.o_dtype == DType::kF32;
  args.late = recording.late_word();
  const LaunchShape shape{.grid_x = static_cast<uint32_t>(args.pieces * args.blocks_per_unit),
                          .threads = static_cast<uint32_t>(variant.threads),
                          .shared_bytes = static_cast<uint32_t>(variant.shared_bytes),
                          .overlap_predecessor = true,
                          .blocks_meet = true};
  return recording.AddKernel(device_.kernels.split[split.kernel], shape, args);
}

absl::Status AbsorbedWork::Add(LaunchRecording& recording, const AttentionParams& params,
                               const DevicePlan& plan) const {
  MLA_ASSIGN_OR_RETURN(auto segments, PutSegments(recording, device_, params));
  const int64_t layer = params.segments[0].layer_offset;
  Rows rows{.segments = segments,
            .format = params.desc.kv_format,
            .products = params.desc.products,
            .page_tables = device_.table_mirror.As<uint32_t>(),
            .pool = device_.pool.As<uint8_t>() + layer};
  const int32_t packed_rows = MostPackedRows(params.plan);
  if (Widens(params, rows, packed_rows)) {
    MLA_RETURN_IF_ERROR(AddWiden(recording, params, &rows));
  }
  const BusyUnits units = UnitsOf(params.plan);
  const int32_t device_units = device_.runtime->units();
  const size_t chosen = ChooseAttend(*device_.arch, rows.format, rows.products,
                                     params.desc.attention, packed_rows, units.busy, device_units);
  const AttendVariant& variant = device_.arch->attend[chosen];
  BoxArgs args = {};
  args.segments = rows.segments;
  if (!params.windows.empty()) {
    MLA_ASSIGN_OR_RETURN(args.windows,
                         recording.metadata().PutEach(params.windows, [layer](WindowRecord record) {
                           record.layer_offset -= layer;
                           return record;
                         }));
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
  args.few_tiles = AttendsFewTiles(*device_.arch, PlacesOf(params.plan),
                                   static_cast<int64_t>(params.plan.work_info.size()));
  args.segment_count = static_cast<int32_t>(params.segments.size());
  args.item_count = static_cast<int32_t>(params.plan.work_info.size());
  args.one_item_per_unit = units.one_item_per_unit ? 1 : 0;
  args.late = recording.late_word();
  const LaunchShape shape{.grid_x = static_cast<uint32_t>(args.blocks),
                          .threads = static_cast<uint32_t>(variant.threads),
                          .shared_bytes = static_cast<uint32_t>(variant.shared_bytes),
                          .overlap_predecessor = true};
  const size_t boxes = FindReplacement(device_.arch->boxes, variant);
  if (device_.brings_boxes && boxes < device_.arch->boxes.size() && PutBoxes(params, rows, &args)) {
    MLA_RETURN_IF_ERROR(recording.AddKernel(device_.kernels.boxes[boxes], shape, args));
  } else {
    const AttendArgs& plain = args;
    MLA_RETURN_IF_ERROR(recording.AddKernel(device_.kernels.attend[chosen], shape, plain));
  }
  const Attended run{.segments = rows.segments,
                     .windows = args.windows,
                     .order = variant.order,
                     .idle_units = std::max(0, device_units - units.busy * args.blocks_per_unit)};
  return AddCombine(recording, device_, params, plan, run);
}

absl::Status AbsorbedWork::EncodeMaps(const GpuRuntime& runtime, const Pages& pages,
                                      KvFormat format, BoxArgs* args) {
  BoxedRows rows = {.first = pages.first,
                    .pages = pages.granules,
                    .page_stride = kPageGranuleBytes,
                    .rows = pages.rows,
                    .row_stride = pages.row_stride,
                    .columns = static_cast<int32_t>(pages.row_stride / int64_t{sizeof(uint16_t)}),
                    .box_rows = args->box_rows,
                    .box_columns = kBoxColumns};
  MLA_RETURN_IF_ERROR(runtime.EncodeMap(rows, args->rows.words));
  rows.box_columns = NarrowColumns(format);
  if (rows.box_columns == 0) return absl::OkStatus();
  return runtime.EncodeMap(rows, args->narrow.words);
}

bool AbsorbedWork::PutBoxes(const AttentionParams& params, const Rows& rows, BoxArgs* args) const {
  const SegmentRecord* const common = CommonLayout(params.segments);
  if (common == nullptr) return false;
  args->box_rows = BoxRowsOf(common->page_size, params.plan);
  const Pages pages = {.first = reinterpret_cast<uint64_t>(rows.pool),
                       .granules = device_.pool.bytes() / kPageGranuleBytes,
                       .rows = common->page_size,
                       .row_stride = common->row_stride};
  return args->box_rows >= kLeastBoxRows && pages.granules <= kMostGranules &&
         EncodeMaps(*device_.runtime, pages, rows.format, args).ok();
}

bool AbsorbedWork::Widens(const AttentionParams& params, const Rows& rows,
                          int32_t packed_rows) const {
  if (params.desc.attention != AttentionKind::kSparse) return false;
  const int64_t kv_rows = KvRows(params);
  if (kv_rows == 0 || kv_rows * kBf16RowBytes > widened_.bytes()) return false;
  return WidensLists(*device_.arch, rows.format, packed_rows, PlacesOf(params.plan), kv_rows);
}

absl::Status AbsorbedWork::AddWiden(LaunchRecording& recording, const AttentionParams& params,
                                    Rows* rows) const {
  StagedRegion& metadata = recording.metadata();
  const auto count = static_cast<int64_t>(params.segments.size());
  // The metadata has the row counts before each segment, then the page table that all segments
  // share, which has one page.
  MLA_ASSIGN_OR_RETURN(const int64_t first_rows,
                       metadata.Take((count + 2) * int64_t{sizeof(int32_t)}));
  const auto put = [&](int64_t i, int32_t x) {
    metadata.Write(first_rows + i * int64_t{sizeof(x)}, &x, sizeof(x));
  };
  int32_t kv_rows = 0;
  int64_t at = 0;
  MLA_ASSIGN_OR_RETURN(auto widened, metadata.PutEach(params.segments, [&](SegmentRecord record) {
    put(at++, kv_rows);
    record.weights_slot -= params.segments[0].weights_slot;
    record.page_table = count + 1;
    record.layer_offset = int64_t{kv_rows} * kBf16RowBytes;
    record.row_stride = kBf16RowBytes;
    record.page_size = kOnePage;
    kv_rows += record.kv_rows;
    return record;
  }));
  put(count, kv_rows);
  put(count + 1, 0);
  WidenArgs args = {};
  args.segments = rows->segments;
  args.first_row = reinterpret_cast<const int32_t*>(metadata.device(first_rows));
  args.page_tables = rows->page_tables;
  args.pool = rows->pool;
  args.rows = widened_.As<uint8_t>();
  args.count = static_cast<int32_t>(count);
  rows->segments = widened;
  rows->format = KvFormat::kBf16;
  rows->products = DType::kBf16;
  rows->page_tables = reinterpret_cast<const uint32_t*>(args.first_row);
  rows->pool = args.rows;
  const LaunchShape shape{
      .grid_x = static_cast<uint32_t>((kv_rows + kRowsOfBlock - 1) / kRowsOfBlock),
      .threads = kBlockThreads};
  return recording.AddKernel(device_.kernels.widen, shape, args);
}

}  // namespace mla::kernels::hip
