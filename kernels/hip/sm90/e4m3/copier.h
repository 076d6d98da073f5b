// The copying group of attend_e4m3.h.
#ifndef MLA_KERNELS_HIP_SM90_E4M3_COPIER_H_
#define MLA_KERNELS_HIP_SM90_E4M3_COPIER_H_

#include "kernels/hip/kv/row_source.h"
#include "kernels/hip/sm90/e4m3/layout.h"

namespace mla::kernels::hip {

// Copies the KV rows of one item after the other, 64 keys a slot. A warp takes 16 rows, eight lanes
// a row; where a row lies is one lane's business: its entry is read three tiles ahead and its entry
// of the page table two tiles ahead, so no load is waited for.
//
// Rows of fp8_row get one scale instead of four, a power of two: codes and rotated part are brought
// to it in the slot. Copies of up to kBehind tiles run ahead of that, where slots are free.
template <class C>
class E4m3Copier {
 public:
  using L = E4m3Layout<C>;
  using lds_t = tile::lds_t;
  using Source = RowSource<C::kAttention>;

  MLA_DEVICE E4m3Copier(const AttendArgs& a, const L& layout)
      : args(a), shared(layout), warp(tile::wave_index() & 3), lane(tile::lane_index()) {}

  MLA_DEVICE void copy(const Item& item) {
    const Source source(args, item);
    if (source.begin >= source.end) return;
    const int tiles = (source.end - source.begin + C::kTileKv - 1) / C::kTileKv;
    Finder finder(source, source.begin + warp * kRows + (lane & (kRows - 1)));
    for (int t = 0; t < tiles; ++t) {
      wait_emptied();
      if constexpr (L::kLists) write_seen(ring.at, finder.seen);
      copy_tile(ring.at, finder.row);
      if constexpr (L::kScaledRows) {
        tile::close_copies();
        if (++open > kBehind) finish<kBehind>();
      } else {
        tile::barrier_arrive_after_copies(shared.filled(ring.at));
      }
      ring.next();
      finder.next(source);
    }
    finish_all();
  }

 private:
  static constexpr int kRows = 16;           // of a tile, of a warp
  static constexpr int kLaneRows = 4;        // of a tile, that a lane copies chunks of
  static constexpr int kBehind = 1;          // tiles
  static constexpr float kLeast = 0x1p-60f;  // scale of a key
  static_assert(4 * kRows == L::kKeys);

  // Where this lane's row of a tile lies.
  struct Finder {
    const uint8_t* row;
    bool seen;
    int at;                // place of the row in the next tile but two
    int entry;             // of that row
    uint32_t granule = 0;  // of the page of the next tile's row
    int inside = 0;
    bool next_seen = false;

    MLA_DEVICE Finder(const Source& source, int first) : at(first) {
      entry = source.entry(at);
      next(source);
      next(source);
    }
    MLA_DEVICE void next(const Source& source) {
      row = source.pages.address(granule, inside);
      seen = next_seen;
      const typename PagedRows::Place place = source.pages.place(source.position_of(entry));
      granule = source.pages.granule(place.page);
      inside = place.inside;
      next_seen = at < source.end && source.sees_entry(entry);
      at += C::kTileKv;
      entry = source.entry(at);
    }
  };

  // Of this lane's i-th row.
  MLA_DEVICE static int row_lane(int i, int lane) { return i * 4 + (lane >> 3); }
  MLA_DEVICE int row(int i) const { return warp * kRows + row_lane(i, lane); }
  MLA_DEVICE static const uint8_t* from_lane(const uint8_t* x, int from) {
    const auto bits = reinterpret_cast<uintptr_t>(x);
    const uint64_t low = tile::from_lane(static_cast<uint32_t>(bits), from);
    const uint64_t high = tile::from_lane(static_cast<uint32_t>(bits >> 32), from);
    return reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(high << 32 | low));
  }

