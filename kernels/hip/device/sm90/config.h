// Tile sizes on sm_90: 227 KiB of shared memory a block, 255 registers a thread.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_CONFIG_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_CONFIG_H_

#include "kernels/hip/args/kernel_args.h"

namespace mla::kernels::hip {

template <int kRows, KvFormat kFormat = KvFormat::kBf16, DType kProducts = DType::kBf16,
          AttentionKind kAttention = AttentionKind::kDense>
struct AttendConfig;

struct AttendBase {
  static constexpr int kLora = 512;
  static constexpr int kRope = 64;
  static constexpr int kTileKv = 64;
};
// Few heads: memory is the limit. Queries live in registers, three stages of KV in shared memory.
template <>
struct AttendConfig<16> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kBf16;
  static constexpr int kWaveRows = 16, kRowWaves = 1, kColWaves = 8, kStages = 3;
  static constexpr int kKeysAhead = 0, kValuesAhead = 0;
  static constexpr float kOriginSlack = 0.0f;
};
// Up to 64 rows, by warpgroups (attend_wgmma.h). 64 x 512 fp32 accumulators fill half of the
// register file, 128 registers a thread.
template <KvFormat kOfRows, AttentionKind kOfItems>
struct AttendConfig<64, kOfRows, DType::kBf16, kOfItems> : AttendBase {
  static constexpr KvFormat kFormat = kOfRows;
  static constexpr AttentionKind kAttention = kOfItems;
  // With a window, all elements of a row are values, the rotated ones included.
  static constexpr int kRope = kOfItems == AttentionKind::kWindow ? 0 : AttendBase::kRope;
  static constexpr int kStages = 2;
};

// Few heads over rows of e4m3 (device/sm90/decode/rows16_fp8/attend_fp8.h), with as many stages as
// shared memory holds. Probabilities are multiplied by 2^kShift. Together with the origin's slack
// they stay below binary16's largest number.
template <KvFormat kOfRows, AttentionKind kOfItems>
struct AttendFp8Config : AttendBase {
  static constexpr int kRows = 16;
  static constexpr KvFormat kFormat = kOfRows;
  static constexpr AttentionKind kAttention = kOfItems;
  static constexpr int kStages = kOfRows == KvFormat::kFp8Row ? 4 : 5;
  static constexpr float kShift = 7.0f;
  // Registers of a thread that computes scores, of one that sums values, and of one that copies.
  static constexpr int kScoreRegisters = 112, kValueRegisters = 104;
  static constexpr int kCopyRegisters = kOfItems == AttentionKind::kDense ? 40 : 48;
};
template <AttentionKind kOfItems>
struct AttendConfig<16, KvFormat::kFp8Tensor, DType::kBf16, kOfItems>
    : AttendFp8Config<KvFormat::kFp8Tensor, kOfItems> {};
template <AttentionKind kOfItems>
struct AttendConfig<16, KvFormat::kFp8Row, DType::kBf16, kOfItems>
    : AttendFp8Config<KvFormat::kFp8Row, kOfItems> {};

// Up to 64 rows over rows of e4m3, with products in e4m3
// (device/sm90/decode/rows64_codes/attend_e4m3.h).
template <AttentionKind kOfItems>
struct AttendConfig<64, KvFormat::kFp8Tensor, DType::kFp8E4m3, kOfItems> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kFp8Tensor;
  static constexpr AttentionKind kAttention = kOfItems;
  static constexpr int kStages = 4;
  // Steps of 32 columns of the queries that stay in registers.
  static constexpr bool kHolds = kOfItems == AttentionKind::kDense;
  static constexpr int kHeldSteps = kHolds ? 10 : 0;
  // Registers of a thread that computes scores, of one that sums values, and of one that copies.
  static constexpr int kScoreRegisters = kHolds ? 120 : 104;
  static constexpr int kValueRegisters = 176;
  static constexpr int kCopyRegisters = kHolds ? 40 : 56;
};
// As above, over rows with scales of their own (device/sm90/decode/rows64_codes/attend_rows.h).
template <AttentionKind kOfItems>
struct AttendConfig<64, KvFormat::kFp8Row, DType::kFp8E4m3, kOfItems> : AttendBase {
  static constexpr KvFormat kFormat = KvFormat::kFp8Row;
  static constexpr AttentionKind kAttention = kOfItems;
  static constexpr int kStages = 4;
  // Registers of a thread that computes, and of one that copies.
  static constexpr int kComputeRegisters = kOfItems == AttentionKind::kDense ? 232 : 216;
  static constexpr int kCopyRegisters = kOfItems == AttentionKind::kDense ? 40 : 72;
};

struct ProjectConfig {
  static constexpr int kWaveRows = 16, kRowWaves = 4, kColWaves = 2;
};

// Products of whole rows (device/kernels/row_product.h, device/sm90/row_products.h): of few rows by
// two blocks a unit, of many by one. W_UQ of DeepSeek-V3 has 256 tiles of 96 columns for the 264
// blocks that 132 units hold. Two blocks have all of a unit's shared memory, so that a quarter of
// these weights is on its way before the rows are there. Waves whose 16 rows do not exist read
// nothing.
struct FewRowsConfig {
  static constexpr int kWaveRows = 16, kRowWaves = 2, kColWaves = 4, kStages = 7;
  static constexpr int kColumns = 96;
  static constexpr bool kFinishes = true;
};
// W_UQ is 128 tiles of 192 columns for the 132 blocks of many rows. Such a tile is a head, so that
// the block can finish it. The width is chosen for 132 units: a part of 114 takes two waves of
// blocks.
struct ManyRowsConfig {
  static constexpr int kColumns = 192, kStages = 5;
};
// Over weights of e4m3 (device/kernels/code_row_product.h): as many stages as fit next to two tiles
// of widened weights.
struct FewCodeRowsConfig : FewRowsConfig {
  static constexpr int kStages = 8;
};
struct ManyCodeRowsConfig : ManyRowsConfig {
  static constexpr int kStages = 6;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_CONFIG_H_
