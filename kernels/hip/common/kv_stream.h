// The KV rows of a work item on their way into shared memory, a tile of kTileKv rows at a time.
#ifndef MLA_KERNELS_HIP_COMMON_KV_STREAM_H_
#define MLA_KERNELS_HIP_COMMON_KV_STREAM_H_

#include "kernels/hip/common/memory.h"

namespace mla::gpu {

// Every wave copies its share of each tile: kCopyRows rows a lane, kBlocks chunks of each. C gives
// kTileKv, kStages, kLora, kRope and the number of waves.
template <class C, int kWaves>
class KvStream {
 public:
  using lds_t = tile::lds_t;
  static constexpr int kDim = C::kLora + C::kRope;
  static constexpr int kStageBytes = C::kTileKv * kDim * 2;
  static constexpr int kRowsPerCopy = tile::kWave / 8;
  static constexpr int kBlocks = kDim / 64;
  static constexpr int kCopyRows = C::kTileKv / kRowsPerCopy / kWaves;
  static constexpr int kCopies = kCopyRows * kBlocks;
  static_assert(kCopyRows * kRowsPerCopy * kWaves == C::kTileKv);

  MLA_DEVICE KvStream(lds_t stages_at, int wave_number, int lane_number)
      : stages(stages_at), wave(wave_number), lane(lane_number) {}

  // Looks up where this lane's rows of the tile at `first` lie, for the next issue. Rows past the
  // range repeat its last row, so that masked probabilities, which are zero, always meet values
  // that exist.
  MLA_DEVICE void find(const PagedRows& pages, int first, int kv_end) {
    if (kv_end <= 0) return;
#pragma unroll
    for (int g = 0; g < kCopyRows; ++g) {
      const int position = first + (g * kWaves + wave) * kRowsPerCopy + (lane >> 3);
      next[g] = pages.row(position < kv_end ? position : kv_end - 1);
    }
  }

  template <int kIndex = 0>
  MLA_DEVICE void issue(int stage) {
    if constexpr (kIndex < kCopies) {
      constexpr int g = kIndex / kBlocks, block = kIndex % kBlocks;
      copies.template issue<kIndex, offset(g, block)>(base(stage), lane,
                                                      next[g] + block * 128 + chunk(g) * 16);
      issue<kIndex + 1>(stage);
    }
  }
  MLA_DEVICE void close_stage() { copies.close_stage(); }
  template <int kYounger>
  MLA_DEVICE void wait() {
    copies.template wait<kYounger, kCopies>();
  }
  // For copies through registers: writes the issued tile to stage 0.
  template <int kIndex = 0>
  MLA_DEVICE void land() {
    if constexpr (kIndex < kCopies) {
      copies.template land<kIndex, offset(kIndex / kBlocks, kIndex % kBlocks)>(base(0), lane);
      land<kIndex + 1>();
    }
  }

 private:
  // Where copy (g, block) of a wave goes: a constant from where its first one does.
  MLA_DEVICE static constexpr int offset(int g, int block) {
    return block * (C::kTileKv * 128) + g * kWaves * kRowsPerCopy * 128;
  }
  MLA_DEVICE lds_t base(int stage) const {
    return stages + stage * kStageBytes + wave * kRowsPerCopy * 128;
  }
  MLA_DEVICE int chunk(int g) const {
    const int row = (g * kWaves + wave) * kRowsPerCopy + (lane >> 3);
    return (lane & 7) ^ (row & 7);
  }

  lds_t stages;
  int wave, lane;
  tile::Copies copies;
  const uint8_t* next[kCopyRows];
};

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_COMMON_KV_STREAM_H_
