// Tests small tensors in pinned memory that kernels use in place or copy, words that launches wait
// for and set, metadata that stays on the device, and launches on one stream. The tests run on
// every architecture, because each has its own kernels for this.
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"
#include "tests/fake_hip/rocm/row_launch.h"

namespace mla::kernels::hip {
namespace {

class InPlaceTest : public PinnedMemoryTest {
 protected:
  // Returns a row in the pinned memory, filled with `value`.
  Bf16* Row(size_t offset, Bf16 value) const {
    auto* const row = reinterpret_cast<Bf16*>(memory_.data() + offset);
    std::fill_n(row, kRowElements, value);
    return row;
  }
};

TEST_P(InPlaceTest, KernelsReadAndWritePinnedMemory) {
  Bf16* const row = Row(0, 0x3f80);
  auto* const differs = reinterpret_cast<int32_t*>(memory_.data() + 4096);
  RowLaunch store;
  const int64_t in = control_->copies_in, out = control_->copies_out;
  ASSERT_TRUE(store.Submit(*backend_, 0, row, 0).ok());
  EXPECT_TRUE(store.in_place());
  ASSERT_TRUE(backend_->Wait(0).ok());
  EXPECT_EQ(control_->copies_in - in, 1);  // the launch's metadata
  *differs = 7;
  RowLaunch equal;
  ASSERT_TRUE(equal.Submit(*backend_, 0, row, 0, differs).ok());
  EXPECT_TRUE(equal.in_place());
  ASSERT_TRUE(backend_->Wait(0).ok());
  EXPECT_EQ(*differs, 0);
  row[3] = 0x4000;
  RowLaunch other;
  ASSERT_TRUE(other.Submit(*backend_, 0, row, 0, differs).ok());
  EXPECT_EQ(*differs, 0);  // until the launch has run
  ASSERT_TRUE(backend_->Wait(0).ok());
  EXPECT_EQ(*differs, 1);
  EXPECT_EQ(control_->copies_in - in, 2);  // the slot's last launch had the same metadata
  EXPECT_EQ(control_->copies_out - out, 0);
  EXPECT_EQ(ReadRows(*backend_, 1), std::vector<Bf16>(kRowElements, 0x3f80));
}

TEST_P(InPlaceTest, WhatKernelsCouldNotUseIsCopied) {
  const HipBackend& b = *backend_;
  EXPECT_TRUE(b.InPlace(memory_.data() + 16, kRowBytes));
  EXPECT_FALSE(b.InPlace(memory_.data() + 8, kRowBytes));                  // not aligned
  EXPECT_FALSE(b.InPlace(memory_.data() + kMemoryBytes - 16, kRowBytes));  // ends outside the
                                                                           // pinned memory
  const std::vector<std::byte> loose(4096);
  EXPECT_FALSE(b.InPlace(loose.data(), kRowBytes));
  RowLaunch store;
  std::memcpy(memory_.data() + 8, Row(4096, 0x3f80), kRowBytes);
  ASSERT_TRUE(store.Submit(*backend_, 0, reinterpret_cast<Bf16*>(memory_.data() + 8), 0).ok());
  EXPECT_FALSE(store.in_place());
  ASSERT_TRUE(backend_->Wait(0).ok());
  EXPECT_EQ(ReadRows(*backend_, 1), std::vector<Bf16>(kRowElements, 0x3f80));
}

TEST_P(InPlaceTest, MemoryStaysPinnedUntilTheLaunchHasEnded) {
  RowLaunch store;
  ASSERT_TRUE(store.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
  std::thread closer([&] { backend_->UnregisterHost(memory_); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(control_->registered_bytes, static_cast<int64_t>(kMemoryBytes));
  EXPECT_TRUE(backend_->Wait(0).ok());
  closer.join();
  EXPECT_EQ(control_->registered_bytes, 0);
  RowLaunch late;
  ASSERT_TRUE(late.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
  EXPECT_FALSE(late.in_place());
  EXPECT_TRUE(backend_->Wait(0).ok());
}

TEST_P(InPlaceTest, ManyOutputsAreCopiedAndAllElseWithThem) {
  const int64_t limit = backend_->Info().in_place_bytes;
  EXPECT_GT(limit, 0);
  auto* const differs = reinterpret_cast<int32_t*>(memory_.data() + 4096);
  for (const bool in_place : {true, false}) {
    RowLaunch launch;
    launch.set_output_bytes(in_place ? limit : limit + 1);
    ASSERT_TRUE(launch.Submit(*backend_, 0, Row(0, 0x3f80), 0, differs).ok());
    EXPECT_EQ(launch.in_place(), in_place);
    ASSERT_TRUE(backend_->Wait(0).ok());
  }
}

// For example, rows of a prompt without queries.
TEST_P(InPlaceTest, ManyRowsAreCopied) {
  LaunchLayout layout(*backend_, 0);
  layout.ExpectOutputs(0);
  const int64_t limit = backend_->Info().in_place_bytes;
  ASSERT_TRUE(layout.InputReadOnce(memory_.data(), limit).ok());
  ASSERT_TRUE(layout.InputReadOnce(memory_.data(), limit + 16).ok());
  EXPECT_TRUE(layout.inputs()[0].in_place());
  EXPECT_FALSE(layout.inputs()[1].in_place());
  layout.Clear();
  ASSERT_TRUE(layout.InputReadOnce(memory_.data(), limit).ok());
  EXPECT_FALSE(layout.inputs()[0].in_place());  // the layout does not know the outputs yet
}

// The first launch begins alone, the second while the first runs. The second launch's copies then
// have their own stream.
TEST_P(InPlaceTest, LaunchesBesideEachOtherKeepTheirOrder) {
  std::vector<Bf16> loose(kRowElements, 0x4000);
  int32_t differs = 7;  // not pinned, so copied
  for (int round = 0; round < 3; ++round) {
    RowLaunch first, second;
    ASSERT_TRUE(first.Submit(*backend_, 0, Row(0, 0x3f80), 2 * round).ok());
    ASSERT_TRUE(second.Submit(*backend_, 1, loose.data(), 2 * round, &differs).ok());
    ASSERT_TRUE(backend_->Wait(1).ok());
    EXPECT_EQ(differs, 1);  // the second launch reads the row that the first one stored
    ASSERT_TRUE(backend_->Wait(0).ok());
  }
}

// Launches make these calls only if another launch is running.
TEST_P(InPlaceTest, CallsThatPutCopiesBesideAnotherLaunchFailThatLaunchAlone) {
  int32_t position = 1;
  for (const char* call : {"hipEventRecord", "hipStreamWaitEvent"}) {
    RowLaunch first, second, third;
    ASSERT_TRUE(first.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
    control_->FailOnce(call);
    EXPECT_EQ(second.Submit(*backend_, 1, Row(4096, 0x4000), position).code(),
              absl::StatusCode::kInternal);
    EXPECT_EQ(control_->fail_seen, 1) << call;
    ASSERT_TRUE(backend_->Wait(0).ok()) << call;
    ASSERT_TRUE(third.Submit(*backend_, 1, Row(4096, 0x4000), position).ok()) << call;
    ASSERT_TRUE(backend_->Wait(1).ok());
    ++position;  // otherwise the slot has nothing to upload
  }
  EXPECT_TRUE(backend_->Healthy().ok());
}

TEST_P(InPlaceTest, ALaunchThatUploadsNothingWaitsForNoUpload) {
  RowLaunch first, second, third;
  ASSERT_TRUE(first.Submit(*backend_, 1, Row(4096, 0x4000), 1).ok());
  ASSERT_TRUE(backend_->Wait(1).ok());
  ASSERT_TRUE(second.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
  control_->FailOnce("hipStreamWaitEvent");
  ASSERT_TRUE(third.Submit(*backend_, 1, Row(4096, 0x4000), 1).ok());
  EXPECT_EQ(control_->fail_seen, 0);
  ASSERT_TRUE(backend_->Wait(0).ok());
  ASSERT_TRUE(backend_->Wait(1).ok());
}

TEST_P(InPlaceTest, MetadataOfEqualLaunchesTravelsOnce) {
  const auto copies_of = [&](int32_t position) {
    const int64_t before = control_->copies_in;
    RowLaunch launch;
    EXPECT_TRUE(launch.Submit(*backend_, 0, Row(0, 0x3f80), position).ok());
    EXPECT_TRUE(backend_->Wait(0).ok());
    return control_->copies_in - before;
  };
  EXPECT_EQ(copies_of(1), 1);
  EXPECT_EQ(copies_of(1), 0);
  EXPECT_EQ(copies_of(0), 1);
  EXPECT_EQ(copies_of(0), 0);
  EXPECT_EQ(ReadRows(*backend_, 2), std::vector<Bf16>(2 * kRowElements, 0x3f80));
}

TEST_P(InPlaceTest, LayersOfAStepHaveTheSameMetadata) {
  constexpr int64_t kLayerBytes = 64 * kRowBytes;
  const int64_t before = control_->copies_in;
  for (const int layer : {0, 1, 2}) {
    RowLaunch launch;
    launch.set_layer_offset(layer * kLayerBytes);
    ASSERT_TRUE(launch.Submit(*backend_, 0, Row(0, static_cast<Bf16>(0x3f80 + layer)), 0).ok());
    ASSERT_TRUE(backend_->Wait(0).ok());
  }
  EXPECT_EQ(control_->copies_in - before, 1);
  for (const int layer : {0, 1, 2}) {
    AppendRecord stored = Append(nullptr, 1);
    stored.layer_offset = layer * kLayerBytes;
    const uint32_t page = 0;
    std::vector<Bf16> row(kRowElements);
    ASSERT_TRUE(kernels::ReadRows(*backend_, 0, {&page, 1}, stored, row.data()).ok());
    EXPECT_EQ(row, std::vector<Bf16>(kRowElements, static_cast<Bf16>(0x3f80 + layer))) << layer;
  }
}

TEST_P(InPlaceTest, AFailedUploadIsMadeAgain) {
  RowLaunch first, second;
  control_->FailOnce("hipMemcpyHtoDAsync");
  EXPECT_FALSE(first.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
  const int64_t before = control_->copies_in;
  ASSERT_TRUE(second.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
  ASSERT_TRUE(backend_->Wait(0).ok());
  EXPECT_EQ(control_->copies_in - before, 1);
  EXPECT_EQ(ReadRows(*backend_, 1), std::vector<Bf16>(kRowElements, 0x3f80));
}

TEST_P(InPlaceTest, AKernelCopiesSmallTensorsOfALaunchThatRunsAlone) {
  std::vector<Bf16> loose(kRowElements, 0x4000);
  for (const bool alone : {true, false}) {
    int32_t differs = 7;
    RowLaunch other, store, compare;
    ASSERT_TRUE(store.Submit(*backend_, 0, loose.data(), 0).ok());
    ASSERT_TRUE(backend_->Wait(0).ok());
    if (!alone) {
      ASSERT_TRUE(other.Submit(*backend_, 1, Row(0, 0x3f80), 1).ok());
    }
    const int64_t in = control_->copies_in, out = control_->copies_out;
    ASSERT_TRUE(compare.Submit(*backend_, 0, loose.data(), 0, &differs).ok());
    ASSERT_TRUE(backend_->Wait(0).ok());
    if (!alone) {
      ASSERT_TRUE(backend_->Wait(1).ok());
    }
    EXPECT_EQ(differs, 0);
    // The metadata is always copied. Tensors are copied if another launch has kernels that the
    // copies can overlap with.
    EXPECT_EQ(control_->copies_in - in, alone ? 1 : 2);
    EXPECT_EQ(control_->copies_out - out, alone ? 0 : 1);
  }
}

TEST_P(InPlaceTest, ALaunchThatKernelsCopyForIsOneGraphAndOneEvent) {
  std::vector<Bf16> loose(kRowElements, 0x4000);
  RowLaunch store;
  ASSERT_TRUE(store.Submit(*backend_, 0, loose.data(), 0).ok());
  ASSERT_TRUE(backend_->Wait(0).ok());
  for (int launch = 0; launch < KernelGraphs::kUsesBefore + 2; ++launch) {
    int32_t differs = 7;
    RowLaunch compare;
    const int64_t graphs = control_->graph_launches;
    control_->FailOnce("hipEventRecord", 1);  // a second one would fail
    ASSERT_TRUE(compare.Submit(*backend_, 0, loose.data(), 0, &differs).ok());
    EXPECT_EQ(control_->fail_seen, 1);
    control_->FailOnce("");
    const auto ns = backend_->Wait(0);
    ASSERT_TRUE(ns.ok());
    EXPECT_GT(*ns, 0);  // time of the kernels between the copies, by the device's clock
    EXPECT_LT(*ns, 1'000'000'000);
    EXPECT_EQ(differs, 0);
    EXPECT_EQ(control_->graph_launches - graphs, launch >= KernelGraphs::kUsesBefore ? 1 : 0);
  }
}

class WordsTest : public InPlaceTest {
 protected:
  static constexpr int64_t kLimitNs = 2'000'000'000;
  uint32_t* Word(size_t index) const {
    return reinterpret_cast<uint32_t*>(memory_.data() + 8192) + 16 * index;
  }
};

TEST_P(WordsTest, ALaunchWaitsForAWordAndSetsOneAtItsEnd) {
  EXPECT_TRUE(backend_->Info().waits_for_words);
  const WordValue ready{Word(0), 3}, done{Word(1), 8};
  *Word(0) = 2;
  RowLaunch launch;
  launch.set_words(ready, kLimitNs, done);
  ASSERT_TRUE(launch.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
  std::thread client([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Row(0, 0x4000);
    ready.Store();
  });
  EXPECT_TRUE(backend_->Wait(0).ok());
  client.join();
  EXPECT_FALSE(backend_->WasLate(0));
  EXPECT_EQ(*Word(1), 8u);
  EXPECT_EQ(ReadRows(*backend_, 1), std::vector<Bf16>(kRowElements, 0x4000));
}

TEST_P(WordsTest, OneThatIsLateSetsNoWordAndTheNextIsItsOwn) {
  for (uint32_t i = 0; i < 8; ++i) {
    const bool late = i % 2 == 1;
    const uint32_t value = 0xfffffffcu + i;  // the values wrap around zero
    *Word(0) = late ? value - 1 : value;
    RowLaunch launch;
    launch.set_words({Word(0), value}, late ? 1000 : kLimitNs, {Word(1), value});
    ASSERT_TRUE(launch.Submit(*backend_, 0, Row(0, static_cast<Bf16>(0x3f80 + i)), 0).ok());
    const auto ns = backend_->Wait(0);
    ASSERT_TRUE(ns.ok());
    EXPECT_GE(*ns, 0);
    EXPECT_EQ(backend_->WasLate(0), late);
    EXPECT_EQ(*Word(1), late ? value - 1 : value);
    EXPECT_GE(backend_->GateNanos(0), late ? 1000 : 0);
    // A launch whose wait timed out leaves the row of the previous launch.
    const Bf16 stored = static_cast<Bf16>(0x3f80 + (late ? i - 1 : i));
    EXPECT_EQ(ReadRows(*backend_, 1), std::vector<Bf16>(kRowElements, stored));
  }
  EXPECT_GE(control_->graph_launches, 6);  // all but the first launch
  RowLaunch plain;
  ASSERT_TRUE(plain.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
  EXPECT_TRUE(backend_->Wait(0).ok());
  EXPECT_FALSE(backend_->WasLate(0));
}

TEST_P(WordsTest, WordsNearbyAreLookedAtAndStored) {
  const WordValue ready{Word(0), 3, Word(2)}, done{Word(1), 8, Word(3)};
  *Word(0) = 2;
  *Word(2) = 3;
  RowLaunch launch;
  launch.set_words(ready, kLimitNs, done);
  ASSERT_TRUE(launch.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
  ASSERT_TRUE(backend_->Wait(0).ok());
  EXPECT_FALSE(backend_->WasLate(0));
  EXPECT_TRUE(backend_->Signalled(0));
  EXPECT_EQ(*Word(1), 8u);
  EXPECT_EQ(*Word(3), 8u);
}

TEST_P(WordsTest, AGateWaitsForTheWordsOfAllItsClients) {
  constexpr uint32_t kMost = LaunchGate::kMostWords;
  uint32_t* const done = Word(kMost);
  uint32_t* const nearby = Word(kMost + 1);
  *done = 0;
  std::vector<WordValue> others;
  for (uint32_t i = 1; i < kMost; ++i) others.push_back({Word(i), i, nullptr});
  others[2].nearby = nearby;
  for (uint32_t missing = 0; missing <= kMost; ++missing) {
    for (uint32_t i = 0; i < kMost; ++i) *Word(i) = i == missing ? i - 1 : i + 5;
    *nearby = *Word(3);
    *Word(3) = 2;  // not looked at, because the other one is nearby
    const bool late = missing < kMost;
    RowLaunch launch;
    launch.set_words({Word(0), 0}, late ? 1000 : kLimitNs, {done, missing});
    launch.set_other_words(others);
    ASSERT_TRUE(launch.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
    ASSERT_TRUE(backend_->Wait(0).ok());
    EXPECT_EQ(backend_->WasLate(0), late) << missing;
    EXPECT_EQ(*done, late ? 0u : missing);
  }
  others.push_back({Word(0), 1, nullptr});
  RowLaunch refused;
  refused.set_words({Word(0), 0}, kLimitNs, {done, 1});
  refused.set_other_words(others);
  EXPECT_EQ(refused.Submit(*backend_, 0, Row(0, 0x3f80), 0).code(),
            absl::StatusCode::kInvalidArgument);
  uint32_t loose = 5;
  others.assign(1, {&loose, 5, nullptr});
  refused.set_other_words(others);
  EXPECT_EQ(refused.Submit(*backend_, 0, Row(0, 0x3f80), 0).code(),
            absl::StatusCode::kInvalidArgument);
}

// Outputs are copied after the kernels, and no kernel runs after the copies to set the word.
TEST_P(WordsTest, ALaunchWhoseOutputsAreCopiedLeavesItsSignalsToTheCaller) {
  *Word(0) = 3;
  std::vector<int32_t> differs(1, 7);
  ASSERT_TRUE(AppendOnce(*backend_, Row(0, 0x3f80)).ok());
  RowLaunch launch, other;
  ASSERT_TRUE(other.Submit(*backend_, 1, Row(4096, 0x3f80), 1).ok());  // so that no kernel moves
                                                                       // the outputs
  launch.set_output_bytes(1 << 20);
  launch.set_words({Word(0), 3}, kLimitNs, {Word(1), 8});
  ASSERT_TRUE(launch.Submit(*backend_, 0, Row(0, 0x3f80), 0, differs.data()).ok());
  EXPECT_FALSE(launch.in_place());
  ASSERT_TRUE(backend_->Wait(1).ok());
  ASSERT_TRUE(backend_->Wait(0).ok());
  EXPECT_EQ(differs[0], 0);
  EXPECT_FALSE(backend_->WasLate(0));
  EXPECT_FALSE(backend_->Signalled(0));
  EXPECT_EQ(*Word(1), 0u);
}

TEST_P(WordsTest, WordsThatTheDeviceDoesNotReach) {
  uint32_t loose[2] = {5, 5};
  RowLaunch gated, signalling;
  gated.set_words({&loose[0], 5}, kLimitNs, {Word(1), 1});
  EXPECT_EQ(gated.Submit(*backend_, 0, Row(0, 0x3f80), 0).code(),
            absl::StatusCode::kInvalidArgument);
  *Word(0) = 5;
  signalling.set_words({Word(0), 5}, kLimitNs, {&loose[1], 6});
  ASSERT_TRUE(signalling.Submit(*backend_, 0, Row(0, 0x3f80), 0).ok());
  ASSERT_TRUE(backend_->Wait(0).ok());
  EXPECT_EQ(loose[1], 5u);  // the caller sets this word
}

// Other threads' driver calls wait while a gate waits, so every gate has a time limit.
TEST_P(WordsTest, GatesWaitForTwoSecondsAtMost) {
  for (const int64_t limit_ns : {int64_t{-1}, kLimitNs + 1}) {
    RowLaunch launch;
    launch.set_words({Word(0), 5}, limit_ns, {Word(1), 1});
    const absl::Status refused = launch.Submit(*backend_, 0, Row(0, 0x3f80), 0);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, InPlaceTest, ::testing::Values("gfx950", "gfx942", "sm_90"),
                         [](const auto& arch) { return std::string(arch.param); });
INSTANTIATE_TEST_SUITE_P(Architectures, WordsTest, ::testing::Values("gfx950", "gfx942", "sm_90"),
                         [](const auto& arch) { return std::string(arch.param); });

}  // namespace
}  // namespace mla::kernels::hip
