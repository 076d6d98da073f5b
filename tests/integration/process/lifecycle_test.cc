// Time and operation: leases, drain, health, the operations port, readers that do not read.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "client/cpp/streams/errors.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/attention.grpc.pb.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// True once `condition` holds, within five seconds.
bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 500; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return false;
}

TEST(LifecycleTest, LeasesExpireUnlessRenewed) {
  const TestServer server([](server::Config& config) { config.limits.sequence_lease_ms = 1000; });
  const auto keeper = server.Connect();
  client::ClientOptions lazy_options;
  lazy_options.renew_leases = false;
  const auto lazy = server.Connect(lazy_options);
  Worker kept(keeper.get(), {}, "m", 1);
  Worker lost(lazy.get(), {}, "m", 2);
  Track a = *kept.Open();
  Track b = *lost.Open();
  EXPECT_TRUE(Eventually([&] { return keeper->GetStats()->leases_expired() == 1; }));
  std::this_thread::sleep_for(milliseconds(2300));
  EXPECT_EQ(kept.Step({&a}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(lost.Step({&b}, {1}, v1::PROFILE_ABSORBED)));
}

TEST(LifecycleTest, SilentStepsAreAborted) {
  const TestServer server([](server::Config& config) { config.limits.step_lease_ms = 150; });
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  auto step = worker.session().Begin("m", {{&track.sequence, 1}});
  ASSERT_TRUE(step.ok());
  EXPECT_TRUE(Eventually([&] { return client->GetStats()->steps_aborted() == 1; }));
  EXPECT_FALSE((*step)->End().ok());
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(LifecycleTest, AStepDiesWithItsStream) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  {
    auto session = *client->OpenSession();
    auto step = session->Begin("m", {{&track.sequence, 1}});
    ASSERT_TRUE(step.ok());
    ASSERT_EQ(client->GetStats()->open_steps(), 1u);
    EXPECT_EQ(session->Close(), absl::OkStatus());
    EXPECT_EQ(client->GetStats()->open_steps(), 0u);
  }
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(LifecycleTest, DrainUnderLoadLosesNothing) {
  TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {4}, v1::PROFILE_ABSORBED), absl::OkStatus());
  auto step = worker.session().Begin("m", {{&track.sequence, 1}});
  ASSERT_TRUE(step.ok());

  std::thread drainer([&] {
    const auto operator_client = server.Connect();
    const auto reply = operator_client->Drain(5000, true);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(reply->drained());
  });
  EXPECT_TRUE(Eventually([&] { return !*client->IsServing(); }));
  const absl::Status refused = client->OpenSequence("m").status();
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_EQ(client::DetailOf(refused)->reason(), "draining");
  EXPECT_FALSE(server.exit_requested());

  // The open step may finish.
  const Dims& dims = worker.dims();
  const auto kv = RandomBf16(static_cast<size_t>(dims.row()), &worker.random());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    client::AttendCall call;
    call.layer = layer;
    call.row_count = 1;
    call.profile = v1::PROFILE_APPEND_ONLY;
    call.kv = kv.data();
    EXPECT_TRUE((*step)->Attend(call).ok());
  }
  EXPECT_TRUE((*step)->End().ok());
  drainer.join();
  EXPECT_TRUE(server.exit_requested());
  EXPECT_TRUE(server.server().Shutdown(milliseconds(1000)).drained);
}

TEST(LifecycleTest, DrainDeadlineAbortsWhatIsOpen) {
  TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  client::BeginOptions options;
  options.lease_ms = 60000;
  auto step = worker.session().Begin("m", {{&track.sequence, 1}}, options);
  ASSERT_TRUE(step.ok());
  const auto begun = std::chrono::steady_clock::now();
  const server::DrainResult result = server.server().Shutdown(milliseconds(300));
  EXPECT_FALSE(result.drained);
  EXPECT_EQ(result.aborted_steps, 1);
  const auto took = std::chrono::steady_clock::now() - begun;
  EXPECT_GE(took, milliseconds(300));
  EXPECT_LT(took, milliseconds(1300));
}

TEST(LifecycleTest, ADrainByTheServersDeadlineOutlastsOtherCalls) {
  TestServer server([](server::Config& config) { config.drain_deadline_ms = 4000; });
  client::ClientOptions options;
  options.call_timeout_ms = 2000;
  const auto drainer = server.Connect(options), client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  client::BeginOptions long_lease;
  long_lease.lease_ms = 60000;
  auto step = worker.session().Begin("m", {{&track.sequence, 1}}, long_lease);
  ASSERT_TRUE(step.ok());
  const auto reply = drainer->Drain(0, false);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_FALSE(reply->drained());
  EXPECT_EQ(reply->aborted_steps(), 1u);
}

