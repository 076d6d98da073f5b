// Tensors that clients put into memory of the server's GPU, and outputs that are put from there:
// a server on the fake GPU, a relay that maps its device memory, and clients over the fake UCX.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/integration/ucx/gpu_ring.h"

namespace mla::integration {
namespace {

using absl::StatusCode;

class GpuMemoryTest : public testing::Test {
 protected:
  void SetUp() override { fake_ucx::Reset({.memory_types = kTypes}); }
  void TearDown() override {
    EXPECT_EQ(fake_ucx::counts().live_requests, 0u);
    EXPECT_EQ(fake_ucx::counts().live_keys, 0u);
    EXPECT_EQ(fake_ucx::counts().registered, 0u);
    EXPECT_EQ(fake_ucx::counts().wrong_types, 0u);
  }
  static absl::StatusOr<std::unique_ptr<client::UcxMemory>> OpenClient(bool device = true) {
    client::UcxMemoryOptions options;
    options.link.puts = true;
    options.device_memory = device;
    return client::UcxMemory::Open(fake_ucx::Api(), options);
  }
  // A stream over `ring`.
  static absl::StatusOr<std::unique_ptr<client::RingStream>> Over(GpuRing* ring) {
    auto memory = OpenClient();
    if (!memory.ok()) return memory.status();
    (*memory)->OnGivenUp([at = memory->get()] { at->SetEnded(absl::OkStatus()); });
    if (absl::Status s = ring->Connect((*memory)->address()); !s.ok()) return s;
    client::UcxRing described = ring->Described();
    const std::string address = ring->relay().address();
    described.worker_address = address;
    if (absl::Status s = (*memory)->Connect(described); !s.ok()) return s;
    return std::make_unique<client::RingStream>(*std::move(memory), ring->shared().boot_id(), kLong,
                                                kArena, wire::ThreadTeamOptions());
  }
  // What the same step gives with tensors in the region of a ring in shared memory.
  static std::vector<std::byte> Expected(const DeviceServer& server, Steps* steps, uint32_t rows) {
    client::SharedMemoryOptions options;
    options.bytes = kArena;
    auto memory =
        client::SharedMemory::Connect(server.server().folder().File("mla.sock.shm"), options);
    EXPECT_TRUE(memory.ok()) << memory.status();
    const uint64_t boot_id = (*memory)->boot_id();
    client::RingStream stream(*std::move(memory), boot_id, kLong, kArena,
                              wire::ThreadTeamOptions());
    auto outputs = steps->Run(&stream, rows);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    return outputs.ok() ? *outputs : std::vector<std::byte>();
  }
};

TEST_F(GpuMemoryTest, TensorsArePutIntoItAndOutputsFromIt) {
  DeviceServer server;
  const auto client = server.server().Connect();
  Steps steps(client.get());
  const std::vector<std::byte> expected = Expected(server, &steps, kRows);
  ASSERT_FALSE(AllZero(expected));
  const auto to_device = [&server] {
    return server.control().bytes_in + server.control().bytes_by_kernel;
  };
  GpuRing ring;
  ASSERT_EQ(ring.Open(server), absl::OkStatus());
  EXPECT_GT(server.control().remote_bytes, 0);  // it was made for network devices
  auto stream = Over(&ring);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const int64_t before = to_device();
  for (int i = 0; i < 3; ++i) {
    const auto outputs = steps.Run(stream->get(), kRows);
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    EXPECT_EQ(*outputs, expected);
  }
  const fake_ucx::Counts counts = fake_ucx::counts();
  EXPECT_EQ(counts.device_puts, 6u);
  EXPECT_EQ(counts.device_put_bytes, 6u * kRows * kRowDim * 2 * (1 + kHeads));
  EXPECT_EQ(counts.puts_from_device, 6u);
  EXPECT_EQ(ring.relay().counts().put_bytes, 3 * expected.size());
  // No queries are copied to the GPU.
  EXPECT_LT(to_device() - before, int64_t{6} * kRows * kRowDim * 2);
  EXPECT_EQ(server.control().remote_shown, 0);  // this GPU orders the writes
  EXPECT_EQ(ring.relay().status(), absl::OkStatus());
}

TEST_F(GpuMemoryTest, WhateverOrderPutsAndFramesComeIn) {
  for (uint64_t seed = 1; seed < 5; ++seed) {
    fake_ucx::Reset({.reorder = seed, .memory_types = kTypes});
    DeviceServer server;
    const auto client = server.server().Connect();
    Steps steps(client.get());
    const std::vector<std::byte> expected = Expected(server, &steps, kRows);
    GpuRing ring;
    ASSERT_EQ(ring.Open(server), absl::OkStatus());
    auto stream = Over(&ring);
    ASSERT_TRUE(stream.ok()) << stream.status();
    const auto outputs = steps.Run(stream->get(), kRows);
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    EXPECT_EQ(*outputs, expected);
    EXPECT_EQ(ring.relay().status(), absl::OkStatus());
  }
}

TEST_F(GpuMemoryTest, SmallTensorsTravelWithTheirFrames) {
  DeviceServer server;
  const auto client = server.server().Connect();
  Steps steps(client.get());
  const std::vector<std::byte> expected = Expected(server, &steps, 1);
  GpuRing ring;
  ASSERT_EQ(ring.Open(server), absl::OkStatus());
  auto stream = Over(&ring);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const auto outputs = steps.Run(stream->get(), 1);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  EXPECT_EQ(*outputs, expected);
  EXPECT_EQ(fake_ucx::counts().puts, 0u);
}

// A GPU that orders no writes of network devices is asked to show them before the server reads
// them.
TEST_F(GpuMemoryTest, WritesAreShownToTheGpu) {
  DeviceServer server({}, [](fake_hip::Control& control) { control.remote_order = 0; });
  const auto client = server.server().Connect();
  Steps steps(client.get());
  GpuRing ring;
  ASSERT_EQ(ring.Open(server), absl::OkStatus());
  auto stream = Over(&ring);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const int64_t before = server.control().remote_shown;
  EXPECT_TRUE(steps.Run(stream->get(), kRows).ok());
  EXPECT_EQ(server.control().remote_shown - before, 2);  // a layer each
  EXPECT_EQ(ring.relay().status(), absl::OkStatus());
  stream->reset();
  server.control().remote_flushes = 0;
  GpuRing other;
  const absl::Status refused = other.Open(server);
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << refused;
  EXPECT_NE(refused.message().find("does not order"), std::string::npos) << refused;
  server.control().remote_order = 100;
  server.control().remote_flushes = 1;
}

TEST_F(GpuMemoryTest, AUcxThatDoesNotKnowTheGpuIsTheReason) {
  for (const bool nvidia : {true, false}) {
    const char* const arch = nvidia ? "sm_90" : "gfx950";
    const DeviceServer server({}, [arch](fake_hip::Control& control) { control.arch = arch; });
    for (const uint64_t types :
         {UCS_BIT(UCS_MEMORY_TYPE_HOST),
          UCS_BIT(UCS_MEMORY_TYPE_HOST) |
              UCS_BIT(nvidia ? UCS_MEMORY_TYPE_ROCM : UCS_MEMORY_TYPE_CUDA)}) {
      fake_ucx::Reset({.memory_types = types});
      GpuRing ring;
      const absl::Status refused = ring.Open(server);
      EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << refused;
      EXPECT_NE(refused.message().find("it knows host"), std::string::npos) << refused;
      EXPECT_NE(refused.message().find(nvidia ? "not cuda" : "not rocm"), std::string::npos)
          << refused;
    }
    fake_ucx::Reset({.memory_types = kTypes | UCS_BIT(UCS_MEMORY_TYPE_ROCM)});
    GpuRing ring;
    EXPECT_EQ(ring.Open(server), absl::OkStatus());
  }
}

// A key may name memory that any process of this user has on the GPU.
TEST_F(GpuMemoryTest, UcxDoesNotOpenMemoryOfTheHostsGpusUnlessItIsToldTo) {
  for (const bool nvidia : {true, false}) {
    const char* const arch = nvidia ? "sm_90" : "gfx950";
    const DeviceServer server({}, [arch](fake_hip::Control& control) { control.arch = arch; });
    fake_ucx::Reset({.memory_types = kTypes | UCS_BIT(UCS_MEMORY_TYPE_ROCM)});
    auto shared = GpuRing::Attach(server, "");
    ASSERT_TRUE(shared.ok()) << shared.status();
    relay::RelayOptions options = RelayOptionsOf();
    options.link.transports = "^shm";
    options.between_hosts = true;
    ASSERT_TRUE(relay::Relay::Open(fake_ucx::Api(), options, shared->get()).ok());
    EXPECT_EQ(fake_ucx::Transports(), nvidia ? "^shm,cuda_ipc" : "^shm,rocm_ipc");
    options.device = false;  // then UCX need not know them, and would warn of the names
    ASSERT_TRUE(relay::Relay::Open(fake_ucx::Api(), options, shared->get()).ok());
    EXPECT_EQ(fake_ucx::Transports(), "^shm");
    options = RelayOptionsOf();
    options.link.transports = "rc,cuda_copy,cuda_ipc";
    ASSERT_TRUE(relay::Relay::Open(fake_ucx::Api(), options, shared->get()).ok());
    EXPECT_EQ(fake_ucx::Transports(), "rc,cuda_copy,cuda_ipc");
  }
}

TEST_F(GpuMemoryTest, AServerWithoutRoomIsTheReason) {
  const DeviceServer server([](server::Config& config) { config.shm.device_bytes = kMiB; });
  GpuRing ring;
  const absl::Status refused = ring.Open(server);
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable) << refused;
  EXPECT_NE(refused.message().find("shm.device_bytes"), std::string::npos) << refused;
}

TEST_F(GpuMemoryTest, AClientSaysWhatTheServerLacks) {
  DeviceServer server;
  GpuRing ring;
  ASSERT_EQ(ring.Open(server), absl::OkStatus());
  for (const bool wanted : {true, false}) {
    auto memory = OpenClient(wanted);
    ASSERT_TRUE(memory.ok());
    client::UcxRing described = ring.Described();
    const std::string address = ring.relay().address();
    described.worker_address = address;
    if (wanted) {
      described.device_key = {};
      described.arena_offset = wire::RingBytes(described.entries);
      described.region_bytes = described.arena_offset + kArena;
    }
    EXPECT_EQ((*memory)->Connect(described).code(), StatusCode::kUnimplemented);
  }
}

// ------------------------------------------------------------------ Memory between its owners

// One tenant's rows, in the region and in the GPU's memory, are not there for the next, and the
// keys of the first open nothing of the second's.
TEST_F(GpuMemoryTest, ItIsScrubbedBetweenTenantsAndKeysEnd) {
  DeviceServer server;
  const int64_t unused = server.device_bytes();
  const std::vector<std::byte> secret(100'000, std::byte{0x5a});
  auto peer = std::make_unique<Peer>();
  wire::UcxTarget arena, device;
  {
    GpuRing first;
    ASSERT_EQ(first.Open(server, "first"), absl::OkStatus());
    ASSERT_EQ(first.relay().Connect(peer->link().address()), absl::OkStatus());
    ASSERT_EQ(peer->link().Connect(first.relay().address()), absl::OkStatus());
    arena = first.arena();
    device = first.device();
    ASSERT_EQ(peer->link().Reach(arena, wire::UcxRemote::kArena), absl::OkStatus());
    ASSERT_EQ(peer->link().Reach(device, wire::UcxRemote::kDevice), absl::OkStatus());
    ASSERT_EQ(peer->Put(secret, 4096, wire::UcxRemote::kArena), absl::OkStatus());
    ASSERT_EQ(peer->Put(secret, 8192, wire::UcxRemote::kDevice), absl::OkStatus());
    peer->Progress();
    ASSERT_EQ(fake_ucx::counts().device_put_bytes, secret.size());
    ASSERT_EQ(
        std::memcmp(first.shared().device()->tensors().data() + 8192, secret.data(), secret.size()),
        0);
    EXPECT_GT(server.device_bytes(), unused);
  }
  EXPECT_TRUE(Becomes([&] { return server.device_bytes() == unused; })) << server.device_bytes();
  for (const char* tenant : {"second", "first"}) {
    GpuRing next;
    ASSERT_EQ(next.Open(server, tenant), absl::OkStatus());
    EXPECT_NE(next.device().key, device.key);
    const auto clean = [&next] {
      return AllZero(next.shared().region().last(next.shared().arena_bytes())) &&
             AllZero(next.shared().device()->tensors());
    };
    EXPECT_TRUE(clean()) << tenant;
    // The first one's keys, at the addresses of the next ring.
    Peer late;
    ASSERT_EQ(next.relay().Connect(late.link().address()), absl::OkStatus());
    ASSERT_EQ(late.link().Connect(next.relay().address()), absl::OkStatus());
    const uint64_t refused = fake_ucx::counts().refused_puts;
    ASSERT_EQ(late.link().Reach({next.device().address, device.bytes, device.key},
                                wire::UcxRemote::kDevice),
              absl::OkStatus());
    ASSERT_EQ(late.Put(secret, 8192, wire::UcxRemote::kDevice), absl::OkStatus());
    late.Progress();
    EXPECT_EQ(fake_ucx::counts().refused_puts, refused + 1);
    EXPECT_TRUE(clean()) << tenant;
  }
}

// The same connection's next ring, too, begins with memory that holds nothing.
TEST_F(GpuMemoryTest, ARingOfTheSameClientBeginsClean) {
  DeviceServer server;
  const auto client = server.server().Connect();
  Steps steps(client.get());
  for (int i = 0; i < 3; ++i) {
    GpuRing ring;
    ASSERT_EQ(ring.Open(server), absl::OkStatus());
    EXPECT_TRUE(AllZero(ring.shared().device()->tensors()));
    EXPECT_TRUE(AllZero(ring.shared().region().last(ring.shared().arena_bytes())));
    auto stream = Over(&ring);
    ASSERT_TRUE(stream.ok()) << stream.status();
    ASSERT_TRUE(steps.Run(stream->get(), kRows).ok());
    EXPECT_FALSE(AllZero(ring.shared().device()->tensors()));
  }
}

// ------------------------------------------------------------------------------ A lying client

class LyingGpuClientTest : public GpuMemoryTest {
 protected:
  void Start(bool device = true) {
    End();
    shared_ = *GpuRing::Attach(server_, "liar", device ? 2 : 0);
    relay_ = *relay::Relay::Open(fake_ucx::Api(), RelayOptionsOf(device), shared_.get());
    peer_ = std::make_unique<Peer>();
    ASSERT_EQ(relay_->Connect(peer_->link().address()), absl::OkStatus());
    ASSERT_EQ(peer_->link().Connect(relay_->address()), absl::OkStatus());
  }
  void End() {
    relay_.reset();
    peer_.reset();
    if (shared_ != nullptr) shared_->Close(kLong);
    shared_.reset();
  }
  void TearDown() override {
    End();
    GpuMemoryTest::TearDown();
  }
  void Run() {
    for (int i = 0; i < 200; ++i) {
      relay_->Step();
      peer_->link().Progress();
    }
  }
  StatusCode After(const wire::UcxRequestFrame& frame, std::span<const std::byte> payload = {},
                   bool device = true) {
    Start(device);
    EXPECT_EQ(peer_->Send(frame, payload), absl::OkStatus());
    Run();
    return relay_->status().code();
  }

  DeviceServer server_;
  std::unique_ptr<client::SharedMemory> shared_;
  std::unique_ptr<relay::Relay> relay_;
  std::unique_ptr<Peer> peer_;
};

TEST_F(LyingGpuClientTest, EntriesThatBreakARuleEndItsRelay) {
  constexpr auto kInvalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(After(OnDevice(0)), StatusCode::kOk);
  EXPECT_EQ(After(OnDevice(0), {}, false), kInvalid);  // its ring has no such memory
  const std::vector<std::byte> payload(64);
  EXPECT_EQ(After(OnDevice(0), payload), kInvalid);  // inputs are put
  wire::UcxRequestFrame frame = OnDevice(0);
  frame.entry.flags |= wire::kEntryChained;
  EXPECT_EQ(After(frame), kInvalid);
  Start();
  const uint64_t size = std::min<uint64_t>(shared_->device()->tensors().size(), kArena);
  const std::pair<uint64_t, uint64_t> places[] = {
      {size - 63, 64}, {size + 1, 1}, {UINT64_MAX, 64}, {64, UINT64_MAX}, {0, size + 1}};
  for (const auto& [offset, bytes] : places) {
    frame = OnDevice(0);
    frame.entry.out_offset = offset;
    frame.out_bytes = bytes;
    EXPECT_EQ(After(frame), kInvalid) << offset << " " << bytes;
  }
  frame = OnDevice(0);
  frame.entry.out_offset = size - 64;
  EXPECT_EQ(After(frame), StatusCode::kOk);
}

// The key opens tensors, and neither the words of chains after them nor the memory of others.
TEST_F(LyingGpuClientTest, ItsPutsStayInTheTensors) {
  Start();
  const auto device = relay_->OfferDevice();
  ASSERT_TRUE(device.ok()) << device.status();
  const std::span<std::byte> all = shared_->device()->memory();
  EXPECT_LT(device->bytes, all.size());
  wire::UcxTarget lie = *device;
  lie.bytes = all.size() + kMiB;
  ASSERT_EQ(peer_->link().Reach(lie, wire::UcxRemote::kDevice), absl::OkStatus());
  const std::vector<std::byte> noise(4096, std::byte{1});
  const std::vector<std::byte> before(all.begin(), all.end());
  ASSERT_EQ(peer_->Put(noise, device->bytes - 64, wire::UcxRemote::kDevice), absl::OkStatus());
  Run();
  EXPECT_EQ(fake_ucx::counts().refused_puts, 1u);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), all.begin()));
}

// Outputs in the GPU's memory can only be put: they wait for the client's key, and the ring with
// them.
TEST_F(LyingGpuClientTest, CompletionsWaitForTheKey) {
  Start();
  ASSERT_EQ(peer_->Send(OnDevice(0)), absl::OkStatus());  // of no step: an error answers it
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto run_until = [this](int wanted) {
    return Becomes([&] {
      Run();
      return peer_->arrived >= wanted;
    });
  };
  for (int i = 0; i < 50; ++i) Run();
  EXPECT_EQ(peer_->arrived, 0);
  EXPECT_EQ(relay_->status(), absl::OkStatus());
  std::vector<std::byte> outputs(kArena);
  auto mirror = peer_->link().Offer(outputs);
  ASSERT_TRUE(mirror.ok());
  wire::UcxKeyFrame key{};
  key.token.fill(7);
  key.address = mirror->address;
  key.bytes = shared_->arena_bytes();
  ASSERT_EQ(peer_->Send(key, std::as_bytes(std::span<const char>(mirror->key))), absl::OkStatus());
  EXPECT_TRUE(run_until(1)) << relay_->status();
}

}  // namespace
}  // namespace mla::integration
