// Tests the runner of device code on the host: correct kernels give the right results, and each
// condition that a device would leave to chance ends the launch with a message that names it.
#include "kernels/hip/emulator/block/block.h"

#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/emulator/block/counted_barrier.h"
#include "kernels/hip/emulator/block/products.h"
#include "kernels/hip/emulator/block/tensor_map.h"

namespace mla::kernels::hip::host {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kWave = 32;
constexpr size_t kShared = 1024;

// Memory that the lanes of a test read and write; one launch at a time.
std::vector<int> results;
std::vector<int> source;

int Index() { return the_lane->index; }
char* Shared(int at) { return the_block->shared.Base(kShared) + at; }
int Load(int at) {
  the_block->shared.Read(Shared(at), sizeof(int), the_lane->wave->index);
  int x = 0;
  std::memcpy(&x, Shared(at), sizeof(x));
  return x;
}
void Store(int at, int x) {
  the_block->shared.Write(Shared(at), sizeof(int), the_lane->wave->index);
  std::memcpy(Shared(at), &x, sizeof(x));
}
void StartCopy(int at, const int* from) {
  the_block->shared.StartCopy(the_lane->copies, Shared(at), from, sizeof(int),
                              the_lane->wave->index);
}
void LandAllBut(int younger) {
  the_block->shared.LandAllBut(the_lane->copies, younger, the_lane->wave->index);
}
void Nothing(Wave&) {}
void OtherThing(Wave&) {}

// The fault of a launch of `waves` waves, or empty.
std::string Launch(void (*lane)(const void*), uint32_t waves = 1, uint32_t blocks = 1) {
  const Kernel kernel{"kernel", 0, lane};
  results.assign(waves * kWave * blocks, -1);
  const char* const fault = Run(kernel, kWave, Grid{blocks, 1, waves * kWave, 0}, nullptr);
  return fault == nullptr ? "" : fault;
}

TEST(BlockTest, LanesOfAllBlocksRun) {
  EXPECT_THAT(Launch(
                  [](const void*) {
                    results[the_block->x * 64 + static_cast<uint32_t>(Index())] = Index();
                  },
                  2, 3),
              IsEmpty());
  for (size_t i = 0; i < results.size(); ++i) EXPECT_EQ(results[i], static_cast<int>(i % 64));
}

TEST(BlockTest, AnInstructionSeesTheOperandsOfAllLanes) {
  EXPECT_THAT(Launch([](const void*) {
                for (int round = 0; round < 3; ++round) {
                  int x = Index() + round;
                  Meet(
                      [](Wave& wave) {
                        int sum = 0;
                        for (int i = 0; i < kWave; ++i) sum += wave.slot<int>(i);
                        for (int i = 0; i < kWave; ++i) wave.slot<int>(i) = sum;
                      },
                      &x);
                  results[static_cast<size_t>(Index())] = x;
                }
              }),
              IsEmpty());
  for (const int x : results) EXPECT_EQ(x, kWave * (kWave - 1) / 2 + 2 * kWave);
}

TEST(BlockTest, ABarrierOrdersSharedMemory) {
  EXPECT_THAT(Launch(
                  [](const void*) {
                    Store(Index() * 4, Index());
                    BlockBarrier();
                    results[static_cast<size_t>(Index())] = Load((127 - Index()) * 4);
                  },
                  4),
              IsEmpty());
  for (int i = 0; i < 128; ++i) EXPECT_EQ(results[static_cast<size_t>(i)], 127 - i);
}

TEST(BlockTest, WithoutABarrierReadersAndWritersAreFaults) {
  EXPECT_THAT(Launch(
                  [](const void*) {
                    Store(Index() * 4, Index());
                    Load((127 - Index()) * 4);
                  },
                  4),
              HasSubstr("with no barrier between them"));
  EXPECT_THAT(Launch(
                  [](const void*) {
                    Load(0);
                    if (Index() == 64) Store(0, 1);
                  },
                  4),
              HasSubstr("s a word "));
  EXPECT_THAT(Launch([](const void*) { Store(0, the_lane->wave->index); }, 2),
              HasSubstr("writes a word written by wave"));
}

TEST(BlockTest, WordsThatNothingHasWrittenAreNaN) {
  EXPECT_THAT(Launch([](const void*) { results[static_cast<size_t>(Index())] = Load(8); }),
              IsEmpty());
  EXPECT_EQ(results[0], -1);  // all bits
}

TEST(BlockTest, CopiesLandOldestFirstAndAsLateAsWaitsAllow) {
  source = {10, 20, 30};
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 0) return;
                for (int i = 0; i < 3; ++i) StartCopy(i * 4, &source[static_cast<size_t>(i)]);
                source[0] = 11;  // the source is read when the copy lands
                LandAllBut(1);
                source[1] = 21;
                results[0] = Load(0);
                results[1] = Load(4);
                LandAllBut(0);
                results[2] = Load(8);
              }),
              IsEmpty());
  EXPECT_THAT(std::vector<int>(results.begin(), results.begin() + 3), ElementsAre(11, 20, 30));
}

