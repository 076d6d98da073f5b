#include "kernels/host/input_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace mla::kernels {
namespace {

// Bytes 0, 1, 2, ... of a whole, cut at those places; each piece lies `skew` bytes off alignment.
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

const std::byte* Behind(const void* address, int64_t bytes) {
  return static_cast<const std::byte*>(address) + bytes;
}

TEST(InputMapTest, AlignedBytesOfOnePieceAreReadWhereTheyLie) {
  const Whole whole(4096, {1024, 2048}, 0);
  InputMap map;
  map.Reserve(1);
  const void* const input = map.Add(whole.Input(64, 4000));
  ASSERT_TRUE(InputMap::IsInPieces(input));
  alignas(8) std::byte spare[1024];
  EXPECT_EQ(map.Read(input, 960, spare), whole.piece(0) + 64);
  EXPECT_EQ(map.Read(Behind(input, 960), 1024, spare), whole.piece(1));
  EXPECT_EQ(map.Read(Behind(input, 2000), 100, spare), whole.piece(2) + 16);
}

TEST(InputMapTest, BytesOfSeveralPiecesOrUnalignedOnesAreBroughtTogether) {
  const Whole whole(4096, {1001, 1002, 1003, 2500}, 0);
  InputMap map;
  map.Reserve(1);
  const void* const input = map.Add(whole.Input(0, 4096));
  alignas(8) std::byte spare[4096];
  const void* const all = map.Read(input, 4096, spare);
  EXPECT_EQ(all, spare);
  EXPECT_TRUE(Holds(all, 0, 4096));
  EXPECT_EQ(map.Read(Behind(input, 6), 100, spare), spare);
  EXPECT_TRUE(Holds(spare, 6, 100));
}

TEST(InputMapTest, EveryRowOfSeveralInputsIsFound) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    InputMap map;
    map.Reserve(3);
    std::vector<Whole> wholes;
    std::vector<const void*> inputs;
    std::vector<int64_t> offsets;
    const int64_t row = 1 + static_cast<int64_t>(random() % 300), rows = 1 + random() % 40;
    for (int i = 0; i < 3; ++i) {
      const int64_t offset = random() % 50, bytes = offset + row * rows;
      std::vector<int64_t> cuts;
      for (size_t cut = random() % 8; cut > 0; --cut) {
        cuts.push_back(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(bytes)));
      }
      std::sort(cuts.begin(), cuts.end());
      cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
      std::erase(cuts, bytes);
      wholes.emplace_back(bytes, cuts, random() % 4);
      offsets.push_back(offset);
    }
    for (int i = 0; i < 3; ++i) inputs.push_back(map.Add(wholes[i].Input(offsets[i], row * rows)));
    std::vector<std::byte> spare(static_cast<size_t>(row));
    for (int i = 0; i < 3; ++i) {
      for (int64_t r = 0; r < rows; ++r) {
        const void* const read = RowAt(&map, Behind(inputs[i], r * row), row, spare.data());
        ASSERT_TRUE(Holds(read, offsets[i] + r * row, row)) << "round " << round;
      }
    }
  }
}

TEST(InputMapTest, HoldsAsManyInputsAsWereReserved) {
  const Whole whole(64, {}, 0);
  InputMap map;
  map.Reserve(2);
  EXPECT_NE(map.Add(whole.Input(0, 64)), nullptr);
  EXPECT_NE(map.Add(whole.Input(0, 64)), nullptr);
  EXPECT_EQ(map.Add(whole.Input(0, 64)), nullptr);
  map.Clear();
  EXPECT_NE(map.Add(whole.Input(0, 64)), nullptr);
}

TEST(InputMapTest, TensorsInOnePieceAreLeftAlone) {
  const std::vector<std::byte> tensor(64);
  EXPECT_FALSE(InputMap::IsInPieces(tensor.data()));
  const InputMap map;
  EXPECT_EQ(RowAt(&map, tensor.data(), 64, nullptr), tensor.data());
}

}  // namespace
}  // namespace mla::kernels
