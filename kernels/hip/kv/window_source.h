// RowSource of attention to a window and to compressed entries (kernels/window.h).
#ifndef MLA_KERNELS_HIP_KV_WINDOW_SOURCE_H_
#define MLA_KERNELS_HIP_KV_WINDOW_SOURCE_H_

#include "kernels/hip/common/small_kernels.h"
#include "kernels/hip/kv/row_source.h"

namespace mla::kernels::hip {

// Places are those of the window first, from the oldest row on, then the entries: all that are
// whole, or those of the query row's list. The *entry* of a place, as RowSource has it, is a number
// >= 0 for a compressed entry, the complement of a position for a row, and kNone for what a list
// names that is no entry which the query row sees; that leads to the query row's own KV row.
template <>
class RowSource<AttentionKind::kWindow> {
 public:
  MLA_DEVICE RowSource(const AttendArgs& args, const Item& item)
      : begin(0), end(item.work.kv_end), pool(args.pool), page_tables(args.page_tables) {
    MLA_RECORD const SegmentRecord& r = *item.segment;
    MLA_RECORD const WindowRecord& w = *as_record(args.windows + item.work.segment);
    segment = &r;
    window = &w;
    const int q = item.work.q_begin;
    seen = r.causal ? r.kv_rows - r.q_rows + q + 1 : r.kv_rows;
    whole = w.ratio == 0 ? 0 : seen / w.ratio;
    held = seen < w.window ? seen : w.window;
    first = item.work.kv_begin;
    int places = held + whole;
    if (r.list_begin != nullptr) {
      MLA_RECORD const int32_t* const of_row = as_record(r.list_begin);
      list = r.list + (of_row[q] - of_row[0]);
      places = held + of_row[q + 1] - of_row[q];
    }
    end = (end < places ? end : places) - first;
    if (seen <= 0 || end < 0) end = 0;
  }

  // REQUIRES begin < end, here and below.
  MLA_DEVICE int entry(int at) const {
    const int place = first + (at < end ? at : end - 1);
    if (place < held) return ~(seen - held + place);
    const int of_list = place - held;
    const int named = list == nullptr ? of_list : as_global<const int32_t>(list)[of_list];
    return static_cast<uint32_t>(named) < static_cast<uint32_t>(whole) ? named : kNone;
  }
  MLA_DEVICE static bool sees_entry(int of_place) { return of_place != kNone; }

  // Where a row or an entry lies, and its exponents where the format keeps them behind the page's
  // rows.
  MLA_DEVICE const uint8_t* row_of(int of_place, const uint8_t*& exponents) const {
    const bool is_entry = of_place >= 0;
    const int position = is_entry ? of_place : of_place == kNone ? seen - 1 : ~of_place;
    const PagedRows pages =
        is_entry ? PagedRows(page_tables, window->page_table, pool, window->layer_offset,
                             window->row_stride, window->page_size, kPageGranuleBytes)
                 : PagedRows(page_tables, segment->page_table, pool, segment->layer_offset,
                             segment->row_stride, segment->page_size, kPageGranuleBytes);
    const PagedRows::Place at = pages.place(position);
    const uint8_t* const page = pages.address(pages.granule(at.page), 0);
    exponents = page + pages.page_size * pages.row_stride + at.inside * kExponentBytes;
    return page + at.inside * pages.row_stride;
  }
  MLA_DEVICE const uint8_t* row_of(int of_place) const {
    const uint8_t* exponents;
    return row_of(of_place, exponents);
  }

  const int begin;
  int end;

 private:
  static constexpr int kNone = static_cast<int>(0x80000000u);
  static constexpr int kExponentBytes = kPageScalesMultiple;  // of a row, in KvFormat::kFp8Page

  const uint8_t* const pool;
  const uint32_t* const page_tables;
  MLA_RECORD const SegmentRecord* segment;
  MLA_RECORD const WindowRecord* window;
  const int32_t* list = nullptr;  // of the query row
  int seen, whole, held;          // positions that it sees, entries, rows of the window
  int first;                      // place that the item begins with
};

// By how much the sink of a head, if there is one, makes an output smaller.
MLA_DEVICE float sink_factor(const WindowRecord& window, int head, float lse) {
  if (window.sinks == nullptr) return 1.0f;
  return sink_factor(as_global<const float>(window.sinks)[head], lse);
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_KV_WINDOW_SOURCE_H_
