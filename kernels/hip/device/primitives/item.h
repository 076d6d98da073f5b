// Work items as the attention kernels see them.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_ITEM_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_ITEM_H_

#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

// One work item as a block sees it: packed rows [first, first + rows) of the item.
struct Item {
  WorkInfo work;
  MLA_RECORD const SegmentRecord* segment;
  int heads;
  int first;
  int rows;

  MLA_DEVICE int query(int p) const { return work.q_begin + (first + p) / heads; }
  MLA_DEVICE int head(int p) const {
    return static_cast<int>(work.heads & 0xffffu) + (first + p) % heads;
  }
  // Rows [0, limit) of the segment are visible to packed row p.
  MLA_DEVICE int limit(int p) const {
    const int seen = segment->kv_rows - segment->q_rows + query(p) + 1;
    return segment->causal && seen < work.kv_end ? seen : work.kv_end;
  }
};

// Returns the packed rows of work item `index` that share `share` of its unit takes, kRows a share.
// A share may have no rows.
template <int kRows>
MLA_DEVICE Item load_item(const AttendArgs& args, int index, int share) {
  Item item;
  item.work = read_record(args.work_info + index);
  item.segment = as_record(args.segments + item.work.segment);
  item.heads =
      static_cast<int>(item.work.heads >> 16) - static_cast<int>(item.work.heads & 0xffffu);
  item.first = share * kRows;
  const int rows = (item.work.q_end - item.work.q_begin) * item.heads - item.first;
  item.rows = rows < kRows ? rows : kRows;
  return item;
}

// Starts to bring the launch's items and segments to the L2 (sm_90), because a block reads one
// after the other, and each first read of memory is slow. Called by kThreads threads of each block,
// a power of two; each brings one line.
template <int kThreads>
MLA_DEVICE void prefetch_records(const AttendArgs& args) {
#if !MLA_AMD
  static_assert((kThreads & (kThreads - 1)) == 0);
  constexpr uint64_t kLine = 128;
  const uint64_t number =
      uint64_t{static_cast<uint32_t>(block_index())} * kThreads + (thread_index() & (kThreads - 1));
  const auto bring = [number](const void* records, uint64_t bytes) {
    const auto begin = reinterpret_cast<uint64_t>(records);
    const uint64_t line = (begin & ~(kLine - 1)) + number * kLine;
    if (line < begin + bytes) tile::prefetch(reinterpret_cast<const void*>(line));
  };
  bring(args.work_info, static_cast<uint32_t>(args.item_count) * sizeof(WorkInfo));
  bring(args.segments, static_cast<uint32_t>(args.segment_count) * sizeof(SegmentRecord));
  if (args.windows != nullptr) {
    bring(args.windows, static_cast<uint32_t>(args.segment_count) * sizeof(WindowRecord));
  }
#endif
}

// Items [begin, end) of a unit, for a kernel of kRows packed rows. Kernels of 16 rows and of
// streams have no registers left to tell units of one item apart.
template <int kRows, class Args>
struct UnitItems {
  int begin, end;
  MLA_DEVICE UnitItems(const Args& args, int unit) : begin(unit), end(unit + 1) {
    if (!MLA_AMD && kRows > 16 && !Args::kStreams && args.one_item_per_unit != 0) return;
    begin = args.work_indptr[unit];
    end = args.work_indptr[unit + 1];
  }
};

// Calls `body` with item, index and share for each work item of this block's unit in which the
// block has rows. `first` and `step` restrict it to the unit's items first, first + step, ...
template <int kRows, class Args, class Body>
MLA_DEVICE void for_each_indexed_item(const Args& args, const Body& body, int first = 0,
                                      int step = 1) {
#if MLA_AMD
  const BlockPlace place = PlaceOf(block_index(), args.blocks, args.blocks_per_unit, args.xcds);
  const int unit = place.unit, share = place.share;
#else
  const int unit = block_index() / args.blocks_per_unit;
  const int share = block_index() - unit * args.blocks_per_unit;
#endif
  const UnitItems<kRows, Args> items(args, unit);
  for (int i = items.begin + first; i < items.end; i += step) {
    const Item item = load_item<kRows>(args, i, share);
    if (item.rows > 0) body(item, i, share);
  }
}
template <int kRows, class Args, class Body>
MLA_DEVICE void for_each_item(const Args& args, const Body& body) {
  for_each_indexed_item<kRows>(args, [&body](const Item& item, int, int) { body(item); });
}

