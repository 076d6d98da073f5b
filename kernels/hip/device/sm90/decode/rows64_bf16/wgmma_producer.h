// The copying group of attend_wgmma.h.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_PRODUCER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_PRODUCER_H_

#include "kernels/hip/device/kv/row_finder.h"
#include "kernels/hip/device/kv/window_source.h"
#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_layout.h"

namespace mla::kernels::hip {

// The group that copies queries and KV rows of one item after the other. Eight lanes copy a row.
// With lists a row is looked up by one lane (RowFinder), which hands it to the eight; without them
// each finds its rows, which keeps more registers and takes fewer instructions.
template <class C, class Args = AttendArgs>
class WgmmaProducer {
 public:
  using L = WgmmaLayout<C>;
  using lds_t = tile::lds_t;
  using Source = RowSource<C::kAttention>;
  // Registers of a thread. A lane that finds rows of lists holds where they lie.
  static constexpr int kRegisters = L::kLists ? 88 : 56;
  static constexpr int kTileArrivals = L::kTileArrivals, kQueryArrivals = L::kQueryArrivals;

  MLA_DEVICE WgmmaProducer(const Args& a, const L& layout)
      : args(a), shared(layout), lane(tile::lane_index()), warp(tile::wave_index() & 3) {}

  MLA_DEVICE void produce(const Item& item) {
    const Source source(args, item);
    if (source.begin >= source.end) return;
    if constexpr (L::kLists) {
      produce_lists(item, source);
    } else {
      produce_positions(item, source);
    }
  }

 private:
  using Finder = RowFinder<Source, C::kTileKv>;
  static constexpr int kQueries = 2;   // number of their barrier in `uses`
  static constexpr int kCopyRows = 4;  // rows of a tile a lane copies chunks of
  static constexpr int kWarpRows = 4;  // neighbouring rows that a warp copies at a time

  MLA_DEVICE int row(int g) const { return (g * 4 + warp) * kWarpRows + (lane >> 3); }
  // A lane copies chunk position lane mod 8 of its rows, which are all congruent mod 8.
  MLA_DEVICE int chunk_bytes() const { return ((lane & 7) ^ tile::swizzle(row(0))) * 16; }

  MLA_DEVICE void produce_positions(const Item& item, const Source& source) {
    find(source, source.begin);
    if constexpr (!Args::kStreams) start_queries(item);
    for (int first = source.begin; first < source.end; first += 2 * C::kTileKv) {
      copy_tile<0>(!Args::kStreams && first == source.begin);
      find(source, first + C::kTileKv);
      const bool second = first + C::kTileKv < source.end;
      if (!Args::kStreams && !second) break;  // a stream's queries come after one tile or two
      if (second) copy_tile<1>(false);
      if (Args::kStreams && first == source.begin) bring_arriving_queries(item);
      find(source, first + 2 * C::kTileKv);
    }
  }
  // Finds this lane's chunks of the tile at `first`.
  MLA_DEVICE void find(const Source& source, int first) {
    source.find(kv_rows, first, [this](int g) { return row(g); });
#pragma unroll
    for (int g = 0; g < kCopyRows; ++g) kv_rows[g] += chunk_bytes();
  }

