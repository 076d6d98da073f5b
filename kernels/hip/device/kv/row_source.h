// Finds the KV rows that a work item takes, and their places. It takes the rows of its sequence by
// position, or the rows that the index list of its query row names.
#ifndef MLA_KERNELS_HIP_DEVICE_KV_ROW_SOURCE_H_
#define MLA_KERNELS_HIP_DEVICE_KV_ROW_SOURCE_H_

#include "kernels/hip/device/primitives/item.h"

namespace mla::kernels::hip {

// The result of a row's look-up: its page's entry in the page table, and its number in the page.
struct RowSpot {
  const uint32_t* entry;
  int inside;
};

// A *place* is a position of the sequence, or an index in the item's part of the list. The *entry*
// of a place is the position that it stands for. An entry of a list may be a position that the
// query row does not see, anywhere in the list. Places from `end` on repeat the last one, so that
// masked probabilities, which are zero, always meet values that exist. No entry leads outside of
// the sequence: an unseen entry leads to the sequence's first row, whose values may be anything
// (see hide_unseen_values).
//
// In sparse attention an item has one query row, and a place is visible if that row sees its entry;
// Item::limit does not apply. If a list is shorter than the plan assumes, `end` is the list's end,
// and an item may have no places (begin >= end).
template <AttentionKind kKind>
class RowSource {
 public:
  static constexpr bool kLists = kKind == AttentionKind::kSparse;

  template <class Args>
  MLA_DEVICE RowSource(const Args& args, const Item& item)
      : pages(args.page_tables, item.segment->page_table, args.pool, item.segment->layer_offset,
              item.segment->row_stride, item.segment->page_size, args.granule_bytes),
        begin(kLists ? 0 : item.work.kv_begin),
        end(item.work.kv_end) {
    if constexpr (kLists) {
      MLA_RECORD const SegmentRecord& r = *item.segment;
      MLA_RECORD const int32_t* const of_row = as_record(r.list_begin);
      const int q = item.work.q_begin, first = of_row[q], length = of_row[q + 1] - first;
      list = r.list + (first - of_row[0] + item.work.kv_begin);
      seen = r.causal ? r.kv_rows - r.q_rows + q + 1 : r.kv_rows;
      end = (end < length ? end : length) - item.work.kv_begin;
      if (seen <= 0 || end < 0) end = 0;
      // Loops over the places are then the same in all lanes for sm_90's compiler, which may keep
      // their addresses in scalar registers. Without it some kernels spill.
      if constexpr (!MLA_AMD) end = uniform(end);
    }
  }

  MLA_DEVICE int place(int at) const { return at < end ? at : end - 1; }
  // With lists: return the address of the word that gives a place's entry, and the entry made from
  // that word.
  MLA_DEVICE const int32_t* entry_at(int at) const { return list + place(at); }
  MLA_DEVICE static int entry_of(int, int word) { return word; }
  // REQUIRES begin < end, also for the calls below.
  MLA_DEVICE int entry(int at) const { return entry_of(at, word(at)); }
  // Returns the word that entry_of takes, for callers that use it later than it is loaded.
  MLA_DEVICE int word(int at) const {
    if constexpr (kLists) return *as_global<const int32_t>(entry_at(at));
    return place(at);
  }
  // Returns true if the query row sees the entry. In dense attention Item::limit decides instead.
  MLA_DEVICE bool sees_entry(int of_place) const {
    return !kLists || static_cast<uint32_t>(of_place) < static_cast<uint32_t>(seen);
  }
  MLA_DEVICE int position_of(int of_place) const { return sees_entry(of_place) ? of_place : 0; }
  MLA_DEVICE const uint8_t* row_of(int of_place) const { return pages.row(position_of(of_place)); }
  // row_of in three steps, so that loads of several rows can overlap. table_at returns the address
  // of the page-table entry of a position, which the caller loads. inside returns the row inside
  // the page, and address the address of that row from both.
  MLA_DEVICE const uint32_t* table_at(int position) const {
    return pages.table + pages.place(position).page;
  }
  MLA_DEVICE int inside(int position) const { return pages.place(position).inside; }
  MLA_DEVICE RowSpot spot(int position) const {
    const PagedRows::Place at = pages.place(position);
    return {pages.table + at.page, at.inside};
  }
  MLA_DEVICE const uint8_t* address(uint32_t granule, int row_inside) const {
    return pages.address(granule, row_inside);
  }

  // The same look-up at once, for callers that can wait for two or three dependent loads.
  MLA_DEVICE const uint8_t* row(int at) const { return row_of(entry(at)); }
  MLA_DEVICE bool sees(int at) const { return at < end && sees_entry(entry(at)); }
  // Finds the rows of places first + of(0), first + of(1), ...
  template <int kCount, class Of>
  MLA_DEVICE void find(const uint8_t* (&rows)[kCount], int first, const Of& of) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) rows[i] = row(first + of(i));
  }

  const PagedRows pages;
  const int begin;
  int end;

 private:
  const int32_t* list = nullptr;
  int seen = 0;  // rows of the sequence that the query row sees
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KV_ROW_SOURCE_H_