#if !MLA_AMD
// As for_each_item, for warps with few registers: the block's unit and its items are found again
// for each item, so that nothing of the block is kept while `body` runs.
template <int kRows, class Body>
MLA_DEVICE void for_each_item_found_again(const AttendArgs& args, const Body& body) {
  struct Place {
    int unit, share;
    MLA_DEVICE explicit Place(const AttendArgs& of) {
      const int block = static_cast<int>(tile::unknown(static_cast<uint32_t>(block_index())));
      unit = block / of.blocks_per_unit;
      share = block - unit * of.blocks_per_unit;
    }
  };
  using Items = UnitItems<kRows, AttendArgs>;
  for (int i = Items(args, Place(args).unit).begin; i < Items(args, Place(args).unit).end; ++i) {
    const Item item = load_item<kRows>(args, i, Place(args).share);
    if (item.rows > 0) body(item);
  }
}
#endif

// Address of the results of packed row p: in a partial tile, or in the segment's own output.
struct RowTarget {
  void* base;
  int64_t index;
  float* lse;
  bool f32;

  template <class Args>
  MLA_DEVICE RowTarget(const Args& args, const Item& item, int p, int columns) {
    MLA_RECORD const SegmentRecord& r = *item.segment;
    if (Args::kSplit || item.work.partial_row >= 0) {
      const int64_t row = static_cast<int64_t>(item.work.partial_row) + item.first + p;
      base = args.partial_o;
      index = row * columns;
      lse = args.partial_lse + row;
      f32 = true;
      return;
    }
    const int64_t q = item.query(p), h = item.head(p);
    base = r.o;
    index = q * r.o_row_stride + h * r.o_head_stride;
    lse = r.lse == nullptr ? nullptr : r.lse + q * r.lse_row_stride + h * r.lse_head_stride;
    f32 = args.o_is_f32 != 0;
  }
};

// Returns true if runs of `count` results of the item can be stored at once.
template <class Args>
MLA_DEVICE bool aligned_results(const Args& args, const Item& item, int count) {
  MLA_RECORD const SegmentRecord& r = *item.segment;
  const int bytes = args.o_is_f32 ? 4 : 2;
  return Args::kSplit || item.work.partial_row >= 0 ||
         aligned_to(r.o, r.o_row_stride, r.o_head_stride, bytes, bytes * count);
}

// The final scale and LSE of a row, from its maximum of logits times log2(e) and its sum of
// exponentials. A row without keys is recognised by its sum, because logits that are all NaN leave
// the maximum at -inf too.
struct RowScale {
  float inverse, lse;
  bool empty;
  MLA_DEVICE RowScale(float max, float sum) {
    empty = sum == 0.0f;
    inverse = empty ? 0.0f : 1.0f / sum;
    lse = empty ? negative_infinity() : (max + log2_fast(sum)) * kLn2;
  }
};

// Zeroes the values of a chunk that are not finite. Returns true if there are any.
MLA_DEVICE bool clear_non_finite(Chunk& c) {
  uint32_t cleared = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t low = (c.w[w] & 0x7f80u) == 0x7f80u ? 0xffffu : 0u;
    const uint32_t high = (c.w[w] & 0x7f800000u) == 0x7f800000u ? 0xffff0000u : 0u;
    c.w[w] &= ~(low | high);
    cleared |= low | high;
  }
  return cleared != 0;
}

// Zeroes values that are not finite in rows [first_row, kTileKv) of a tile, because a masked
// probability is zero and zero times NaN is NaN. A packed row that sees such a value has no finite
// logit for it, so its probability carries the NaN already. kThreads threads share the work; the
// caller is number `thread`.
// place(row, chunk) is where a chunk of a row lies.
template <class C, int kThreads, class At>
MLA_DEVICE void hide_unseen_values(int first_row, int thread, const At& place) {
  constexpr int kChunks = C::kLora / 8;
  const int begin = first_row > 0 ? first_row * kChunks : 0;
  for (int i = begin + thread; i < C::kTileKv * kChunks; i += kThreads) {
    const tile::lds_t at = place(i / kChunks, i % kChunks);
    Chunk c = tile::load_chunk_shared(at);
    if (clear_non_finite(c)) tile::store_chunk(at, c);
  }
}
// Does the same in a tile of column blocks.
template <class C, int kThreads>
MLA_DEVICE void hide_unseen_values(tile::lds_t tile_base, int first_row, int thread) {
  hide_unseen_values<C, kThreads>(first_row, thread, [tile_base](int row, int chunk) {
    return tile::chunk_at<C::kTileKv>(tile_base, row, chunk);
  });
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_ITEM_H_
