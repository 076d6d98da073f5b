// Values that identify their tenant: every element that a simulated tenant sends carries the
// tenant's number in its two lowest mantissa bits, so that a word of another tenant is recognised
// anywhere. Shares nothing with the product.
#ifndef MLA_TESTS_SIMULATION_ORACLE_PATTERNS_H_
#define MLA_TESTS_SIMULATION_ORACLE_PATTERNS_H_

#include <bit>
#include <cstdint>

#include "base/splitmix.h"

namespace mla::simulation {

inline constexpr int kMostTenants = 3;  // numbers 1..3; 0 stands for zeroed memory
inline constexpr int kTenantNumbers = kMostTenants + 1;
inline constexpr uint16_t kPoison = 0xffff;    // memory that was never written: reads as NaN
inline constexpr uint32_t kWild = 0xffffffff;  // a page-table entry that was never written

// bf16 bits of element `index` of the pattern `key` of a tenant; magnitude 0.25 to 2.
inline uint16_t PatternBits(uint64_t key, int index, int tenant) {
  const uint64_t hash = SplitMix(key * 1000003u + static_cast<uint64_t>(index));
  const auto sign = static_cast<uint16_t>(hash & 0x8000u);
  const auto exponent = static_cast<uint16_t>(125 + (hash >> 20) % 3);
  const auto mantissa = static_cast<uint16_t>((hash >> 32) & 0x7cu);
  return static_cast<uint16_t>(sign | exponent << 7 | mantissa | tenant);
}

// Returns true if the index list of a step's row, under the key of its request, names a position.
inline bool IsListed(uint64_t key, int row, int position) {
  return SplitMix((key * 8191 + static_cast<uint64_t>(row)) * 8191 +
                  static_cast<uint64_t>(position)) %
             3 ==
         0;
}

inline float FromBits(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// The element's tenant; 0 for zeroed memory. REQUIRES: not poison.
inline int TenantOf(uint16_t bits) { return bits & 3; }

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_ORACLE_PATTERNS_H_
