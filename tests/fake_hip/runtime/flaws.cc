#include "tests/fake_hip/runtime/flaws.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/args/kernel_args.h"

namespace mla::fake_hip {
namespace {

using kernels::Bf16;
using kernels::ToBf16;
using kernels::ToFloat;
using kernels::hip::SegmentRecord;

constexpr int kRowDim = 576;
constexpr int kLateRows = 11 * 64;

const kernels::WorkInfo& WorkOf(const kernels::WorkInfo& item) { return item; }
const kernels::WorkInfo& WorkOf(const kernels::hip::ExpandedItem& item) { return item.work; }

// A launch's items by unit, and its records, as copies that a flaw can change.
template <class Item>
struct Work {
  std::vector<Item> items;
  std::vector<int32_t> indptr{0};
  std::vector<SegmentRecord> segments;

  // Skips the items for which `keep(item, number in its unit)` returns false.
  template <class Keep>
  Work(const Item* all, const int32_t* all_indptr, const SegmentRecord* all_segments, int units,
       const Keep& keep) {
    int last_segment = -1;
    for (int unit = 0; unit < units; ++unit) {
      for (int i = all_indptr[unit]; i < all_indptr[unit + 1]; ++i) {
        last_segment = std::max(last_segment, WorkOf(all[i]).segment);
        if (keep(all[i], i - all_indptr[unit])) items.push_back(all[i]);
      }
      indptr.push_back(static_cast<int32_t>(items.size()));
    }
    segments.assign(all_segments, all_segments + last_segment + 1);
  }
};

// Restores changed rows of the pool in its destructor.
class SavedRows {
 public:
  ~SavedRows() {
    for (const auto& [at, row] : rows_) std::memcpy(at, row.data(), row.size() * sizeof(Bf16));
  }
  Bf16* Save(const kernels::hip::AttendArgs& a, const SegmentRecord& r, int position) {
    Bf16* const at = At(a, r, position);
    rows_.try_emplace(at, at, at + kRowDim);
    return at;
  }
  // Returns the original values of row `position`.
  std::vector<Bf16> Original(const kernels::hip::AttendArgs& a, const SegmentRecord& r,
                             int position) {
    Bf16* const at = At(a, r, position);
    const auto found = rows_.find(at);
    return found != rows_.end() ? found->second : std::vector<Bf16>(at, at + kRowDim);
  }

