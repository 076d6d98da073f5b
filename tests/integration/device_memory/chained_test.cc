// Chained calls: streams instead of threads wait for replies, and continue if a reply will never
// come.
#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "client/cpp/shared_memory/shared_memory.h"
#include "tests/integration/device_memory/device_server.h"
#include "tests/integration/device_memory/fake_stream.h"

namespace mla::integration {
namespace {

using absl::StatusCode;

constexpr size_t kIn = 1152 + 2 * 1152, kOut = 2 * 512 * 4;

class ChainedTest : public testing::Test {
 protected:
  ChainedTest() : client_(server_->server().Connect(DeviceServer::Options())) {
    worker_ = std::make_unique<Worker>(client_.get(), DeviceDims(), "m", 1);
    track_ = std::make_unique<Track>(*worker_->Open());
    for (int layer = 0; layer < DeviceDims().layers; ++layer) {
      in_.push_back(worker_->session().AllocateOnDevice(kIn));
      out_.push_back(worker_->session().AllocateOnDevice(kOut));
      auto* const values = reinterpret_cast<uint16_t*>(in_.back().data());
      for (size_t i = 0; i < kIn / 2; ++i) {
        values[i] =
            static_cast<uint16_t>(0x3c00u + 64 * (i + 7 * static_cast<size_t>(layer)) % 512);
      }
    }
  }
  std::unique_ptr<client::Step> Begin() {
    auto step = worker_->session().Begin("m", {{&track_->sequence, 1}});
    EXPECT_TRUE(step.ok()) << step.status();
    return step.ok() ? *std::move(step) : nullptr;
  }
  client::AttendCall Call(int layer, bool chained) const {
    const auto index = static_cast<size_t>(layer);
    client::AttendCall call;
    call.layer = static_cast<uint32_t>(layer);
    call.row_count = 1;
    call.num_heads = 2;
    call.profile = v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = in_[index].data();
    call.q = in_[index].data() + 1152;
    call.o = out_[index].data();
    call.stream = stream_.get();
    call.chained = chained;
    return call;
  }
  // Copies the outputs and clears them.
  std::vector<std::byte> TakeOutputs() {
    std::vector<std::byte> all;
    for (const std::span<std::byte> out : out_) {
      all.insert(all.end(), out.begin(), out.begin() + kOut);
      std::memset(out.data(), 0, kOut);
    }
    return all;
  }

