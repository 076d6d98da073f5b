// The format of rows that the loop of common/attend.h computes on.
#ifndef MLA_KERNELS_HIP_AMD_TILE_FORMAT_OF_H_
#define MLA_KERNELS_HIP_AMD_TILE_FORMAT_OF_H_

#include "kernels/hip/amd/e4m3_format.h"
#include "kernels/hip/amd/fp8_format.h"
#include "kernels/hip/amd/page_format.h"

namespace mla::kernels::hip {

template <KvFormat kFormat, class C, DType kProducts = C::kProducts>
struct TileFormatOf {
  using Wave = tile::Wave<C::kWaveRows>;
  using Type = Fp8Format<kFormat, C, Wave>;
};
template <class C>
struct TileFormatOf<KvFormat::kBf16, C, DType::kBf16> {
  using Wave = tile::Wave<C::kWaveRows>;
  using Type = Bf16Format<C, Wave>;
};
template <class C>
struct TileFormatOf<KvFormat::kFp8Page, C, DType::kBf16> {
  using Wave = tile::Wave<C::kWaveRows>;
  using Type = PageFormat<C, Wave>;
};
template <KvFormat kFormat, class C>
struct TileFormatOf<kFormat, C, DType::kFp8E4m3> {
  using Wave = tile::CodeWave<C::kWaveRows>;
  using Type = E4m3Format<C>;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_AMD_TILE_FORMAT_OF_H_
