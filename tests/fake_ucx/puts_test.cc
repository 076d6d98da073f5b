// Tensors that are put into the other side's memory, over a fake UCX: whole requests in any order
// of puts, keys of both sides and their ends, and clients that lie about theirs.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "proto/wire/ucx/frames.h"
#include "proto/wire/ucx/ucx_link.h"
#include "relay/relay.h"
#include "tests/fake_ucx/fake_ucx.h"
#include "tests/fake_ucx/ring_pair.h"

namespace mla {
namespace {

using fake_ucx::RingPair;

constexpr uint64_t kLarge = 20'000, kSmall = 100;
static_assert(kLarge >= wire::UcxLink::kLeastPutBytes && kSmall < wire::UcxLink::kLeastPutBytes);

class PutsTest : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(fake_ucx::counts().live_requests, 0u);
    EXPECT_EQ(fake_ucx::counts().registered, 0u);
    EXPECT_EQ(fake_ucx::counts().live_keys, 0u);
  }
};

TEST_F(PutsTest, TensorsArriveBeforeTheirFramesWhateverTheirOrder) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    fake_ucx::Reset({.reorder = seed});
    RingPair pair;
    ASSERT_EQ(pair.Start(true, true), absl::OkStatus());
    for (const uint64_t bytes : {kLarge, kSmall, RingPair::kSlotBytes}) {
      ASSERT_TRUE(pair.Run(20, bytes)) << pair.fault() << pair.relay()->status();
    }
    EXPECT_EQ(pair.fault(), "");
    const fake_ucx::Counts counts = fake_ucx::counts();
    // The large ones both ways, except for replies before the client's key has come.
    EXPECT_GE(counts.puts, 40u + 40u - RingPair::kEntries);
    EXPECT_LE(counts.puts, 80u);
    EXPECT_EQ(counts.refused_puts, 0u);
    EXPECT_GT(counts.flushes, 0u);
    const relay::RelayCounts carried = pair.relay()->counts();
    EXPECT_EQ(carried.received_frames, 60u);
    EXPECT_EQ(carried.sent_frames, 60u);
    EXPECT_GE(carried.received_bytes, 20 * kSmall);  // those that are not put
    EXPECT_GE(carried.sent_bytes, 20 * kSmall);
    EXPECT_GE(carried.put_bytes, 20 * RingPair::kSlotBytes);
    EXPECT_LE(counts.flushes, counts.puts);
  }
}

TEST_F(PutsTest, PutsUnderWayShareOneFlush) {
  fake_ucx::Reset({.stalled = true});
  RingPair pair;
  ASSERT_EQ(pair.Start(true, true), absl::OkStatus());
  for (uint32_t i = 0; i < RingPair::kEntries; ++i) ASSERT_TRUE(pair.Submit(kLarge));
  EXPECT_EQ(fake_ucx::counts().flushes, 1u);
  fake_ucx::SetStalled(false);
  pair.computes = false;
  for (int i = 0; i < 20'000 && pair.ring().submitted.size() < RingPair::kEntries; ++i) {
    pair.Step();
    ASSERT_EQ(pair.Take(), absl::OkStatus());
  }
  ASSERT_EQ(pair.ring().submitted.size(), RingPair::kEntries);
  EXPECT_EQ(fake_ucx::counts().puts, RingPair::kEntries);
  EXPECT_EQ(fake_ucx::counts().flushes, 2u);  // one for the first, one for all that came meanwhile
}

TEST_F(PutsTest, BothSidesMustWantThem) {
  for (const bool client : {false, true}) {
    fake_ucx::Reset();
    RingPair pair;
    ASSERT_EQ(pair.Start(client, !client), absl::OkStatus());
    ASSERT_TRUE(pair.Run(8, kLarge)) << pair.fault();
    EXPECT_EQ(fake_ucx::counts().puts, 0u);
  }
}