  MLA_DEVICE void produce_lists(const Item& item, const Source& source) {
    Finder finder(source, source.begin + found_row());
    await_queries_emptied();
    const QueryLoader queries(item);
    queries_aligned = queries.aligned;
    if (!queries_aligned) {
      queries.copy_tile<L::kRows, L::kDim, L::kGroupWarps>(shared.queries(), warp, lane);
    }
    const auto* const query = reinterpret_cast<const uint8_t*>(queries.row(found_row()));
    for (int first = source.begin; first < source.end; first += 2 * C::kTileKv) {
      copy_listed<0>(source, finder, first == source.begin ? query : nullptr);
      if (first + C::kTileKv < source.end) copy_listed<1>(source, finder, nullptr);
    }
  }
  // Returns the row of a tile that this lane finds; 16 lanes of a warp find its rows.
  MLA_DEVICE int found_row() const { return ((lane >> 2 & 3) * 4 + warp) * kWarpRows + (lane & 3); }
  // Copies the tile that `finder` is at, and moves it to the next one. `query`: the query row that
  // this lane has found, for the first tile of an item, whose queries come part by part; or null.
  template <int kSlot>
  MLA_DEVICE void copy_listed(const Source& source, Finder& finder, const uint8_t* query) {
    const uint32_t emptied = uses.template next<kSlot>() ^ 1;
    const uint8_t* const own_row = finder.row(source);
    const uint32_t seen = tile::ballot(finder.sees());
    finder.next(source);
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      if (query != nullptr) {
        if (queries_aligned) {
          copy_found(0, part, shared.queries(), query);
          tile::barrier_arrive_after_copies(shared.queries_filled(part));
        } else {  // already copied
          tile::barrier_arrive(shared.queries_filled(part));
        }
      }
      if (part % 2 == 0) tile::barrier_wait(shared.emptied(kSlot, part / 2 ^ kSlot), emptied);
      if (part == 0) publish_seen(kSlot, seen);
      copy_found(kSlot, part, shared.slot(kSlot), own_row);
      tile::barrier_arrive_after_copies(shared.filled(kSlot, part));
    }
  }
  // As copy_part, from the rows that lanes have found.
  MLA_DEVICE void copy_found(int s, int part, lds_t tile_base, const uint8_t* found) const {
#pragma unroll
    for (int g = 0; g < kCopyRows; ++g) {
      const uint8_t* const from = row_from_lane(found, g * kWarpRows + (lane >> 3)) + chunk_bytes();
      const lds_t target = tile_base + row(g) * 128 + (lane & 7) * 16;
#pragma unroll
      for (int i = 0; i < L::part_blocks(part); ++i) {
        const int block = L::block(s, L::kPartBlocks * part + i);
        tile::copy_chunk(target + block * L::kBlockBytes, from + block * 128);
      }
    }
  }

  // With lists: stores which of this warp's rows of a tile are seen, four bits a row. The bits
  // belong to the tile's first part. `rows` has a bit for each row that the warp has found.
  MLA_DEVICE void publish_seen(int s, uint32_t rows) const {
    if (lane < kCopyRows) {
      const uint32_t four = rows >> (lane * kWarpRows) & 0xfu;
      const uint32_t spread = (four | four << 3 | four << 6 | four << 9) & 0x1111u;
      tile::store_half_word(shared.seen(s, 2 * lane + (warp >> 1)) + (warp & 1) * 2, spread * 0xfu);
    }
    tile::sync_warp();
    if (lane == 0) tile::barrier_arrive(shared.filled(s, 0));
  }

  MLA_DEVICE void copy_block(lds_t tile_base, int block,
                             const uint8_t* const (&source)[kCopyRows]) const {
#pragma unroll
    for (int g = 0; g < kCopyRows; ++g) {
      tile::copy_chunk(tile_base + block * L::kBlockBytes + row(g) * 128 + (lane & 7) * 16,
                       source[g] + block * 128);
    }
  }

  // Copies the column blocks of a part, in the order of slot s.
  MLA_DEVICE void copy_part(int s, int part, lds_t tile_base,
                            const uint8_t* const (&source)[kCopyRows]) const {
    copy_block(tile_base, L::block(s, 2 * part), source);
    copy_block(tile_base, L::block(s, 2 * part + 1), source);
    if (L::kRotated && part == L::kParts - 1) copy_block(tile_base, L::kBlocks - 1, source);
  }

