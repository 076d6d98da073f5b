// The group of attend_wide.h that copies queries and KV rows.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDENING_PRODUCER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDENING_PRODUCER_H_

#include "kernels/hip/device/kv/window_source.h"
#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_layout.h"
#include "kernels/hip/device/sm90/decode/rows64_widened/row_rounds.h"
#include "kernels/hip/device/sm90/fp8_instructions.h"

namespace mla::kernels::hip {

// Widens rows of 8 bits to bf16 and writes them to the slots of WgmmaLayout, half a tile at a time,
// four lanes a row. A lane copies its chunks of 16 codes through a staging area of its own,
// L::kStages of them at a time, and widens two together, so that one's instructions run in the
// other's waits. Chunks that are bf16 already are copied straight to their slot.
// RowRounds prefetches rows to the L2, three to six halves ahead.
template <class C>
class WideningProducer {
 public:
  using L = WgmmaLayout<C>;
  using lds_t = tile::lds_t;
  // Registers of a thread. A lane that finds rows of lists holds where they lie.
  static constexpr int kRegisters = L::kLists ? 104 : 72;
  static constexpr int kTileArrivals = L::kTileArrivals, kQueryArrivals = L::kQueryArrivals;

  MLA_DEVICE WideningProducer(const AttendArgs& a, const L& layout)
      : args(a), shared(layout), warp(tile::wave_index() & 3), lane(tile::lane_index()) {}

  MLA_DEVICE void produce(const Item& item) {
    const Source source(args, item);
    if (source.begin >= source.end) return;
    const int tiles = (source.end - source.begin + C::kTileKv - 1) / C::kTileKv;
    Rounds rounds(source, source.begin + row(), lane);
    Stream stream;
    stream.next = rounds.first_row();
#pragma unroll
    for (int i = 0; i < L::kStages; ++i) fetch(stream.next, offset(0, i), i);
    bool brought = false;
    for (int step = 0;; ++step) {
      // Widening the first tile needs no queries, so that the groups may still work on the item
      // before.
      if (!brought && (step == 2 || queries_are_free())) {
        bring_queries(item);
        brought = true;
      }
      if (step == 2 * tiles) break;
      const int of_round = step % Rounds::kSteps;
      if (of_round == 0) rounds.begin(source);
      if (of_round == 1) rounds.find(source);
      stream.row = stream.next;
      stream.next = rounds.row_after(of_round);
      stream.scales = rounds.scales_of(of_round);
      stream.seen = rounds.seen_of(of_round);
      if ((step & 2) == 0) {
        store_half<0>(step & 1, stream);
      } else {
        store_half<1>(step & 1, stream);
      }
    }
    tile::wait_for_copies<0>();
  }

 private:
  using Source = RowSource<C::kAttention>;
  static constexpr bool kRowScales = C::kFormat == KvFormat::kFp8Row;
  // For kFp8Page the last column block of values is bf16, and scales are exponents stored after the
  // page's rows.
  static constexpr bool kPages = C::kFormat == KvFormat::kFp8Page;
  static constexpr int kCodeBlocks = C::kLora / 64;  // column blocks, that of keys alone excluded
  // Chunks of codes a lane and row, in the order of a slot: one of each block that has codes. The
  // block of keys alone has them in kFp8Tensor.
  static constexpr int kTurns = kPages       ? kCodeBlocks - 1
                                : kRowScales ? kCodeBlocks
                                             : kCodeBlocks + 1;
  static constexpr int kRopeAt = C::kLora + (kRowScales ? 16 : 0);
  static constexpr int kPageCodes = C::kLora - 64;  // codes of a row of kPages
  static constexpr int kHalfRows = L::kRows / 2;
  static constexpr int kOtherHalf = L::kHalfBlocks;  // column blocks to the other half
  static constexpr int kQueries = 2;                 // its bit in `uses`
  static_assert(kTurns >= L::kStages);
  static_assert(!kPages || !L::kRotated);

  static constexpr int kRowBytes = kPages ? kPageCodes + 128 : kRopeAt + (kRowScales ? 128 : 64);
  using Rounds = RowRounds<Source, kHalfRows, kRowBytes,
                           kPages       ? 8
                           : kRowScales ? 16
                                        : 0,
                           C::kLora>;

