// Tile sizes on sm_90: 227 KiB of shared memory a block, 255 registers a thread.
#ifndef MLA_KERNELS_HIP_SM90_CONFIG_H_
#define MLA_KERNELS_HIP_SM90_CONFIG_H_

#include "kernels/hip/common/kernel_args.h"

namespace mla::kernels::hip {

template <int kRows, KvFormat kFormat = KvFormat::kBf16, DType kProducts = DType::kBf16>
struct AttendConfig;

struct AttendBase {
  static constexpr int kLora = 512;
  static constexpr int kRope = 64;
  static constexpr int kTileKv = 64;
};
// Few heads: bound by memory. Queries live in registers; in shared memory as many stages of KV as
// there is room for.
template <KvFormat kFormat_>
struct AttendConfig<16, kFormat_, DType::kBf16> : AttendBase {
  static constexpr KvFormat kFormat = kFormat_;
  static constexpr int kWaveRows = 16, kRowWaves = 1, kColWaves = 8;
  static constexpr int kStages = kFormat == KvFormat::kBf16 ? 3 : 5;
  static constexpr int kKeysAhead = 0, kValuesAhead = 0;
  static constexpr float kOriginSlack = 0.0f;
};
// Up to 64 rows, by warpgroups (attend_wgmma.h): 64 x 512 fp32 accumulators fill half the register
// file, 128 a thread.
template <>
struct AttendConfig<64> : AttendBase {
  static constexpr int kStages = 2;
};

struct ProjectConfig {
  static constexpr int kWaveRows = 16, kRowWaves = 4, kColWaves = 2;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SM90_CONFIG_H_
