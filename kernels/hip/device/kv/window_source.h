// Finds rows for attention to a window and to compressed entries (kernels/types/window.h); a
// RowSource.
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
  MLA_DEVICE static bool sees_entry(int of_place) { return of_place != kNone; }
  // A *position* is the number of an entry, or for a row the complement of RowSource's position.
  MLA_DEVICE int position_of(int of_place) const {
    return sees_entry(of_place) ? of_place : ~(seen - 1);
  }

#if !MLA_AMD
  MLA_DEVICE int entry(int at) const { return entry_of(at, word(at)); }
  // word() returns a place's word and entry_of() the entry made from it, as RowSource does.
  MLA_DEVICE int word(int at) const {
    const int of_list = place_of(at) - held;
    if (of_list < 0 || !memory.listed()) return of_list;
    return as_global<const int32_t>(memory.list())[of_list];
  }
  MLA_DEVICE int entry_of(int at, int word) const {
    const int place = place_of(at);
    return place < held ? ~(seen - held + place) : visible(word);
  }
  // The same look-up in steps, as in RowSource; a spot's row is a complement for rows, too.
  MLA_DEVICE RowSpot spot(int position) const {
    const PagedRows of = pages(position < 0);
    const PagedRows::Place at = of.place(static_cast<int>(counted(position)));
    return {of.table + at.page, position < 0 ? ~at.inside : at.inside};
  }
  MLA_DEVICE const uint8_t* address(uint32_t granule, int row_inside) const {
    return pages(row_inside < 0).address(granule, static_cast<int>(counted(row_inside)));
  }
  // Returns the address of the exponents of a row, which a page of kFp8Page keeps after its rows.
  MLA_DEVICE const uint8_t* exponents(uint32_t granule, int row_inside) const {
    const PagedRows of = pages(row_inside < 0);
    return of.address(granule, 0) + of.page_size * of.row_stride +
           counted(row_inside) * kExponentBytes;
  }
#else
  // Returns the address of the word that gives a place's entry, and the entry made from that word.
  // The word may have any value if no list names the entry.
  MLA_DEVICE const int32_t* entry_at(int at) const {
    const int of_list = place_of(at) - held;
    const bool named = memory.listed() && of_list >= 0;
    return memory.list_or_any(named) + (named ? of_list : 0);
  }
  MLA_DEVICE int entry_of(int at, int word) const {
    const int place = place_of(at);
    const int numbered = visible(memory.listed() ? word : place - held);
    return place < held ? ~(seen - held + place) : numbered;
  }
  // The same look-up in steps, as in RowSource; a spot's row is a complement for rows, too.
  MLA_DEVICE RowSpot spot(int position) const {
    const bool is_row = position < 0;
    const PagedRows::Place at = memory.place(is_row, counted(position));
    return {memory.table(is_row) + static_cast<uint32_t>(at.page), is_row ? ~at.inside : at.inside};
  }
  MLA_DEVICE const uint32_t* table_at(int position) const { return spot(position).entry; }
  MLA_DEVICE int inside(int position) const { return spot(position).inside; }
  MLA_DEVICE const uint8_t* address(uint32_t granule, int row_inside) const {
    const bool is_row = row_inside < 0;
    return memory.base(is_row) + uint64_t{granule} * kPageGranuleBytes +
           uint64_t{counted(row_inside)} * memory.row_stride(is_row);
  }
  MLA_DEVICE const uint8_t* exponents(uint32_t granule, int row_inside) const {
    const bool is_row = row_inside < 0;
    return memory.base(is_row) + uint64_t{granule} * kPageGranuleBytes +
           uint64_t{memory.page_size(is_row)} * memory.row_stride(is_row) +
           counted(row_inside) * kExponentBytes;
  }
#endif

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
    // Each returns the pointer for rows or the one for entries; every lane chooses for itself.
    MLA_DEVICE const uint32_t* table(bool of_rows) const { return pointer<uint32_t>(0, of_rows); }
    MLA_DEVICE const uint8_t* base(bool of_rows) const { return pointer<uint8_t>(2, of_rows); }
    MLA_DEVICE uint32_t row_stride(bool of_rows) const { return word(4, of_rows); }
    MLA_DEVICE uint32_t page_size(bool of_rows) const { return word(5, of_rows); }
    MLA_DEVICE PagedRows::Place place(bool of_rows, uint32_t number) const {
      const uint32_t size = page_size(of_rows);
      uint32_t page, inside;
      if (powers) {
        page = number >> word(6, of_rows);
        inside = number & (size - 1);
      } else {
        exclude_from_report_begin();
        page = number / size;
        inside = number - page * size;
        exclude_from_report_end();
      }
      return {static_cast<int>(page), static_cast<int>(inside)};
    }
    // Returns the list if `named`, a choice of each lane; otherwise any address that may be loaded
    // from.
    MLA_DEVICE const int32_t* list_or_any(bool named) const {
      const uint32_t low = words[kListAt], high = words[kListAt + 1];
      const uint32_t any_low = words[0], any_high = words[1];
      return reinterpret_cast<const int32_t*>(
          address(named ? low : any_low, named ? high : any_high));
    }
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
    // scalar registers. Vector registers have room, and a choice of each lane between two of them
    // is one instruction, where a choice between two scalars takes three.
    static constexpr int kWords = 7, kListAt = 2 * kWords;
    MLA_DEVICE void put(const PagedRows& pages, int first) {
      powers = powers && pages.shift >= 0;
      put(pages.table, first);
      put(pages.base, first + 2);
      put(static_cast<uint32_t>(pages.row_stride), first + 4);
      put(static_cast<uint32_t>(pages.page_size), first + 5);
      put(static_cast<uint32_t>(pages.shift), first + 6);
    }
    MLA_DEVICE void put(const void* at, int first) {
      const auto bits = reinterpret_cast<uintptr_t>(at);
      put(static_cast<uint32_t>(bits), first);
      put(static_cast<uint32_t>(bits >> 32), first + 1);
    }
    MLA_DEVICE void put(uint32_t word, int place) {
      words[place] = static_cast<uint32_t>(tile::opaque(static_cast<int>(word)));
    }
    MLA_DEVICE uint32_t word(int place, bool of_rows) const {
      const uint32_t rows = words[place], entries = words[kWords + place];
      return of_rows ? rows : entries;
    }
    // From two registers: a shift and an addition would be instructions.
    MLA_DEVICE static uintptr_t address(uint32_t low, uint32_t high) {
      return __builtin_bit_cast(uintptr_t, tile::u32x2{low, high});
    }
    template <class T>
    MLA_DEVICE const T* pointer(int place, bool of_rows) const {
      return reinterpret_cast<const T*>(address(word(place, of_rows), word(place + 1, of_rows)));
    }
    uint32_t words[kListAt + 2] = {};
    bool powers = true;  // pages of rows and those of entries hold 2^n rows each
    bool has_list = false;
#else
    const int32_t* the_list = nullptr;
#endif
    const uint8_t* const pool;
    const uint32_t* const page_tables;
    MLA_RECORD const SegmentRecord* segment;
    MLA_RECORD const WindowRecord* window;
  };

#if !MLA_AMD
  MLA_DEVICE PagedRows pages(bool of_rows) const {
    return of_rows ? memory.rows() : memory.entries();
  }
#endif
  // Returns the number of a row or an entry from its position or complement.
  MLA_DEVICE static uint32_t counted(int of) { return static_cast<uint32_t>(of < 0 ? ~of : of); }
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
