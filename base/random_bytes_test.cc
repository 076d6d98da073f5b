#include "base/random_bytes.h"

#include <array>
#include <set>

#include "base/splitmix.h"
#include "gtest/gtest.h"

namespace mla {
namespace {

// A byte that stays 0 in 64 draws does so with probability 2^-512.
TEST(RandomBytesTest, FillsEveryByte) {
  std::array<uint8_t, 300> seen{};  // more than one call of the system is sure to give
  for (int draw = 0; draw < 64; ++draw) {
    std::array<uint8_t, 300> bytes{};
    ASSERT_TRUE(FillRandom(&bytes));
    for (size_t i = 0; i < bytes.size(); ++i) seen[i] |= bytes[i];
  }
  for (const uint8_t byte : seen) EXPECT_NE(byte, 0);
  EXPECT_TRUE(FillRandom(std::span<std::byte>()));
}

TEST(RandomBytesTest, NumbersDiffer) {
  std::set<uint64_t> numbers;
  for (int draw = 0; draw < 1000; ++draw) numbers.insert(RandomNumber());
  EXPECT_EQ(numbers.size(), 1000u);
  EXPECT_FALSE(numbers.contains(0));
}

// Vigna's reference program gives these numbers for the seed 1234567.
TEST(SplitMixTest, GivesTheReferenceSequence) {
  uint64_t state = 1234567;
  EXPECT_EQ(SplitMix(state), 6457827717110365317u);
  EXPECT_EQ(NextSplitMix(&state), 6457827717110365317u);
  EXPECT_EQ(NextSplitMix(&state), 3203168211198807973u);
  EXPECT_EQ(NextSplitMix(&state), 9817491932198370423u);
}

}  // namespace
}  // namespace mla
