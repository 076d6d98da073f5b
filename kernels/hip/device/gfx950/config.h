// Tile sizes on gfx950: 160 KiB of LDS, 512 registers a lane at one wave a SIMD.
#ifndef MLA_KERNELS_HIP_DEVICE_GFX950_CONFIG_H_
#define MLA_KERNELS_HIP_DEVICE_GFX950_CONFIG_H_

#include "kernels/hip/args/kernel_args.h"

namespace mla::kernels::hip {

template <int kRows, KvFormat kFormat = KvFormat::kBf16, DType kProducts = DType::kBf16,
          AttentionKind kKind = AttentionKind::kDense>
struct AttendConfig;

// Four waves, each with its own packed rows, all output columns and its queries in registers.
struct AttendBase {
  static constexpr int kLora = 512;
  static constexpr int kRope = 64;
  static constexpr int kTileKv = 32;
  static constexpr int kRowWaves = 4, kColWaves = 1, kStages = 4;
  static constexpr DType kProducts = DType::kBf16;
  // Powers of two by which maxima may pass the origin of the exponentials before that follows.
  static constexpr float kOriginSlack = 8.0f;
};
// Of 64 rows, each wave keeps 16.
template <KvFormat kFormat_, AttentionKind kKind>
struct AttendConfig<64, kFormat_, DType::kBf16, kKind> : AttendBase {
  static constexpr KvFormat kFormat = kFormat_;
  // With a window all of a row is value, rotated columns too.
  static constexpr int kRope = kKind == AttentionKind::kWindow ? 0 : AttendBase::kRope;
  // Rows that are widened on their way pass through registers.
  static constexpr int kStages = kFormat == KvFormat::kFp8Page ? 1 : AttendBase::kStages;
  // Products that reads of keys and values in LDS run ahead; 0: in the order of the compiler.
  static constexpr int kWaveRows = 16, kKeysAhead = 8, kValuesAhead = 8;
};
// Each value has to be widened by the wave that reads it, so waves divide the tile: two of them
// share 32 packed rows, each the scores of half of the KV rows and half of the output columns.
template <AttentionKind kKind>
struct AttendConfig<64, KvFormat::kFp8Tensor, DType::kBf16, kKind> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kFp8Tensor;
  static constexpr int kTileKv = 64, kStages = 3;
  static constexpr int kRowWaves = 2, kColWaves = 2;
  static constexpr int kWaveRows = 32, kKeysAhead = 5, kValuesAhead = 6;
};
template <KvFormat kFormat_, AttentionKind kKind>
struct AttendConfig<128, kFormat_, DType::kBf16, kKind> : AttendBase {
  static constexpr KvFormat kFormat = kFormat_;
  static constexpr int kWaveRows = 32, kKeysAhead = 5, kValuesAhead = 5;
};
// With others than these the compiler moves accumulators about in every turn.
template <AttentionKind kKind>
struct AttendConfig<128, KvFormat::kFp8Tensor, DType::kBf16, kKind> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kFp8Tensor;
  static constexpr int kWaveRows = 32, kKeysAhead = 4, kValuesAhead = 6;
};

// With products of 8 bits, whose operands of values are 64 KV rows deep.
template <AttentionKind kKind>
struct AttendConfig<128, KvFormat::kFp8Tensor, DType::kFp8E4m3, kKind> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kFp8Tensor;
  static constexpr DType kProducts = DType::kFp8E4m3;
  static constexpr int kTileKv = 64, kStages = 3;
  static constexpr int kWaveRows = 32, kKeysAhead = 3, kValuesAhead = 3;
};

// Attention: two blocks a CU of two stages each; with wider heads than kDims128 one.
struct ExpandedConfig {
  static constexpr int kWaveRows = 32, kRowWaves = 4, kColWaves = 1;
  static constexpr int kExpandStages = 3;
  static constexpr int kExpandedTile = 64, kExpandedStages = 2;
  static constexpr int kCodeStages = 3;  // with products of 8 bits
  static constexpr int kExpandAhead = 5, kExpandedAhead = 4, kWideAhead = 8;  // as kKeysAhead
  static constexpr int kCodesAhead = 3;
  static constexpr float kOriginSlack = AttendBase::kOriginSlack;
};
struct ProjectConfig {
  static constexpr int kWaveRows = 16, kRowWaves = 4, kColWaves = 1;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_GFX950_CONFIG_H_
