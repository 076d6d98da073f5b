// The same-host path as clients use it: regions, and tensors in them that gRPC messages refer to.
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <optional>

#include "client/cpp/shared_memory/shared_memory.h"
#include "client/cpp/streams/errors.h"
#include "mla/v1/attention.grpc.pb.h"
#include "tests/integration/shared_memory/shared_memory_harness.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using absl::StatusCode;
using client::ClientOptions;
using client::SharedMemory;
using client::SharedMemoryOptions;

TEST(SharedMemoryTest, RingServesWholeStepsWithoutCopies) {
  const TestServer server;
  const auto client = server.Connect(Over(ClientOptions::Transport::kRing));
  Worker worker(client.get(), {}, "m", 1);
  ASSERT_EQ(worker.Upload(), absl::OkStatus());
  Track a = *worker.Open(), b = *worker.Open();
  EXPECT_EQ(worker.Step({&a, &b}, {5, 3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&b, &a}, {1, 1}, v1::PROFILE_EXPANDED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&a}, {7}, v1::PROFILE_APPEND_ONLY), absl::OkStatus());
  EXPECT_EQ(worker.Step({&a}, {4}, v1::PROFILE_ABSORBED, {2}), absl::OkStatus());
  EXPECT_EQ(worker.Step({&a, &b}, {1, 2}, v1::PROFILE_EXPANDED, {}, v1::DTYPE_BF16),
            absl::OkStatus());
  const auto stats = client->GetStats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->rings(), 1u);
  EXPECT_EQ(stats->copied_bytes(), 0u);
  EXPECT_GT(stats->shared_bytes(), 0u);
}