  MLA_DEVICE void copy_tile(int slot, const uint8_t* mine) const {
    const int place = lane & 7;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const uint8_t* const from = from_lane(mine, row_lane(i, lane));
      const int to = row(i), chunk = place ^ tile::swizzle(to);
#pragma unroll
      for (int block = 0; block < L::kBlocks; ++block) {
        tile::copy_chunk(shared.slot(slot) + block * L::kBlockBytes + to * 128 + place * 16,
                         from + block * 128 + chunk * 16);
      }
      if constexpr (L::kScaledRows) {
        tile::copy_chunk(shared.rope(slot) + to * 128 + place * 16,
                         from + C::kLora + 16 + chunk * 16);
        if (place == i) tile::copy_chunk(shared.raw_scales(slot) + to * 16, from + C::kLora);
      } else if (place >> 2 == (i & 1)) {
        // Four chunks a row: half of a row's eight lanes take each second row.
        const int narrow = place & 3;
        tile::copy_chunk(shared.rope(slot) + to * 64 + narrow * 16,
                         from + C::kLora + (narrow ^ narrow_swizzle(to)) * 16);
      }
    }
  }

  // Bit k: whether key k of this warp's rows is seen.
  MLA_DEVICE void write_seen(int slot, bool seen) const {
    const uint32_t word = tile::ballot(seen) & 0xffffu;
    if (lane == 0) {
      tile::store_half_word(shared.seen(slot) + warp * 2, word);
      if (!L::kScaledRows) tile::barrier_arrive(shared.filled(slot));
    }
  }

  // Until the next slot is free. It may be so only once tiles that were copied are finished.
  MLA_DEVICE void wait_emptied() {
    const lds_t barrier = shared.emptied(ring.at);
    if (L::kScaledRows && !tile::any(tile::barrier_ended(barrier, ring.parity ^ 1))) finish_all();
    tile::barrier_wait(barrier, ring.parity ^ 1);
  }
  MLA_DEVICE void finish_all() {
    if constexpr (L::kScaledRows) {
      static_assert(kBehind == 1);
      if (open > 0) finish<0>();
    }
  }
  // The oldest tile that has been copied; kYounger are under way.
  template <int kYounger>
  MLA_DEVICE void finish() {
    --open;
    tile::wait_for_copies<kYounger>();
    tile::sync_warp();
    to_one_scale(finished.at);
    tile::publish_shared();
    tile::barrier_arrive(shared.filled(finished.at));
    finished.next();
  }
  MLA_DEVICE void to_one_scale(int slot) const {
    const lds_t at = row(0) * 128 + (lane & 7) * 16;  // of a block, and from row to row 4 x 128
    float inverse[kLaneRows];
    bool mixed = false;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int key = row(i);
      const Chunk raw = tile::load_chunk_shared(shared.raw_scales(slot) + key * 16);
      float top = kLeast;
#pragma unroll
      for (int b = 0; b < L::kBlocks; ++b) top = max_f(top, stored_scale(bits_to_float(raw.w[b])));
      const uint32_t power = (float_to_bits(top) + 0x7fffffu) & 0x7f800000u;
#pragma unroll
      for (int b = 0; b < L::kBlocks; ++b) mixed |= raw.w[b] != power;
      inverse[i] = bits_to_float((254u << 23) - power);
      if ((lane & 7) == 0) {
        tile::store_float(shared.key_scales(slot) + key * 4, bits_to_float(power));
        tile::store_float(shared.key_exponents(slot) + key * 4,
                          static_cast<float>(static_cast<int>(power >> 23) - 127));
      }
    }
    divide_rotated(shared.rope(slot) + at, inverse);
    if (!tile::any(mixed)) return;
#pragma unroll 1
    for (int b = 0; b < L::kBlocks; ++b) {
      const lds_t block = shared.slot(slot) + b * L::kBlockBytes + at;
      Chunk codes[kLaneRows];
      float scale[kLaneRows];
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        codes[i] = tile::load_chunk_shared(block + i * (4 * 128));
        scale[i] = tile::load_float(shared.raw_scales(slot) + row(i) * 16 + b * 4);
      }
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        multiply(codes[i], stored_scale(scale[i]) * inverse[i]);
        tile::store_chunk(block + i * (4 * 128), codes[i]);
      }
    }
  }
  MLA_DEVICE static void divide_rotated(lds_t at, const float (&inverse)[kLaneRows]) {
    Chunk rotated[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      rotated[i] = tile::load_chunk_shared(at + i * (4 * 128));
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const uint32_t by = pack_bf16(inverse[i], inverse[i]);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        rotated[i].w[w] = tile::multiply_bf16_pairs(rotated[i].w[w], by);
      }
      tile::store_chunk(at + i * (4 * 128), rotated[i]);
    }
  }
  // By at most 1.
  MLA_DEVICE static void multiply(Chunk& codes, float by) {
    const uint32_t pair = tile::pack_f16(by, by);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      codes.w[w] =
          tile::e4m3_of_f16(tile::multiply_f16_pairs(tile::fp8_to_f16<0>(codes.w[w]), pair),
                            tile::multiply_f16_pairs(tile::fp8_to_f16<1>(codes.w[w]), pair));
    }
  }

  const AttendArgs& args;
  const L shared;
  const int warp, lane;
  Ring<L::kSlots> ring, finished;
  int open = 0;  // tiles that are copied or on their way, and not finished
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SM90_E4M3_COPIER_H_
