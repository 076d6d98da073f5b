// Ranks that share a step, whose calls are chained: each has a client, a stream and a part of the
// heads, and no thread waits for outputs.
#include <array>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tests/integration/device_memory/device_server.h"
#include "tests/integration/device_memory/fake_stream.h"

namespace mla::integration {
namespace {

constexpr size_t kRanks = 2;
constexpr size_t kKv = 1152;                     // bytes of a row
constexpr size_t kIn = kKv + 1152, kOut = 2048;  // of a rank, in the larger one of both profiles

// A tensor-parallel rank with one of the model's two heads.
struct Rank {
  std::unique_ptr<client::Client> client;
  std::unique_ptr<client::Session> session;
  FakeStream stream;
  std::vector<std::span<std::byte>> in, out;  // by layer
  std::unique_ptr<client::Step> step;
  std::vector<client::PendingAttend> pending;
};

class ChainedRanksTest : public testing::TestWithParam<v1::Profile> {
 protected:
  ChainedRanksTest() {
    leader_client_ = server_.server().Connect(DeviceServer::Options());
    leader_ = std::make_unique<Worker>(leader_client_.get(), DeviceDims(), "m", 1);
    EXPECT_EQ(leader_->Upload(), absl::OkStatus());
    track_ = std::make_unique<Track>(*leader_->Open());
    // Rows that all queries see.
    EXPECT_EQ(leader_->Step({track_.get()}, {5}, v1::PROFILE_ABSORBED), absl::OkStatus());
    uint16_t value = 0;
    for (Rank& rank : ranks_) {
      rank.client = server_.server().Connect(DeviceServer::Options());
      rank.session = *rank.client->OpenSession();
      for (int layer = 0; layer < DeviceDims().layers; ++layer) {
        rank.in.push_back(rank.session->AllocateOnDevice(kIn));
        rank.out.push_back(rank.session->AllocateOnDevice(kOut));
        auto* const values = reinterpret_cast<uint16_t*>(rank.in.back().data());
        for (size_t i = 0; i < kIn / 2; ++i) {
          values[i] = static_cast<uint16_t>(0x3c00u + (value += 37) % 512);
        }
      }
    }
  }

  static bool expanded() { return GetParam() == v1::PROFILE_EXPANDED; }

  client::AttendCall Call(size_t number, int layer, bool chained) const {
    const Rank& rank = ranks_[number];
    const std::byte* const in = rank.in[static_cast<size_t>(layer)].data();
    client::AttendCall call;
    call.layer = static_cast<uint32_t>(layer);
    call.row_count = 1;
    call.head_offset = static_cast<uint32_t>(number);
    call.num_heads = 1;
    call.profile = GetParam();
    call.o_dtype = v1::DTYPE_F32;
    call.kv = number == 0 ? in : nullptr;  // the first rank sends the rows
    call.q = number == 0 ? in + kKv : in;
    call.o = rank.out[static_cast<size_t>(layer)].data();
    call.stream = rank.stream.get();
    call.chained = chained;
    return call;
  }

  void Begin() {
    client::BeginOptions options;
    options.step_id = ++step_id_;
    options.participants = kRanks;
    for (Rank& rank : ranks_) {
      rank.pending.clear();
      auto step = rank.session->Begin("m", {{&track_->sequence, 1}}, options);
      ASSERT_TRUE(step.ok()) << step.status();
      rank.step = *std::move(step);
    }
  }
  void Send(size_t number, int layer, bool chained) {
    Rank& rank = ranks_[number];
    rank.pending.push_back(rank.step->AttendAsync(Call(number, layer, chained)));
  }
  void SendAll(size_t number) {
    for (int layer = 0; layer < DeviceDims().layers; ++layer) Send(number, layer, true);
  }
  absl::Status Wait(size_t number) {
    absl::Status status;
    for (client::PendingAttend& one : ranks_[number].pending) status.Update(one.Wait().status());
    return status;
  }
  // Ends the step without its row.
  absl::Status End() { return ranks_[0].step->End({0}).status(); }

  // Copies the outputs of a rank and clears them.
  std::vector<std::byte> TakeOutputs(size_t number) {
    std::vector<std::byte> all;
    for (const std::span<std::byte> out : ranks_[number].out) {
      all.insert(all.end(), out.begin(), out.begin() + kOut);
      std::memset(out.data(), 0, kOut);
    }
    return all;
  }
  using Outputs = std::array<std::vector<std::byte>, kRanks>;
  Outputs TakeAll() { return {TakeOutputs(0), TakeOutputs(1)}; }