  // The first tile of an item brings its queries with it, part by part.
  template <int kSlot>
  MLA_DEVICE void copy_tile(bool with_queries) {
    const uint32_t n = used[kSlot]++;
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      if (with_queries) copy_query_part(part);
      const int half = part / 2;
      if (part % 2 == 0 && n > 0) {
        tile::barrier_wait(shared.emptied(kSlot, half ^ kSlot), (n - 1) & 1);
      }
      copy_part(kSlot, part, shared.slot(kSlot), kv_rows);
      tile::barrier_arrive_after_copies(shared.filled(kSlot, part));
    }
  }

  MLA_DEVICE void start_queries(const Item& item) {
    await_queries_emptied();
    const QueryLoader queries(item);
    queries_aligned = queries.aligned;
    if (!queries_aligned) {
      queries.copy_tile<L::kRows, L::kDim, L::kGroupWarps>(shared.queries(), warp, lane);
    }
#pragma unroll
    for (int g = 0; g < kCopyRows; ++g) {
      query_rows[g] = reinterpret_cast<const uint8_t*>(queries.row(row(g))) + chunk_bytes();
    }
  }
  // Runs after the copies of the first KV rows, which do not wait for queries. All lanes wait for
  // the warp's last chunk, by one load; earlier chunks have nearly always arrived by then. If the
  // wait times out, chunks are read in host memory. Chunks are handled row by row, to save
  // registers.
  MLA_DEVICE void bring_arriving_queries(const Item& item) {
    if constexpr (Args::kStreams) {
      await_queries_emptied();
      const QueryLoader queries(item);
      const auto chunks_of = [&](int g) {
        return reinterpret_cast<const uint8_t*>(queries.row(row(g))) + chunk_bytes();
      };
      const auto place = [&](int g, int block) {
        return shared.queries() + block * L::kBlockBytes + row(g) * 128 + (lane & 7) * 16;
      };
      const int last_row = ((kCopyRows - 1) * 4 + warp) * kWarpRows + kWarpRows - 1;
      const int last = last_row < item.rows ? last_row : item.rows - 1;
      const bool come = tile::await_queries(queries.row(last) + L::kDim - 8, args, shared.begun());
      if (!come) args.report->impatient = args.ticket;
#pragma unroll 1
      for (int g = 0; g < kCopyRows; ++g) {
        const uint8_t* from = chunks_of(g);
        if (!come) from += away(*item.segment);
#pragma unroll
        for (int block = 0; block < L::kBlocks; ++block) {
          tile::copy_chunk(place(g, block), from + block * 128);
        }
      }
      tile::close_copies();
      tile::wait_for_copies<0>();
      bool all = true;
#pragma unroll 1
      for (int g = 0; come && g < kCopyRows; ++g) {
#pragma unroll 3
        for (int block = 0; block < L::kBlocks; ++block) {
          all &= tile::has_come(tile::load_chunk_shared(place(g, block)));
        }
      }
#pragma unroll 1
      for (int g = 0; !all && g < kCopyRows; ++g) {
        const uint8_t* const from = chunks_of(g);
#pragma unroll 1
        for (int block = 0; block < L::kBlocks; ++block) {
          if (tile::has_come(tile::load_chunk_shared(place(g, block)))) continue;
          tile::store_chunk(place(g, block), tile::await_chunk(from + block * 128, args));
        }
      }
#pragma unroll
      for (int part = 0; part < L::kParts; ++part) {
        tile::barrier_arrive(shared.queries_filled(part));
      }
    }
  }
  // Returns the distance in bytes from the device's copy of a segment's queries to the originals in
  // host memory.
  MLA_DEVICE static int64_t away(MLA_RECORD const SegmentRecord& r) {
    return reinterpret_cast<const uint8_t*>(r.list) - static_cast<const uint8_t*>(r.q);
  }
  MLA_DEVICE void await_queries_emptied() {
    if constexpr (L::kLists) {
      tile::barrier_wait(shared.queries_emptied(), uses.template next<kQueries>() ^ 1);
    } else {
      const uint32_t n = items++;
      if (n > 0) tile::barrier_wait(shared.queries_emptied(), (n - 1) & 1);
    }
  }
  MLA_DEVICE void copy_query_part(int part) const {
    if (!queries_aligned) {  // already copied
      tile::barrier_arrive(shared.queries_filled(part));
      return;
    }
    copy_part(0, part, shared.queries(), query_rows);
    tile::barrier_arrive_after_copies(shared.queries_filled(part));
  }

  const Args& args;
  const L shared;
  const int lane, warp;
  const uint8_t* kv_rows[kCopyRows];     // addresses of this lane's chunks of the next tile
  const uint8_t* query_rows[kCopyRows];  // addresses of its chunks of the item's queries
  bool queries_aligned = true;
  uint32_t used[2] = {0, 0};
  uint32_t items = 0;
  // With lists instead of these: tiles of both slots, items. A wait for the phase before the first
  // one returns at once.
  Phases<3, true> uses;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_PRODUCER_H_
