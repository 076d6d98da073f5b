// A relay between a fake UCX and a ring of this test: order, bounds, hostile frames and lost peers.
#include "relay/relay.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fake_ucx/fake_ucx.h"
#include "tests/fake_ucx/test_ring.h"

namespace mla::relay {
namespace {

constexpr uint32_t kEntries = 8;
constexpr uint64_t kArena = 1 << 16;

using fake_ucx::TestRing;

// The other end, which sends what the test wants.
class Peer final : public wire::UcxReceiver {
 public:
  absl::StatusOr<std::byte*> Place(std::span<const std::byte> header, size_t bytes) override {
    wire::UcxCompletionFrame frame;
    EXPECT_EQ(header.size(), sizeof(frame));
    std::memcpy(&frame, header.data(), sizeof(frame));
    std::vector<std::byte>& room = payloads[frame.number];
    room.resize(std::max<size_t>(bytes, 1));
    sizes[frame.number] = bytes;
    return room.data();
  }
  void OnArrived(std::span<const std::byte> header) override {
    wire::UcxCompletionFrame frame;
    std::memcpy(&frame, header.data(), sizeof(frame));
    frames[frame.number] = frame;
  }
  void OnSent(uint64_t) override {}

  std::map<uint64_t, std::vector<std::byte>> payloads;
  std::map<uint64_t, size_t> sizes;
  std::map<uint64_t, wire::UcxCompletionFrame> frames;
};

class RelayTest : public testing::Test {
 protected:
  void Start(const fake_ucx::Faults& faults = {}) {
    fake_ucx::Reset(faults);
    api_ = fake_ucx::Api();
    RelayOptions options;
    options.token.fill(7);
    auto relay = Relay::Open(api_, options, &ring_);
    ASSERT_TRUE(relay.ok()) << relay.status();
    relay_ = *std::move(relay);
    auto link = wire::UcxLink::Open(api_, {}, &peer_);
    ASSERT_TRUE(link.ok());
    link_ = *std::move(link);
    ASSERT_TRUE(relay_->Connect(link_->address()).ok());
    ASSERT_TRUE(link_->Connect(relay_->address()).ok());
  }
  void TearDown() override {
    relay_.reset();
    link_.reset();
    EXPECT_EQ(fake_ucx::counts().registered, 0u);
    EXPECT_EQ(fake_ucx::counts().live_requests, 0u);
  }

  static wire::UcxRequestFrame Frame(uint64_t number) {
    wire::UcxRequestFrame frame{};
    frame.token.fill(7);
    frame.number = number;
    frame.place = ArenaAt(number % kEntries * 4096);
    frame.entry.kind = wire::kEntryAttend;
    frame.entry.tag = 1000 + number;
    frame.entry.in_offset = frame.place;
    frame.entry.out_offset = frame.place;
    return frame;
  }
  static uint64_t ArenaAt(uint64_t offset) { return wire::RingBytes(kEntries) + offset; }

  absl::Status Send(const wire::UcxRequestFrame& frame, std::span<const std::byte> payload,
                    size_t header_bytes = sizeof(wire::UcxRequestFrame)) {
    const auto header = std::as_bytes(std::span<const wire::UcxRequestFrame, 1>(&frame, 1));
    return link_->Send(header.first(header_bytes), payload, frame.number);
  }
  void Run(int rounds = 2000) {
    for (int i = 0; i < rounds; ++i) {
      relay_->Step();
      link_->Progress();
    }
  }

