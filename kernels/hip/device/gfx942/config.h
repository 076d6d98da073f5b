// Tile sizes on gfx942: 64 KiB of LDS, 512 registers a lane at one wave a SIMD.
#ifndef MLA_KERNELS_HIP_DEVICE_GFX942_CONFIG_H_
#define MLA_KERNELS_HIP_DEVICE_GFX942_CONFIG_H_

#include "kernels/hip/args/kernel_args.h"

namespace mla::kernels::hip {

template <int kRows, KvFormat kFormat = KvFormat::kBf16, DType kProducts = DType::kBf16,
          AttentionKind kKind = AttentionKind::kDense>
struct AttendConfig;

// Four waves, each with its own packed rows, all output columns and its queries in registers. 128
// rows would not fit with bf16 operands, because the KV tile passes through registers too.
struct AttendBase {
  static constexpr int kLora = 512;
  static constexpr int kRope = 64;
  static constexpr int kTileKv = 32;
  static constexpr int kRowWaves = 4, kColWaves = 1, kStages = 1;
  static constexpr DType kProducts = DType::kBf16;
  // log2 of how far a row maximum may exceed the exponent origin before the origin is updated.
  static constexpr float kOriginSlack = 8.0f;
};
template <KvFormat kFormat_, AttentionKind kKind>
struct AttendConfig<64, kFormat_, DType::kBf16, kKind> : AttendBase {
  static constexpr KvFormat kFormat = kFormat_;
  // With a window, all elements of a row are values, the rotated ones included.
  static constexpr int kRope = kKind == AttentionKind::kWindow ? 0 : AttendBase::kRope;
  // Keys and values are read from LDS this many products ahead; 0: the compiler chooses the order.
  static constexpr int kWaveRows = 16, kKeysAhead = 4, kValuesAhead = 4;
};

// With 8-bit products registers suffice for 128 rows, so that a tile is read once. A row's
// probabilities share one power of two, and none may exceed the largest code. While a tile is
// computed, the next one lands in LDS and the one after that is in flight.
struct AttendCodesBase : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kFp8Tensor;
  static constexpr DType kProducts = DType::kFp8E4m3;
  static constexpr int kStages = 2;
  static constexpr float kOriginSlack = 7.0f;
};
template <AttentionKind kKind>
struct AttendConfig<64, KvFormat::kFp8Tensor, DType::kFp8E4m3, kKind> : AttendCodesBase {
  static constexpr int kWaveRows = 16, kKeysAhead = 4, kValuesAhead = 3;
};
template <AttentionKind kKind>
struct AttendConfig<128, KvFormat::kFp8Tensor, DType::kFp8E4m3, kKind> : AttendCodesBase {
  // With most other values the compiler spills.
  static constexpr int kWaveRows = 32, kKeysAhead = kKind == AttentionKind::kSparse ? 3 : 4;
  static constexpr int kValuesAhead = 3;
};

// Attention: two blocks a CU; one with wider heads than kDims128. Operand tiles in flight are held
// in registers.
struct ExpandedConfig {
  static constexpr int kWaveRows = 32, kRowWaves = 4, kColWaves = 1;
  static constexpr int kExpandStages = 1;
  static constexpr int kExpandedTile = 32, kExpandedStages = 1;
  static constexpr int kExpandAhead = 5, kExpandedAhead = 4, kWideAhead = 4;  // as kKeysAhead
  static constexpr float kOriginSlack = AttendBase::kOriginSlack;
};
struct ProjectConfig {
  static constexpr int kWaveRows = 16, kRowWaves = 4, kColWaves = 1;
};

// Products of whole rows (device/kernels/row_product.h); two blocks a unit.
struct FewRowsConfig {
  static constexpr int kWaveRows = 32, kRowWaves = 1, kColWaves = 4, kStages = 1;
  static constexpr int kColumns = 128;
  static constexpr bool kFinishes = false;
};
struct ManyRowsConfig {
  static constexpr int kWaveRows = 32, kRowWaves = 4, kColWaves = 1, kStages = 1;
  static constexpr int kColumns = 128;
  static constexpr bool kFinishes = false;
};
// Over weights of e4m3 (device/kernels/code_row_product.h).
using FewCodeRowsConfig = FewRowsConfig;
using ManyCodeRowsConfig = ManyRowsConfig;

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_GFX942_CONFIG_H_