  // Outputs of a step whose calls threads wait for.
  Outputs Awaited() {
    Begin();
    for (int layer = 0; layer < DeviceDims().layers; ++layer) {
      for (size_t number = 0; number < kRanks; ++number) Send(number, layer, false);
      for (size_t number = 0; number < kRanks; ++number) {
        EXPECT_EQ(ranks_[number].pending.back().Wait().status(), absl::OkStatus()) << number;
      }
    }
    EXPECT_EQ(End(), absl::OkStatus());
    Outputs outputs = TakeAll();
    EXPECT_NE(outputs[0], TakeOutputs(0)) << "zeros";
    EXPECT_NE(outputs[0], outputs[1]);
    return outputs;
  }

  DeviceServer server_{[](server::Config& config) { config.limits.slice_wait_us = 20000; }};
  std::unique_ptr<client::Client> leader_client_;
  std::unique_ptr<Worker> leader_;
  std::unique_ptr<Track> track_;
  std::array<Rank, kRanks> ranks_;
  uint64_t step_id_ = 100;
};
INSTANTIATE_TEST_SUITE_P(Profiles, ChainedRanksTest,
                         testing::Values(v1::PROFILE_ABSORBED, v1::PROFILE_EXPANDED));

TEST_P(ChainedRanksTest, StreamsHaveTheOutputsOfAwaitedCalls) {
  const Outputs expected = Awaited();
  for (int turn = 0; turn < 10; ++turn) {
    Begin();
    // Ranks give their streams a layer each, as an engine's ranks do, or all layers at once.
    if (turn % 2 == 0) {
      for (int layer = 0; layer < DeviceDims().layers; ++layer) {
        for (size_t number = 0; number < kRanks; ++number) Send(number, layer, true);
      }
    } else {
      for (size_t number = 0; number < kRanks; ++number) SendAll(number);
    }
    for (Rank& rank : ranks_) rank.stream.Finish();
    ASSERT_EQ(TakeAll(), expected) << turn;
    for (size_t number = 0; number < kRanks; ++number) {
      ASSERT_EQ(Wait(number), absl::OkStatus()) << number;
    }
    ASSERT_EQ(End(), absl::OkStatus());
  }
}

// The other ranks' slices wait for the rows, which the first rank sends.
TEST_P(ChainedRanksTest, ARankMayComeBeforeTheRows) {
  const Outputs expected = Awaited();
  Begin();
  for (int layer = 0; layer < DeviceDims().layers; ++layer) {
    Send(1, layer, true);
    Send(0, layer, true);
  }
  for (Rank& rank : ranks_) rank.stream.Finish();
  EXPECT_EQ(TakeAll(), expected);
  for (size_t number = 0; number < kRanks; ++number) EXPECT_EQ(Wait(number), absl::OkStatus());
  EXPECT_EQ(End(), absl::OkStatus());
}

// The first rank's slices go without the others after limits.slice_wait_us.
TEST_P(ChainedRanksTest, ARankThatComesLateHasItsOutputs) {
  const Outputs expected = Awaited();
  Begin();
  SendAll(0);
  ranks_[0].stream.Finish();
  EXPECT_EQ(TakeOutputs(0), expected[0]);
  SendAll(1);
  ranks_[1].stream.Finish();
  EXPECT_EQ(TakeOutputs(1), expected[1]);
  for (size_t number = 0; number < kRanks; ++number) EXPECT_EQ(Wait(number), absl::OkStatus());
  EXPECT_EQ(End(), absl::OkStatus());
}

TEST_P(ChainedRanksTest, ALostRankLetsTheStreamsOfOthersGoOn) {
  Begin();
  Send(1, 0, true);  // waits for the rows
  ranks_[0].step.reset();
  ranks_[0].session.reset();
  ranks_[1].stream.Finish();
  EXPECT_FALSE(Wait(1).ok());
}

TEST_P(ChainedRanksTest, ARefusedSliceFailsItsRankAlone) {
  const Outputs expected = Awaited();
  Begin();
  client::AttendCall call = Call(1, 0, true);
  call.head_offset = 2;  // the model has two
  ranks_[1].pending.push_back(ranks_[1].step->AttendAsync(call));
  SendAll(0);
  for (Rank& rank : ranks_) rank.stream.Finish();
  EXPECT_EQ(TakeOutputs(0), expected[0]);
  EXPECT_EQ(Wait(0), absl::OkStatus());
  EXPECT_EQ(Wait(1).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace mla::integration
