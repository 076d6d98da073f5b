// Finds the rows of the steps of WideningProducer, four steps at a time, and their scales.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_ROW_ROUNDS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_ROW_ROUNDS_H_

#include "kernels/hip/device/kv/row_finder.h"
#include "kernels/hip/device/sm90/e4m3_instructions.h"

namespace mla::kernels::hip {

// A step takes eight rows a warp, and four lanes share a row. Each of the four looks up the row of
// another step, so that a look-up is paid for once in four steps, a *round*. It begins a round
// ahead, and no load of it is used before the step after the one that started it:
//
//     first step of a round:   the list's word of the round after the next, the page of the next
//     second step:             the scales of the next round's rows, which are prefetched to the L2
//
// kScaleBytes: of a row's scales, 16 (fp32, kScalesAt bytes into the row), 8 (exponents that follow
// the page's rows) or 0.
template <class Source, int kPlaces, int kRowBytes, int kScaleBytes, int kScalesAt>
class RowRounds {
 public:
  static constexpr int kSteps = 4;

  // `first` is the place of the lane's row in the first step. Steps are kPlaces places apart.
  // REQUIRES source.begin < source.end.
  MLA_DEVICE RowRounds(const Source& source, int first, int of_lane)
      : lane(of_lane), next_place(first + (of_lane & 3) * kPlaces), word(source.word(next_place)) {
    look_up(source);
    find(source);
  }

  // Called before the first step of a round.
  MLA_DEVICE void begin(const Source& source) {
    now = next;
    seen_now = seen_next;
    if constexpr (kScaleBytes == 8) {
      widen_exponents();
    } else if constexpr (kScaleBytes == 16) {
      scales = raw;
    }
    look_up(source);
  }
  // Called before the second step of a round.
  MLA_DEVICE void find(const Source& source) {
    next = source.address(granule, inside);
    const uint8_t* from = next + kScalesAt;
    if constexpr (kScaleBytes == 8) from = source.exponents(granule, inside);
#pragma unroll
    for (int i = 0; i < kScaleBytes / 4; ++i) raw.w[i] = as_global<const uint32_t>(from)[i];
#pragma unroll
    for (int i = 0; i < kRowBytes; i += kLine) tile::prefetch(next + i);
    tile::prefetch(next + kRowBytes - 1);
  }

  // The first row after the constructor.
  MLA_DEVICE const uint8_t* first_row() const { return row_from_lane(next, lane & ~3); }
  // The row of the step after `step` (0 to 3) of the round. REQUIRES that find() was called in the
  // round if `step` is 3.
  MLA_DEVICE const uint8_t* row_after(int step) const {
    return row_from_lane(step == kSteps - 1 ? next : now, of_step((step + 1) % kSteps));
  }
  // The scales of the step: four fp32, or eight powers of two in bf16.
  MLA_DEVICE Chunk scales_of(int step) const {
    Chunk c{};
    if constexpr (kScaleBytes > 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c.w[i] = tile::from_lane(scales.w[i], of_step(step));
    }
    return c;
  }
  // Four bits for each of the warp's rows of the step: set if the item's query row sees it.
  MLA_DEVICE uint32_t seen_of(int step) const { return (seen_now >> step & 0x11111111u) * 0xfu; }

 private:
  static constexpr int kLine = 128;  // bytes

  MLA_DEVICE int of_step(int step) const { return (lane & ~3) | step; }
  MLA_DEVICE void look_up(const Source& source) {
    const int entry = source.entry_of(next_place, word);
    const RowSpot spot = source.spot(source.position_of(entry));
    granule = *as_global<const uint32_t>(spot.entry);
    inside = spot.inside;
    if constexpr (Source::kLists) {
      seen_next = tile::ballot(next_place < source.end && source.sees_entry(entry));
    }
    next_place += kSteps * kPlaces;
    word = source.word(next_place);
  }
  // An exponent of 0 is 2^-127, which is subnormal in bf16, too; one that is too large becomes NaN.
  MLA_DEVICE void widen_exponents() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t of_two[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t bits = (raw.w[i / 2] >> (i % 2 * 16 + k * 8) & 0xffu) << 23;
        of_two[k] = float_to_bits(stored_scale(bits_to_float(bits == 0 ? 1u << 22 : bits)));
      }
      scales.w[i] = tile::choose_bytes<0x7632>(of_two[0], of_two[1]);
    }
  }

  const int lane;
  int next_place;                        // place of the row that is looked up next
  int word;                              // its word
  uint32_t granule;                      // page of the next round's row
  int inside;                            // its row in that page, see RowSpot
  const uint8_t *now, *next;             // this lane's rows of the round and of the next one
  Chunk scales, raw;                     // their scales; those of the next round as they are stored
  uint32_t seen_now = 0, seen_next = 0;  // bit l: lane l's row is seen
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_ROW_ROUNDS_H_
