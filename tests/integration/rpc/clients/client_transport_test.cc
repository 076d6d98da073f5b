// The C++ client's ways to a server: each serves the same steps, and reports which one it is.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/streams/errors.h"
#include "client/cpp/streams/stream.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using Transport = client::ClientOptions::Transport;

client::ClientOptions Over(Transport transport) {
  client::ClientOptions options;
  options.transport = transport;
  return options;
}

struct Way {
  Transport transport;
  const char* name;
};

class ClientTransportTest : public testing::TestWithParam<Way> {};

TEST_P(ClientTransportTest, ServesWholeSteps) {
  const TestServer server;
  const auto client = server.Connect(Over(GetParam().transport));
  Worker worker(client.get(), {}, "m", 1);
  EXPECT_EQ(worker.session().transport(), GetParam().name);
  ASSERT_EQ(worker.Upload(), absl::OkStatus());
  Track a = *worker.Open(), b = *worker.Open();
  EXPECT_EQ(worker.Step({&a, &b}, {5, 3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&b, &a}, {1, 1}, v1::PROFILE_EXPANDED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&a}, {7}, v1::PROFILE_APPEND_ONLY), absl::OkStatus());
  EXPECT_EQ(worker.Step({&a}, {4}, v1::PROFILE_ABSORBED, {2}), absl::OkStatus());
  const auto stats = client->GetStats();
  ASSERT_TRUE(stats.ok());
  const bool shared = GetParam().transport != Transport::kInline;
  EXPECT_EQ(stats->shared_bytes() > 0, shared);
  EXPECT_EQ(stats->copied_bytes() > 0, !shared);
}

// Tensors of more than half a megabyte, which a session's own threads copy together.
TEST_P(ClientTransportTest, SeveralThreadsCopyLargeTensors) {
  const TestServer server([](server::Config& config) { config.wire.copy_threads = 3; });
  client::ClientOptions options = Over(GetParam().transport);
  options.copy_threads = 3;
  const auto client = server.Connect(options);
  Dims dims;
  dims.heads = 16;
  dims.layers = 1;
  Worker worker(client.get(), dims, "m", 1);
  std::deque<Track> tracks;  // many short ones, because checking a row costs as much as it sees
  std::vector<Track*> each;
  for (int i = 0; i < 30; ++i) each.push_back(&tracks.emplace_back(*worker.Open()));
  const std::vector<uint32_t> rows(each.size(), 15);
  EXPECT_EQ(worker.Step(each, rows, v1::PROFILE_ABSORBED, {}, v1::DTYPE_BF16), absl::OkStatus());
  EXPECT_EQ(worker.most_messages(), 1u);
}

// Queries of whole messages are computed where gRPC left them, wherever rows begin in its slices;
// only rows for the cache are copied.
TEST(InlineTest, CpuBackendReadsQueriesInPlace) {
  const TestServer server([](server::Config& config) { config.backend = "cpu"; });
  const auto client = server.Connect(Over(Transport::kInline));
  Dims dims;
  dims.heads = 16;
  Worker worker(client.get(), dims, "m", 1);
  ASSERT_EQ(worker.Upload(), absl::OkStatus());
  Track a = *worker.Open(), b = *worker.Open();
  EXPECT_EQ(worker.Step({&a, &b}, {90, 3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&b, &a}, {1, 60}, v1::PROFILE_EXPANDED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&a, &b}, {1, 1}, v1::PROFILE_EXPANDED), absl::OkStatus());
  const auto stats = client->GetStats();
  ASSERT_TRUE(stats.ok());
  const int rows = 93 + 61 + 2;
  EXPECT_EQ(stats->copied_bytes(), static_cast<uint64_t>(rows * dims.layers * dims.row() * 2));
}

