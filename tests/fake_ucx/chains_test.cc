// Chained calls over a fake UCX, by streams of a fake GPU: layers that follow each other without a
// thread of the worker, entries that wait for their stream, and streams that go on when the ring
// ends.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "client/cpp/shared_memory/device_copy.h"
#include "tests/fake_hip/backend_fixture.h"
#include "tests/fake_ucx/fake_ucx.h"
#include "tests/fake_ucx/ring_pair.h"
#include "tests/integration/device_memory/fake_stream.h"

namespace mla {
namespace {

using client::DeviceCopy;
using fake_ucx::RingPair;

constexpr uint64_t kBytes = 20'000;
constexpr int kRounds = 20'000;

class ChainsTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    kernels::hip::FakeControl()->arch = "sm_90";
    fake_ucx::Reset();
    ASSERT_EQ(pair_.Start(GetParam(), GetParam(), Options()), absl::OkStatus());
    ASSERT_EQ(pair_.memory()->pinned(), absl::OkStatus());
    pair_.knows = false;
  }
  void TearDown() override {
    pair_.EndClient();
    pair_.EndRelay();
    EXPECT_EQ(pair_.fault(), "");
    EXPECT_EQ(kernels::hip::FakeControl()->registered_bytes, 0);
    EXPECT_EQ(fake_ucx::counts().live_requests, 0u);
  }
  static client::UcxMemoryOptions Options() {
    client::UcxMemoryOptions options;
    options.pins = true;
    options.device.library = kernels::hip::kLibrary;
    return options;
  }

  static uint64_t InOffset(uint64_t slot) {
    return RingPair::kArena + slot * 2 * RingPair::kSlotBytes;
  }
  std::byte* At(uint64_t offset) { return pair_.memory()->region().data() + offset; }

  // A layer: the stream copies `from` to the inputs, and gets the outputs.
  void Layer(uint64_t index, const std::byte* from) {
    const uint64_t slot = index % RingPair::kEntries;
    const DeviceCopy in{At(InOffset(slot)), from, kBytes, 1, kBytes, kBytes};
    ASSERT_EQ(pair_.memory()->device()->Copy({&in, 1}, stream_.get()), absl::OkStatus());
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryAttend;
    entry.flags = wire::kEntryChained;
    entry.tag = index;
    entry.row_count = kBytes;
    entry.in_offset = InOffset(slot);
    entry.out_offset = InOffset(slot) + RingPair::kSlotBytes;
    ASSERT_TRUE(
        pair_.memory()->Submit(entry, {entry.in_offset, kBytes, kBytes}, stream_.get(), true));
  }
  // Returns the outputs of a layer, from which the next layer copies.
  const std::byte* OutputsOf(uint64_t index) {
    return At(InOffset(index % RingPair::kEntries) + RingPair::kSlotBytes);
  }
  bool SubmitMessage(uint64_t tag) {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryMessage;
    entry.tag = tag;
    return pair_.memory()->Submit(entry, {}, nullptr, false);
  }

  RingPair pair_;
  integration::FakeStream stream_;
};

TEST_P(ChainsTest, LayersFollowEachOtherWithoutAThreadOfTheWorker) {
  std::vector<std::byte> first(kBytes);
  for (size_t i = 0; i < kBytes; ++i) first[i] = static_cast<std::byte>(i * 7 + i / 256);
  std::atomic<bool> stop{false};
  std::thread server([&] {
    while (!stop) pair_.Step();
  });
  uint64_t index = 0;
  for (int step = 0; step < 5; ++step) {
    // All layers of the step are in flight at once.
    for (uint32_t layer = 0; layer < RingPair::kEntries; ++layer, ++index) {
      Layer(index, layer == 0 ? first.data() : OutputsOf(index - 1));
    }
    stream_.Finish();
    // Each layer inverts its inputs, and there is an even number of them.
    ASSERT_EQ(std::memcmp(OutputsOf(index - 1), first.data(), kBytes), 0) << step;
    for (uint32_t layer = 0; layer < RingPair::kEntries; ++layer) {
      wire::CompletionEntry entry;
      ASSERT_EQ(pair_.memory()->Wait(&entry, std::chrono::seconds(60)), absl::OkStatus());
      EXPECT_EQ(entry.tag, index - RingPair::kEntries + layer);
    }
  }
  stop = true;
  server.join();
  for (const wire::SubmissionEntry& entry : pair_.ring().submitted) EXPECT_EQ(entry.flags, 0);
}

