// Frames that travel together over a fake UCX: a step is one message each way, in any order of
// arrivals, with frames, puts and encryption; and lists of frames that are not well formed end the
// ring.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "proto/wire/ucx/frame_batch.h"
#include "proto/wire/ucx/frames.h"
#include "tests/fake_ucx/fake_ucx.h"
#include "tests/fake_ucx/ring_pair.h"

namespace mla {
namespace {

using fake_ucx::RingPair;

constexpr uint64_t kSmall = 300, kLarge = 20'000;  // bytes of inputs, and of outputs
constexpr uint64_t kRequests = RingPair::kEntries;

struct Counted {
  uint64_t sent, answered;  // messages of each side
};

// Holds requests back. First waits until the client's own thread sleeps, because that would send
// them after a pause.
void Hold(RingPair* pair) {
  while (!pair->memory()->pump_rests()) std::this_thread::yield();
  pair->memory()->Hold();
}

// A step of `bytes` a request: all requests are submitted, served and answered at once.
Counted RunStep(RingPair* pair, uint64_t bytes) {
  Hold(pair);
  const uint64_t sent = pair->memory()->messages_sent();
  const uint64_t answered = pair->relay()->messages_sent();
  for (uint64_t i = 0; i < kRequests; ++i) EXPECT_TRUE(pair->Submit(bytes));
  EXPECT_EQ(pair->memory()->messages_sent(), sent) << "they are held back";
  pair->memory()->SendHeld();
  const uint64_t end = pair->taken() + kRequests;
  pair->computes = false;
  for (int round = 0; round < 100'000 && pair->taken() < end; ++round) {
    pair->Step();
    // The server answers when it has all requests.
    pair->computes = pair->ring().in_flight() == kRequests || pair->computes;
    EXPECT_EQ(pair->Take(), absl::OkStatus());
  }
  EXPECT_EQ(pair->taken(), end);
  EXPECT_EQ(pair->fault(), "");
  return {pair->memory()->messages_sent() - sent, pair->relay()->messages_sent() - answered};
}

class BatchesTest : public testing::Test {
 protected:
  void TearDown() override {
    pair_.EndClient();
    pair_.EndRelay();
    EXPECT_EQ(pair_.fault(), "");
    EXPECT_EQ(fake_ucx::counts().live_requests, 0u);
    EXPECT_EQ(fake_ucx::counts().registered, 0u);
  }
  void Start(bool puts = false, const std::optional<wire::UcxSecret>& secret = {}) {
    client::UcxMemoryOptions client;
    client.pump_rest = std::chrono::milliseconds(0);
    ASSERT_EQ(pair_.Start(puts, puts, client, secret), absl::OkStatus());
  }
  RingPair pair_;
};

TEST_F(BatchesTest, AStepOfSmallRequestsIsOneMessageEachWay) {
  fake_ucx::Reset();
  Start();
  for (int step = 0; step < 5; ++step) {
    const Counted counted = RunStep(&pair_, kSmall);
    EXPECT_EQ(counted.sent, 1u);
    EXPECT_EQ(counted.answered, 1u);
  }
}

TEST_F(BatchesTest, WithoutBatchesItIsAMessageForEachRequest) {
  fake_ucx::Reset();
  pair_.batches = false;
  Start();
  const Counted counted = RunStep(&pair_, kSmall);
  EXPECT_EQ(counted.sent, kRequests);
  EXPECT_EQ(counted.answered, kRequests);
}

TEST_F(BatchesTest, TheClientsThreadDoesNotRestWhileRequestsAreUnderWay) {
  fake_ucx::Reset();
  Start();
  for (const bool held : {true, false}) {
    Hold(&pair_);
    if (!held) pair_.memory()->SendHeld();
    ASSERT_TRUE(pair_.Submit(kSmall));
    EXPECT_EQ(pair_.memory()->pump_rests(), held) << "a call is to send the request";
    pair_.memory()->SendHeld();
    EXPECT_FALSE(pair_.memory()->pump_rests());
    EXPECT_TRUE(pair_.Run(1, kSmall)) << pair_.fault();
  }
}

// A tensor is never copied into a list, so there are as many messages as tensors.
TEST_F(BatchesTest, ALargeTensorTravelsWithTheFramesAroundIt) {
  fake_ucx::Reset();
  Start();
  Hold(&pair_);
  ASSERT_TRUE(pair_.Submit(kSmall));
  ASSERT_TRUE(pair_.Submit(kLarge));
  ASSERT_TRUE(pair_.Submit(kSmall));
  pair_.memory()->SendHeld();
  EXPECT_EQ(pair_.memory()->messages_sent(), 1u);
  EXPECT_TRUE(pair_.Run(1, kSmall)) << pair_.fault();
  const Counted counted = RunStep(&pair_, kLarge);
  EXPECT_EQ(counted.sent, kRequests);
}

TEST_F(BatchesTest, FramesOfPutsTravelTogether) {
  fake_ucx::Reset();
  Start(true);
  ASSERT_TRUE(pair_.Run(2, kLarge));  // the client's key has come
  const Counted counted = RunStep(&pair_, kLarge);
  // Some puts are flushed together.
  EXPECT_LE(counted.sent, 2u);
  EXPECT_LE(counted.answered, 2u);
}

TEST_F(BatchesTest, WaitSendsWhatIsHeld) {
  fake_ucx::Reset();
  Start();
  Hold(&pair_);
  ASSERT_TRUE(pair_.Submit(kSmall));
  ASSERT_TRUE(pair_.Submit(kSmall));
  EXPECT_EQ(pair_.memory()->messages_sent(), 0u);
  EXPECT_EQ(pair_.Take(), absl::OkStatus());
  EXPECT_EQ(pair_.memory()->messages_sent(), 1u);
}

TEST_F(BatchesTest, HeadersThatUcxDoesNotTakeAreNotMade) {
  fake_ucx::Reset({.most_header_bytes = wire::kMostBatchBytes});
  Start();
  const Counted counted = RunStep(&pair_, kSmall);
  EXPECT_EQ(counted.sent, kRequests);
  EXPECT_EQ(counted.answered, kRequests);
}

TEST_F(BatchesTest, RowsAreRightInEveryOrderOfArrivals) {
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    fake_ucx::Reset({.reorder = seed});
    RingPair pair;
    std::optional<wire::UcxSecret> secret;
    const bool puts = seed % 3 == 1;
    if (seed % 3 == 2) secret.emplace().fill(5);
    ASSERT_EQ(pair.Start(puts, puts, {}, secret), absl::OkStatus());
    std::mt19937_64 random(seed);
    uint64_t submitted = 0;
    for (int round = 0; round < 100'000 && pair.taken() < 200; ++round) {
      if (random() % 4 == 0) pair.memory()->Hold();
      for (uint64_t i = random() % kRequests; i > 0 && submitted < 200; --i) {
        const uint64_t sizes[] = {0, kSmall, wire::kMostBatchedPayload,
                                  wire::kMostBatchedPayload + 1, kLarge};
        if (pair.Submit(sizes[random() % 5])) ++submitted;
      }
      if (random() % 2 == 0) pair.memory()->SendHeld();
      for (uint64_t i = random() % 6; i > 0; --i) pair.Step();
      ASSERT_EQ(pair.Take(), absl::OkStatus()) << seed << pair.relay()->status();
    }
    EXPECT_EQ(pair.taken(), 200u) << seed;
    EXPECT_EQ(pair.fault(), "");
  }
}

// ------------------------------------------------------------------------------- Hostile lists

std::span<const std::byte> BytesOf(const wire::UcxRequestFrame& frame) {
  return std::as_bytes(std::span<const wire::UcxRequestFrame, 1>(&frame, 1));
}

wire::UcxRequestFrame Good(uint64_t number) {
  wire::UcxRequestFrame frame{};
  frame.token.fill(7);
  frame.number = number;
  frame.place = RingPair::kArena;
  frame.entry.kind = wire::kEntryAttend;
  frame.entry.tag = number;
  frame.entry.in_offset = frame.entry.out_offset = frame.place;
  return frame;
}

struct Hostile {
  const char* name;
  void (*change)(std::vector<std::byte>* list);
  size_t payload_bytes;  // of the message
};

class HostileBatchTest : public testing::TestWithParam<Hostile> {};

TEST_P(HostileBatchTest, EndsTheRing) {
  fake_ucx::Reset();
  RingPair pair;
  ASSERT_EQ(pair.Start(false, false), absl::OkStatus());
  fake_ucx::RawPeer peer(pair.relay()->address());
  ASSERT_TRUE(peer.connected());
  wire::FrameBatch batch;
  const std::vector<std::byte> payload(GetParam().payload_bytes, std::byte{1});
  const std::vector<std::byte> inline_payload(64, std::byte{2});
  ASSERT_TRUE(batch.Add(BytesOf(Good(0)), inline_payload));
  ASSERT_TRUE(batch.Add(BytesOf(Good(1)), {}));
  std::vector<std::byte> list(batch.bytes().begin(), batch.bytes().end());
  GetParam().change(&list);
  pair.knows = false;
  peer.Send(wire::kUcxBatchId, list, payload);
  for (int i = 0; i < 100; ++i) pair.Step();
  EXPECT_FALSE(pair.relay()->status().ok());
  // Later frames are not taken.
  peer.Send(wire::kUcxFrameId, BytesOf(Good(pair.ring().submitted.size())), {});
  const size_t before = pair.ring().submitted.size();
  for (int i = 0; i < 100; ++i) pair.Step();
  EXPECT_EQ(pair.ring().submitted.size(), before);
  for (const std::byte byte : pair.ring().region().first(RingPair::kArena)) {
    ASSERT_EQ(byte, std::byte{0}) << "the ring's own part changed";
  }
}

void SetLengths(std::vector<std::byte>* list, size_t at, uint16_t header, uint16_t payload) {
  const wire::BatchedFrame lengths{header, payload};
  std::memcpy(list->data() + at, &lengths, sizeof(lengths));
}
constexpr uint16_t kHeader = sizeof(wire::UcxRequestFrame);
constexpr size_t kSecond = sizeof(wire::BatchedFrame) + kHeader + 64;

const Hostile kHostiles[] = {
    {"cut", [](auto* list) { list->pop_back(); }, 0},
    {"lengths_cut", [](auto* list) { list->resize(kSecond + 3); }, 0},
    {"header_beyond", [](auto* list) { SetLengths(list, kSecond, kHeader + 1, 0); }, 0},
    {"header_long", [](auto* list) { SetLengths(list, 0, 0xfffe, 0); }, 0},
    {"header_of_another_size", [](auto* list) { SetLengths(list, 0, kHeader - 8, 72); }, 0},
    {"payload_beyond", [](auto* list) { SetLengths(list, kSecond, kHeader, 1); }, 0},
    {"payload_large",
     [](auto* list) { SetLengths(list, 0, kHeader, wire::kMostBatchedPayload + 1); }, 0},
    {"payload_follows_and_is_there",
     [](auto* list) { SetLengths(list, 0, kHeader, wire::kPayloadFollows); }, 64},
    {"payload_follows_twice",
     [](auto* list) {
       SetLengths(list, kSecond, kHeader, wire::kPayloadFollows);
       list->insert(list->end(), list->begin() + kSecond, list->end());
     },
     64},
    {"payload_of_none", [](auto*) {}, 64},
    {"payload_of_none_that_is_fetched", [](auto*) {}, 5000},
    {"token", [](auto* list) { (*list)[sizeof(wire::BatchedFrame)] ^= std::byte{1}; }, 0},
    {"second_token",
     [](auto* list) { (*list)[kSecond + sizeof(wire::BatchedFrame) + 3] ^= std::byte{1}; }, 0},
    {"too_long", [](auto* list) { list->resize(wire::kMostBatchBytes + 1); }, 0},
    {"number_twice",
     [](auto* list) {
       std::memset(list->data() + kSecond + sizeof(wire::BatchedFrame) +
                       offsetof(wire::UcxRequestFrame, number),
                   0, sizeof(uint64_t));
     },
     0},
    {"in_the_ring",
     [](auto* list) {
       std::memset(
           list->data() + sizeof(wire::BatchedFrame) + offsetof(wire::UcxRequestFrame, place), 0,
           sizeof(uint64_t));
     },
     0},
};
INSTANTIATE_TEST_SUITE_P(Lists, HostileBatchTest, testing::ValuesIn(kHostiles),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(BatchReaderTest, StaysWithinAnyList) {
  std::mt19937_64 random(41);
  for (int round = 0; round < 20'000; ++round) {
    const auto list = std::make_unique<std::byte[]>(300);  // its end is known to the sanitizer
    const size_t bytes = random() % 300;
    for (size_t i = 0; i < bytes; ++i) {
      list[i] = static_cast<std::byte>(random() % 3 == 0 ? random() : 0);
    }
    wire::BatchReader reader({list.get(), bytes});
    wire::BatchReader::Frame frame;
    size_t listed = 0;
    while (!reader.done() && reader.Next(&frame)) {
      listed += sizeof(wire::BatchedFrame) + frame.header.size() + frame.payload.size();
      ASSERT_LE(frame.payload.size(), wire::kMostBatchedPayload);
    }
    ASSERT_LE(listed, bytes);
  }
}

}  // namespace
}  // namespace mla
