// The group of attend_wide.h that copies queries and KV rows.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDENING_PRODUCER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDENING_PRODUCER_H_

#include "kernels/hip/device/kv/row_finder.h"
#include "kernels/hip/device/kv/window_source.h"
#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_layout.h"
#include "kernels/hip/device/sm90/fp8_instructions.h"

namespace mla::kernels::hip {

// Widens rows of 8 bits to bf16 and writes them to the slots of WgmmaLayout, half a tile at a time,
// four lanes a row. A lane copies its chunks of 16 bytes through a staging area of its own,
// L::kStages of them at a time, and widens two together, so that one's instructions run in the
// other's waits.
template <class C>
class WideningProducer {
 public:
  using L = WgmmaLayout<C>;
  using lds_t = tile::lds_t;

  MLA_DEVICE WideningProducer(const AttendArgs& a, const L& layout)
      : args(a), shared(layout), warp(tile::wave_index() & 3), lane(tile::lane_index()) {}

  MLA_DEVICE void produce(const Item& item) {
    const Source source(args, item);
    if (source.begin >= source.end) return;
    const int tiles = (source.end - source.begin + C::kTileKv - 1) / C::kTileKv;
    Finder finder(source, source.begin + row());
    Stream stream;
    stream.take(source, finder);
    for (int step = 0; step < 2 * tiles; ++step) {
      const bool seen = finder.sees();
      finder.next(source);
      stream.row = stream.next;
      stream.scales = stream.next_scales;
      stream.take(source, finder);
      prefetch_row(stream.next);
      if (step == 0) {
        for (int i = 0; i < L::kStages; ++i) fetch(0, i, i, stream);
        bring_queries(item);
      }
      store_half(step, seen, stream);
    }
    tile::wait_for_copies<0>();
  }

 private:
  using Source = RowSource<C::kAttention>;
  static constexpr bool kRowScales = C::kFormat == KvFormat::kFp8Row;
  // For kFp8Page the last column block of values is bf16, and scales are exponents stored after the
  // page's rows.
  static constexpr bool kPages = C::kFormat == KvFormat::kFp8Page;
  using Finder = RowFinder<Source, L::kRows / 2>;
  static constexpr int kCodeChunks = C::kLora / 64;  // chunks a lane: one of each column block
  // The rotated part, or the last block of kPages, is two chunks of bf16 or one of codes.
  static constexpr int kRopeChunks = kRowScales ? 2 : 1;
  static constexpr int kChunks = kCodeChunks + kRopeChunks;  // of a lane's row
  static constexpr int kRopeAt = C::kLora + (kRowScales ? 16 : 0);
  static constexpr int kPageCodes = C::kLora - 64;  // codes of a row of kPages
  static constexpr int kHalfRows = L::kRows / 2;
  static constexpr int kOtherHalf = L::kHalfBlocks;  // column blocks to the other half
  static constexpr int kQueries = 2;                 // its bit in `uses`
  static_assert(kChunks > L::kStages);
  static_assert(!kPages || !L::kRotated);

  struct Stream {
    const uint8_t *row, *next;  // rows that chunks are copied from; four lanes share a row
    Chunk scales, next_scales;  // their scales: one fp32 each 128 columns, or a byte each 64
    int taken = 0;              // chunks of the item

    MLA_DEVICE void take(const Source& source, const Finder& finder) {
      next = finder.row(source);
      if constexpr (kPages) {
        load_scales<2>(finder.exponents(source));
      } else if constexpr (kRowScales) {
        load_scales<4>(next + C::kLora);
      }
    }
    template <int kWords>
    MLA_DEVICE void load_scales(const uint8_t* at) {
      const auto* from = as_global<const uint32_t>(at);
#pragma unroll
      for (int i = 0; i < kWords; ++i) next_scales.w[i] = from[i];
    }
  };

  // Returns the index of this lane's row in a half tile.
  MLA_DEVICE int row() const { return warp * 8 + (lane >> 2); }
  // Two halves of a tile share a slot.
  MLA_DEVICE static int slot_of(int step) { return step >> 1 & 1; }

  // With as many stages as kPages has, copies begin soon enough without this.
  MLA_DEVICE void prefetch_row(const uint8_t* from) const {
    if constexpr (kPages) return;
    tile::prefetch(from + (lane & 3) * 128);
    tile::prefetch(from + C::kLora + (kRowScales ? (lane & 1) * 128 : 0));
  }

  // Staging address of this lane's n-th chunk of the item.
  MLA_DEVICE lds_t staged(int n) const {
    const int stage = n & (L::kStages - 1);
    return shared.staging() + ((stage * L::kGroupWarps + warp) * tile::kWave + lane) * 16;
  }
  // Starts the copy of chunk `i` of a step, or of the next step from kChunks on, to the stage of
  // this number. Chunks have the order of a slot: the second slot begins with the other half.
  MLA_DEVICE void fetch(int step, int i, int stage, const Stream& stream) const {
    const uint8_t* from = stream.row;
    if (i >= kChunks) {
      i -= kChunks;
      ++step;
      from = stream.next;
    }
    tile::copy_chunk(staged(stage), from + offset(slot_of(step), i));
    tile::close_copies();
  }
  MLA_DEVICE int offset(int slot, int i) const {
    const int quarter = (lane & 3) * 16;
    if constexpr (kPages) {
      // The two chunks of the last block come at that block's place in the order.
      const int after = i - (slot == 0 ? kCodeChunks - 1 : kOtherHalf - 1);
      if (after == 0 || after == 1) return kPageCodes + 2 * quarter + after * 16;
      return ((after < 0 ? i : i - 1) ^ slot * kOtherHalf) * 64 + quarter;
    } else {
      if (i < kCodeChunks) return (i ^ slot * kOtherHalf) * 64 + quarter;
      return kRopeAt + kRopeChunks * quarter + (i - kCodeChunks) * 16;
    }
  }