  // This step's row and the next step's; four lanes share a row.
  struct Stream {
    const uint8_t *row, *next;
    Chunk scales;
    uint32_t seen;  // see RowRounds
    int taken = 0;  // chunks of the item
  };

  // Returns the index of this lane's row in a half tile.
  MLA_DEVICE int row() const { return warp * 8 + (lane >> 2); }

  // Staging address of this lane's n-th chunk of the item.
  MLA_DEVICE lds_t staged(int n) const {
    const int stage = n % L::kStages;
    return shared.staging() + ((stage * L::kGroupWarps + warp) * tile::kWave + lane) * 16;
  }
  // The number in the item of a step's chunk, up to a multiple of the stages.
  MLA_DEVICE static int number(const Stream& stream, int turn) {
    return kTurns % L::kStages == 0 ? turn : stream.taken + turn;
  }
  MLA_DEVICE void fetch(const uint8_t* row, int at, int stage) const {
    tile::copy_chunk(staged(stage), row + at);
    tile::close_copies();
  }
  // Returns where a row has this lane's chunk of a turn: the second slot begins with the other
  // half.
  MLA_DEVICE int offset(int slot, int turn) const {
    const int quarter = (lane & 3) * 16;
    if (turn == kCodeBlocks) return kRopeAt + quarter;
    const int first =
        kPages ? kTurns - kOtherHalf : kOtherHalf;  // turns of the second slot's first half
    const int block = slot == 0 ? turn : turn < first ? turn + kOtherHalf : turn - first;
    return block * 64 + quarter;
  }

  MLA_DEVICE uint32_t query_phase() const { return (uses >> kQueries & 1) ^ 1; }
  // Returns true if this warp need not wait to bring queries.
  MLA_DEVICE bool queries_are_free() const {
    return tile::any(tile::barrier_ended(shared.queries_emptied(), query_phase()));
  }
  MLA_DEVICE void bring_queries(const Item& item) {
    tile::barrier_wait(shared.queries_emptied(), query_phase());
    uses ^= 1u << kQueries;
    const QueryLoader queries(item);
    if (queries.aligned) {
      copy_queries(queries);
    } else {
      queries.copy_tile<L::kRows, L::kDim, L::kGroupWarps>(shared.queries(), warp, lane);
    }
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      if (queries.aligned) {
        tile::barrier_arrive_after_copies(shared.queries_filled(part));
      } else {
        tile::barrier_arrive(shared.queries_filled(part));
      }
    }
  }

  // Each lane finds one of the warp's rows, because finding a row takes longer than copying it.
  MLA_DEVICE void copy_queries(const QueryLoader& queries) const {
    constexpr int kWarpRows = L::kRows / L::kGroupWarps;
    const int own = (lane & (kWarpRows - 1)) * L::kGroupWarps + warp;
    const auto* const found = reinterpret_cast<const uint8_t*>(queries.row(own));
#pragma unroll 2
    for (int i = 0; i < kWarpRows; ++i) {
      const uint8_t* const from = row_from_lane(found, i);
      for (int c = lane; c < L::kDim / 8; c += tile::kWave) {
        tile::copy_chunk(tile::chunk_at<L::kRows>(shared.queries(), i * L::kGroupWarps + warp, c),
                         from + c * 16);
      }
    }
  }

