// The group of attend_wide.h that copies queries and KV rows.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDENING_PRODUCER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDENING_PRODUCER_H_

#include "kernels/hip/device/kv/window_source.h"
#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_layout.h"
#include "kernels/hip/device/sm90/fp8_instructions.h"

namespace mla::kernels::hip {

// Widens rows of 8 bits to bf16 and writes them to the slots of WgmmaLayout, half a tile at a time,
// four lanes a row. A lane copies its chunks of 16 bytes through a staging area of its own,
// L::kStages of them at a time. The next half's rows are prefetched to the L2.
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
    Stream stream;
    stream.entry = source.entry(place(source, 0));
    stream.row = find(source, 0, 0, stream);
    for (int i = 0; i < L::kStages; ++i) fetch(0, i, stream);
    load_scales(stream);
    bring_queries(item);
    for (int step = 0; step < 2 * tiles; ++step) store_half(source, step, stream);
    tile::wait_for_copies<0>();
  }

 private:
  using Source = RowSource<C::kAttention>;
  static constexpr bool kRowScales = C::kFormat == KvFormat::kFp8Row;
  // For kFp8Page the last column block of values is bf16, and scales are exponents stored after the
  // page's rows.
  static constexpr bool kPages = C::kFormat == KvFormat::kFp8Page;
  static constexpr int kCodeChunks = C::kLora / 64;       // chunks a lane: one of each column block
  static constexpr int kRopeChunks = kRowScales ? 2 : 1;  // two chunks of bf16 or one of codes
  static constexpr int kChunks = 10;                      // for rows that are all codes, the last
                                                          // one is empty
  static constexpr int kRopeAt = C::kLora + (kRowScales ? 16 : 0);
  static constexpr int kHalfRows = L::kRows / 2;
  static constexpr int kOtherHalf = L::kHalfBlocks;       // column blocks to the other half
  static constexpr int kQueries = 2;                      // its bit in `uses`
  static_assert(kChunks % L::kStages == L::kStages / 2);  // steps begin at two stages in turn

  struct Stream {
    Chunk scales;               // the row's scales: one fp32 each 128 columns, or a byte each 64
    const uint8_t *row, *next;  // rows that chunks are copied from; four lanes share a row
    const uint8_t* exponents;   // exponents of `next`, for kPages
    int entry;                  // entry of the row after these
    uint32_t seen = 0;          // bit i: the query row sees the i-th row from `row` on
  };

  // Returns the index of this lane's row in a half tile.
  MLA_DEVICE int row() const { return warp * 8 + (lane >> 2); }
  MLA_DEVICE int place(const Source& source, int step) const {
    return source.begin + step * kHalfRows + row();
  }
  // Two halves of a tile share a slot.
  MLA_DEVICE static int slot_of(int step) { return step >> 1 & 1; }

  // Finds the row of `step`, the `ahead`-th after the current one, whose entry has been loaded, and
  // loads the next entry. Steps past the item's end repeat its last row.
  MLA_DEVICE const uint8_t* find(const Source& source, int step, int ahead, Stream& stream) const {
    if constexpr (L::kLists) {
      const bool seen = place(source, step) < source.end && source.sees_entry(stream.entry);
      stream.seen |= static_cast<uint32_t>(seen) << ahead;
    }
    const uint8_t* found;
    if constexpr (kPages) {
      found = source.row_of(stream.entry, stream.exponents);
      tile::prefetch(stream.exponents);
    } else {
      found = source.row_of(stream.entry);
    }
    stream.entry = source.entry(place(source, step + 1));
    return found;
  }
  MLA_DEVICE void prefetch_row(const uint8_t* from) const {
    tile::prefetch(from + (lane & 3) * 128);
    tile::prefetch(from + C::kLora + (kRowScales ? (lane & 1) * 128 : 0));
  }
  MLA_DEVICE void load_scales(Stream& stream) const {
    if constexpr (kPages) {
      const auto* from = as_global<const uint32_t>(stream.exponents);
#pragma unroll
      for (int i = 0; i < 2; ++i) stream.scales.w[i] = from[i];
    }
    if constexpr (!kRowScales) return;
    const auto* from = as_global<const uint32_t>(stream.row + C::kLora);
#pragma unroll
    for (int i = 0; i < 4; ++i) stream.scales.w[i] = from[i];
  }

  // Staging address of this lane's chunk `i` of a step's row.
  MLA_DEVICE lds_t staged(int step, int i) const {
    const int stage = i % L::kStages ^ (step & 1) * (L::kStages / 2);
    return shared.staging() + ((stage * L::kGroupWarps + warp) * tile::kWave + lane) * 16;
  }
  // Starts the copy of chunk `i` of a step, or of the next step. Chunks have the order of a slot.
  MLA_DEVICE void fetch(int step, int i, const Stream& stream) const {
    const uint8_t* from = stream.row;
    if (i >= kChunks) {
      i -= kChunks;
      ++step;
      from = stream.next;
    }
    if constexpr (kPages) {
      const Piece piece(slot_of(step), i);
      const int chunk = piece.rotated < 0 ? piece.block * 4 + (lane & 3)
                                          : (kPageCodes / 16) + (lane & 3) * 2 + piece.rotated;
      if (i < kPieces) tile::copy_chunk(staged(step, i), from + chunk * 16);
    } else if (i < kCodeChunks) {
      tile::copy_chunk(staged(step, i), from + block(step, i) * 64 + (lane & 3) * 16);
    } else if (i < kCodeChunks + kRopeChunks) {
      const int chunk = (lane & 3) * kRopeChunks + i - kCodeChunks;
      tile::copy_chunk(staged(step, i), from + kRopeAt + chunk * 16);
    }
    tile::close_copies();
  }
  // For kPages: describes the i-th chunk of a lane. The two chunks of the last block, which is
  // bf16, come at that block's place in the order of the slot.
  static constexpr int kPageCodes = C::kLora - 64;  // values that are codes
  static constexpr int kPieces = kCodeChunks + 1;
  struct Piece {
    int turn;     // block in the order of the slot
    int block;    // block of the tile
    int rotated;  // 0 or 1: index of the bf16 chunk; -1: a chunk of codes
    MLA_DEVICE Piece(int slot, int i) {
      const int last = slot == 0 ? kCodeChunks - 1 : kOtherHalf - 1;
      turn = i <= last ? i : i - 1;
      block = turn ^ slot * kOtherHalf;
      rotated = turn == last ? i - last : -1;
    }
    MLA_DEVICE bool begins_turn() const { return rotated <= 0; }
    MLA_DEVICE bool ends_turn() const { return rotated != 0; }
  };

  // Returns the i-th column block: the second slot begins with the other half.
  MLA_DEVICE static int block(int step, int i) { return i ^ slot_of(step) * kOtherHalf; }

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

  // Writes the half tile of `step` part by part. After each chunk it takes, it fetches one of the
  // next half. Loops are not unrolled, so that the code fits the smallest cache.
  MLA_DEVICE void store_half(const Source& source, int step, Stream& stream) {
    const int slot = slot_of(step), tile_row = (step & 1) * kHalfRows + row();
    const lds_t to =
        shared.slot(slot) + tile_row * 128 + (((lane & 3) * 2) ^ tile::swizzle(tile_row)) * 16;
    stream.next = find(source, step + 1, 1, stream);
    prefetch_row(stream.next);
    if constexpr (kPages) {
      store_pieces(step, slot, to, stream);
    } else {
      store_blocks(step, slot, to, stream);
    }
    publish(shared.filled(slot, L::kParts - 1));
    if ((step & 1) != 0) uses ^= 1u << slot;
    stream.row = stream.next;
    stream.seen >>= 1;
    load_scales(stream);
  }
  MLA_DEVICE void store_blocks(int step, int slot, lds_t to, const Stream& stream) {
#pragma unroll 1
    for (int i = 0; i < kCodeChunks; ++i) {
      if (i % kOtherHalf == 0 && (step & 1) == 0) wait_emptied(slot, (i / kOtherHalf) ^ slot);
      if (L::kLists && i == 0) write_seen(slot, step, (stream.seen & 1) != 0);
      tile::wait_for_copies<L::kStages - 1>();
      const float scale = kRowScales ? pick(stream.scales, block(step, i) / 2) : 1.0f;
      write_codes(tile::load_chunk_shared(staged(step, i)), scale,
                  to + block(step, i) * L::kBlockBytes);
      fetch(step, i + L::kStages, stream);
      if (i % 2 == 1 && i + 2 < kCodeChunks) publish(shared.filled(slot, i / 2));
    }
    write_rope(step, to + kCodeChunks * L::kBlockBytes, stream);
  }
  MLA_DEVICE void store_pieces(int step, int slot, lds_t to, const Stream& stream) {
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const Piece piece(slot, i);
      if (piece.turn % kOtherHalf == 0 && piece.begins_turn() && (step & 1) == 0) {
        wait_emptied(slot, (piece.turn / kOtherHalf) ^ slot);
      }
      if (i == 0) write_seen(slot, step, (stream.seen & 1) != 0);
      tile::wait_for_copies<L::kStages - 1>();
      const Chunk chunk = tile::load_chunk_shared(staged(step, i));
      const lds_t at = to + piece.block * L::kBlockBytes;
      if (piece.rotated >= 0) {
        tile::store_chunk(at ^ (piece.rotated * 16), chunk);
      } else {
        write_codes(chunk, exponent_scale(stream.scales, piece.block), at);
      }
      fetch(step, i + L::kStages, stream);
      if (piece.turn % 2 == 1 && piece.ends_turn() && piece.turn + 2 < kCodeChunks) {
        publish(shared.filled(slot, piece.turn / 2));
      }
    }
    tile::wait_for_copies<L::kStages - 1>();  // for the empty chunk
    fetch(step, kPieces + L::kStages, stream);
  }
  MLA_DEVICE static float exponent_scale(const Chunk& scales, int block) {
    const uint32_t word = block < 4 ? scales.w[0] : scales.w[1];
    const uint32_t bits = (word >> (block & 3) * 8 & 0xffu) << 23;
    return stored_scale(bits_to_float(bits == 0 ? 1u << 22 : bits));  // 2^-127 is denormal
  }
  MLA_DEVICE void write_rope(int step, lds_t to, const Stream& stream) const {
#pragma unroll
    for (int i = 0; i < kChunks - kCodeChunks; ++i) {
      tile::wait_for_copies<L::kStages - 1>();
      if (i < kRopeChunks) {
        const Chunk chunk = tile::load_chunk_shared(staged(step, kCodeChunks + i));
        if constexpr (kRowScales) {
          tile::store_chunk(to ^ (i * 16), chunk);
        } else {
          write_codes(chunk, 1.0f, to);
        }
      }
      fetch(step, kCodeChunks + i + L::kStages, stream);
    }
  }
  // Returns the scale of a group of 128 columns.
  MLA_DEVICE static float pick(const Chunk& scales, int group) {
    const uint32_t low = (group & 1) == 0 ? scales.w[0] : scales.w[1];
    const uint32_t high = (group & 1) == 0 ? scales.w[2] : scales.w[3];
    return stored_scale(bits_to_float(group < 2 ? low : high));
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