  MLA_DEVICE void bring_queries(const Item& item) {
    tile::barrier_wait(shared.queries_emptied(), (uses >> kQueries & 1) ^ 1);
    uses ^= 1u << kQueries;
    const QueryLoader queries(item);
    queries.copy_tile<L::kRows, L::kDim, L::kGroupWarps>(shared.queries(), warp, lane);
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      if (queries.aligned) {
        tile::barrier_arrive_after_copies(shared.queries_filled(part));
      } else {
        tile::barrier_arrive(shared.queries_filled(part));
      }
    }
  }

  // Writes the half tile of `step` part by part. After the chunks it takes, it fetches as many
  // later ones.
  MLA_DEVICE void store_half(int step, bool seen, Stream& stream) {
    const int slot = slot_of(step), tile_row = (step & 1) * kHalfRows + row();
    const lds_t to =
        shared.slot(slot) + tile_row * 128 + (((lane & 3) * 2) ^ tile::swizzle(tile_row)) * 16;
    int chunk = 0;
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      if (part % 2 == 0 && (step & 1) == 0) wait_emptied(slot, (part / 2) ^ slot);
      if (L::kLists && part == 0) write_seen(slot, step, seen);
      const int first = 2 * part ^ slot * kOtherHalf;  // block
      const bool ends_in_bf16 = kPages && first + 2 == kCodeChunks;
      Chunk codes[2];
      take<2>(stream, codes);
      write_codes(codes[0], scale(stream, first), to + first * L::kBlockBytes);
      const lds_t second = to + (first + 1) * L::kBlockBytes;
      if (ends_in_bf16) {
        tile::store_chunk(second, codes[1]);
      } else {
        write_codes(codes[1], scale(stream, first + 1), second);
      }
      refetch<2>(step, chunk, stream);
      if (ends_in_bf16) {
        Chunk last[1];
        take<1>(stream, last);
        tile::store_chunk(second ^ 16, last[0]);
        refetch<1>(step, chunk, stream);
      }
      if (L::kRotated && part == L::kParts - 1) {
        write_rope(step, chunk, to + kCodeChunks * L::kBlockBytes, stream);
      }
      publish(shared.filled(slot, part));
    }
    if ((step & 1) != 0) uses ^= 1u << slot;
  }
  // Waits for the next chunks and loads them.
  template <int kCount>
  MLA_DEVICE void take(Stream& stream, Chunk (&chunks)[kCount]) const {
    tile::wait_for_copies<L::kStages - kCount>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) chunks[i] = tile::load_chunk_shared(staged(stream.taken++));
  }
  // Fetches chunks, from `chunk` of the step on, into the stages that were taken last.
  template <int kCount>
  MLA_DEVICE void refetch(int step, int& chunk, const Stream& stream) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      fetch(step, chunk + i + L::kStages, stream.taken - kCount + i, stream);
    }
    chunk += kCount;
  }
  MLA_DEVICE void write_rope(int step, int& chunk, lds_t to, Stream& stream) const {
    Chunk chunks[kRopeChunks];
    take<kRopeChunks>(stream, chunks);
    if constexpr (kRowScales) {
#pragma unroll
      for (int i = 0; i < kRopeChunks; ++i) tile::store_chunk(to ^ (i * 16), chunks[i]);
    } else {
      write_codes(chunks[0], 1.0f, to);
    }
    refetch<kRopeChunks>(step, chunk, stream);
  }

  // Returns the scale of a column block.
  MLA_DEVICE static float scale(const Stream& stream, int block) {
    const uint32_t(&w)[4] = stream.scales.w;
    if constexpr (kPages) {
      const uint32_t word = block < 4 ? w[0] : w[1];
      const uint32_t bits = (word >> (block & 3) * 8 & 0xffu) << 23;
      return stored_scale(bits_to_float(bits == 0 ? 1u << 22 : bits));  // 2^-127 is denormal
    } else if constexpr (kRowScales) {
      const int group = block / 2;
      const uint32_t low = (group & 1) == 0 ? w[0] : w[1];
      const uint32_t high = (group & 1) == 0 ? w[2] : w[3];
      return stored_scale(bits_to_float(group < 2 ? low : high));
    } else {
      return 1.0f;
    }
  }

  MLA_DEVICE void wait_emptied(int slot, int half) const {
    tile::barrier_wait(shared.emptied(slot, half), (uses >> slot & 1) ^ 1);
  }
  // Arrives for this warp's rows of a part.
  MLA_DEVICE void publish(lds_t barrier) const {
    tile::sync_warp();
    if (lane == 0) tile::barrier_arrive(barrier);
  }
  // Stores which of this warp's rows are seen; belongs to the first part.
  MLA_DEVICE void write_seen(int slot, int step, bool seen) const {
    const uint32_t word = tile::ballot(seen);
    const int eight = (step & 1) * (kHalfRows / 8) + warp;
    if (lane == 0) tile::store_word(shared.seen(slot, eight), word);
  }

  // Writes 16 codes as two neighbouring chunks.
  MLA_DEVICE void write_codes(const Chunk& codes, float scale, lds_t at) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t eight[2] = {codes.w[2 * i], codes.w[2 * i + 1]};
      tile::store_chunk(at ^ (i * 16), fp8_chunk(eight, scale));
    }
  }

  const AttendArgs& args;
  const L shared;
  const int warp, lane;
  uint32_t uses = 0;  // bit s: parity of the tiles that slot s has held; bit kQueries: parity of
                      // items
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDENING_PRODUCER_H_
