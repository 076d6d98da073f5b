// Tile sizes on gfx950: 160 KiB of LDS, 512 registers a lane at one wave a SIMD.
#ifndef MLA_KERNELS_HIP_DEVICE_GFX950_CONFIG_H_
#define MLA_KERNELS_HIP_DEVICE_GFX950_CONFIG_H_

#include "kernels/hip/args/kernel_args.h"

namespace mla::kernels::hip {

template <int kRows, KvFormat kFormat = KvFormat::kBf16, DType kProducts = DType::kBf16,
          AttentionKind kKind = AttentionKind::kDense>
struct AttendConfig;

// A block has four waves. Each wave has its own packed rows, all output columns, and its queries in
// registers.
struct AttendBase {
  static constexpr int kLora = 512;
  static constexpr int kRope = 64;
  static constexpr int kTileKv = 32;
  static constexpr int kRowWaves = 4, kColWaves = 1, kStages = 4;
  static constexpr DType kProducts = DType::kBf16;
  // log2 of how far a row maximum may exceed the exponent origin before the origin is updated.
  static constexpr float kOriginSlack = 8.0f;
};
// 64 rows; each wave keeps 16.
template <KvFormat kFormat_, AttentionKind kKind>
struct AttendConfig<64, kFormat_, DType::kBf16, kKind> : AttendBase {
  static constexpr KvFormat kFormat = kFormat_;
  // With a window, all elements of a row are values, the rotated ones included.
  static constexpr int kRope = kKind == AttentionKind::kWindow ? 0 : AttendBase::kRope;
  // Keys and values are read from LDS this many products ahead; 0: the compiler chooses the order.
  static constexpr int kWaveRows = 16, kKeysAhead = 8, kValuesAhead = 8;
};
// Two waves share 32 packed rows: each computes the scores of half of the KV rows, and half of the
// output columns. So a wave reads, and for rows of 8 bits widens, half as much as one that keeps 16
// rows alone.
struct AttendGrid : AttendBase {
  static constexpr int kTileKv = 64, kStages = 3;
  static constexpr int kRowWaves = 2, kColWaves = 2;
  static constexpr int kWaveRows = 32, kKeysAhead = 5, kValuesAhead = 6;
};
template <AttentionKind kKind>
struct AttendConfig<64, KvFormat::kFp8Tensor, DType::kBf16, kKind> : AttendGrid {
  static constexpr KvFormat kFormat = KvFormat::kFp8Tensor;
};
// Rows that pass through registers and are widened before they are stored in LDS, a tile ahead.
struct AttendWidened : AttendGrid {
  static constexpr int kStages = 2, kKeysAhead = 6;
};
template <AttentionKind kKind>
struct AttendConfig<64, KvFormat::kFp8Page, DType::kBf16, kKind> : AttendWidened {
  static constexpr KvFormat kFormat = KvFormat::kFp8Page;
  static constexpr int kRope = 0;
  // The number of pieces of work for later tiles (KvStream::bring_piece) between products of
  // values.
  static constexpr int kPiecesOfValues = 8;
};
template <AttentionKind kKind>
struct AttendConfig<64, KvFormat::kFp8Row, DType::kBf16, kKind> : AttendWidened {
  static constexpr KvFormat kFormat = KvFormat::kFp8Row;
  static constexpr int kPiecesOfValues = 0;
};
template <KvFormat kFormat_, AttentionKind kKind>
struct AttendConfig<128, kFormat_, DType::kBf16, kKind> : AttendBase {
  static constexpr KvFormat kFormat = kFormat_;
  static constexpr int kWaveRows = 32, kKeysAhead = 5, kValuesAhead = 5;
};
// Other values make the compiler spill, or take longer.
template <>
struct AttendConfig<128, KvFormat::kBf16, DType::kBf16, AttentionKind::kWindow> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kBf16;
  static constexpr int kRope = 0, kStages = 3;
  static constexpr int kWaveRows = 32, kKeysAhead = 4, kValuesAhead = 5;
};
// Other values make the compiler spill, or move accumulators in every iteration.
template <AttentionKind kKind>
struct AttendConfig<128, KvFormat::kFp8Tensor, DType::kBf16, kKind> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kFp8Tensor;
  static constexpr int kWaveRows = 32, kKeysAhead = kKind == AttentionKind::kSparse ? 3 : 4;
  static constexpr int kValuesAhead = 5;
};

// The configuration with 8-bit products, whose operands of values are 64 KV rows deep.
template <AttentionKind kKind>
struct AttendConfig<128, KvFormat::kFp8Tensor, DType::kFp8E4m3, kKind> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kFp8Tensor;
  static constexpr DType kProducts = DType::kFp8E4m3;
  static constexpr int kTileKv = 64, kStages = 3;
  static constexpr int kWaveRows = 32, kKeysAhead = 3, kValuesAhead = 3;
};
// With products of 8 bits for scores, where keys are used as they are stored; values are widened.
template <AttentionKind kKind>
struct AttendConfig<128, KvFormat::kFp8Row, DType::kFp8E4m3, kKind> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kFp8Row;
  static constexpr DType kProducts = DType::kFp8E4m3;
  static constexpr int kTileKv = 64, kStages = 3;
  static constexpr int kWaveRows = 32, kKeysAhead = 4;
  static constexpr int kValuesAhead = kKind == AttentionKind::kSparse ? 5 : 6;
};

// Attention runs two blocks a CU, of two stages each; heads wider than kDims128 leave room for one.
struct ExpandedConfig {
  static constexpr int kWaveRows = 32, kRowWaves = 4, kColWaves = 1;
  static constexpr int kExpandStages = 3;
  static constexpr int kExpandedTile = 64, kExpandedStages = 2;
  static constexpr int kCodeStages = 3;                                       // with 8-bit products
  static constexpr int kExpandAhead = 5, kExpandedAhead = 4, kWideAhead = 8;  // as kKeysAhead
  static constexpr int kCodesAhead = 3;
  static constexpr float kOriginSlack = AttendBase::kOriginSlack;
};
struct ProjectConfig {
  static constexpr int kWaveRows = 16, kRowWaves = 4, kColWaves = 1;
};

// Products of whole rows (device/kernels/row_product.h); two blocks a unit.
struct FewRowsConfig {
  static constexpr int kWaveRows = 32, kRowWaves = 1, kColWaves = 4, kStages = 4;
  static constexpr int kColumns = 128;
  static constexpr bool kFinishes = false;
};
struct ManyRowsConfig {
  static constexpr int kWaveRows = 32, kRowWaves = 4, kColWaves = 1, kStages = 2;
  static constexpr int kColumns = 128;
  static constexpr bool kFinishes = false;
};
// Over weights of e4m3 (device/kernels/code_row_product.h) the widened ones take the place that
// codes save.
using FewCodeRowsConfig = FewRowsConfig;
using ManyCodeRowsConfig = ManyRowsConfig;

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_GFX950_CONFIG_H_
