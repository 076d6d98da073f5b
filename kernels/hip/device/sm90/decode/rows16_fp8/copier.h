// The copying group of attend_fp8.h.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_COPIER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_COPIER_H_

#include "kernels/hip/device/kv/row_source.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"

namespace mla::kernels::hip {

// Copies the KV rows of one item after the other, 64 keys a slot.
template <class C, class Args = AttendArgs>
class Fp8Copier {
 public:
  using L = Fp8Layout<C>;
  using lds_t = tile::lds_t;
  using Source = RowSource<C::kAttention>;

  MLA_DEVICE Fp8Copier(const Args& a, const L& layout)
      : args(a), shared(layout), thread(thread_index() & (L::kGroupThreads - 1)) {}

  MLA_DEVICE void copy(const Item& item) {
    const Source source(args, item);
    if (source.begin >= source.end) return;
    find(source, source.begin);
    for (int first = source.begin; first < source.end; first += C::kTileKv) {
      tile::barrier_wait(shared.emptied(ring.slot), ring.parity ^ 1);
      copy_tile();
      tile::barrier_arrive_after_copies(shared.filled(ring.slot));
      ring.next();
      find(source, first + C::kTileKv);
    }
  }

 private:
  static constexpr int kRows = 4;  // rows of a tile that this lane copies chunks of

  MLA_DEVICE int row(int i) const { return i * 16 + (thread >> 3); }
  // Finds this lane's rows of the tile at `first`.
  MLA_DEVICE void find(const Source& source, int first) {
    source.find(rows, first, [this](int i) { return row(i); });
  }

  MLA_DEVICE void copy_tile() const {
    const int place = thread & 7, chunk = place ^ tile::swizzle(row(0));
    const lds_t slot = shared.slot(ring.slot), rope = shared.rope(ring.slot);
#pragma unroll
    for (int block = 0; block < C::kLora / 128; ++block) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        tile::copy_chunk(slot + block * (L::kKeys * 128) + row(i) * 128 + place * 16,
                         rows[i] + block * 128 + chunk * 16);
      }
    }
    if constexpr (L::kScaledRows) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        tile::copy_chunk(rope + row(i) * 128 + place * 16, rows[i] + C::kLora + 16 + chunk * 16);
        if (place == i) {
          tile::copy_chunk(shared.raw_scales(ring.slot) + row(i) * 16, rows[i] + C::kLora);
        }
      }
    } else {
      // Four chunks a row: each half of a row's eight lanes takes every second row.
      const int half = place >> 2, narrow = place & 3;
#pragma unroll
      for (int i = 0; i < kRows; i += 2) {
        const uint8_t* const from = half != 0 ? rows[i + 1] : rows[i];
        const int to = row(i) + half * 16;
        tile::copy_chunk(rope + to * 64 + narrow * 16,
                         from + C::kLora + (narrow ^ narrow_swizzle(to)) * 16);
      }
    }
  }

  const Args& args;
  const L shared;
  const int thread;
  const uint8_t* rows[kRows];
  Ring<L::kSlots> ring;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_COPIER_H_