// A request for a shorter deadline than that of the drain in progress gets it, above all a stop by
// a signal.
TEST(LifecycleTest, AShorterDeadlineEndsADrainThatRuns) {
  TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  client::BeginOptions options;
  options.lease_ms = 60000;
  auto step = worker.session().Begin("m", {{&track.sequence, 1}}, options);
  ASSERT_TRUE(step.ok());
  std::thread drainer([&] {
    client::ClientOptions patient;
    patient.call_timeout_ms = 120000;
    const auto reply = server.Connect(patient)->Drain(60000, false);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_FALSE(reply->drained());
    EXPECT_EQ(reply->aborted_steps(), 1u);
  });
  EXPECT_TRUE(Eventually([&] { return !*client->IsServing(); }));
  const auto begun = std::chrono::steady_clock::now();
  const server::DrainResult result = server.server().Shutdown(milliseconds(300));
  EXPECT_EQ(result.aborted_steps, 1);
  EXPECT_GE(std::chrono::steady_clock::now() - begun, milliseconds(300));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, milliseconds(30000));
  drainer.join();
}

TEST(LifecycleTest, HealthOfEveryService) {
  TestServer server;
  const auto client = server.Connect();
  for (const char* service :
       {"", "mla.v1.Attention", "mla.v1.Sequences", "mla.v1.Models", "mla.v1.Admin"}) {
    const auto serving = client->IsServing(service);
    ASSERT_TRUE(serving.ok()) << service << serving.status();
    EXPECT_TRUE(*serving) << service;
  }
  EXPECT_TRUE(absl::IsNotFound(client->IsServing("mla.v1.Nothing").status()));

  const auto channel =
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials());
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  const auto watch = stub->Watch(&context, {});
  grpc::health::v1::HealthCheckResponse reply;
  ASSERT_TRUE(watch->Read(&reply));
  EXPECT_EQ(reply.status(), grpc::health::v1::HealthCheckResponse::SERVING);
  EXPECT_TRUE(client->Drain(100, false)->drained());
  ASSERT_TRUE(watch->Read(&reply));
  EXPECT_EQ(reply.status(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  context.TryCancel();
}

// Standard clients watch health before they use a connection, one watch for each.
TEST(LifecycleTest, ManyChannelsWithHealthChecksBecomeReady) {
  TestServer server([](server::Config& config) { config.wire.control_threads = 4; });
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < 40; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetServiceConfigJSON(
        R"({"loadBalancingConfig":[{"round_robin":{}}],"healthCheckConfig":{"serviceName":""}})");
    channels.push_back(grpc::CreateCustomChannel(server.unix_target(),
                                                 grpc::InsecureChannelCredentials(), arguments));
    channels.back()->GetState(true);
  }
  const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(20);
  for (const auto& channel : channels) EXPECT_TRUE(channel->WaitForConnected(deadline));
  EXPECT_TRUE(server.Connect()->Drain(100, false)->drained());
  for (const auto& channel : channels) {
    EXPECT_TRUE(Eventually([&] { return channel->GetState(false) != GRPC_CHANNEL_READY; }));
  }
}

TEST(LifecycleTest, HealthCallsAreBounded) {
  const TestServer server([](server::Config& config) { config.wire.max_health_calls = 4; });
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()));
  struct Watch {
    Watch(grpc::health::v1::Health::Stub* health, const std::string& tenant) {
      context.AddMetadata("mla-tenant", tenant);
      reader = health->Watch(&context, {});
    }
    ~Watch() { context.TryCancel(); }
    bool Read() {
      grpc::health::v1::HealthCheckResponse reply;
      return reader->Read(&reply);
    }
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<grpc::health::v1::HealthCheckResponse>> reader;
  };
  // One tenant may have half of the calls; the other half remains for other tenants. Each call is
  // made after the answer to the one before, because the server may take calls in another order.
  Watch a(stub.get(), "red");
  EXPECT_TRUE(a.Read());
  Watch b(stub.get(), "red");
  EXPECT_TRUE(b.Read());
  Watch c(stub.get(), "red");
  EXPECT_FALSE(c.Read());
  EXPECT_EQ(c.reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  Watch d(stub.get(), "blue");
  EXPECT_TRUE(d.Read());
  Watch e(stub.get(), "blue");
  EXPECT_TRUE(e.Read());
  Watch f(stub.get(), "green");
  EXPECT_FALSE(f.Read());
  // Calls that a client returns may be taken again.
  a.context.TryCancel();
  EXPECT_EQ(a.reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return server.Connect()->IsServing().value_or(false); }));
  EXPECT_TRUE(Eventually([&] { return Watch(stub.get(), "red").Read(); }));
}