// More rows than the region holds at a time: later pieces wait for earlier ones.
TEST_P(ClientTransportTest, LargeCallsWaitForRoom) {
  const TestServer server;
  client::ClientOptions options = Over(GetParam().transport);
  options.shared_bytes = 128 << 10;
  const auto client = server.Connect(options);
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  EXPECT_EQ(worker.Step({&track}, {512}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const bool pieces = GetParam().transport != Transport::kInline;
  EXPECT_GT(worker.most_messages(), pieces ? 8u : 0u);
  EXPECT_EQ(worker.Step({&track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

// Tensors that the caller makes in memory that the server reads and writes are neither copied nor
// cut, even if they are larger than a message may be.
TEST_P(ClientTransportTest, TensorsInPlaceAreNeitherCutNorCopied) {
  const TestServer server([](server::Config& config) { config.wire.message_bytes = 64 << 10; });
  const auto client = server.Connect(Over(GetParam().transport));
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  const Dims dims = worker.dims();
  const size_t rows = 512, kv_bytes = rows * 40 * 2, q_bytes = rows * 4 * 40 * 2;
  const size_t o_bytes = rows * 4 * 32 * 2;
  client::Session& session = worker.session();
  std::span<std::byte> in = session.Allocate(kv_bytes + q_bytes), out = session.Allocate(o_bytes);
  const bool shared = GetParam().transport != Transport::kInline;
  ASSERT_EQ(in.empty(), !shared);
  std::vector<std::byte> own_in(kv_bytes + q_bytes), own_out(o_bytes);
  if (!shared) in = own_in, out = own_out;
  const std::vector<uint16_t> values = RandomBf16(in.size() / 2, &worker.random());
  std::memcpy(in.data(), values.data(), in.size());
  auto step = session.Begin("m", {{&track.sequence, static_cast<uint32_t>(rows)}});
  ASSERT_TRUE(step.ok()) << step.status();
  client::AttendCall call;
  call.row_count = static_cast<uint32_t>(rows);
  call.num_heads = static_cast<uint32_t>(dims.heads);
  call.profile = v1::PROFILE_ABSORBED;
  call.kv = in.data();
  call.q = in.data() + kv_bytes;
  call.o = out.data();
  for (int layer = 0; layer < dims.layers; ++layer) {
    call.layer = static_cast<uint32_t>(layer);
    std::memset(out.data(), 0xff, out.size());
    const auto times = (*step)->Attend(call);
    ASSERT_TRUE(times.ok()) << times.status();
    EXPECT_EQ(times->messages == 1, shared);
    // The first row sees only itself, so its output is its latent row.
    EXPECT_EQ(std::memcmp(out.data(), in.data(), 32 * 2), 0);
  }
  EXPECT_TRUE((*step)->End().ok());
  EXPECT_EQ(client->GetStats()->copied_bytes() > 0, !shared);
}

TEST_P(ClientTransportTest, RefusalsLeaveTheSessionUsable) {
  const TestServer server;
  const auto client = server.Connect(Over(GetParam().transport));
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  auto step = worker.session().Begin("m", {{&track.sequence, 2}});
  ASSERT_TRUE(step.ok());
  client::AttendCall call;
  call.row_count = 2;
  call.num_heads = 5;  // the model has 4
  call.profile = v1::PROFILE_ABSORBED;
  std::vector<std::byte> q(2 * 5 * 40 * 2), o(2 * 5 * 32 * 2);
  call.q = q.data();
  call.o = o.data();
  for (int i = 0; i < 50; ++i) {
    const absl::Status refused = (*step)->Attend(call).status();
    ASSERT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    ASSERT_EQ(client::DetailOf(refused)->field(), "attend.num_heads");
  }
  EXPECT_EQ((*step)->Abort(), absl::OkStatus());
  EXPECT_EQ(worker.Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST_P(ClientTransportTest, StepsOfSeveralThreadsShareASession) {
  const TestServer server;
  const auto client = server.Connect(Over(GetParam().transport));
  Worker worker(client.get(), {}, "m", 1);
  std::vector<Track> tracks;
  for (int i = 0; i < 4; ++i) tracks.push_back(*worker.Open());
  const Dims dims = worker.dims();
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (Track& track : tracks) {
    threads.emplace_back([&] {
      const size_t rows = 16, heads = static_cast<size_t>(dims.heads);
      std::vector<uint16_t> kv(rows * static_cast<size_t>(dims.row())), q(kv.size() * heads);
      std::vector<uint16_t> o(rows * heads * static_cast<size_t>(dims.lora));
      auto step = worker.session().Begin("m", {{&track.sequence, 16}});
      ASSERT_TRUE(step.ok()) << step.status();
      client::AttendCall call;
      call.row_count = 16;
      call.num_heads = static_cast<uint32_t>(dims.heads);
      call.profile = v1::PROFILE_ABSORBED;
      call.kv = kv.data();
      call.q = q.data();
      call.o = o.data();
      for (int layer = 0; layer < dims.layers; ++layer) {
        call.layer = static_cast<uint32_t>(layer);
        const auto times = (*step)->Attend(call);
        ASSERT_TRUE(times.ok()) << "layer " << layer << ": " << times.status();
      }
      const auto ended = (*step)->End();
      EXPECT_TRUE(ended.ok()) << ended.status();
      done += ended.ok();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done, 4);
}

INSTANTIATE_TEST_SUITE_P(All, ClientTransportTest,
                         testing::Values(Way{Transport::kInline, "inline"},
                                         Way{Transport::kShm, "shm"}, Way{Transport::kRing, "ring"},
                                         Way{Transport::kAuto, "ring"}),
                         [](const auto& info) { return "Number" + std::to_string(info.index); });

TEST(ClientTransportChoiceTest, OtherTargetsAreInlineOrRefused) {
  const TestServer server;
  for (const auto& [transport, name] :
       {Way{Transport::kAuto, "inline"}, Way{Transport::kInline, "inline"},
        Way{Transport::kShm, nullptr}, Way{Transport::kRing, nullptr}}) {
    auto client = client::Client::Connect(server.tcp_target(), Over(transport));
    ASSERT_TRUE(client.ok());
    const auto session = (*client)->OpenSession();
    if (name != nullptr) {
      EXPECT_EQ((*session)->transport(), name);
    } else {
      EXPECT_EQ(session.status().code(), absl::StatusCode::kUnimplemented);
    }
  }
}

TEST(ClientTransportChoiceTest, RegionsShrinkBeforeSessionsGoWithout) {
  const TestServer server([](server::Config& config) {
    config.shm.region_bytes = int64_t{32} << 20;
    config.shm.total_bytes = int64_t{40} << 20;
    config.tenants.bounds[scheduler::Resource::kRegionBytes] = config.shm.total_bytes;
  });
  const auto client = server.Connect(Over(Transport::kAuto));
  const auto first = client->OpenSession(), second = client->OpenSession(),
             third = client->OpenSession();
  // 32 MiB and a ring of the 40 MiB are taken. 16 and 8 MiB do not fit in addition, but 4 MiB do.
  EXPECT_EQ((*first)->transport(), "ring");
  EXPECT_EQ((*first)->Allocate(32u << 20).size(), 32u << 20);
  EXPECT_EQ((*second)->transport(), "ring");
  EXPECT_EQ((*second)->Allocate((4u << 20) + 1).size(), 0u);
  EXPECT_EQ((*second)->Allocate(4u << 20).size(), 4u << 20);
  EXPECT_EQ((*third)->transport(), "inline");
  // A size that was asked for explicitly is not reduced.
  client::ClientOptions named = Over(Transport::kRing);
  named.shared_bytes = 8 << 20;
  EXPECT_EQ(server.Connect(named)->OpenSession().status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(ClientSpinTest, TakesNoCoreThatOthersNeed) {
  EXPECT_EQ(client::DefaultStreamSpin(1).count(), 0);
  EXPECT_EQ(client::DefaultStreamSpin(3).count(), 0);
  EXPECT_GT(client::DefaultStreamSpin(4).count(), 0);
}

TEST(ClientWatchTest, ReportsUntilToldToStop) {
  const TestServer server;
  const auto client = server.Connect();
  std::vector<v1::ServerState> states;
  EXPECT_EQ(client->WatchStatus(100,
                                [&](const v1::StatusUpdate& update) {
                                  states.push_back(update.state());
                                  if (states.size() == 2) client->Drain(100, false).IgnoreError();
                                  return update.state() != v1::SERVER_STATE_DRAINING;
                                }),
            absl::OkStatus());
  EXPECT_EQ(states.front(), v1::SERVER_STATE_SERVING);
  EXPECT_EQ(states.back(), v1::SERVER_STATE_DRAINING);
}

}  // namespace
}  // namespace mla::integration