 private:
  static Bf16* At(const kernels::hip::AttendArgs& a, const SegmentRecord& r, int position) {
    const int64_t entry = a.page_tables[r.page_table + position / r.page_size];
    return reinterpret_cast<Bf16*>(const_cast<uint8_t*>(a.pool) + entry * a.granule_bytes +
                                   r.layer_offset + position % r.page_size * r.row_stride);
  }
  std::map<Bf16*, std::vector<Bf16>> rows_;
};

void ChangeRows(Flaw flaw, const kernels::hip::AttendArgs& a, const Work<kernels::WorkInfo>& work,
                SavedRows& saved) {
  for (const kernels::WorkInfo& w : work.items) {
    const SegmentRecord& r = a.segments[w.segment];
    for (int j = w.kv_begin; j < w.kv_end; ++j) {
      if (flaw == Flaw::kNaNAsZero) {
        Bf16* const row = saved.Save(a, r, j);
        std::replace_if(
            row, row + kRowDim, [](Bf16 x) { return std::isnan(ToFloat(x)); }, Bf16{0});
      } else if (j - w.kv_begin >= kLateRows) {
        const int early = w.kv_begin + (j - w.kv_begin) % kLateRows;
        const std::vector<Bf16> from = saved.Original(a, r, early);
        std::copy(from.begin(), from.end(), saved.Save(a, r, j));
      }
    }
  }
}

// Copies the pool up to the end of the launch's rows, plus one row, which a kernel with the wrong
// page size reads.
std::vector<uint8_t> CopyPool(const kernels::hip::AttendArgs& a,
                              const Work<kernels::WorkInfo>& work) {
  int64_t end = 0, row_bytes = 0;
  for (const SegmentRecord& r : work.segments) {
    for (int j = 0; j < r.kv_rows; ++j) {
      const int64_t entry = a.page_tables[r.page_table + j / r.page_size];
      end = std::max(
          end, entry * a.granule_bytes + r.layer_offset + (j % r.page_size + 1) * r.row_stride);
    }
    row_bytes = std::max(row_bytes, r.row_stride);
  }
  std::vector<uint8_t> pool(a.pool, a.pool + end);
  pool.resize(static_cast<size_t>(end + row_bytes), 0xff);
  return pool;
}

using RunArguments = std::function<void(const void* arguments)>;

void RunAttend(Flaw flaw, const kernels::hip::host::Grid& grid, kernels::hip::AttendArgs a,
               const RunArguments& run) {
  Work<kernels::WorkInfo> work(a.work_info, a.work_indptr, a.segments,
                               static_cast<int>(grid.x) / a.blocks_per_unit,
                               [flaw](const kernels::WorkInfo& w, int number) {
                                 if (flaw == Flaw::kThirdItem) return number < 2;
                                 return flaw != Flaw::kNoKeys || w.kv_begin < w.kv_end;
                               });
  SavedRows saved;
  if (flaw == Flaw::kNaNAsZero || flaw == Flaw::kLateTile) ChangeRows(flaw, a, work, saved);
  std::vector<uint8_t> pool;
  if (flaw == Flaw::kOddPages) {
    pool = CopyPool(a, work);
    a.pool = pool.data();
    for (SegmentRecord& r : work.segments) r.page_size += r.page_size == 3;
  }
  a.work_info = work.items.data();
  a.work_indptr = work.indptr.data();
  a.segments = work.segments.data();
  run(&a);
}

void RunExpanded(Flaw flaw, const kernels::hip::host::Grid& grid, kernels::hip::ExpandedArgs a,
                 const RunArguments& run) {
  Work<kernels::hip::ExpandedItem> work(a.items, a.unit_indptr, a.segments,
                                        static_cast<int>(grid.x),
                                        [flaw](const kernels::hip::ExpandedItem&, int number) {
                                          return flaw != Flaw::kThirdItem || number < 2;
                                        });
  // Wrong sums that an earlier launch might have left in this memory.
  const bool carried = flaw == Flaw::kCarriedWrong;
  if (carried) {
    std::fill_n(a.partial_lse, kernels::hip::kExpandedRows, 0.0f);
    std::fill_n(a.partial_o, kernels::hip::kExpandedRows * kernels::hip::kDims128.value, 0.5f);
  }
  for (size_t unit = 0; unit + 1 < work.indptr.size(); ++unit) {
    for (int i = work.indptr[unit]; i < work.indptr[unit + 1]; ++i) {
      kernels::hip::ExpandedItem& e = work.items[static_cast<size_t>(i)];
      if (carried && i > work.indptr[unit]) e.carried_row = 0;
      if (flaw != Flaw::kSecondTile || e.work.q_begin < kernels::hip::kExpandedRows) continue;
      SegmentRecord before = work.segments[static_cast<size_t>(e.work.segment)];
      before.q =
          static_cast<const Bf16*>(before.q) - kernels::hip::kExpandedRows * before.q_row_stride;
      e.work.segment = static_cast<int32_t>(work.segments.size());
      work.segments.push_back(before);
    }
  }
  a.items = work.items.data();
  a.unit_indptr = work.indptr.data();
  a.segments = work.segments.data();
  run(&a);
}

// The inputs belong to this launch, so they may stay rounded.
void RoundInputs(const kernels::hip::host::Grid& grid, const kernels::hip::ProjectArgs& a) {
  for (uint32_t t = 0; t < grid.x; ++t) {
    const kernels::hip::ProjectTile& tile = a.tiles[t];
    for (int i = 0; i < tile.rows * tile.num_heads; ++i) {
      const kernels::hip::ProjectRow& r = a.rows[tile.first_row + i / tile.num_heads];
      auto* const in =
          static_cast<float*>(const_cast<void*>(r.in)) + i % tile.num_heads * r.in_head_stride;
      std::transform(in, in + a.k, in, [](float x) { return ToFloat(ToBf16(x)); });
    }
  }
}

}  // namespace

void RunFlawed(Flaw flaw, bool rounded_inputs, const std::string& kernel,
               const kernels::hip::host::Grid& grid, std::vector<std::byte> arguments,
               const RunArguments& run) {
  if (flaw != Flaw::kNone && kernel.starts_with(kernels::hip::kAttendPrefix)) {
    if (!kernel.starts_with(kernels::hip::kExpandedPrefix)) {
      return RunAttend(flaw, grid, *reinterpret_cast<kernels::hip::AttendArgs*>(arguments.data()),
                       run);
    }
    return RunExpanded(flaw, grid, *reinterpret_cast<kernels::hip::ExpandedArgs*>(arguments.data()),
                       run);
  }
  if (rounded_inputs && kernel == kernels::hip::kProjectKernel) {
    const auto& a = *reinterpret_cast<const kernels::hip::ProjectArgs*>(arguments.data());
    if (a.in_is_f32 != 0) RoundInputs(grid, a);
  }
  run(arguments.data());
}

}  // namespace mla::fake_hip
