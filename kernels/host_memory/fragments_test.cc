#include "kernels/host_memory/fragments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace mla::kernels {
namespace {

// Bytes 0, 1, 2, ... of a whole that is cut into pieces at `cuts`; each piece lies `skew` bytes off
// alignment.
class Whole {
 public:
  Whole(int64_t bytes, std::vector<int64_t> cuts, size_t skew) {
    cuts.insert(cuts.begin(), 0);
    for (size_t i = 0; i < cuts.size(); ++i) {
      const int64_t end = i + 1 < cuts.size() ? cuts[i + 1] : bytes;
      pieces_.emplace_back(static_cast<size_t>(end - cuts[i]) + skew);
      for (int64_t at = cuts[i]; at < end; ++at) {
        pieces_.back()[skew + static_cast<size_t>(at - cuts[i])] = std::byte(at % 251);
      }
      fragments_.push_back({pieces_.back().data() + skew, cuts[i]});
    }
  }
  FragmentedInput Input(int64_t offset, int64_t bytes) const { return {fragments_, offset, bytes}; }
  const std::byte* piece(size_t i) const { return fragments_[i].data; }

 private:
  std::vector<std::vector<std::byte>> pieces_;
  std::vector<InputFragment> fragments_;
};

bool Holds(const void* data, int64_t first, int64_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  for (int64_t i = 0; i < bytes; ++i) {
    if (at[i] != std::byte((first + i) % 251)) return false;
  }
  return true;
}

TEST(FragmentsTest, AlignedBytesOfOnePieceAreReadWhereTheyLie) {
  const Whole whole(4096, {1024, 2048}, 0);
  const FragmentedInput input = whole.Input(64, 4000);
  alignas(8) std::byte spare[1024];
  EXPECT_EQ(ReadFragments(input, 0, 960, spare), whole.piece(0) + 64);
  EXPECT_EQ(ReadFragments(input, 960, 1024, spare), whole.piece(1));
  EXPECT_EQ(ReadFragments(input, 2000, 100, spare), whole.piece(2) + 16);
}

TEST(FragmentsTest, BytesOfSeveralPiecesOrUnalignedOnesAreBroughtTogether) {
  const Whole whole(4096, {1001, 1002, 1003, 2500}, 0);
  const FragmentedInput input = whole.Input(0, 4096);
  alignas(8) std::byte spare[4096];
  const void* const all = ReadFragments(input, 0, 4096, spare);
  EXPECT_EQ(all, spare);
  EXPECT_TRUE(Holds(all, 0, 4096));
  EXPECT_EQ(ReadFragments(input, 6, 100, spare), spare);
  EXPECT_TRUE(Holds(spare, 6, 100));
}

TEST(FragmentsTest, EveryRowIsFound) {
  std::mt19937 random(7);
  for (int round = 0; round < 600; ++round) {
    const int64_t row = 1 + static_cast<int64_t>(random() % 300), rows = 1 + random() % 40;
    const int64_t offset = random() % 50, bytes = offset + row * rows;
    std::vector<int64_t> cuts;
    for (size_t cut = random() % 8; cut > 0; --cut) {
      cuts.push_back(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(bytes)));
    }
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    std::erase(cuts, bytes);
    const Whole whole(bytes, cuts, random() % 4);
    const FragmentedInput input = whole.Input(offset, row * rows);
    std::vector<std::byte> spare(static_cast<size_t>(row));
    for (int64_t r = 0; r < rows; ++r) {
      const void* const read = ReadFragments(input, r * row, row, spare.data());
      ASSERT_TRUE(Holds(read, offset + r * row, row)) << "round " << round;
    }
  }
}

TEST(FragmentsTest, ARecordWithoutFragmentsHasNone) {
  const Whole whole(64, {}, 0);
  const FragmentedInput all[] = {{}, whole.Input(0, 64)};
  EXPECT_EQ(FragmentsOf({}, 3), nullptr);
  EXPECT_EQ(FragmentsOf(all, 0), nullptr);
  EXPECT_EQ(FragmentsOf(all, 1), &all[1]);
}

}  // namespace
}  // namespace mla::kernels
