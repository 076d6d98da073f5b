// RowSource of attention to a window and to compressed entries (kernels/types/window.h).
#ifndef MLA_KERNELS_HIP_DEVICE_KV_WINDOW_SOURCE_H_
#define MLA_KERNELS_HIP_DEVICE_KV_WINDOW_SOURCE_H_

#include "kernels/hip/device/kv/row_source.h"
#include "kernels/hip/device/primitives/block.h"

namespace mla::kernels::hip {

// Places count the rows of the window first, oldest first, then the entries, either all complete
// entries or the entries of the query row's list. The *entry* of a place (see RowSource) is a
// number >= 0 for a compressed entry, the complement of a position for a row, and kNone if a list
// names an entry that the query row does not see. kNone leads to the query row's own KV row.
template <>
class RowSource<AttentionKind::kWindow> {
 public:
  static constexpr bool kLists = true;

  MLA_DEVICE RowSource(const AttendArgs& args, const Item& item)
      : begin(0), end(item.work.kv_end), memory(args, item) {
    MLA_RECORD const SegmentRecord& r = *item.segment;
    MLA_RECORD const WindowRecord& w = *as_record(args.windows + item.work.segment);
    const int q = item.work.q_begin;
    seen = r.causal ? r.kv_rows - r.q_rows + q + 1 : r.kv_rows;
    whole = w.ratio == 0 ? 0 : seen / w.ratio;
    held = seen < w.window ? seen : w.window;
    first = item.work.kv_begin;
    int places = held + whole;
    if (r.list_begin != nullptr) {
      MLA_RECORD const int32_t* const of_row = as_record(r.list_begin);
      memory.set_list(r.list + (of_row[q] - of_row[0]));
      places = held + of_row[q + 1] - of_row[q];
    }
    end = (end < places ? end : places) - first;
    if (seen <= 0 || end < 0) end = 0;
  }

  // REQUIRES begin < end, also for the calls below.
  MLA_DEVICE int entry(int at) const {
    const int place = place_of(at);
    if (place < held) return ~(seen - held + place);
    const int of_list = place - held;
    return visible(memory.listed() ? as_global<const int32_t>(memory.list())[of_list] : of_list);
  }
  MLA_DEVICE static bool sees_entry(int of_place) { return of_place != kNone; }
  // Returns the address of the word that gives a place's entry, and the entry made from that word.
  // The word may have any value if no list names the entry.
  MLA_DEVICE const int32_t* entry_at(int at) const {
    const int32_t* const of_any = reinterpret_cast<const int32_t*>(memory.rows().table);
    const int32_t* const of_row = memory.list();
    const int of_list = place_of(at) - held;
    return memory.listed() && of_list >= 0 ? of_row + of_list : of_any;
  }
  MLA_DEVICE int entry_of(int at, int word) const {
    const int place = place_of(at);
    const int numbered = visible(memory.listed() ? word : place - held);
    return place < held ? ~(seen - held + place) : numbered;
  }

  // A *position* is the number of an entry, or for a row the complement of RowSource's position.
  MLA_DEVICE int position_of(int of_place) const {
    return sees_entry(of_place) ? of_place : ~(seen - 1);
  }

  // Returns the address of a row or an entry, and of its exponents if the format keeps them after
  // the page's rows.
  MLA_DEVICE const uint8_t* row_of(int of_place, const uint8_t*& exponents) const {
    const bool is_entry = of_place >= 0;
    const int position = is_entry ? of_place : of_place == kNone ? seen - 1 : ~of_place;
    const PagedRows of = is_entry ? memory.entries() : memory.rows();
    const PagedRows::Place at = of.place(position);
    const uint8_t* const page = of.address(of.granule(at.page), 0);
    exponents = page + of.page_size * of.row_stride + at.inside * kExponentBytes;
    return page + at.inside * of.row_stride;
  }
  MLA_DEVICE const uint8_t* row_of(int of_place) const {
    const uint8_t* exponents;
    return row_of(of_place, exponents);
  }
  // The same look-up in steps, as in RowSource; inside() is a complement for rows, too.
  MLA_DEVICE const uint32_t* table_at(int position) const {
    const PagedRows rows = memory.rows(), entries = memory.entries();
    const int of_rows = rows.place(~position).page, of_entries = entries.place(position).page;
    return position < 0 ? rows.table + of_rows : entries.table + of_entries;
  }
  MLA_DEVICE int inside(int position) const {
    const int of_rows = memory.rows().place(~position).inside;
    const int of_entries = memory.entries().place(position).inside;
    return position < 0 ? ~of_rows : of_entries;
  }
  MLA_DEVICE const uint8_t* address(uint32_t granule, int row_inside) const {
    const PagedRows rows = memory.rows(), entries = memory.entries();
    const bool is_row = row_inside < 0;
    return (is_row ? rows.base : entries.base) + int64_t{granule} * kPageGranuleBytes +
           (is_row ? ~row_inside : row_inside) * (is_row ? rows.row_stride : entries.row_stride);
  }
  MLA_DEVICE const uint8_t* exponents(uint32_t granule, int row_inside) const {
    const PagedRows rows = memory.rows(), entries = memory.entries();
    const bool is_row = row_inside < 0;
    return (is_row ? rows.base + rows.page_size * rows.row_stride
                   : entries.base + entries.page_size * entries.row_stride) +
           int64_t{granule} * kPageGranuleBytes +
           (is_row ? ~row_inside : row_inside) * kExponentBytes;
  }

