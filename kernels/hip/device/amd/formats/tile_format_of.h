// Chooses the format of rows that the loop of device/kernels/attend.h uses.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_TILE_FORMAT_OF_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_TILE_FORMAT_OF_H_

#include "kernels/hip/device/amd/formats/e4m3_format.h"
#include "kernels/hip/device/amd/formats/fp8_format.h"
#include "kernels/hip/device/amd/formats/widened_format.h"
#if MLA_GFX950
#include "kernels/hip/device/amd/formats/code_key_format.h"
#endif

namespace mla::kernels::hip {

template <KvFormat kFormat, class C, DType kProducts = C::kProducts>
struct TileFormatOf;
template <class C>
struct TileFormatOf<KvFormat::kBf16, C, DType::kBf16> {
  using Wave = tile::Wave<C::kWaveRows>;
  using Type = Bf16Format<C, Wave>;
};
template <class C>
struct TileFormatOf<KvFormat::kFp8Tensor, C, DType::kBf16> {
  using Wave = tile::Wave<C::kWaveRows>;
  using Type = Fp8Format<C, Wave>;
};
template <class C>
struct TileFormatOf<KvFormat::kFp8Row, C, DType::kBf16> {
  using Wave = tile::Wave<C::kWaveRows>;
  using Type = WidenedRowFormat<C, Wave>;
};
template <class C>
struct TileFormatOf<KvFormat::kFp8Page, C, DType::kBf16> {
  using Wave = tile::Wave<C::kWaveRows>;
  using Type = PageFormat<C, Wave>;
};
template <class C>
struct TileFormatOf<KvFormat::kFp8Tensor, C, DType::kFp8E4m3> {
  using Wave = tile::CodeWave<C::kWaveRows>;
  using Type = E4m3Format<C>;
};
#if MLA_GFX950
template <class C>
struct TileFormatOf<KvFormat::kFp8Row, C, DType::kFp8E4m3> {
  using Wave = tile::CodeKeyWave;
  using Type = CodeKeyFormat<C>;
};
#endif

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_TILE_FORMAT_OF_H_
