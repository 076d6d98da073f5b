// Shared memory of index_logits.h, and the conversion of a row's queries and weights into it.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_QUERIES_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_QUERIES_H_

#include "kernels/hip/device/primitives/memory.h"
#include "kernels/hip/device/sm90/fp8_instructions.h"
#include "kernels/hip/device/sm90/tile.h"

namespace mla::kernels::hip {

// Layout of the shared memory. An object holds only the address where the block's shared memory
// begins, so every thread makes its own.
//
//   bins      counts of ranks, by their first bits
//   keys      for each stage and group: 64 keys, as index_keys.h arranges them
//   scales    for each stage and group: a word a lane
//   weights   for every head; zero past the last head
//   barriers  of BulkKeys
//   queries   operands of 64 heads, [64 x 128] binary16 each: for every 64 heads the first terms,
//             then for fp32 their second terms
struct IndexLayout {
  using lds_t = tile::lds_t;
  static constexpr int kKeys = 64;  // keys of a group and turn
  static constexpr int kGroupWarps = 4;
  static constexpr int kGroups = 2;
  static constexpr int kWarps = kGroups * kGroupWarps;  // the next warp copies keys
  static constexpr int kThreads = (kWarps + 1) * tile::kWave;
  static constexpr int kStages = 4;
  static constexpr int kBinBytes = kIndexBins * 4;
  static constexpr int kKeyBytes = kStages * kGroups * kKeys * kIndexDim;
  static constexpr int kGroupScaleBytes = kGroupWarps * tile::kWave * 4;
  static constexpr int kScaleBytes = kStages * kGroups * kGroupScaleBytes;
  static constexpr int kWeightBytes = 512;
  static constexpr int kBarrierBytes = 512;
  static constexpr int kFixedBytes =
      kBinBytes + kKeyBytes + kScaleBytes + kWeightBytes + kBarrierBytes;
  static_assert(kernels::kMaxIndexHeads * 4 <= kWeightBytes && kFixedBytes % 1024 == 0);

  MLA_DEVICE lds_t base() const { return tile::shared_base<kFixedBytes>(); }
  MLA_DEVICE lds_t bins() const { return base(); }
  MLA_DEVICE lds_t keys() const { return bins() + kBinBytes; }
  MLA_DEVICE lds_t scales() const { return keys() + kKeyBytes; }
  MLA_DEVICE lds_t weights() const { return scales() + kScaleBytes; }
  MLA_DEVICE lds_t barriers() const { return weights() + kWeightBytes; }
  MLA_DEVICE lds_t queries(int operand) const {
    return base() + kFixedBytes + operand * kIndexOperandBytes;
  }
};

// Four lanes convert a head, a quarter of its elements each.
template <bool kF32>
class IndexQueries {
 public:
  using L = IndexLayout;
  using lds_t = tile::lds_t;

  // Run by the warps that multiply. The matrix unit sees the queries after a block barrier.
  MLA_DEVICE static void write(const SelectRecord& record, int row) {
    const int heads = record.indexer.heads;
    const auto* const first = static_cast<const uint8_t*>(record.inputs) +
                              row * (heads * int64_t{kIndexDim * kElement + 4});
    const auto* const weights = as_global<const float>(first + heads * (kIndexDim * kElement));
    const int own = thread_index() >> 2;
#pragma unroll 1
    for (int block = 0; block < index_blocks(heads); ++block) {
      const int head = block * kIndexHeadBlock + own;
      uint32_t values[kValues] = {};
      if (head < heads) load(values, first + head * (kIndexDim * kElement));
      const uint32_t exponent = exponent_of(values);
      write_head(own, block * kTerms, values, exponent);
      if (quarter() == 0) {
        const float weight = head < heads ? weights[head] : 0.0f;
        tile::store_float(L().weights() + head * 4, weight * bits_to_float((exponent - 14) << 23));
      }
    }
    tile::publish_shared();
  }

 private:
  static constexpr int kElement = kF32 ? 4 : 2;
  static constexpr int kTerms = kF32 ? 2 : 1;
  static constexpr int kMine = kIndexDim / 4;           // elements
  static constexpr int kValues = kMine * kElement / 4;  // words
  static constexpr int kThreads = 4 * kIndexHeadBlock;  // threads that take part
  static_assert(kThreads == L::kWarps * tile::kWave);

  MLA_DEVICE static int quarter() { return thread_index() & 3; }

  MLA_DEVICE static void load(uint32_t (&values)[kValues], const uint8_t* head) {
    const uint8_t* const from = head + quarter() * (kMine * kElement);
    const bool aligned = (reinterpret_cast<uintptr_t>(from) & 15) == 0;
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      uint32_t words[4];
      if (aligned) {
        load_words(words, from + 16 * i);
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = as_global<const uint32_t>(from)[4 * i + w];
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) values[4 * i + w] = words[w];
    }
  }

  // Exponent of the head's largest magnitude, bounded so that 2^14 divided by its power and the
  // inverse are normal numbers. The power of two then brings the magnitude to [2^14, 2^15).
  MLA_DEVICE static uint32_t exponent_of(const uint32_t (&values)[kValues]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if constexpr (kF32) {
        largest = greater(largest, values[i] & 0x7fffffffu);
      } else {
        largest = greater(largest, greater(values[i] & 0x7fff0000u, values[i] << 16 & 0x7fffffffu));
      }
    }
    largest = greater(largest, tile::exchange_word<1>(largest));
    largest = greater(largest, tile::exchange_word<2>(largest));
    const uint32_t found = largest >> 23;
    return found < 20 ? 20 : found > 250 ? 250 : found;
  }
  MLA_DEVICE static uint32_t greater(uint32_t a, uint32_t b) { return a > b ? a : b; }

  // A lane's 16 bytes of a key serve four steps of a product of depth 16. In each 64 elements,
  // element 16 t + 4 s + r belongs to step s, where it is element 2 t + r % 2 + 8 (r / 2).
  MLA_DEVICE static void write_head(int row, int operand, const uint32_t (&values)[kValues],
                                    uint32_t exponent) {
    const float scale = bits_to_float((127 + 127 + 14 - exponent) << 23);
    const int t = quarter() * 2;  // t of this lane's first 16 elements; the next 16 have t + 1
#pragma unroll
    for (int pair = 0; pair < kMine / 2; ++pair) {
      float x[2];
      if constexpr (kF32) {
        x[0] = bits_to_float(values[2 * pair]) * scale;
        x[1] = bits_to_float(values[2 * pair + 1]) * scale;
      } else {
        x[0] = bits_to_float(values[pair] << 16) * scale;
        x[1] = bits_to_float(values[pair] & 0xffff0000u) * scale;
      }
      const int of_16 = t + pair / 8, step = (of_16 >> 2) * 4 + pair % 8 / 2;
      const lds_t address =
          tile::chunk_at<kIndexHeadBlock>(L().queries(operand), row, 2 * step + pair % 2) +
          (of_16 & 3) * 4;
      const uint32_t high = tile::pack_f16(x[0], x[1]);
      tile::store_word(address, high);
      if constexpr (kF32) {
        float rounded[2];
        tile::f16_to_floats(high, rounded[0], rounded[1]);
        tile::store_word(address + kIndexOperandBytes,
                         tile::pack_f16(x[0] - rounded[0], x[1] - rounded[1]));
      }
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_QUERIES_H_