  std::unique_ptr<DeviceServer> server_ = std::make_unique<DeviceServer>();
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Track> track_;
  FakeStream stream_;
  std::vector<std::span<std::byte>> in_, out_;
};

TEST_F(ChainedTest, TheStreamHasTheOutputsThoughNoThreadHasWaited) {
  auto step = Begin();
  for (int layer = 0; layer < DeviceDims().layers; ++layer) {
    ASSERT_TRUE((*step).Attend(Call(layer, false)).ok());
  }
  ASSERT_TRUE(step->End({0}).ok());
  const std::vector<std::byte> expected = TakeOutputs();
  EXPECT_NE(expected, TakeOutputs());
  const int64_t before = server_->control().word_stores;
  constexpr int kTurns = 20;
  for (int turn = 0; turn < kTurns; ++turn) {
    step = Begin();
    std::vector<client::PendingAttend> chain;
    for (int layer = 0; layer < DeviceDims().layers; ++layer) {
      chain.push_back(step->AttendAsync(Call(layer, true)));
    }
    stream_.Finish();
    ASSERT_EQ(TakeOutputs(), expected) << turn;
    for (client::PendingAttend& pending : chain) ASSERT_TRUE(pending.Wait().ok());
    ASSERT_TRUE(step->End({0}).ok());
  }
  // The worker's stream has stored its own words, and launches have stored the server's words.
  EXPECT_LE(server_->control().word_stores - before, kTurns * (2 * DeviceDims().layers + 1));
}

// The fake GPU does one thing at a time, so a launch that waits on it for the client is always
// late.
TEST_F(ChainedTest, WhatWasLaunchedTooEarlyIsComputedAgain) {
  const auto run = [this] {
    const int64_t before = server_->control().launches;
    auto step = Begin();
    std::vector<client::PendingAttend> chain;
    for (int layer = 0; layer < DeviceDims().layers; ++layer) {
      chain.push_back(step->AttendAsync(Call(layer, true)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    stream_.Finish();
    const std::vector<std::byte> outputs = TakeOutputs();
    for (client::PendingAttend& pending : chain) EXPECT_TRUE(pending.Wait().ok());
    EXPECT_TRUE(step->End({0}).ok());
    return std::pair(outputs, server_->control().launches - before);
  };
  const auto [expected, launches] = run();
  server_->control().lazy_words = stream_.get();
  const auto [outputs, more] = run();
  server_->control().lazy_words = nullptr;
  EXPECT_EQ(outputs, expected);
  EXPECT_GT(more, launches);
}

// The launch goes ahead, comes back late, is held, and is refused after shm.device_wait_ms.
TEST_F(ChainedTest, WhatNeverGetsReadyIsRefusedOnce) {
  server_->control().lazy_words = stream_.get();
  auto step = Begin();
  client::PendingAttend pending = step->AttendAsync(Call(0, true));
  EXPECT_EQ(pending.Wait().status().code(), StatusCode::kDeadlineExceeded);
  server_->control().lazy_words = nullptr;
  stream_.Finish();
  EXPECT_TRUE(step->Attend(Call(0, false)).ok());
}

TEST_F(ChainedTest, AFailureLetsTheStreamGoOn) {
  auto step = Begin();
  client::AttendCall call = Call(0, true);
  call.num_heads = 3;  // the model has two
  client::PendingAttend refused = step->AttendAsync(call);
  stream_.Finish();
  EXPECT_EQ(refused.Wait().status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(step->Attend(Call(0, true)).ok());
}

TEST_F(ChainedTest, CallsThatMayOvertakeAreRefused) {
  auto step = Begin();
  FakeStream other;
  for (const bool chained : {false, true}) {
    client::PendingAttend first = step->AttendAsync(Call(0, chained));
    client::AttendCall second = Call(1, !chained);
    EXPECT_EQ(step->Attend(second).status().code(), StatusCode::kFailedPrecondition);
    if (chained) {
      second = Call(1, true);
      second.stream = other.get();
      EXPECT_EQ(step->Attend(second).status().code(), StatusCode::kFailedPrecondition);
    }
    EXPECT_TRUE(first.Wait().ok());
  }
  std::vector<std::byte> in(kIn), out(kOut);
  client::AttendCall on_host = Call(1, true);
  on_host.kv = in.data();
  on_host.q = in.data() + 1152;
  on_host.o = out.data();
  // Neither there nor in a pinned region.
  EXPECT_EQ(step->Attend(on_host).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(step->Attend(Call(1, true)).ok());
}

TEST_F(ChainedTest, AStepEndsBehindItsCallsAndTheNextBeginsBehindThat) {
  for (int turn = 0; turn < 5; ++turn) {
    auto step = Begin();
    std::vector<client::PendingAttend> chain;
    for (int layer = 0; layer < DeviceDims().layers; ++layer) {
      chain.push_back(step->AttendAsync(Call(layer, true)));
    }
    std::thread end([&step] { EXPECT_TRUE(step->End({0}).ok()); });
    stream_.Finish();
    end.join();
    for (client::PendingAttend& pending : chain) EXPECT_TRUE(pending.Wait().ok());
  }
}

TEST_F(ChainedTest, ARuntimeWithoutSuchWaitsSaysSo) {
  server_->control().FailOnce("hipStreamWaitValue32");
  auto step = Begin();
  EXPECT_EQ(step->Attend(Call(0, true)).status().code(), StatusCode::kInternal);
}

TEST_F(ChainedTest, StreamsAreReleasedWhereNoReplyWillCome) {
  client::SharedMemoryOptions options;
  options.bytes = 1 << 20;
  options.device_mib = 2;
  options.device.library = kernels::hip::kLibrary;
  auto ring =
      client::SharedMemory::Connect(server_->server().folder().File("mla.sock.shm"), options);
  ASSERT_TRUE(ring.ok()) << ring.status();
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryAttend;
  entry.flags = wire::kEntryOnDevice;
  // The first call gets a reply; the next two get none, because the ring is closed.
  ASSERT_TRUE((*ring)->Submit(entry, stream_.get(), true));
  stream_.Finish();
  track_.reset();
  worker_.reset();
  client_.reset();
  server_.reset();
  FakeStream mine;
  ASSERT_TRUE((*ring)->Submit(entry, mine.get(), true));
  const uint32_t* const done = (*ring)->device()->Nearby(wire::NearbyDoneOffset(1));
  ASSERT_NE(done, nullptr);
  EXPECT_NE(*done, 2u);
  kernels::hip::FakeControl()->busy_connections = true;
  (*ring)->ReleaseStreams();
  kernels::hip::FakeControl()->busy_connections = false;
  ASSERT_EQ(*done, 2u);
  mine.Finish();
}

}  // namespace
}  // namespace mla::integration