TEST(BlockTest, WhatACopyHasNotBroughtIsNotTouched) {
  source = {10, 20};
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 0) return;
                for (int i = 0; i < 2; ++i) StartCopy(i * 4, &source[static_cast<size_t>(i)]);
                LandAllBut(1);
                Load(4);
              }),
              HasSubstr("a read of a word before its copy has landed"));
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 0) return;
                StartCopy(0, &source[0]);
                Store(0, 5);
              }),
              HasSubstr("a write to a word before its copy has landed"));
  EXPECT_THAT(Launch([](const void*) {
                if (Index() == 7) StartCopy(0, &source[0]);
              }),
              HasSubstr("the block ended before its copies had landed"));
}

TEST(BlockTest, SharedMemoryHasBoundsAndAlignment) {
  EXPECT_THAT(Launch([](const void*) { Load(1024); }), HasSubstr("at 1024 of 1024 bytes"));
  EXPECT_THAT(Launch([](const void*) { Store(-4, 0); }), HasSubstr("at -4 of 1024 bytes"));
  EXPECT_THAT(Launch([](const void*) { Load(6); }), HasSubstr("not aligned"));
  EXPECT_THAT(Launch([](const void*) { the_block->shared.Base(Index() == 0 ? 64 : 128); }),
              HasSubstr("two sizes"));
}

TEST(BlockTest, LanesOfAWaveStayTogether) {
  static int slot = 0;
  static int* const address = &slot;
  EXPECT_THAT(Launch([](const void*) { Meet(Index() == 3 ? OtherThing : Nothing, address); }),
              HasSubstr("different instructions"));
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 3) Meet(Nothing, address);
              }),
              HasSubstr("a lane"));
  EXPECT_THAT(Launch([](const void*) {
                Uniform(Index() / 31);
                Meet(Nothing, address);
              }),
              HasSubstr("lanes differ in a value that must be the same"));
}

TEST(BlockTest, LanesThatWaitForWhatNeverComesAreAFault) {
  EXPECT_THAT(Launch([](const void*) { Barrier(the_block->named[1], 64, true, false); }),
              HasSubstr("all lanes wait for each other"));
  EXPECT_THAT(Launch(
                  [](const void*) {
                    if (Index() == 5) {
                      Barrier(the_block->named[1], 2, true, false);
                    } else {
                      BlockBarrier();
                    }
                  },
                  2),
              HasSubstr("all lanes wait for each other"));
}

TEST(BlockTest, WavesThatAskForMoreRegistersThanThereAreAreAFault) {
  // Two waves with 64 lanes in all have 1024 registers a lane.
  EXPECT_THAT(Launch([](const void*) { SetRegisters(Index() < 32 ? 2000 : 48); }, 2), IsEmpty());
  EXPECT_THAT(Launch([](const void*) { SetRegisters(Index() < 32 ? 2008 : 48); }, 2),
              HasSubstr("waves ask for 2056 registers a lane, of 2048 in all"));
}

TEST(BlockTest, NamedBarriersCountAndAnswer) {
  EXPECT_THAT(Launch(
                  [](const void*) {
                    const bool waits = Index() < 32;
                    const bool any = Barrier(the_block->named[2], 64, waits, Index() == 40);
                    if (waits) results[static_cast<size_t>(Index())] = any;
                  },
                  2),
              IsEmpty());
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(results[i], 1);
}

// Counts its lanes, and has a barrier where the launch after it has one.
const Previous kCountingKernel{
    [](void*) {
      const Kernel kernel{"before", 0, [](const void*) {
                            if (Index() == 0) InitCounted(512, kWave);
                            BlockBarrier();
                            ArriveCounted(512, 0);
                            Poll(CountedPhaseEnded, 512, 0);
                            ++source[0];
                          }};
      EXPECT_EQ(Run(kernel, kWave, Grid{3, 1, kWave, 0}, nullptr), nullptr);
    },
    nullptr};

