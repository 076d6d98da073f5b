// A client's mirror of a ring over a fake UCX: order, bounds, a server that breaks rules or is
// lost, and transfers while no thread waits.
#include "client/cpp/ucx/ucx_memory.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/fake_ucx/fake_ucx.h"

namespace mla::client {
namespace {

using std::chrono::milliseconds;

constexpr uint32_t kEntries = 8;
constexpr uint64_t kArena = 1 << 16;
constexpr auto kLong = std::chrono::seconds(30);

// The server's side of a ring, as the test wants it.
class Peer final : public wire::UcxReceiver {
 public:
  absl::StatusOr<std::byte*> Place(std::span<const std::byte> header, size_t bytes) override {
    wire::UcxRequestFrame frame;
    EXPECT_EQ(header.size(), sizeof(frame));
    std::memcpy(&frame, header.data(), sizeof(frame));
    std::vector<std::byte>& room = payloads[frame.number];
    room.resize(bytes + 1);
    return room.data();
  }
  void OnArrived(std::span<const std::byte> header) override {
    wire::UcxRequestFrame frame;
    std::memcpy(&frame, header.data(), sizeof(frame));
    frames[frame.number] = frame;
  }
  void OnSent(uint64_t) override {}

  std::map<uint64_t, std::vector<std::byte>> payloads;
  std::map<uint64_t, wire::UcxRequestFrame> frames;
};

class UcxMemoryTest : public testing::Test {
 protected:
  void Start(const fake_ucx::Faults& faults = {}) {
    fake_ucx::Reset(faults);
    auto memory = UcxMemory::Open(fake_ucx::Api(), {});
    ASSERT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    auto link = wire::UcxLink::Open(fake_ucx::Api(), {}, &peer_);
    ASSERT_TRUE(link.ok());
    link_ = *std::move(link);
    ASSERT_TRUE(link_->Connect(memory_->address()).ok());
    ASSERT_EQ(memory_->Connect(Ring()), absl::OkStatus());
  }
  UcxRing Ring() const {
    UcxRing ring;
    ring.worker_address = link_->address();
    ring.token = token_;
    ring.region_bytes = wire::RingBytes(kEntries) + kArena;
    ring.arena_offset = wire::RingBytes(kEntries);
    ring.entries = kEntries;
    ring.arena_bytes = kArena;
    return ring;
  }
  void TearDown() override {
    memory_.reset();
    link_.reset();
    EXPECT_EQ(fake_ucx::counts().live_requests, 0u);
    EXPECT_EQ(fake_ucx::counts().registered, 0u);
  }

