// Searches and copies by a block of kSmallThreads threads, and reductions of a wave.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_BLOCK_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_BLOCK_H_

#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

inline constexpr int kSmallThreads = 256;
inline constexpr int kSmallWaves = kSmallThreads / tile::kWave;

// Returns i with first[i] <= x < first[i + 1].
MLA_DEVICE int find_range(const int32_t* first, int count, int x) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] <= x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Returns the rank of an indexer's logit: the larger, the better. Equals the rank in
// kernels::SelectRank.
MLA_DEVICE uint32_t index_rank(float logit) {
  const float same = logit + 0.0f;  // zeros of either sign are equal
  const uint32_t bits = same != same ? 0x7fffffffu : float_to_bits(same);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// Copies by one block. Both addresses and `bytes` are equally aligned, to kWords words.
template <int kWords>
MLA_DEVICE void move_words(uint8_t* target, const uint8_t* from, int bytes) {
  constexpr int kAhead = 4;  // loads in flight at a time
  constexpr int kStep = kSmallThreads * kWords * 4;
  for (int offset = thread_index() * kWords * 4; offset < bytes; offset += kAhead * kStep) {
    uint32_t words[kAhead][kWords] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (from != nullptr && offset + i * kStep < bytes)
        load_words(words[i], from + offset + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (offset + i * kStep < bytes) store_words(target + offset + i * kStep, words[i]);
    }
  }
}

// Copies by one block. `from` null: stores zeros.
MLA_DEVICE void move_bytes(uint8_t* target, const uint8_t* from, int bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(from) |
                    static_cast<uintptr_t>(bytes);
  if (bits % 16 == 0) {
    move_words<4>(target, from, bytes);
  } else if (bits % 4 == 0) {
    move_words<1>(target, from, bytes);
  } else {
    for (int at = thread_index(); at < bytes; at += kSmallThreads) {
      *as_global<uint8_t>(target + at) = from == nullptr ? 0 : *as_global<const uint8_t>(from + at);
    }
  }
}

template <int kStep = tile::kWave / 2>
MLA_DEVICE float wave_max(float x) {
  x = max_f(x, tile::exchange<kStep>(x));
  if constexpr (kStep > 1) return wave_max<kStep / 2>(x);
  return x;
}
template <int kStep = tile::kWave / 2>
MLA_DEVICE float wave_sum(float x) {
  x += tile::exchange<kStep>(x);
  if constexpr (kStep > 1) return wave_sum<kStep / 2>(x);
  return x;
}

// Returns the factor by which a sink scales an output whose log-sum-exp, without the sink, is
// `lse`.
MLA_DEVICE float sink_factor(float sink, float lse) {
  return lse == negative_infinity() ? 1.0f : 1.0f / (1.0f + exp2_fast((sink - lse) * kLog2e));
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_BLOCK_H_