TEST(BlockTest, TheKernelBeforeRunsWhenAllLanesWaitForIt) {
  constexpr int kLanes = 2 * kWave;
  const Kernel kernel{"kernel", 0, [](const void*) {
                        const auto first = static_cast<size_t>(Index()) * 2;
                        if (Index() == 0) InitCounted(512, kLanes);
                        BlockBarrier();
                        results[first] = source[0];
                        if (the_block->x == 0) WaitForPrevious();
                        results[first + 1] = source[0];
                        ArriveCounted(512, 0);
                        Poll(CountedPhaseEnded, 512, 0);
                      }};
  for (const uint32_t blocks : {1u, 2u}) {
    source.assign(1, 0);
    results.assign(size_t{2} * kLanes, -1);
    const char* const fault =
        host::Run(kernel, kWave, Grid{blocks, 1, kLanes, 0}, nullptr, &kCountingKernel);
    ASSERT_EQ(fault, nullptr) << fault;
    EXPECT_EQ(source[0], 3 * kWave);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      // The second block begins when the kernel before has ended.
      EXPECT_EQ(results[2 * lane], blocks == 1 ? 0 : 3 * kWave);
      EXPECT_EQ(results[2 * lane + 1], 3 * kWave);
    }
  }
}

TEST(BlockTest, ALaunchThatNeverWaitsDoesNotRunTheKernelBefore) {
  source.assign(1, 0);
  const Kernel kernel{"kernel", 0, [](const void*) { BlockBarrier(); }};
  EXPECT_EQ(host::Run(kernel, kWave, Grid{2, 1, 2 * kWave, 0}, nullptr, &kCountingKernel), nullptr);
  EXPECT_EQ(source[0], 0);
}

TEST(CountedBarrierTest, CopiesCompleteAPhaseOnceItIsAskedFor) {
  source.assign(kWave, 0);
  EXPECT_THAT(Launch(
                  [](const void*) {
                    if (Index() == 0) InitCounted(512, kWave);
                    BlockBarrier();
                    const auto number = static_cast<size_t>(Index() % kWave);
                    if (Index() < kWave) {
                      StartCopy(Index() * 4, &source[number]);
                      ArriveAfterCopies(512);
                      source[number] = Index() + 100;
                    } else {
                      Poll(CountedPhaseEnded, 512, 0);
                      results[number] = Load(static_cast<int>(number) * 4);
                    }
                  },
                  2),
              IsEmpty());
  for (int i = 0; i < kWave; ++i) EXPECT_EQ(results[static_cast<size_t>(i)], i + 100);
}

TEST(CountedBarrierTest, BulkCopiesAreCountedInBytes) {
  source.assign(64, 7);
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 0) return;
                InitCounted(512, 1);
                ArriveCounted(512, 256);
                StartBulkCopy(Shared(0), source.data(), 128, 512);
                StartBulkCopy(Shared(128), source.data() + 32, 128, 512);
                Poll(CountedPhaseEnded, 512, 0);
                results[0] = Load(252);
              }),
              IsEmpty());
  EXPECT_EQ(results[0], 7);
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 0) return;
                InitCounted(512, 1);
                ArriveCounted(512, 256);
                StartBulkCopy(Shared(0), source.data(), 128, 512);
                Poll(CountedPhaseEnded, 512, 0);
              }),
              HasSubstr("all lanes wait for each other"));
}

// Pages of three rows of 128 columns that begin every 64 bytes, and boxes of four rows and 64
// columns.
std::vector<uint16_t> tensor;
TensorMap map;
void MakeMap() {
  tensor.resize(1024);
  for (size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<uint16_t>(i);
  map = {.mark = TensorMap::kMark,
         .first = reinterpret_cast<const char*>(tensor.data()),
         .dims = {128, 3, 4},
         .strides = {512, 64},
         .box = {64, 4, 1},
         .swizzle = 128};
}

TEST(CountedBarrierTest, BoxesArriveSwizzledWithZerosPastThePage) {
  MakeMap();
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 0) return;
                InitCounted(960, 1);
                ArriveCounted(960, 512);
                StartBoxCopy(Shared(128), &map, {64, 1, 2}, 960);
                tensor[64 + 256 + 64] = 9999;  // the source is read when the copy lands
                Poll(CountedPhaseEnded, 960, 0);
                for (int i = 0; i < 128; ++i) results.push_back(Load(128 + i * 4));
              }),
              IsEmpty());
  const auto* const words = results.data() + kWave;
  for (int row = 0; row < 4; ++row) {
    for (int word = 0; word < 32; ++word) {
      // Row 0 of the box lies in row 1 of the eight after which the swizzle repeats.
      const int at = row * 32 + (word / 4 ^ (row + 1)) * 4 + word % 4;
      const int first = 2 * 32 + (1 + row) * 256 + 64 + 2 * word;
      const int low = first == 64 + 256 + 64 ? 9999 : first;
      EXPECT_EQ(words[at], row < 2 ? low | (first + 1) << 16 : 0) << row << " " << word;
    }
  }
}