TEST(SharedMemoryTest, UnixTargetsUseTheRingAndOthersFallBack) {
  const TestServer server;
  const auto local = server.Connect();
  EXPECT_EQ(local->info().limits().shm_ring_entries(), 256u);
  const auto session = local->OpenSession();
  ASSERT_TRUE(session.ok());
  EXPECT_FALSE((*session)->Allocate(64).empty());
  auto remote = client::Client::Connect(server.tcp_target(), {});
  ASSERT_TRUE(remote.ok());
  Worker worker(remote->get(), {}, "m", 1);
  Track track = *worker.Open();
  EXPECT_TRUE(worker.session().Allocate(64).empty());
  EXPECT_EQ(worker.Step({&track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());

  const TestServer off([](server::Config& config) { config.shm.enabled = false; });
  const auto client = off.Connect();
  EXPECT_EQ(client->info().limits().shm_ring_entries(), 0u);
  EXPECT_TRUE((*client->OpenSession())->Allocate(64).empty());
  EXPECT_EQ(off.Connect(Over(ClientOptions::Transport::kRing))->OpenSession().status().code(),
            StatusCode::kUnimplemented);
}

TEST(SharedMemoryTest, RefusalsAreThoseOfTheStream) {
  const TestServer server;
  const auto ring = server.Connect(Over(ClientOptions::Transport::kRing));
  const auto grpc = server.Connect(Over(ClientOptions::Transport::kInline));
  Worker by_ring(ring.get(), {}, "m", 1), by_grpc(grpc.get(), {}, "m", 1);
  absl::Status seen[2];
  for (Worker* worker : {&by_ring, &by_grpc}) {
    Track track = *worker->Open();
    auto step = worker->session().Begin("m", {{&track.sequence, 2}});
    ASSERT_TRUE(step.ok());
    client::AttendCall call;
    call.row_count = 2;
    call.num_heads = 5;  // the model has 4
    call.profile = v1::PROFILE_ABSORBED;
    std::vector<std::byte> q(2 * 5 * 40 * 2), o(2 * 5 * 32 * 2);
    call.q = q.data();
    call.o = o.data();
    seen[worker == &by_grpc] = (*step)->Attend(call).status();
    EXPECT_EQ((*step)->End().status().code(), StatusCode::kFailedPrecondition);
  }
  EXPECT_EQ(seen[0].code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(seen[0].message(), seen[1].message());
  EXPECT_EQ(client::DetailOf(seen[0])->field(), "attend.num_heads");
  EXPECT_EQ(client::DetailOf(seen[0])->limit(), client::DetailOf(seen[1])->limit());
}

// A gRPC stream, written by hand, whose attends name places in a region.
class SharedTensorsTest : public testing::Test {
 protected:
  SharedTensorsTest() : client_(server_.Connect(Over(ClientOptions::Transport::kInline))) {
    EXPECT_TRUE(client_->RegisterModel(SpecOf(Dims(), "m")).ok());
    sequence_.emplace(*client_->OpenSequence("m"));
    channel_ = grpc::CreateChannel(server_.unix_target(), grpc::InsecureChannelCredentials());
    stub_ = v1::Attention::NewStub(channel_);
    stream_ = stub_->Attend(&context_);
    v1::AttendStreamRequest request;
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(1);
    begin->set_model_id("m");
    v1::StepSequence* rows = begin->add_sequences();
    rows->set_sequence_id(sequence_->id());
    rows->set_epoch(sequence_->epoch());
    rows->set_rows(2);
    EXPECT_TRUE(Call(request).has_begin_step());
    region_ = Region(server_, false);
    in_ = region_->Allocate(kInBytes);
    out_ = region_->Allocate(kOutBytes);
    std::mt19937_64 random(7);
    const auto values = RandomBf16(kInBytes / 2, &random);
    std::memcpy(in_.data(), values.data(), kInBytes);
  }

  ~SharedTensorsTest() override {
    stream_->WritesDone();
    EXPECT_TRUE(stream_->Finish().ok());
  }

  v1::AttendStreamReply Call(const v1::AttendStreamRequest& request) {
    v1::AttendStreamReply reply;
    EXPECT_TRUE(stream_->Write(request));
    EXPECT_TRUE(stream_->Read(&reply));
    return reply;
  }

  // Two rows of four heads with their KV rows: kv 160 bytes, padded to 192, q 640; o 512, lse 32.
  static constexpr size_t kKvBytes = 160, kQAt = 192, kInBytes = kQAt + 640;
  static constexpr size_t kOBytes = 512, kOutBytes = kOBytes + 32;

  v1::AttendStreamRequest Attend() const {
    v1::AttendStreamRequest request;
    v1::Attend* attend = request.mutable_attend();
    attend->set_step_id(1);
    attend->set_row_count(2);
    attend->set_num_heads(4);
    attend->set_profile(v1::PROFILE_ABSORBED);
    attend->set_has_kv(true);
    attend->set_want_lse(true);
    v1::SharedTensors* shared = request.mutable_shared();
    shared->set_handle(std::string(region_->handle()));
    shared->set_in_offset(region_->OffsetOf(in_.data()));
    shared->set_in_length(kInBytes);
    shared->set_out_offset(region_->OffsetOf(out_.data()));
    shared->set_out_length(kOutBytes);
    return request;
  }

  v1::StepError ErrorOf(const v1::AttendStreamRequest& request) {
    const v1::AttendStreamReply reply = Call(request);
    EXPECT_TRUE(reply.has_error());
    return reply.error();
  }

  // The server waits for missing rows for as long as the test takes.
  TestServer server_{[](server::Config& config) { config.limits.kv_wait_ms = 20000; }};
  std::unique_ptr<client::Client> client_;
  std::optional<client::Sequence> sequence_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Attention::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttendStreamRequest, v1::AttendStreamReply>> stream_;
  std::unique_ptr<SharedMemory> region_;
  std::span<std::byte> in_, out_;
};

TEST_F(SharedTensorsTest, EqualsThePayload) {
  const v1::AttendStreamReply shared = Call(Attend());
  ASSERT_TRUE(shared.has_attend()) << shared.DebugString();
  EXPECT_TRUE(shared.payload().empty());
  EXPECT_EQ(client_->GetStats()->copied_bytes(), 0u);
  v1::AttendStreamRequest inline_request = Attend();
  inline_request.clear_shared();
  const auto* in = reinterpret_cast<const char*>(in_.data());
  inline_request.set_payload(std::string(in, kKvBytes) + std::string(in + kQAt, 640));
  const v1::AttendStreamReply by_payload = Call(inline_request);
  ASSERT_TRUE(by_payload.has_attend()) << by_payload.DebugString();
  ASSERT_EQ(by_payload.payload().size(), kOutBytes);
  EXPECT_EQ(std::memcmp(by_payload.payload().data(), out_.data(), kOutBytes), 0);
}

TEST_F(SharedTensorsTest, ForgedForeignAndStaleHandlesAreTheSame) {
  const auto foreign = Region(server_, false, "other-tenant");
  auto stale = Region(server_, false);
  const std::string stale_handle(stale->handle());
  stale.reset();
  ASSERT_TRUE(Becomes(*client_, [](const auto& s) { return s.shared_regions() == 2; }));
  const std::string handles[] = {std::string(16, 'x'), std::string(foreign->handle()), stale_handle,
                                 "", std::string(region_->handle()) + "x"};
  for (const std::string& handle : handles) {
    v1::AttendStreamRequest request = Attend();
    request.mutable_shared()->set_handle(handle);
    const v1::StepError error = ErrorOf(request);
    EXPECT_EQ(error.code(), static_cast<int>(StatusCode::kNotFound));
    EXPECT_EQ(error.message(), "shared.handle: no such region");
    EXPECT_EQ(error.detail().SerializeAsString(), [] {
      v1::ErrorDetail detail;
      detail.set_field("shared.handle");
      detail.set_limit("the handle of a region whose connection stands");
      detail.set_got("another handle");
      detail.set_reason("region_not_found");
      return detail.SerializeAsString();
    }());
  }
  EXPECT_TRUE(Call(Attend()).has_attend());
}

TEST_F(SharedTensorsTest, PlacesAreChecked) {
  const uint64_t size = region_->region().size();
  struct Case {
    const char* field;
    std::function<void(v1::SharedTensors*)> change;
  };
  const Case cases[] = {
      {"shared.in_offset", [&](auto* s) { s->set_in_offset(size - 64); }},
      {"shared.in_offset", [&](auto* s) { s->set_in_offset(size + 64); }},
      {"shared.in_offset", [](auto* s) { s->set_in_offset(UINT64_MAX - 63); }},
      {"shared.in_offset", [](auto* s) { s->set_in_offset(s->in_offset() + 32); }},
      {"shared.out_offset", [&](auto* s) { s->set_out_offset(size); }},
      {"shared.out_offset", [](auto* s) { s->set_out_offset(s->out_offset() + 4); }},
      {"shared.in_length", [](auto* s) { s->set_in_length(kInBytes - 1); }},
      {"shared.out_length", [](auto* s) { s->set_out_length(UINT64_MAX); }},
  };
  for (const Case& one : cases) {
    v1::AttendStreamRequest request = Attend();
    one.change(request.mutable_shared());
    const v1::StepError error = ErrorOf(request);
    EXPECT_EQ(error.code(), static_cast<int>(StatusCode::kInvalidArgument)) << one.field;
    EXPECT_EQ(error.detail().field(), one.field);
  }
  v1::AttendStreamRequest both = Attend();
  both.set_payload("x");
  EXPECT_EQ(ErrorOf(both).detail().field(), "payload");
  EXPECT_TRUE(Call(Attend()).has_attend());
}

TEST_F(SharedTensorsTest, ARequestInFlightKeepsTheMemoryOfAClientThatHasGone) {
  v1::AttendStreamRequest waits = Attend();  // waits for KV rows of a later message
  waits.mutable_attend()->set_has_kv(false);
  waits.set_tag(1);
  waits.mutable_shared()->set_in_length(640);
  ASSERT_TRUE(stream_->Write(waits));
  ASSERT_TRUE(Becomes(*client_, [](const auto& s) { return s.requests_waiting() == 1; }));
  region_.reset();
  ASSERT_TRUE(Becomes(*client_, [](const auto& s) { return s.shared_regions() == 0; }));
  v1::AttendStreamRequest rows;
  rows.set_tag(2);
  v1::Attend* attend = rows.mutable_attend();
  attend->set_step_id(1);
  attend->set_row_count(2);
  attend->set_profile(v1::PROFILE_APPEND_ONLY);
  attend->set_has_kv(true);
  rows.set_payload(std::string(kKvBytes, '\x3c'));
  ASSERT_TRUE(stream_->Write(rows));
  // The reply is written where no client reads any more; the server and other clients go on.
  uint64_t tags = 0;
  for (int i = 0; i < 2; ++i) {
    v1::AttendStreamReply reply;
    ASSERT_TRUE(stream_->Read(&reply));
    EXPECT_TRUE(reply.has_attend()) << reply.DebugString();
    tags += reply.tag();
  }
  EXPECT_EQ(tags, 3u);
  EXPECT_EQ(ErrorOf(waits).detail().reason(), "region_not_found");
}

TEST_F(SharedTensorsTest, RegionsAreBounded) {
  std::vector<std::unique_ptr<SharedMemory>> regions;
  SharedMemoryOptions other, too_large, unnamed;
  other.tenant = "other";
  too_large.bytes = UINT64_MAX;
  unnamed.tenant = "a b";
  absl::Status refused;
  for (int i = 0; i < 20 && refused.ok(); ++i) {
    SharedMemoryOptions options;
    options.bytes = 65536;
    auto region = SharedMemory::Connect(ShmPathOf(server_), options);
    refused = region.status();
    if (region.ok()) regions.push_back(*std::move(region));
  }
  EXPECT_EQ(regions.size(), 15u);  // in addition to the fixture's own
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted) << refused;
  EXPECT_TRUE(SharedMemory::Connect(ShmPathOf(server_), other).ok());
  regions.clear();
  EXPECT_TRUE(Becomes(*client_, [](const auto& s) { return s.shared_regions() == 1; }));
  EXPECT_TRUE(SharedMemory::Connect(ShmPathOf(server_), {}).ok());
  EXPECT_EQ(SharedMemory::Connect(ShmPathOf(server_), too_large).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(SharedMemory::Connect(ShmPathOf(server_), unnamed).status().code(),
            StatusCode::kInvalidArgument);
}

// A tenant may have all regions, but not all their memory.
TEST(SharedMemoryTest, MemoryForRegionsIsLeftToOtherTenants) {
  constexpr uint64_t kBytes = 1 << 20;
  const TestServer server([](server::Config& config) {
    config.shm.total_bytes = 16 * kBytes;
    config.shm.tenant_regions = config.shm.regions_max;
  });
  const auto open = [&server](const char* tenant) {
    SharedMemoryOptions options;
    options.tenant = tenant;
    options.bytes = kBytes / 2;
    return SharedMemory::Connect(ShmPathOf(server), options);
  };
  std::vector<std::unique_ptr<SharedMemory>> regions;
  absl::Status refused;
  while (refused.ok() && regions.size() < 100) {
    auto region = open("a");
    refused = region.status();
    if (region.ok()) regions.push_back(*std::move(region));
  }
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted) << refused;
  EXPECT_GT(regions.size(), 8u);
  EXPECT_LT(regions.size(), 32u);
  const absl::Status other = open("b").status();
  EXPECT_EQ(other, absl::OkStatus());
}

}  // namespace
}  // namespace mla::integration