TEST_F(PutsTest, KeysEndWithTheirRing) {
  fake_ucx::Reset();
  RingPair pair;
  ASSERT_EQ(pair.Start(true, true), absl::OkStatus());
  ASSERT_TRUE(pair.Run(8, kLarge)) << pair.fault();
  std::vector<std::byte> before(pair.ring().region().begin(), pair.ring().region().end());
  pair.EndRelay();
  // The client's put finds no memory, and the ring's memory stays as it was.
  pair.Submit(kLarge);
  absl::Status ended;
  for (int i = 0; i < 20'000 && ended.ok(); ++i) ended = pair.Take();
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
  EXPECT_TRUE(std::equal(before.begin(), before.end(), pair.ring().region().begin()));
}

TEST_F(PutsTest, FailuresAreTheEndOfTheRingOrOfItsStart) {
  for (const char* call : {"put", "flush"}) {
    fake_ucx::Reset();
    RingPair pair;
    ASSERT_EQ(pair.Start(true, true), absl::OkStatus());
    ASSERT_TRUE(pair.Run(4, kLarge)) << pair.fault();
    fake_ucx::SetFails(call);
    EXPECT_FALSE(pair.Run(1, kLarge)) << call;
    EXPECT_EQ(pair.fault(), "");
    EXPECT_FALSE(pair.memory()->Connected());
  }
  for (const char* call : {"key", "take_key"}) {
    fake_ucx::Reset({.fails = call});
    RingPair pair;
    EXPECT_EQ(pair.Start(true, true).code(), absl::StatusCode::kUnavailable) << call;
  }
}

// ------------------------------------------------------------------------------- A lying client

// Takes whatever comes.
class Liar final : public wire::UcxReceiver {
 public:
  absl::StatusOr<std::byte*> Place(std::span<const std::byte>, size_t bytes) override {
    room.resize(std::max(room.size(), bytes + 1));
    return room.data();
  }
  void OnArrived(std::span<const std::byte>) override { ++arrived; }
  void OnSent(uint64_t) override {}
  std::vector<std::byte> room = std::vector<std::byte>(1 << 20);
  int arrived = 0;
};

class LyingClientTest : public PutsTest {
 protected:
  void Start(bool relay_puts = true) {
    fake_ucx::Reset();
    relay::RelayOptions options;
    options.token.fill(7);
    options.link.puts = relay_puts;
    relay_ = *relay::Relay::Open(fake_ucx::Api(), options, &ring_);
    wire::UcxLinkOptions puts;
    puts.puts = true;
    link_ = *wire::UcxLink::Open(fake_ucx::Api(), puts, &liar_);
    ASSERT_TRUE(relay_->Connect(link_->address()).ok());
    ASSERT_TRUE(link_->Connect(relay_->address()).ok());
  }
  void TearDown() override {
    relay_.reset();
    link_.reset();
    PutsTest::TearDown();
  }
  wire::UcxKeyFrame Frame() {
    wire::UcxKeyFrame frame{};
    frame.token.fill(7);
    frame.address = reinterpret_cast<uint64_t>(liar_.room.data());
    frame.bytes = RingPair::kArenaBytes;
    return frame;
  }
  void SendKey(const wire::UcxKeyFrame& frame, const std::string& key) {
    ASSERT_TRUE(link_
                    ->Send(std::as_bytes(std::span<const wire::UcxKeyFrame, 1>(&frame, 1)),
                           std::as_bytes(std::span<const char>(key)), 0)
                    .ok());
    Run();
  }
  void Run() {
    for (int i = 0; i < 200; ++i) {
      relay_->Step();
      link_->Progress();
    }
  }

  fake_ucx::TestRing ring_{RingPair::kEntries, RingPair::kArenaBytes};
  Liar liar_;
  std::unique_ptr<relay::Relay> relay_;
  std::unique_ptr<wire::UcxLink> link_;
};

TEST_F(LyingClientTest, FramesOfKeysThatBreakARuleEndTheRelay) {
  const auto code_after = [&](auto change, const std::string& key, bool relay_puts = true) {
    relay_.reset();
    link_.reset();
    Start(relay_puts);
    wire::UcxKeyFrame frame = Frame();
    change(&frame);
    SendKey(frame, key);
    return relay_->status().code();
  };
  const auto nothing = [](wire::UcxKeyFrame*) {};
  const std::string good(8, 'k');
  EXPECT_EQ(code_after(nothing, good), absl::StatusCode::kOk);
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code_after([](wire::UcxKeyFrame* frame) { frame->token[3] ^= 1; }, good),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(code_after([](wire::UcxKeyFrame* frame) { ++frame->bytes; }, good), kInvalid);
  EXPECT_EQ(code_after([](wire::UcxKeyFrame* frame) { frame->address = UINT64_MAX; }, good),
            kInvalid);
  EXPECT_EQ(code_after(nothing, ""), kInvalid);
  EXPECT_EQ(code_after(nothing, std::string(wire::kUcxMostKeyBytes, 'k')), absl::StatusCode::kOk);
  EXPECT_EQ(code_after(nothing, std::string(wire::kUcxMostKeyBytes + 1, 'k')), kInvalid);
  EXPECT_EQ(code_after(nothing, good, false), kInvalid);  // none was asked for
}

TEST_F(LyingClientTest, ASecondKeyEndsTheRelay) {
  Start();
  SendKey(Frame(), std::string(8, 'k'));
  EXPECT_EQ(relay_->status(), absl::OkStatus());
  SendKey(Frame(), std::string(8, 'k'));
  EXPECT_EQ(relay_->status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(LyingClientTest, OutputsToMemoryThatIsNotItsOwnEndItsRelayAlone) {
  Start();
  SendKey(Frame(), std::string(8, 'k'));  // a key of nothing
  wire::UcxRequestFrame frame{};
  frame.token.fill(7);
  frame.out_bytes = kLarge;
  frame.entry.kind = wire::kEntryAttend;
  frame.entry.out_offset = RingPair::kArena;
  ASSERT_TRUE(
      link_->Send(std::as_bytes(std::span<const wire::UcxRequestFrame, 1>(&frame, 1)), {}, 0).ok());
  Run();
  ASSERT_EQ(ring_.submitted.size(), 1u);
  wire::CompletionEntry done{};
  done.kind = wire::kEntryAttend;
  ring_.Complete(done);
  Run();
  EXPECT_EQ(fake_ucx::counts().refused_puts, 1u);
  EXPECT_EQ(relay_->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(liar_.arrived, 0);
}

// A key of the arena does not open the ring next to it, and no put leaves the memory.
TEST_F(LyingClientTest, ItsPutsStayInTheArena) {
  Start();
  const auto arena = relay_->Offer();
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ(arena->bytes, RingPair::kArenaBytes);
  wire::UcxTarget lie = *arena;
  lie.address -= RingPair::kArena;  // the ring's
  lie.bytes += RingPair::kArena + (1 << 20);
  ASSERT_EQ(link_->Reach(lie), absl::OkStatus());
  std::memset(ring_.region().data(), 0x5a, ring_.region().size());
  const std::vector<std::byte> noise(kLarge, std::byte{1});
  const auto put = [&](uint64_t offset) {
    const std::byte header[1] = {};
    return link_->Put(header, noise, offset, 0);
  };
  EXPECT_EQ(put(lie.bytes - kLarge + 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(put(UINT64_MAX).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(put(0).ok());
  Run();
  EXPECT_EQ(fake_ucx::counts().refused_puts, 1u);
  EXPECT_FALSE(link_->status().ok());
  for (const std::byte byte : ring_.region()) ASSERT_EQ(byte, std::byte{0x5a});
}

}  // namespace
}  // namespace mla
