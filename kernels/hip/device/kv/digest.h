// Computes digests of parts of page transfers (kernels/types/part_digest.h): 128-bit XXH3 without a
// seed, of 256 bytes to kDigestPartBytes in whole granules. Eight lanes make one digest; each lane
// holds one of the hash's eight accumulators.
//
// The hash takes stripes of 64 bytes, one word a lane. Sixteen stripes make a block, after which
// accumulators are scrambled; the very last stripe has keys of its own. A lane sums over a block
// what its words add to its neighbour's accumulator, so that lanes exchange once a block.
#ifndef MLA_KERNELS_HIP_DEVICE_KV_DIGEST_H_
#define MLA_KERNELS_HIP_DEVICE_KV_DIGEST_H_

#include "kernels/hip/device/primitives/block.h"

namespace mla::kernels::hip {

class Digest {
 public:
  MLA_DEVICE static void run(const DigestArgs& args) {
    const int parts = args.first_part[args.count];
    const int own = block_index() * kDigestsPerBlock + thread_index() / kLanes;
    // Lanes without a part of their own recompute the last part and do not store it.
    const int part = own < parts ? own : parts - 1;
    const int index = find_range(args.first_part, args.count, part);
    const DigestRange range = args.ranges[index];
    const int64_t begin =
        static_cast<int64_t>(part - args.first_part[index]) * kernels::kDigestPartBytes;
    const int64_t left = range.bytes - begin;
    const int bytes = left < kernels::kDigestPartBytes
                          ? static_cast<int>(left)
                          : static_cast<int>(kernels::kDigestPartBytes);
    const Digest self(thread_index() % kLanes);
    const uint64_t half = self.make(range.from + begin, bytes);
    if (own < parts && self.lane < 2)
      *as_global<uint64_t>(args.digests + 2 * part + self.lane) = half;
  }

 private:
  static constexpr int kLanes = 8, kWordBytes = 8;
  static constexpr int kStripeBytes = kLanes * kWordBytes;
  static constexpr int kBlockStripes = 16;
  static constexpr int kBlocks =
      static_cast<int>(kernels::kDigestPartBytes) / (kBlockStripes * kStripeBytes);
  static_assert(kDigestsPerBlock * kLanes == kSmallThreads);

  static constexpr uint64_t kPrime32_1 = 0x9e3779b1u, kPrime32_2 = 0x85ebca77u,
                            kPrime32_3 = 0xc2b2ae3du;
  static constexpr uint64_t kPrime64_1 = 0x9e3779b185ebca87u, kPrime64_2 = 0xc2b2ae3d27d4eb4fu,
                            kPrime64_3 = 0x165667b19e3779f9u, kPrime64_4 = 0x85ebca77c2b2ae63u,
                            kPrime64_5 = 0x27d4eb2f165667c5u;
  static constexpr uint64_t kAvalanche = 0x165667919e3779f9u;
  // The byte offsets in the secret of the keys of some steps.
  static constexpr int kScrambleKeys = 128, kLastKeys = 121, kLowKeys = 11, kHighKeys = 117;

  // Returns a word of the secret, from any byte offset.
  MLA_DEVICE static uint64_t secret(int byte) {
    static constexpr uint64_t kSecret[] = {
        0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
        0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
        0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
        0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
        0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
        0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};
    const int word = byte / kWordBytes, shift = byte % kWordBytes * 8;
    const uint64_t low = kSecret[word] >> shift;
    return shift == 0 ? low : low | kSecret[word + 1] << (64 - shift);
  }

  MLA_DEVICE static uint64_t first_value(int lane) {
    static constexpr uint64_t kFirst[kLanes] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                                kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    return kFirst[lane];
  }

  MLA_DEVICE explicit Digest(int own_lane)
      : lane(own_lane),
        scramble_key(secret(kScrambleKeys + own_lane * kWordBytes)),
        last_key(secret(kLastKeys + own_lane * kWordBytes)) {
#pragma unroll
    for (int s = 0; s < kBlockStripes; ++s) keys[s] = secret((own_lane + s) * kWordBytes);
  }

  template <int kStep>
  MLA_DEVICE static uint64_t exchange(uint64_t x) {
    const float low = tile::exchange<kStep>(bits_to_float(static_cast<uint32_t>(x)));
    const float high = tile::exchange<kStep>(bits_to_float(static_cast<uint32_t>(x >> 32)));
    return static_cast<uint64_t>(float_to_bits(high)) << 32 | float_to_bits(low);
  }
  // Returns the XOR of the product's halves.
  MLA_DEVICE static uint64_t fold(uint64_t a, uint64_t b) {
    const uint64_t mask = 0xffffffffu;
    const uint64_t low = (a & mask) * (b & mask), high = (a >> 32) * (b >> 32);
    const uint64_t one = (a >> 32) * (b & mask), other = (a & mask) * (b >> 32);
    const uint64_t middle = (low >> 32) + (one & mask) + other;
    return ((low & mask) | middle << 32) ^ (high + (one >> 32) + (middle >> 32));
  }

  // Returns the digest's low half in lane 0 and its high half in lane 1. All lanes of a wave take
  // the same branches, because they exchange values; `bytes` may differ between the parts of a
  // wave.
  MLA_DEVICE uint64_t make(const uint8_t* from, int bytes) const {
    const int last = bytes / kStripeBytes - 1;
    uint64_t value = first_value(lane);
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      uint64_t words[kBlockStripes];
#pragma unroll
      for (int s = 0; s < kBlockStripes; ++s) {
        const int stripe = block * kBlockStripes + s;
        uint32_t word[2] = {};
        if (stripe <= last) load_words(word, from + stripe * kStripeBytes + lane * kWordBytes);
        words[s] = static_cast<uint64_t>(word[1]) << 32 | word[0];
      }
      uint64_t sum = 0;
#pragma unroll
      for (int s = 0; s < kBlockStripes; ++s) {
        const int stripe = block * kBlockStripes + s;
        const uint64_t keyed = words[s] ^ (stripe == last ? last_key : keys[s]);
        const uint64_t product = (keyed & 0xffffffffu) * (keyed >> 32);
        value += stripe <= last ? product : 0;
        sum += words[s];
      }
      value += exchange<1>(sum);
      if ((block + 1) * kBlockStripes <= last) {
        value = ((value ^ value >> 47) ^ scramble_key) * kPrime32_1;
      }
    }
    return merge(value, static_cast<uint64_t>(bytes));
  }

  // Even lanes compute the low half, odd lanes the high half, each from the values of two lanes.
  MLA_DEVICE uint64_t merge(uint64_t value, uint64_t bytes) const {
    const bool high = lane % 2 == 1;
    const uint64_t others = exchange<1>(value);
    const int at = (high ? kHighKeys : kLowKeys) + lane / 2 * 2 * kWordBytes;
    uint64_t sum = fold((high ? others : value) ^ secret(at),
                        (high ? value : others) ^ secret(at + kWordBytes));
    sum += exchange<2>(sum);
    sum += exchange<4>(sum);
    sum += high ? ~(bytes * kPrime64_2) : bytes * kPrime64_1;
    sum = (sum ^ sum >> 37) * kAvalanche;
    return sum ^ sum >> 32;
  }

  const int lane;
  const uint64_t scramble_key, last_key;
  uint64_t keys[kBlockStripes];
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KV_DIGEST_H_