  TestRing ring_{kEntries, kArena};
  Peer peer_;
  wire::UcxApi api_{};
  std::unique_ptr<Relay> relay_;
  std::unique_ptr<wire::UcxLink> link_;
};

std::vector<std::byte> Noise(size_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> noise(bytes);
  for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
  return noise;
}

TEST_F(RelayTest, KeepsTheOrderOfNumbersWhateverOrderFramesArriveIn) {
  for (const uint64_t seed : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}) {
    ring_.submitted.clear();
    peer_ = {};
    Start({.reorder = seed});
    std::mt19937_64 random(seed);
    uint64_t sent = 0, completed = 0;
    std::map<uint64_t, std::vector<std::byte>> payloads;
    while (completed < 100) {
      while (sent < completed + kEntries && sent < 100) {
        const size_t bytes = random() % 4096;  // some stay with the sender, some do not
        payloads[sent] = Noise(bytes, sent);
        wire::UcxRequestFrame frame = Frame(sent);
        frame.out_bytes = bytes;
        ASSERT_TRUE(Send(frame, payloads[sent]).ok());
        ++sent;
      }
      Run(50);
      ASSERT_EQ(relay_->status(), absl::OkStatus());
      ASSERT_EQ(ring_.submitted.size(), sent);
      for (; completed < sent; ++completed) {
        const wire::SubmissionEntry& entry = ring_.submitted[completed];
        ASSERT_EQ(entry.tag, 1000 + completed);
        // The ring's server finds the payload, and returns it as the outputs.
        const std::vector<std::byte>& payload = payloads[completed];
        ASSERT_EQ(
            std::memcmp(ring_.region().data() + entry.in_offset, payload.data(), payload.size()),
            0);
        wire::CompletionEntry done{};
        done.kind = wire::kEntryAttend;
        done.tag = entry.tag;
        ring_.Complete(done);
      }
      Run(200);
      ASSERT_EQ(peer_.frames.size(), completed);
    }
    for (uint64_t number = 0; number < 100; ++number) {
      EXPECT_EQ(peer_.frames[number].entry.tag, 1000 + number);
      ASSERT_EQ(peer_.sizes[number], payloads[number].size());
      EXPECT_EQ(std::memcmp(peer_.payloads[number].data(), payloads[number].data(),
                            payloads[number].size()),
                0);
    }
    relay_.reset();
    link_.reset();
  }
}

TEST_F(RelayTest, SendsMessagesFromTheirPlaces) {
  Start();
  wire::UcxRequestFrame frame = Frame(0);
  frame.entry.kind = wire::kEntryMessage;
  const std::vector<std::byte> message = Noise(100, 1);
  ASSERT_TRUE(Send(frame, message).ok());
  Run(50);
  ASSERT_EQ(ring_.submitted.size(), 1u);
  for (const uint64_t bytes : {uint64_t{200}, uint64_t{30000}}) {
    const uint64_t at = bytes < wire::kReplySlotBytes ? wire::RepliesOffset(kEntries) : ArenaAt(0);
    const std::vector<std::byte> reply = Noise(bytes, bytes);
    std::memcpy(ring_.region().data() + at, reply.data(), bytes);
    wire::CompletionEntry done{};
    done.kind = wire::kEntryMessage;
    done.message_offset = at;
    done.message_length = static_cast<uint32_t>(bytes);
    ring_.Complete(done);
    relay_->Step();
    // Its place in the ring may be written again at once.
    std::memset(ring_.region().data() + at, 0, bytes);
    Run(50);
    const uint64_t number = peer_.frames.size() - 1;
    EXPECT_EQ(peer_.frames[number].place, at);
    ASSERT_EQ(peer_.sizes[number], bytes);
    EXPECT_EQ(std::memcmp(peer_.payloads[number].data(), reply.data(), bytes), 0);
  }
}

struct Fault {
  const char* name;
  void (*change)(wire::UcxRequestFrame*);
  size_t payload_bytes, header_bytes;
};

class HostileFrameTest : public RelayTest, public testing::WithParamInterface<Fault> {};

TEST_P(HostileFrameTest, EndsTheRelayAndTouchesNothing) {
  Start();
  std::memset(ring_.region().data(), 0x5a, ring_.region().size());
  wire::UcxRequestFrame frame = Frame(0);
  GetParam().change(&frame);
  const std::vector<std::byte> payload = Noise(GetParam().payload_bytes, 1);
  ASSERT_TRUE(Send(frame, payload, GetParam().header_bytes).ok());
  Run(100);
  EXPECT_FALSE(relay_->status().ok());
  EXPECT_TRUE(ring_.submitted.empty());
  for (const std::byte byte : ring_.region()) ASSERT_EQ(byte, std::byte{0x5a});
  // Nothing that comes later is taken either.
  ASSERT_TRUE(Send(Frame(0), payload).ok());
  Run(100);
  EXPECT_TRUE(ring_.submitted.empty());
}

constexpr size_t kWhole = sizeof(wire::UcxRequestFrame);
const Fault kFaults[] = {
    {"token", [](wire::UcxRequestFrame* frame) { frame->token[15] ^= 1; }, 64, kWhole},
    {"header", [](wire::UcxRequestFrame*) {}, 64, kWhole - 1},
    {"number", [](wire::UcxRequestFrame* frame) { frame->number = kEntries; }, 64, kWhole},
    {"earlier", [](wire::UcxRequestFrame* frame) { frame->number = UINT64_MAX; }, 64, kWhole},
    {"in_the_ring", [](wire::UcxRequestFrame* frame) { frame->place = 0; }, 64, kWhole},
    {"at_the_ring",
     [](wire::UcxRequestFrame* frame) { frame->place = wire::RingBytes(kEntries) - 1; }, 64,
     kWhole},
    {"beyond", [](wire::UcxRequestFrame* frame) { frame->place += kArena - 63; }, 64, kWhole},
    {"far", [](wire::UcxRequestFrame* frame) { frame->place = UINT64_MAX - 10; }, 64, kWhole},
    {"large", [](wire::UcxRequestFrame*) {}, kArena + 1, kWhole},
    {"outputs_beyond", [](wire::UcxRequestFrame* frame) { frame->out_bytes = kArena + 1; }, 64,
     kWhole},
    {"outputs_far", [](wire::UcxRequestFrame* frame) { frame->out_bytes = UINT64_MAX; }, 64,
     kWhole},
    {"outputs_in_the_ring",
     [](wire::UcxRequestFrame* frame) {
       frame->entry.out_offset = 0;
       frame->out_bytes = 64;
     },
     64, kWhole},
    {"device", [](wire::UcxRequestFrame* frame) { frame->entry.flags = wire::kEntryOnDevice; }, 64,
     kWhole},
    {"chained", [](wire::UcxRequestFrame* frame) { frame->entry.flags = wire::kEntryChained; }, 64,
     kWhole},
};
INSTANTIATE_TEST_SUITE_P(Faults, HostileFrameTest, testing::ValuesIn(kFaults),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(RelayTest, ARepeatedNumberEndsIt) {
  Start();
  ASSERT_TRUE(Send(Frame(1), {}).ok());
  Run(20);
  EXPECT_EQ(relay_->status(), absl::OkStatus());
  ASSERT_TRUE(Send(Frame(1), {}).ok());
  Run(20);
  EXPECT_FALSE(relay_->status().ok());
  EXPECT_TRUE(ring_.submitted.empty());
}

TEST_F(RelayTest, MoreRequestsThanTheRingHasEntriesEndIt) {
  Start();
  for (uint64_t number = 0; number <= kEntries; ++number) {
    ASSERT_TRUE(Send(Frame(number), {}).ok());
    Run(20);
  }
  EXPECT_EQ(relay_->status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ring_.submitted.size(), kEntries);
}

TEST_F(RelayTest, AClientThatTakesNothingHoldsABoundedNumberOfFrames) {
  Start();
  const std::vector<std::byte> large = Noise(2048, 1);
  uint64_t number = 0;
  for (int round = 0; round < 20; ++round) {
    wire::UcxRequestFrame frame = Frame(number);
    frame.out_bytes = 2048;
    if (!Send(frame, large).ok()) break;
    for (int i = 0; i < 50; ++i) relay_->Step();  // the client does not progress
    if (!relay_->status().ok()) break;
    wire::CompletionEntry done{};
    done.kind = wire::kEntryAttend;
    done.tag = frame.entry.tag;
    ring_.Complete(done);
    for (int i = 0; i < 50; ++i) relay_->Step();
    ++number;
  }
  // The relay has sent as many frames as the ring has entries; the ring has kept the others.
  EXPECT_LE(fake_ucx::counts().messages, 2 * kEntries + 20);
  EXPECT_GT(ring_.waiting(), 0u);
}

TEST_F(RelayTest, NoiseNeverLeavesTheArena) {
  std::mt19937_64 random(41);
  for (int round = 0; round < 3000; ++round) {
    TestRing ring(kEntries, kArena);
    std::memset(ring.region().data(), 0x5a, ring.region().size());
    fake_ucx::Reset();
    api_ = fake_ucx::Api();
    RelayOptions options;
    options.token.fill(7);
    auto relay = *Relay::Open(api_, options, &ring);
    auto link = *wire::UcxLink::Open(api_, {}, &peer_);
    ASSERT_TRUE(relay->Connect(link->address()).ok());
    ASSERT_TRUE(link->Connect(relay->address()).ok());
    const std::vector<std::byte> payload = Noise(random() % 3000, 1);
    for (uint64_t number = 0; number < 4; ++number) {
      wire::UcxRequestFrame frame = Frame(number);
      auto* const bytes = reinterpret_cast<unsigned char*>(&frame) + sizeof(frame.token);
      for (uint64_t flips = random() % 4; flips > 0; --flips) {
        bytes[random() % (sizeof(frame) - sizeof(frame.token))] ^= 1u << (random() % 8);
      }
      const auto header = std::as_bytes(std::span<const wire::UcxRequestFrame, 1>(&frame, 1));
      if (!link->Send(header, payload, number).ok()) break;
    }
    for (int i = 0; i < 40; ++i) {
      relay->Step();
      link->Progress();
    }
    for (const std::byte byte : ring.region().first(wire::RingBytes(kEntries))) {
      ASSERT_EQ(byte, std::byte{0x5a});
    }
    for (const wire::SubmissionEntry& entry : ring.submitted) {
      ASSERT_EQ(entry.kind == wire::kEntryAttend &&
                    (entry.flags & (wire::kEntryOnDevice | wire::kEntryChained)) != 0,
                false);
    }
  }
}

TEST_F(RelayTest, ALostPeerAndFailedCallsEndIt) {
  Start({.lost_after = 2});
  for (uint64_t number = 0; number < 4; ++number) Send(Frame(number), {}).IgnoreError();
  Run(100);
  EXPECT_EQ(relay_->status().code(), absl::StatusCode::kUnavailable);
  relay_.reset();
  link_.reset();
  for (const char* call : {"send", "receive"}) {
    ring_.submitted.clear();
    Start();
    const std::vector<std::byte> large = Noise(3000, 1);
    ASSERT_TRUE(Send(Frame(0), large).ok());
    if (std::string(call) == "receive") fake_ucx::faults().fails = call;
    Run(50);
    if (std::string(call) == "send") {
      fake_ucx::faults().fails = call;
      wire::CompletionEntry done{};
      done.kind = wire::kEntryAttend;
      ring_.Complete(done);
      Run(50);
    }
    EXPECT_EQ(relay_->status().code(), absl::StatusCode::kUnavailable) << call;
    relay_.reset();
    link_.reset();
  }
}

TEST_F(RelayTest, FailuresOfTheStartAreReasons) {
  for (const char* call : {"init", "worker"}) {
    fake_ucx::Reset({.fails = call});
    const auto relay = Relay::Open(fake_ucx::Api(), {}, &ring_);
    EXPECT_EQ(relay.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_NE(relay.status().message().find(call), absl::string_view::npos);
  }
  Start({.fails = "memory"});  // slower, but it works
  ASSERT_TRUE(Send(Frame(0), Noise(3000, 1)).ok());
  relay_.reset();
  link_.reset();
  Start({.fails = ""});
  fake_ucx::faults().fails = "connection";
  EXPECT_EQ(relay_->Connect(link_->address()).code(), absl::StatusCode::kUnavailable);
}

// With the threads of a real relay.
TEST_F(RelayTest, RunsUntilItsServerSaysSo) {
  Start();
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  absl::Status ended = absl::UnknownError("running");
  std::thread thread([&] { ended = relay_->Run(pipe_ends[0]); });
  ASSERT_TRUE(Send(Frame(0), {}).ok());
  while (true) {
    link_->Progress();
    if (ring_.in_flight() == 1) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  wire::CompletionEntry done{};
  done.kind = wire::kEntryAttend;
  done.tag = 1000;
  ring_.Complete(done);
  while (peer_.frames.empty()) {
    link_->Progress();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  close(pipe_ends[1]);
  thread.join();
  EXPECT_EQ(ended, absl::OkStatus());
  close(pipe_ends[0]);
}

// Answers that come at once are seen by the relay's first thread, later ones by the second: while
// requests follow each other, wait for each other, and come after a pause.
TEST_F(RelayTest, AnswersComeBackHoweverLongTheyTake) {
  Start();
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  absl::Status ended = absl::UnknownError("running");
  std::thread thread([&] { ended = relay_->Run(pipe_ends[0]); });
  std::mt19937_64 random(5);
  constexpr int kPauses[] = {0, 0, 20, 60, 300, 30'000};  // microseconds
  const auto pause = [&] {
    std::this_thread::sleep_for(std::chrono::microseconds(kPauses[random() % std::size(kPauses)]));
  };
  uint64_t sent = 0;
  while (sent < 200) {
    const uint64_t together = 1 + random() % kEntries;
    for (uint64_t i = 0; i < together; ++i) ASSERT_TRUE(Send(Frame(sent++), {}).ok());
    while (ring_.in_flight() < together) link_->Progress();
    for (uint64_t i = 0; i < together; ++i) {
      pause();
      wire::CompletionEntry done{};
      done.kind = wire::kEntryAttend;
      done.tag = 1000 + sent - together + i;
      ring_.Complete(done);
    }
    while (peer_.frames.size() < sent) link_->Progress();
    pause();
  }
  close(pipe_ends[1]);
  thread.join();
  EXPECT_EQ(ended, absl::OkStatus());
  EXPECT_EQ(relay_->counts().sent_frames, sent);
  close(pipe_ends[0]);
}

// Its end shows also while the ring has nothing to answer.
TEST_F(RelayTest, EndsWithARingThatEndsLater) {
  Start();
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  std::thread ending([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ring_.End();
  });
  EXPECT_EQ(relay_->Run(pipe_ends[0]), absl::UnavailableError("the ring has ended"));
  ending.join();
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST_F(RelayTest, EndsWithItsRing) {
  Start();
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  ring_.End();
  EXPECT_EQ(relay_->Run(pipe_ends[0]), absl::UnavailableError("the ring has ended"));
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

}  // namespace
}  // namespace mla::relay
