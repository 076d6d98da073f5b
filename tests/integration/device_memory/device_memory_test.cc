// Steps whose tensors lie in device memory: replies, refusals, and the release of memory.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "client/cpp/shared_memory/shared_memory.h"
#include "tests/integration/device_memory/device_server.h"

namespace mla::integration {
namespace {

using absl::StatusCode;

bool Becomes(const std::function<bool()>& holds) {
  for (int i = 0; i < 3000; ++i) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

TEST(DeviceMemoryTest, StepsEqualTheDenseModel) {
  DeviceServer server;
  const auto client = server.server().Connect(DeviceServer::Options());
  Worker worker(client.get(), DeviceDims(), "m", 1);
  ASSERT_EQ(worker.session().DeviceStatus(), absl::OkStatus());
  EXPECT_EQ(worker.session().DeviceWarning(), "");
  ASSERT_EQ(worker.Upload(), absl::OkStatus());
  worker.UseDevice();
  auto first = worker.Open(), second = worker.Open();
  ASSERT_EQ(worker.Step({&*first, &*second}, {5, 3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  ASSERT_EQ(worker.Step({&*first}, {2}, v1::PROFILE_APPEND_ONLY), absl::OkStatus());
  for (const v1::Profile profile : {v1::PROFILE_ABSORBED, v1::PROFILE_EXPANDED}) {
    ASSERT_EQ(worker.Step({&*first, &*second}, {1, 1}, profile), absl::OkStatus());
    ASSERT_EQ(worker.Step({&*first, &*second}, {1, 1}, profile, {}, v1::DTYPE_BF16),
              absl::OkStatus());
  }
}

// Without MPS a driver gives a GPU to one process at a time.
TEST(DeviceMemoryTest, ASharedGpuWithoutMpsIsWarnedOf) {
  DeviceServer server;
  server.control().served_by_mps = false;
  const auto client = server.server().Connect(DeviceServer::Options());
  Worker worker(client.get(), DeviceDims(), "m", 1);
  EXPECT_EQ(worker.session().DeviceStatus(), absl::OkStatus());
  EXPECT_NE(worker.session().DeviceWarning().find("without MPS"), std::string::npos);
  server.control().served_by_mps = true;
}

// Steps with queries in host memory copy them to the device; the same steps with queries in device
// memory copy only metadata.
TEST(DeviceMemoryTest, NoPayloadIsCopied) {
  DeviceServer server;
  const auto client = server.server().Connect(DeviceServer::Options());
  Worker host(client.get(), DeviceDims(), "m", 1), device(client.get(), DeviceDims(), "m", 1);
  device.UseDevice();
  constexpr int64_t kRows = 32, kQueries = kRows * 2 * 576 * 2;
  const auto copied = [&server](Worker& worker) {
    auto track = worker.Open();
    const fake_hip::Control& control = server.control();
    const int64_t before = control.bytes_in + control.bytes_by_kernel;
    EXPECT_EQ(worker.Step({&*track}, {kRows}, v1::PROFILE_ABSORBED), absl::OkStatus());
    return control.bytes_in + control.bytes_by_kernel - before;
  };
  const int64_t from_host = copied(host), on_device = copied(device);
  EXPECT_GE(from_host - on_device, DeviceDims().layers * kQueries);
  EXPECT_LT(on_device, DeviceDims().layers * kQueries);
}

// Steps with tensors in device memory and steps with tensors in host memory share a launch.
TEST(DeviceMemoryTest, OtherTransportsBesideIt) {
  DeviceServer server;
  const auto on_device = server.server().Connect(DeviceServer::Options());
  const auto inline_client = server.server().Connect();
  Worker one(on_device.get(), DeviceDims(), "m", 1), two(inline_client.get(), DeviceDims(), "m", 2);
  one.UseDevice();
  std::thread thread([&two] {
    auto track = two.Open();
    for (int i = 0; i < 10; ++i) {
      EXPECT_EQ(two.Step({&*track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
    }
  });
  auto track = one.Open();
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(one.Step({&*track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  thread.join();
}

TEST(DeviceMemoryTest, ANotANumberStaysItsOwn) {
  DeviceServer server;
  const auto client = server.server().Connect(DeviceServer::Options());
  Worker worker(client.get(), DeviceDims(), "m", 1);
  auto track = worker.Open();
  auto step = worker.session().Begin("m", {{&track->sequence, 1}});
  ASSERT_TRUE(step.ok()) << step.status();
  const std::span<std::byte> in = worker.session().AllocateOnDevice(1152 + 2 * 1152);
  const std::span<std::byte> out = worker.session().AllocateOnDevice(2 * 512 * 4 + 64);
  std::memset(in.data(), 0, in.size());
  // An infinite element of the new row meets queries of zero, which gives NaN as its inputs demand.
  const uint16_t infinity = 0x7f80;
  std::memcpy(in.data(), &infinity, sizeof(infinity));
  client::AttendCall call;
  call.row_count = 1;
  call.num_heads = 2;
  call.profile = v1::PROFILE_ABSORBED;
  call.o_dtype = v1::DTYPE_F32;
  call.kv = in.data();
  call.q = in.data() + 1152;
  call.o = out.data();
  call.lse = reinterpret_cast<float*>(out.data() + 2 * 512 * 4);
  const auto times = (*step)->Attend(call);
  ASSERT_TRUE(times.ok()) << times.status();
  EXPECT_TRUE(std::isnan(call.lse[0]));
  EXPECT_TRUE(std::isnan(reinterpret_cast<const float*>(out.data())[7]));
}

TEST(DeviceMemoryTest, SomeTensorsInIt) {
  DeviceServer server;
  const auto client = server.server().Connect(DeviceServer::Options());
  Worker worker(client.get(), DeviceDims(), "m", 1);
  auto track = worker.Open();
  auto step = worker.session().Begin("m", {{&track->sequence, 1}});
  const std::span<std::byte> in = worker.session().AllocateOnDevice(4096);
  std::vector<std::byte> out(8192);
  client::AttendCall call;
  call.row_count = 1;
  call.num_heads = 2;
  call.profile = v1::PROFILE_ABSORBED;
  call.kv = in.data();
  call.q = in.data() + 1152;
  call.o = out.data();
  EXPECT_EQ((*step)->Attend(call).status().code(), StatusCode::kInvalidArgument);
}

// Requests that only a client with hand-made entries can send.
class DeviceEntriesTest : public testing::Test {
 protected:
  DeviceEntriesTest() : client_(server_.server().Connect(DeviceServer::Options())) {
    EXPECT_TRUE(client_->RegisterModel(SpecOf(DeviceDims(), "m")).ok());
  }
  std::unique_ptr<client::SharedMemory> Ring(uint32_t device_mib) {
    client::SharedMemoryOptions options;
    options.bytes = 1 << 20;
    options.device_mib = device_mib;
    options.device.library = kernels::hip::kLibrary;
    auto ring =
        client::SharedMemory::Connect(server_.server().folder().File("mla.sock.shm"), options);
    EXPECT_TRUE(ring.ok()) << ring.status();
    return ring.ok() ? *std::move(ring) : nullptr;
  }
  v1::AttendStreamReply Answer(client::SharedMemory& ring) {
    wire::CompletionEntry done;
    EXPECT_EQ(ring.Wait(&done, std::chrono::seconds(20)), absl::OkStatus());
    v1::AttendStreamReply reply;
    EXPECT_TRUE(reply.ParseFromString(std::string(ring.Message(done))));
    return reply;
  }
  uint64_t Begin(client::SharedMemory& ring) {
    sequences_.push_back(*client_->OpenSequence("m"));
    v1::AttendStreamRequest request;
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(++step_);
    begin->set_model_id("m");
    v1::StepSequence* rows = begin->add_sequences();
    rows->set_sequence_id(sequences_.back().id());
    rows->set_epoch(sequences_.back().epoch());
    rows->set_rows(1);
    const std::string bytes = request.SerializeAsString();
    const std::span<std::byte> room = ring.Allocate(bytes.size());
    std::memcpy(room.data(), bytes.data(), bytes.size());
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryMessage;
    entry.row_count = static_cast<uint32_t>(bytes.size());
    entry.in_offset = ring.OffsetOf(room.data());
    EXPECT_TRUE(ring.Submit(entry));
    EXPECT_TRUE(Answer(ring).has_begin_step());
    return step_;
  }
  wire::SubmissionEntry Attend(uint64_t step) const {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryAttend;
    entry.profile = v1::PROFILE_ABSORBED;
    entry.flags = wire::kEntryHasKv | wire::kEntryOnDevice;
    entry.dtypes = v1::DTYPE_BF16 | v1::DTYPE_BF16 << 4;
    entry.step_id = step;
    entry.row_count = 1;
    entry.num_heads = 2;
    return entry;
  }

  DeviceServer server_;
  std::unique_ptr<client::Client> client_;
  std::vector<client::Sequence> sequences_;
  uint64_t step_ = 0;
};

TEST_F(DeviceEntriesTest, PlacesAreChecked) {
  const auto ring = Ring(2);
  ASSERT_NE(ring->device(), nullptr) << ring->device_status();
  const uint64_t end = ring->device()->memory().size(), step = Begin(*ring);
  const auto refused = [&](uint64_t in, uint64_t out, uint8_t flags, const char* field) {
    wire::SubmissionEntry entry = Attend(step);
    entry.in_offset = in;
    entry.out_offset = out;
    entry.flags |= flags;
    ASSERT_TRUE(ring->Submit(entry));
    const v1::AttendStreamReply reply = Answer(*ring);
    EXPECT_EQ(reply.error().code(), static_cast<int>(StatusCode::kInvalidArgument)) << field;
    EXPECT_EQ(reply.error().detail().field(), field) << in << " " << out;
  };
  refused(8, 0, 0, "in_offset");
  refused(end - 64, 0, 0, "in_offset");
  refused(end, 0, 0, "in_offset");
  refused(std::numeric_limits<uint64_t>::max() - 63, 0, 0, "in_offset");
  refused(0, end - 64, 0, "out_offset");
  refused(0, 32, 0, "out_offset");
}

TEST_F(DeviceEntriesTest, WithoutDeviceMemoryTheyAreRefused) {
  const auto ring = Ring(0);
  EXPECT_EQ(ring->device(), nullptr);
  const uint64_t step = Begin(*ring);
  wire::SubmissionEntry entry = Attend(step);
  EXPECT_FALSE(ring->Submit(entry));
  // The client library refuses this itself, so the entry is written by hand.
  auto* const slots =
      reinterpret_cast<wire::SubmissionEntry*>(ring->region().data() + wire::SubmissionsOffset());
  entry.sequence = 0;
  slots[1] = entry;
  std::atomic_ref<uint32_t>(slots[1].sequence)
      .store(wire::PublishedSequence(1), std::memory_order_release);
  const v1::AttendStreamReply reply = Answer(*ring);
  EXPECT_EQ(reply.error().code(), static_cast<int>(StatusCode::kInvalidArgument));
  EXPECT_EQ(reply.error().detail().field(), "flags");
}

TEST(DeviceLimitsTest, DeviceMemoryTakesNothingOfTheHosts) {
  const DeviceServer server([](server::Config& config) {
    config.shm.region_bytes = kMiB;
    config.shm.total_bytes = 3 * kMiB / 2;
    config.shm.device_bytes = 8 * kMiB;
  });
  const auto connect = [&server](uint32_t device_mib) {
    client::SharedMemoryOptions options;
    options.bytes = kMiB;
    options.device_mib = device_mib;
    options.device.library = kernels::hip::kLibrary;
    return client::SharedMemory::Connect(server.server().folder().File("mla.sock.shm"), options);
  };
  {
    const auto ring = connect(4);
    ASSERT_TRUE(ring.ok()) << ring.status();
    EXPECT_TRUE((*ring)->has_device_memory()) << (*ring)->device_status();
    // The device's share is not the host's.
    EXPECT_EQ(connect(0).status().code(), StatusCode::kResourceExhausted);
  }
}

// If no device memory is left, the listener replies without any. Memory is available again when its
// client has gone.
TEST_F(DeviceEntriesTest, ItIsBoundedAndReturns) {
  const int64_t before = server_.device_bytes();  // the fixture's own client may have a session
  auto large = Ring(16);
  ASSERT_NE(large->device(), nullptr) << large->device_status();
  EXPECT_EQ(server_.device_bytes() - before, 16 * kMiB);
  for (const std::byte byte : large->device()->memory().first(1 << 20)) {
    ASSERT_EQ(byte, std::byte{0});  // cleared, whatever the device's memory held before
  }
  std::memset(large->device()->memory().data(), 0x5a, 1 << 20);
  const auto none = Ring(2);
  EXPECT_EQ(none->device(), nullptr);
  EXPECT_THAT(none->device_status().message(), testing::HasSubstr("tenants.region_bytes"));
  large.reset();
  EXPECT_TRUE(Becomes([&] { return server_.device_bytes() == before; })) << server_.device_bytes();
  const auto again = Ring(2);
  ASSERT_NE(again->device(), nullptr) << again->device_status();
  EXPECT_EQ(again->device()->memory()[100], std::byte{0});
}

TEST_F(DeviceEntriesTest, ADeviceThatCannotExportIt) {
  server_.control().FailOnce("hipMemCreate", 0, 2);  // out of memory
  const auto ring = Ring(2);
  EXPECT_EQ(ring->device(), nullptr);
  EXPECT_NE(ring->device_status().message().find("memory"), std::string::npos);
  const uint64_t step = Begin(*ring);
  EXPECT_GT(step, 0u);  // the ring works
}

}  // namespace
}  // namespace mla::integration
