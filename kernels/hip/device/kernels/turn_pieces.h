// Places in a turn of absorbed attention for the pieces of its work for later tiles.
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_TURN_PIECES_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_TURN_PIECES_H_

#include "kernels/hip/device/target/vendor.h"

namespace mla::kernels::hip {

// A turn reads kKeys operands of keys, then kValues of values, and does kPieces pieces after some
// of those reads: the last kOfValues of them after reads of values, and none before read kBefore.
// Pieces are spread evenly over the reads of keys. The last ones, which only start loads, follow
// early reads of values: so their loads have longer to arrive.
template <int kKeys, int kValues, int kPieces, int kOfValues, int kBefore>
struct TurnPieces {
  // The first piece that follows read n; the pieces before first(n + 1) do, too.
  MLA_DEVICE static constexpr int first(int n) {
    constexpr int kOfKeys = kPieces - kOfValues;
    if (n < kBefore) return 0;
    if (n < kKeys) return spread(n - kBefore, kOfKeys, kKeys - kBefore);
    return kOfKeys + spread(n - kKeys, kOfValues, kValues / 4);
  }

 private:
  MLA_DEVICE static constexpr int spread(int i, int pieces, int places) {
    return i < places ? (i * pieces + places - 1) / places : pieces;
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_TURN_PIECES_H_