TEST(LifecycleTest, WatchStatusFollowsTheState) {
  TestServer server;
  const auto client = server.Connect();
  const auto stub = v1::Admin::NewStub(
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::WatchStatusRequest request;
  request.set_interval_ms(100);
  const auto watch = stub->WatchStatus(&context, request);
  v1::StatusUpdate update;
  ASSERT_TRUE(watch->Read(&update));
  EXPECT_EQ(update.state(), v1::SERVER_STATE_SERVING);
  EXPECT_EQ(update.percent(), 100u);
  EXPECT_EQ(update.boot_id(), client->info().boot_id());
  ASSERT_TRUE(watch->Read(&update));  // the interval brings another update without a change
  EXPECT_TRUE(client->Drain(100, false).ok());
  while (update.state() != v1::SERVER_STATE_DRAINING) ASSERT_TRUE(watch->Read(&update));
  context.TryCancel();
}

TEST(LifecycleTest, OperationsPort) {
  TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {4}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const int port = server.server().ops_port();
  EXPECT_THAT(HttpGet(port, "/livez"), StartsWith("200 alive"));
  EXPECT_THAT(HttpGet(port, "/readyz?verbose"), HasSubstr("state serving"));
  const std::string metrics = HttpGet(port, "/metrics");
  EXPECT_THAT(metrics, StartsWith("200 "));
  EXPECT_THAT(metrics, HasSubstr("mla_requests_total{code=\"OK\",tenant=\"default\"}"));
  // Four rows at two layers, and the one row of the known-answer test.
  EXPECT_THAT(metrics, HasSubstr("mla_rows_total{stage=\"prefill\"} 9"));
  EXPECT_THAT(metrics, HasSubstr("mla_leases_active 1"));
  EXPECT_THAT(metrics, HasSubstr("mla_backend_info{"));
  EXPECT_THAT(metrics, HasSubstr("\nmla_serving 1\n"));
  EXPECT_THAT(HttpGet(port, "/statusz"), HasSubstr("<th scope=\"row\">state</th><td>serving"));
  const std::string status = HttpGet(port, "/statusz?json");
  for (const char* part : {"\"state\": \"serving\"", "\"device_lost\": false", "\"backends_tried\"",
                           "\"sequences\": 1,"}) {
    EXPECT_THAT(status, HasSubstr(part));
  }
  EXPECT_THAT(HttpGet(port, "/etc/passwd"), StartsWith("404 "));
  EXPECT_THAT(HttpGet(port, "/metrics", "POST"), StartsWith("405 "));
  EXPECT_TRUE(client->Drain(100, false)->drained());
  EXPECT_THAT(HttpGet(port, "/readyz"), StartsWith("503 "));
  EXPECT_THAT(HttpGet(port, "/metrics"), HasSubstr("\nmla_serving 0\n"));
  EXPECT_THAT(HttpGet(port, "/livez"), StartsWith("200 "));
}

// A client that sends and never reads is disconnected; another client does not notice.
TEST(LifecycleTest, SlowReaderIsDisconnected) {
  const TestServer server([](server::Config& config) {
    config.wire.slow_reader_ms = 300;
    config.wire.inflight_bytes = int64_t{1} << 20;
    config.limits.step_lease_ms = 60000;
  });
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  const auto stub = v1::Attention::NewStub(
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->Attend(&context);
  v1::AttendStreamRequest request;
  request.mutable_begin_step()->set_step_id(1);
  request.mutable_begin_step()->set_model_id("m");
  v1::StepSequence* sequence = request.mutable_begin_step()->add_sequences();
  sequence->set_sequence_id(track.sequence.id());
  sequence->set_epoch(track.sequence.epoch());
  sequence->set_rows(256);
  ASSERT_TRUE(stream->Write(request));
  v1::Attend* attend = request.mutable_attend();
  attend->set_step_id(1);
  attend->set_row_count(256);
  attend->set_num_heads(4);
  attend->set_profile(v1::PROFILE_ABSORBED);
  attend->set_has_kv(true);
  attend->set_o_dtype(v1::DTYPE_F32);
  request.set_payload(std::string(256 * 40 * 2 * 5, '\0'));
  std::thread flood([&] {
    // Every repeat gets a reply of 128 KiB that the client never reads.
    while (stream->Write(request)) {
    }
  });
  EXPECT_TRUE(Eventually([&] {
    const auto stats = client->GetStats();
    return stats.ok() && stats->steps_aborted() == 1;
  }));
  context.TryCancel();
  flood.join();
  EXPECT_THAT(HttpGet(server.server().ops_port(), "/metrics"),
              HasSubstr("mla_streams_disconnected_total{reason=\"slow_reader\"} 1"));
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(LifecycleTest, StreamsAreBounded) {
  const TestServer server([](server::Config& config) { config.wire.max_streams = 2; });
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kInline;
  const auto client = server.Connect(options);
  Worker worker(client.get(), {}, "m", 1);  // one stream
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  auto second = *client->OpenSession();
  ASSERT_TRUE(second->Begin("m", {{&track.sequence, 1}}).ok());
  auto third = *client->OpenSession();
  const auto refused = third->Begin("m", {{&track.sequence, 1}});
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
}

}  // namespace
}  // namespace mla::integration