  // Writes the rows of this step, half `half` of a tile, part by part. As soon as it has
  // taken chunks from their stages, it fetches as many later chunks into these.
  template <int kSlot>
  MLA_DEVICE void store_half(int half, Stream& stream) {
    const int tile_row = half * kHalfRows + row();
    const lds_t target =
        shared.slot(kSlot) + tile_row * 128 + (((lane & 3) * 2) ^ tile::swizzle(tile_row)) * 16;
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      if (part % 2 == 0 && half == 0) wait_emptied(kSlot, (part / 2) ^ kSlot);
      if (L::kDirect && part == L::direct_part(kSlot) - 1) copy_direct<kSlot>(target, stream);
      if (L::kLists && part == 0) write_seen(kSlot, half, stream.seen);
      const int block = 2 * part ^ kSlot * kOtherHalf;
      const int turn = kPages && kSlot == 1 && part >= 2 ? 2 * part - 1 : 2 * part;
      if (kPages && block + 2 == kCodeBlocks) {  // the second one is bf16
        Chunk codes[1];
        take(turn, stream, codes);
        write_codes(codes[0], scale(stream, block), target + block * L::kBlockBytes);
        refetch<kSlot, 1>(turn, half, stream);
      } else {
        Chunk codes[2];
        take(turn, stream, codes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          write_codes(codes[i], scale(stream, block + i), target + (block + i) * L::kBlockBytes);
        }
        refetch<kSlot, 2>(turn, half, stream);
      }
      if (kTurns > kCodeBlocks && part == L::kParts - 1) {
        Chunk codes[1];
        take(kCodeBlocks, stream, codes);
        write_codes(codes[0], 1.0f, target + kCodeBlocks * L::kBlockBytes);
        refetch<kSlot, 1>(kCodeBlocks, half, stream);
      }
      publish(shared.filled(kSlot, part));
    }
    stream.taken += kTurns;
    if (half != 0) uses ^= 1u << kSlot;
  }
  // Waits for the chunks of a step from `turn` on and loads them.
  template <int kCount>
  MLA_DEVICE void take(int turn, const Stream& stream, Chunk (&chunks)[kCount]) const {
    tile::wait_for_copies<L::kStages - kCount>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      chunks[i] = tile::load_chunk_shared(staged(number(stream, turn + i)));
    }
  }
  // Fetches chunks into the stages whose chunks, from `turn` on, were taken last.
  template <int kSlot, int kCount>
  MLA_DEVICE void refetch(int turn, int half, const Stream& stream) const {
#pragma unroll
    for (int i = turn; i < turn + kCount; ++i) {
      const int ahead = i + L::kStages;
      if (ahead < kTurns) {
        fetch(stream.row, offset(kSlot, ahead), number(stream, i));
      } else {  // a tile's first half is followed by its second one, which has the same slot
        const int same = offset(kSlot, ahead - kTurns), other = offset(kSlot ^ 1, ahead - kTurns);
        fetch(stream.next, half == 0 ? same : other, number(stream, i));
      }
    }
  }
  // Starts the copies of this row's chunks that are bf16, and lets the groups wait for them.
  template <int kSlot>
  MLA_DEVICE void copy_direct(lds_t target, const Stream& stream) const {
    const int block = kPages ? kCodeBlocks - 1 : kCodeBlocks;
    const uint8_t* const from = stream.row + (kPages ? kPageCodes : kRopeAt) + (lane & 3) * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile::copy_chunk((target + block * L::kBlockBytes) ^ (i * 16), from + i * 16);
    }
    tile::barrier_arrive_after_copies(shared.filled(kSlot, L::direct_part(kSlot)));
  }

  // Returns the scale of a column block: for kPages twice, in bf16.
  MLA_DEVICE static auto scale(const Stream& stream, int block) {
    const uint32_t(&w)[4] = stream.scales.w;
    if constexpr (kPages) {
      const uint32_t pair = w[block / 2];
      return block % 2 == 0 ? tile::choose_bytes<0x1010>(pair, 0)
                            : tile::choose_bytes<0x3232>(pair, 0);
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
  MLA_DEVICE void write_seen(int slot, int half, uint32_t seen) const {
    if (lane == 0) tile::store_word(shared.seen(slot, half * (kHalfRows / 8) + warp), seen);
  }

  MLA_DEVICE static Chunk widened(const uint32_t (&codes)[2], float by) {
    return fp8_chunk(codes, by);
  }
  // Any code is exact in bf16, so the product is rounded once here, too.
  MLA_DEVICE static Chunk widened(const uint32_t (&codes)[2], uint32_t pair) {
    Chunk c = fp8_chunk(codes, 1.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) c.w[i] = tile::multiply_bf16_pairs(c.w[i], pair);
    return c;
  }
  // Writes 16 codes, times their scale, as two neighbouring chunks.
  template <class Scale>
  MLA_DEVICE void write_codes(const Chunk& codes, Scale by, lds_t target) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t eight[2] = {codes.w[2 * i], codes.w[2 * i + 1]};
      tile::store_chunk(target ^ (i * 16), widened(eight, by));
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