TEST_P(ChainsTest, AnEntryLeavesWhenItsStreamHasComeToIt) {
  kernels::hip::FakeControl()->lazy_words = stream_.get();
  const std::vector<std::byte> inputs(kBytes, std::byte{9});
  Layer(0, inputs.data());
  ASSERT_TRUE(SubmitMessage(1));  // the end of the step
  for (int i = 0; i < 1000; ++i) {
    pair_.Step();
    wire::CompletionEntry entry;
    EXPECT_FALSE(pair_.memory()->Wait(&entry, std::chrono::nanoseconds(0)).ok());
  }
  EXPECT_TRUE(pair_.ring().submitted.empty());
  pair_.computes = false;
  std::thread stream([this] { stream_.Finish(); });
  const auto run_until = [this](size_t entries) {
    wire::CompletionEntry entry;
    for (int i = 0; i < kRounds && pair_.ring().submitted.size() < entries; ++i) {
      pair_.Step();
      (void)pair_.memory()->Wait(&entry, std::chrono::microseconds(100));
    }
    return pair_.ring().submitted.size();
  };
  // Nothing is answered, and the end comes after the last layer nevertheless.
  ASSERT_EQ(run_until(2), 2u);
  EXPECT_EQ(pair_.ring().submitted[0].kind, wire::kEntryAttend);
  EXPECT_EQ(pair_.ring().submitted[1].kind, wire::kEntryMessage);
  EXPECT_EQ(pair_.memory()->messages_sent(), GetParam() ? 3u : 1u);  // with puts: key, end, attend
  pair_.computes = true;
  wire::CompletionEntry entry;
  for (int taken = 0; taken < 2;) {
    pair_.Step();
    taken += pair_.memory()->Wait(&entry, std::chrono::microseconds(100)).ok() ? 1 : 0;
  }
  stream.join();
  kernels::hip::FakeControl()->lazy_words = nullptr;
  EXPECT_EQ(*OutputsOf(0), ~std::byte{9});
}

TEST_P(ChainsTest, StreamsGoOnWhenTheRingEnds) {
  const std::vector<std::byte> inputs(kBytes, std::byte{9});
  kernels::hip::FakeControl()->lazy_words = stream_.get();
  for (uint32_t layer = 0; layer < RingPair::kEntries; ++layer) Layer(layer, inputs.data());
  pair_.memory()->SetEnded(absl::UnavailableError("the server has gone"));
  EXPECT_FALSE(pair_.memory()->Connected());
  pair_.memory()->ReleaseStreams();
  stream_.Finish();  // hangs if one of its waits does
  kernels::hip::FakeControl()->lazy_words = nullptr;
  EXPECT_TRUE(pair_.ring().submitted.empty());
}

TEST_P(ChainsTest, AFailureOfTheDriverIsTheCalls) {
  kernels::hip::FakeControl()->lost = true;
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryAttend;
  entry.in_offset = entry.out_offset = RingPair::kArena;
  EXPECT_FALSE(pair_.memory()->Submit(entry, {entry.in_offset, 64, 64}, stream_.get(), true));
  kernels::hip::FakeControl()->lost = false;
  EXPECT_FALSE(pair_.memory()->device_status().ok());
  EXPECT_EQ(pair_.memory()->in_flight(), 0u);
  pair_.memory()->ReleaseStreams();
}

INSTANTIATE_TEST_SUITE_P(Puts, ChainsTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "puts" : "frames"; });

TEST(ChainsWithoutGpuTest, TheReasonIsThere) {
  fake_ucx::Reset();
  RingPair pair;
  client::UcxMemoryOptions options;
  options.pins = true;
  options.device.library = "/nowhere/libcuda.so";
  ASSERT_EQ(pair.Start(false, false, options), absl::OkStatus());
  const absl::Status pinned = pair.memory()->pinned();
  EXPECT_EQ(pinned.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(pinned.message().find("/nowhere/libcuda.so"), absl::string_view::npos) << pinned;
  EXPECT_TRUE(pair.Run(4, kBytes)) << pair.fault();
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryAttend;
  EXPECT_FALSE(pair.memory()->Submit(entry, {}, nullptr, true));
}

}  // namespace
}  // namespace mla