  const int begin;
  int end;

 private:
  static constexpr int kNone = static_cast<int>(0x80000000u);
  static constexpr int kExponentBytes = kPageScalesMultiple;  // per row, in KvFormat::kFp8Page

  // Addresses of the pages of rows and of entries, and of the list.
  class Memory {
   public:
    MLA_DEVICE Memory(const AttendArgs& args, const Item& item)
        : pool(args.pool),
          page_tables(args.page_tables),
          segment(item.segment),
          window(as_record(args.windows + item.work.segment)) {
#if MLA_AMD
      put(read(*segment, segment->page_size), 0);
      // Without entries, page_size of their pages may be 0, so 1 is used.
      put(read(*window, window->ratio > 0 ? window->page_size : 1), kWords);
#endif
    }
#if MLA_AMD
    MLA_DEVICE PagedRows rows() const { return get(0); }
    MLA_DEVICE PagedRows entries() const { return get(kWords); }
    MLA_DEVICE const int32_t* list() const { return pointer<int32_t>(kListAt); }
    MLA_DEVICE void set_list(const int32_t* at) {
      put(at, kListAt);
      has_list = true;
    }
    MLA_DEVICE bool listed() const { return has_list; }
#else
    MLA_DEVICE PagedRows rows() const { return read(*segment, segment->page_size); }
    MLA_DEVICE PagedRows entries() const { return read(*window, window->page_size); }
    MLA_DEVICE const int32_t* list() const { return the_list; }
    MLA_DEVICE void set_list(const int32_t* at) { the_list = at; }
    MLA_DEVICE bool listed() const { return the_list != nullptr; }
#endif

   private:
    template <class Record>
    MLA_DEVICE PagedRows read(MLA_RECORD const Record& r, int page_rows) const {
      return PagedRows(page_tables, r.page_table, pool, r.layer_offset, r.row_stride, page_rows,
                       kPageGranuleBytes);
    }
#if MLA_AMD
    // Loads of records would be waited for in every iteration, and there are too many words for
    // scalar registers. So lane i of one register holds word i.
    static constexpr int kWords = 6, kListAt = 2 * kWords;
    MLA_DEVICE void put(const PagedRows& pages, int first) {
      put(pages.table, first);
      put(pages.base, first + 2);
      put(static_cast<uint32_t>(pages.row_stride), first + 4);
      put(static_cast<uint32_t>(pages.page_size), first + 5);
    }
    MLA_DEVICE void put(const void* at, int first) {
      const auto bits = reinterpret_cast<uintptr_t>(at);
      put(static_cast<uint32_t>(bits), first);
      put(static_cast<uint32_t>(bits >> 32), first + 1);
    }
    MLA_DEVICE void put(uint32_t word, int lane) {
      if (tile::lane_again() == lane) words = static_cast<int>(word);
    }
    MLA_DEVICE uint32_t word(int lane) const {
      return static_cast<uint32_t>(tile::read_lane(words, lane));
    }
    template <class T>
    MLA_DEVICE const T* pointer(int lane) const {
      return reinterpret_cast<const T*>(static_cast<uintptr_t>(word(lane + 1)) << 32 | word(lane));
    }
    MLA_DEVICE PagedRows get(int first) const {
      return PagedRows(pointer<uint32_t>(first), 0, pointer<uint8_t>(first + 2), 0,
                       static_cast<int>(word(first + 4)), static_cast<int>(word(first + 5)),
                       kPageGranuleBytes);
    }
    int words = 0;
    bool has_list = false;
#else
    const int32_t* the_list = nullptr;
#endif
    const uint8_t* const pool;
    const uint32_t* const page_tables;
    MLA_RECORD const SegmentRecord* segment;
    MLA_RECORD const WindowRecord* window;
  };

  MLA_DEVICE int place_of(int at) const { return first + (at < end ? at : end - 1); }
  MLA_DEVICE int visible(int named) const {
    return static_cast<uint32_t>(named) < static_cast<uint32_t>(whole) ? named : kNone;
  }

  Memory memory;
  int seen, whole, held;  // positions seen by the row, complete entries, rows of the window
  int first;              // place at which the item begins
};

// Returns the factor by which a head's sink scales an output; 1 if the head has no sink.
MLA_DEVICE float sink_factor(const WindowRecord& window, int head, float lse) {
  if (window.sinks == nullptr) return 1.0f;
  return sink_factor(as_global<const float>(window.sinks)[head], lse);
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KV_WINDOW_SOURCE_H_