// Rows of 64 bytes: two neighbouring ones have the same swizzle, of four chunks. Rows of 16 bytes
// have none. The page has three rows.
TEST(CountedBarrierTest, NarrowBoxesArriveUnderTheirOwnSwizzle) {
  MakeMap();
  map.box[0] = 32;
  map.swizzle = 64;
  static TensorMap plain;
  plain = map;
  plain.box[0] = 8;
  plain.swizzle = 0;
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 0) return;
                InitCounted(960, 1);
                ArriveCounted(960, 256 + 64);
                StartBoxCopy(Shared(384), &map, {32, 0, 1}, 960);
                StartBoxCopy(Shared(640), &plain, {120, 0, 1}, 960);
                Poll(CountedPhaseEnded, 960, 0);
                for (int i = 0; i < 80; ++i) results.push_back(Load(384 + i * 4));
              }),
              IsEmpty());
  const auto* const words = results.data() + kWave;
  for (int row = 0; row < 4; ++row) {
    const auto want = [row](int column) {  // the page begins 64 bytes on
      const int low = 32 + row * 256 + column;
      return row < 3 ? low | (low + 1) << 16 : 0;
    };
    for (int word = 0; word < 16; ++word) {
      const int chunk = word / 4 ^ (384 + row * 64) / 128 % 4;
      EXPECT_EQ(words[row * 16 + chunk * 4 + word % 4], want(32 + 2 * word)) << row << " " << word;
    }
    for (int word = 0; word < 4; ++word) {
      EXPECT_EQ(words[64 + row * 4 + word], want(120 + 2 * word)) << row << " " << word;
    }
  }
}

TEST(CountedBarrierTest, BoxesOutsideOfTheTensorAreZerosAndOthersAreFaults) {
  MakeMap();
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 0) return;
                InitCounted(960, 1);
                ArriveCounted(960, 512);
                StartBoxCopy(Shared(0), &map, {0, 0, 4}, 960);
                Poll(CountedPhaseEnded, 960, 0);
                results[0] = Load(0);
              }),
              IsEmpty());
  EXPECT_EQ(results[0], 0);
  EXPECT_THAT(Launch([](const void*) {
                InitCounted(960, 1);
                StartBoxCopy(Shared(0), &map, {128, 0, 0}, 960);
              }),
              HasSubstr("a box that begins with column 128"));
  EXPECT_THAT(Launch([](const void*) {
                InitCounted(960, 1);
                StartBoxCopy(Shared(64), &map, {0, 0, 0}, 960);
              }),
              HasSubstr("a box at 64 of shared memory"));
  map.mark = 0;
  EXPECT_THAT(Launch([](const void*) {
                InitCounted(960, 1);
                StartBoxCopy(Shared(0), &map, {0, 0, 0}, 960);
              }),
              HasSubstr("that the driver has not encoded"));
}

TEST(CountedBarrierTest, MoreArrivalsThanCountedAreAFault) {
  EXPECT_THAT(Launch([](const void*) {
                if (Index() != 0) return;
                InitCounted(512, 1);
                ArriveAfterCopies(512);
                ArriveCounted(512, 0);
              }),
              HasSubstr("more arrivals at a barrier than it counts"));
  EXPECT_THAT(Launch([](const void*) { ArriveCounted(64, 0); }), HasSubstr("not initialised"));
}

TEST(ProductsTest, AnyNumberOfColumnVectors) {
  for (const int cols : {8, 16, 24, 32, 56}) {
    constexpr int kRows = 3, kDepth = 5;
    alignas(32) float a[kRows * kDepth], b[kDepth * 64], d[kRows * 64];
    for (int i = 0; i < kRows * kDepth; ++i) a[i] = static_cast<float>(i % 7 - 3);
    for (int i = 0; i < kDepth * cols; ++i) b[i] = static_cast<float>(i % 11 - 5);
    for (int i = 0; i < kRows * cols; ++i) d[i] = static_cast<float>(i);
    MultiplyAdd(d, a, b, kRows, cols, kDepth);
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < cols; ++c) {
        float want = static_cast<float>(r * cols + c);
        for (int k = 0; k < kDepth; ++k) want += a[r * kDepth + k] * b[k * cols + c];
        EXPECT_EQ(d[r * cols + c], want) << cols << " " << r << " " << c;
      }
    }
  }
}

}  // namespace
}  // namespace mla::kernels::hip::host
