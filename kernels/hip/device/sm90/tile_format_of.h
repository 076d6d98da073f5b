// The format of rows that the loop of device/kernels/attend.h uses; rows of 8 bits have kernels of
// their own (device/sm90/decode/rows16_fp8/attend_fp8.h).
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_TILE_FORMAT_OF_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_TILE_FORMAT_OF_H_

#include "kernels/hip/device/kv/tile_format.h"

namespace mla::kernels::hip {

template <KvFormat kFormat, class C>
struct TileFormatOf;
template <class C>
struct TileFormatOf<KvFormat::kBf16, C> {
  using Wave = tile::Wave<C::kWaveRows>;
  using Type = Bf16Format<C, Wave>;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_TILE_FORMAT_OF_H_