  bool Submit(uint64_t tag, uint64_t in_bytes, uint64_t out_bytes) {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryAttend;
    entry.tag = tag;
    entry.in_offset = entry.out_offset = At(tag);
    return memory_->Submit(entry, {entry.in_offset, in_bytes, out_bytes}, nullptr, false);
  }
  static uint64_t At(uint64_t tag) { return wire::RingBytes(kEntries) + tag % kEntries * 8192; }
  wire::UcxCompletionFrame Completion(uint64_t number) {
    wire::UcxCompletionFrame frame{};
    std::memcpy(frame.token.data(), token_.data(), frame.token.size());
    frame.number = number;
    frame.place = At(number);
    frame.entry.kind = wire::kEntryAttend;
    frame.entry.tag = number;
    return frame;
  }
  absl::Status Send(const wire::UcxCompletionFrame& frame, std::span<const std::byte> payload) {
    return link_->Send(std::as_bytes(std::span<const wire::UcxCompletionFrame, 1>(&frame, 1)),
                       payload, frame.number);
  }
  template <typename Done>
  bool RunPeer(Done done) {
    const auto end = std::chrono::steady_clock::now() + kLong;
    while (std::chrono::steady_clock::now() < end) {
      if (done()) return true;
      if (!link_->Progress()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return false;
  }

  const std::string token_ = std::string(wire::kUcxTokenBytes, '\7');
  Peer peer_;
  std::unique_ptr<UcxMemory> memory_;
  std::unique_ptr<wire::UcxLink> link_;
};

TEST_F(UcxMemoryTest, TakesCompletionsInTheirOrderWithTheirOutputs) {
  for (const uint64_t seed : {0, 1, 2, 3, 4, 5, 6, 7}) {
    peer_ = {};
    fake_ucx::Faults faults;
    faults.reorder = seed;
    Start(faults);
    std::mt19937_64 random(seed);
    for (uint64_t base = 0; base < 40; base += kEntries) {
      std::vector<std::vector<std::byte>> outputs(kEntries);
      for (uint64_t i = 0; i < kEntries; ++i) {
        std::memset(memory_->region().data() + At(base + i), static_cast<int>(base + i), 4000);
        ASSERT_TRUE(Submit(base + i, 1 + random() % 4000, 4000));
      }
      EXPECT_FALSE(Submit(99, 1, 1));  // the ring is full
      ASSERT_TRUE(RunPeer([&] { return peer_.frames.size() == base + kEntries; }));
      for (uint64_t i = 0; i < kEntries; ++i) {
        EXPECT_EQ(peer_.frames[base + i].entry.tag, base + i);
        EXPECT_EQ(peer_.payloads[base + i][0], static_cast<std::byte>(base + i));
        outputs[i].assign(random() % 4000, static_cast<std::byte>(100 + i));
        ASSERT_TRUE(Send(Completion(base + i), outputs[i]).ok());
      }
      for (uint64_t i = 0; i < kEntries; ++i) {
        wire::CompletionEntry entry;
        absl::Status status = absl::UnknownError("");
        std::thread waiter([&] { status = memory_->Wait(&entry, kLong); });
        std::atomic<bool> done{false};
        std::thread watcher([&] {
          waiter.join();
          done = true;
        });
        ASSERT_TRUE(RunPeer([&] { return done.load(); }));
        watcher.join();
        ASSERT_EQ(status, absl::OkStatus());
        ASSERT_EQ(entry.tag, base + i);
        ASSERT_EQ(std::memcmp(memory_->region().data() + At(base + i), outputs[i].data(),
                              outputs[i].size()),
                  0);
      }
      EXPECT_EQ(memory_->in_flight(), 0u);
    }
    memory_.reset();
    link_.reset();
  }
}

TEST_F(UcxMemoryTest, LargeTensorsLeaveWhileNobodyWaits) {
  Start();
  ASSERT_TRUE(Submit(0, 8000, 0));
  // The payload stays with the sender until both sides have made progress.
  EXPECT_TRUE(RunPeer([&] { return peer_.frames.size() == 1; }));
  EXPECT_TRUE(RunPeer([&] { return fake_ucx::counts().live_requests == 0; }));
}

struct Fault {
  const char* name;
  void (*change)(wire::UcxCompletionFrame*);
};
class HostileServerTest : public UcxMemoryTest, public testing::WithParamInterface<Fault> {};

TEST_P(HostileServerTest, EndsTheRing) {
  Start();
  ASSERT_TRUE(Submit(0, 64, 64));
  std::memset(memory_->region().data(), 0x5a, memory_->region().size());
  wire::UcxCompletionFrame frame = Completion(0);
  GetParam().change(&frame);
  const std::vector<std::byte> payload(64);
  ASSERT_TRUE(Send(frame, payload).ok());
  wire::CompletionEntry entry;
  const absl::Status status = memory_->Wait(&entry, kLong);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_FALSE(memory_->Connected());
  for (const std::byte byte : memory_->region()) ASSERT_EQ(byte, std::byte{0x5a});
}

const Fault kFaults[] = {
    {"token", [](wire::UcxCompletionFrame* frame) { frame->token[0] ^= 1; }},
    {"unasked", [](wire::UcxCompletionFrame* frame) { frame->number = 1; }},
    {"far", [](wire::UcxCompletionFrame* frame) { frame->number = UINT64_MAX; }},
    {"beyond",
     [](wire::UcxCompletionFrame* frame) {
       frame->place = wire::RingBytes(kEntries) + kArena - 63;
     }},
    {"overflow", [](wire::UcxCompletionFrame* frame) { frame->place = UINT64_MAX - 8; }},
};
INSTANTIATE_TEST_SUITE_P(Faults, HostileServerTest, testing::ValuesIn(kFaults),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(UcxMemoryTest, ALostPeerAndTheCallsEndAreErrors) {
  Start();
  ASSERT_TRUE(Submit(0, 64, 64));
  link_.reset();
  wire::CompletionEntry entry;
  EXPECT_EQ(memory_->Wait(&entry, kLong).code(), absl::StatusCode::kUnavailable);
  memory_.reset();
  Start();
  ASSERT_TRUE(Submit(0, 64, 64));
  EXPECT_TRUE(memory_->Connected());
  EXPECT_EQ(memory_->Wait(&entry, milliseconds(1)).code(), absl::StatusCode::kDeadlineExceeded);
  memory_->SetEnded(absl::ResourceExhaustedError("from the server"));
  EXPECT_EQ(memory_->Wait(&entry, kLong), absl::ResourceExhaustedError("from the server"));
}

TEST_F(UcxMemoryTest, IsGivenUpOnce) {
  Start();
  int calls = 0;
  memory_->OnGivenUp([&] {
    ++calls;
    memory_->SetEnded(absl::CancelledError("by the client"));
  });
  memory_->Close(milliseconds(1000));
  memory_->Disconnect();
  memory_.reset();
  EXPECT_EQ(calls, 1);
}

TEST_F(UcxMemoryTest, RingsOfAnotherLayoutAreRefused) {
  Start();
  const auto refused = [&](void (*change)(UcxRing*)) {
    auto memory = *UcxMemory::Open(fake_ucx::Api(), {});
    UcxRing ring = Ring();
    change(&ring);
    return memory->Connect(ring).code();
  };
  constexpr auto kRefused = absl::StatusCode::kUnimplemented;
  EXPECT_EQ(refused([](UcxRing* ring) { ring->token = "short"; }), kRefused);
  EXPECT_EQ(refused([](UcxRing* ring) { ring->entries = 0; }), kRefused);
  EXPECT_EQ(refused([](UcxRing* ring) { ring->entries = 12; }), kRefused);
  EXPECT_EQ(refused([](UcxRing* ring) { ring->entries = 1u << 20; }), kRefused);
  EXPECT_EQ(refused([](UcxRing* ring) { ring->arena_offset = 0; }), kRefused);
  EXPECT_EQ(refused([](UcxRing* ring) { ring->region_bytes = 64; }), kRefused);
  EXPECT_EQ(refused([](UcxRing* ring) { ring->region_bytes = uint64_t{1} << 50; }), kRefused);
}

TEST_F(UcxMemoryTest, CallsThatDoNotTravelAreRefused) {
  Start();
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryAttend;
  EXPECT_FALSE(memory_->Submit(entry, {}, nullptr, true));
  entry.flags = wire::kEntryOnDevice;
  EXPECT_FALSE(memory_->Submit(entry, {}, nullptr, false));
  EXPECT_FALSE(memory_->pinned().ok());
  EXPECT_FALSE(memory_->has_device_memory());
}

}  // namespace
}  // namespace mla::client
