// A server whose device hangs or is lost: which calls still get replies, and which ones.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "mla/v1/attention.grpc.pb.h"
#include "scheduler/testing/faulty_backend.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using namespace std::chrono_literals;
using scheduler::testing::FaultyBackend;
using ::testing::HasSubstr;
using ::testing::StartsWith;

bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

class FailingDeviceTest : public testing::Test {
 protected:
  void Start(const std::function<void(server::Config&)>& change) {
    server::ServerOptions options;
    options.config = SmallConfig();
    options.config.listen.unix_path = folder_.File("mla.sock");
    change(options.config);
    auto backend = std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
    device_ = backend.get();
    options.backend = std::move(backend);
    auto started = server::Server::Start(std::move(options));
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }
  ~FailingDeviceTest() override {
    if (device_ != nullptr) device_->ReleaseLaunches();
  }
  std::string target() const { return "unix:" + folder_.File("mla.sock"); }
  std::unique_ptr<client::Client> Connect() const {
    client::ClientOptions options;
    options.transport = client::ClientOptions::Transport::kInline;
    auto client = client::Client::Connect(target(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  TempFolder folder_;
  FaultyBackend* device_ = nullptr;
  std::unique_ptr<server::Server> server_;
};

// Returns OK if a stream is served, or the code with which it is refused because there are too
// many.
absl::StatusCode TryStream(const std::string& target) {
  const auto channel = grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
  const auto stub = v1::Attention::NewStub(channel);
  grpc::ClientContext context;
  const auto stream = stub->Attend(&context);
  v1::AttendStreamRequest request;
  request.mutable_end_step()->set_step_id(7);  // names no open step, which the stream survives
  stream->Write(request);
  v1::AttendStreamReply reply;
  if (stream->Read(&reply)) {
    std::this_thread::sleep_for(500ms);
    stream->WritesDone();
  }
  return static_cast<absl::StatusCode>(stream->Finish().error_code());
}

// The thread that polls runs the launch, and other threads open and close streams. Neither may keep
// health, administration and operations from getting replies.
TEST_F(FailingDeviceTest, WhileALaunchHangsTheRestAnswers) {
  ASSERT_NO_FATAL_FAILURE(Start([](server::Config& config) {
    config.unhealthy_after_ms = 500;
    config.restart_after_ms = 5000;
    config.wire.poll_threads = 2;
  }));
  const auto client = Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const uint64_t launches = client->GetStats()->launches();
  const int port = server_->ops_port();

  device_->HoldLaunches();
  absl::Status answer;
  std::thread waiting([&] { answer = worker.Step({&track}, {1}, v1::PROFILE_ABSORBED); });
  EXPECT_TRUE(Eventually([&] { return device_->holds_launch(); }));
  std::vector<std::thread> opening;
  for (int i = 0; i < 8; ++i) {
    opening.emplace_back([&] { EXPECT_EQ(TryStream(target()), absl::StatusCode::kOk); });
  }
  std::this_thread::sleep_for(200ms);
  const auto other = Connect();  // reads the server's limits
  EXPECT_TRUE(Eventually([&] { return !other->IsServing().value_or(true); }));
  EXPECT_EQ(other->GetStats()->launches(), launches);
  EXPECT_THAT(HttpGet(port, "/metrics"), HasSubstr("\nmla_serving 0\n"));
  EXPECT_THAT(HttpGet(port, "/statusz"), HasSubstr("no heartbeat"));
  EXPECT_THAT(HttpGet(port, "/readyz"), StartsWith("503 "));
  EXPECT_THAT(HttpGet(port, "/livez"), StartsWith("200 "));  // the device may recover
  EXPECT_TRUE(Eventually(
      [&] { return HttpGet(port, "/livez").find("503 restart this server: no heartbeat") == 0; }));

  device_->ReleaseLaunches();
  waiting.join();
  for (std::thread& thread : opening) thread.join();
  EXPECT_EQ(answer, absl::OkStatus());
  EXPECT_TRUE(Eventually([&] { return other->IsServing().value_or(false); }));
  EXPECT_THAT(HttpGet(port, "/livez"), StartsWith("200 "));
  EXPECT_GT(other->GetStats()->launches(), launches);
}

// Streams that wait to be opened count, too.
TEST_F(FailingDeviceTest, StreamsAreBoundedAlsoWhileTheyWait) {
  ASSERT_NO_FATAL_FAILURE(Start([](server::Config& config) { config.wire.max_streams = 3; }));
  const auto client = Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  device_->HoldLaunches();
  std::thread waiting([&] { worker.Step({&track}, {1}, v1::PROFILE_ABSORBED).IgnoreError(); });
  EXPECT_TRUE(Eventually([&] { return device_->holds_launch(); }));
  std::atomic<int> served{0}, refused{0};
  std::vector<std::thread> opening;
  for (int i = 0; i < 8; ++i) {
    opening.emplace_back([&] {
      const absl::StatusCode code = TryStream(target());
      served += code == absl::StatusCode::kOk;
      refused += code == absl::StatusCode::kResourceExhausted;
    });
  }
  EXPECT_TRUE(Eventually([&] { return refused == 6; }));
  device_->ReleaseLaunches();
  waiting.join();
  for (std::thread& thread : opening) thread.join();
  EXPECT_EQ(served, 2);
  EXPECT_EQ(refused, 6);
}

TEST_F(FailingDeviceTest, ALostDeviceWantsARestart) {
  ASSERT_NO_FATAL_FAILURE(Start([](server::Config&) {}));
  const auto client = Connect();
  const int port = server_->ops_port();
  EXPECT_THAT(HttpGet(port, "/livez"), StartsWith("200 alive"));
  device_->SetUnhealthy();
  EXPECT_TRUE(Eventually([&] { return !client->IsServing().value_or(true); }));
  EXPECT_THAT(HttpGet(port, "/readyz?verbose"), HasSubstr("the device is lost"));
  EXPECT_THAT(HttpGet(port, "/livez"), StartsWith("503 restart this server: the device is lost"));
  EXPECT_THAT(HttpGet(port, "/metrics"), HasSubstr("\nmla_serving 0\n"));
  ASSERT_TRUE(client->Drain(100, false).ok());
  EXPECT_THAT(HttpGet(port, "/readyz?verbose"), HasSubstr("no step was open\nthe device is lost"));
  EXPECT_THAT(HttpGet(port, "/livez"), StartsWith("503 restart this server: the device is lost"));
}

}  // namespace
}  // namespace mla::integration
