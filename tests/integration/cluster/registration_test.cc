// Repeated registrations with a cluster: who waits for them, and what they send again.
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "mla/v1/admin.pb.h"
#include "mla/v1/model.pb.h"
#include "mla/v1/sequence.pb.h"
#include "tests/integration/cluster/fleet_worker.h"
#include "tests/integration/hostile/hostile_server.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

using client::ClusterClient;

constexpr char kRegister[] = "/mla.v1.Models/Register";
constexpr char kOpen[] = "/mla.v1.Sequences/Open";
constexpr char kProbe[] = "/mla.v1.Sequences/Probe";
constexpr char kOther[] = "other";

absl::Status RegisterAt(const FleetWorker& worker, ClusterClient* client, const char* model) {
  return client->RegisterModel(SpecOf(worker.dims(), model)).status();
}

TEST(RegistrationTest, ARepeatUploadsWhereAnotherClientHasMadeTheModelAgain) {
  TestServer server;
  FleetWorker worker(server.tcp_target(), {}, {});
  int uploads = 0;
  const auto upload = [&uploads](client::Client*) {
    ++uploads;
    return absl::OkStatus();
  };
  ASSERT_EQ(worker.client().Upload(kModel, "weights", upload), absl::OkStatus());
  ASSERT_EQ(RegisterAt(worker, &worker.client(), kModel), absl::OkStatus());
  EXPECT_EQ(uploads, 1);
  const auto direct = server.Connect();
  ASSERT_EQ(direct->UnregisterModel(kModel), absl::OkStatus());
  ASSERT_TRUE(direct->RegisterModel(SpecOf(worker.dims(), kModel)).ok());
  ASSERT_EQ(RegisterAt(worker, &worker.client(), kModel), absl::OkStatus());
  EXPECT_EQ(uploads, 2);
  ASSERT_EQ(RegisterAt(worker, &worker.client(), kModel), absl::OkStatus());
  EXPECT_EQ(uploads, 2);
}

TEST(RegistrationTest, OtherModelsAreUsedWhileOneArrives) {
  TestServer server;
  FleetWorker worker(server.tcp_target(), {}, {});
  ClusterClient& client = worker.client();
  ASSERT_EQ(RegisterAt(worker, &client, kOther), absl::OkStatus());
  std::vector<absl::Status> opened;
  ASSERT_EQ(client.Upload(kModel, "weights",
                          [&](client::Client*) {
                            opened.push_back(client.OpenSequence(kOther).status());
                            return absl::OkStatus();
                          }),
            absl::OkStatus());
  ASSERT_EQ(server.Connect()->UnregisterModel(kModel), absl::OkStatus());
  ASSERT_EQ(RegisterAt(worker, &client, kModel), absl::OkStatus());
  EXPECT_EQ(opened, std::vector<absl::Status>(2));
}

template <typename Reply>
HostileAnswer AnswerOf(const Reply& reply) {
  HostileAnswer answer;
  answer.messages = {reply.SerializeAsString()};
  return answer;
}

v1::RegisterReply Registered(uint64_t boot_id, uint64_t instance) {
  v1::RegisterReply reply;
  reply.set_boot_id(boot_id);
  *reply.mutable_model() = SpecOf(Dims(), kModel);
  reply.set_page_group_bytes(1);
  reply.set_instance(instance);
  return reply;
}

v1::OpenReply Opened(uint64_t boot_id) {
  v1::OpenReply reply;
  reply.set_boot_id(boot_id);
  reply.mutable_sequence()->set_sequence_id(7);
  return reply;
}

// From now on the server answers as the process of this boot id does.
void Boot(HostileServer* server, uint64_t boot_id) {
  v1::GetServerInfoReply info;
  info.set_boot_id(boot_id);
  server->Answer("/mla.v1.Admin/GetServerInfo", AnswerOf(info));
  server->Answer(kRegister, AnswerOf(Registered(boot_id, 5)));
  server->Answer(kOpen, AnswerOf(Opened(boot_id)));
}

// A cluster of one server, whose answers are the test's.
class ScriptedServerTest : public ::testing::Test {
 protected:
  ScriptedServerTest() { Boot(server_.get(), 1); }

  void AnswerRegister(uint64_t instance) {
    server_->Answer(kRegister, AnswerOf(Registered(1, instance)));
  }
  // From now on registrations get no answer.
  void LeaveRegister() {
    HostileAnswer open;
    open.ends = false;
    server_->Answer(kRegister, open);
  }
  void Connect(int64_t call_timeout_ms) {
    client::ClientOptions options;
    options.call_timeout_ms = call_timeout_ms;
    options.renew_leases = false;
    auto client = ClusterClient::Connect(server_->target(), options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }
  absl::Status Register() { return client_->RegisterModel(SpecOf(Dims(), kModel)).status(); }
  void Upload() {
    ASSERT_EQ(client_->Upload(kModel, "weights",
                              [this](client::Client*) {
                                ++uploads_;
                                return uploaded_;
                              }),
              absl::OkStatus());
  }

  std::unique_ptr<HostileServer> server_ = std::make_unique<HostileServer>();
  std::unique_ptr<ClusterClient> client_;
  int uploads_ = 0;
  absl::Status uploaded_;  // result of the next uploads
};

TEST_F(ScriptedServerTest, NobodyWaitsForARepeat) {
  AnswerRegister(5);
  Connect(/*call_timeout_ms=*/600'000);
  ASSERT_EQ(Register(), absl::OkStatus());
  LeaveRegister();
  absl::Status repeated;
  std::thread repeat([&] { repeated = Register(); });
  EXPECT_TRUE(Eventually([&] { return server_->calls(kRegister) == 2; }));
  auto opened = client_->OpenSequence(kModel);  // the call above would last ten minutes
  EXPECT_TRUE(opened.ok()) << opened.status();
  if (opened.ok()) opened->Detach();
  server_.reset();
  repeat.join();
  EXPECT_EQ(repeated.code(), absl::StatusCode::kUnavailable);
}

// The server may have made the model again, without its weights.
TEST_F(ScriptedServerTest, ARepeatWithoutAnAnswerIsFollowedByUploads) {
  AnswerRegister(5);
  Connect(/*call_timeout_ms=*/60'000);
  ASSERT_EQ(Register(), absl::OkStatus());
  Upload();
  EXPECT_EQ(uploads_, 1);
  HostileAnswer broken;  // as gRPC says it where a connection breaks during a call
  broken.status = {grpc::StatusCode::UNAVAILABLE, "gone"};
  server_->Answer(kRegister, broken);
  EXPECT_EQ(Register().code(), absl::StatusCode::kUnavailable);
  AnswerRegister(6);
  auto opened = client_->OpenSequence(kModel);
  ASSERT_TRUE(opened.ok()) << opened.status();
  opened->Detach();
  EXPECT_EQ(uploads_, 2);
}

TEST_F(ScriptedServerTest, ASequenceOpenedDuringARepeatIsOfAModelWithItsUploads) {
  AnswerRegister(5);
  Connect(/*call_timeout_ms=*/60'000);
  ASSERT_EQ(Register(), absl::OkStatus());
  Upload();
  std::promise<std::function<void()>> held;
  HostileAnswer answer = AnswerOf(Opened(1));
  answer.hold = [&held](std::function<void()> send) { held.set_value(std::move(send)); };
  server_->Answer(kOpen, answer);
  absl::Status opened;
  std::thread open([&] {
    auto sequence = client_->OpenSequence(kModel);
    opened = sequence.status();
    if (sequence.ok()) sequence->Detach();
  });
  const std::function<void()> send = held.get_future().get();
  // The server has made the model again, and the uploads of the repeat fail.
  AnswerRegister(6);
  uploaded_ = absl::ResourceExhaustedError("no memory for now");
  EXPECT_EQ(Register(), uploaded_);
  EXPECT_EQ(uploads_, 2);
  uploaded_ = absl::OkStatus();
  send();
  open.join();
  EXPECT_EQ(opened, absl::OkStatus());
  EXPECT_EQ(uploads_, 3);
}

TEST_F(ScriptedServerTest, AnOlderReleaseIsAskedWhetherItHasTheModel) {
  AnswerRegister(0);
  Connect(/*call_timeout_ms=*/60'000);
  ASSERT_EQ(Register(), absl::OkStatus());
  Upload();
  v1::ProbeReply here;
  here.set_boot_id(1);
  server_->Answer(kProbe, AnswerOf(here));
  ASSERT_EQ(Register(), absl::OkStatus());
  EXPECT_EQ(uploads_, 1);
  HostileAnswer lost;
  lost.status = {grpc::StatusCode::NOT_FOUND, "no model"};
  v1::ErrorDetail detail;
  detail.set_reason("model_not_found");
  lost.trailers = {{"mla-error-detail-bin", detail.SerializeAsString()}};
  server_->Answer(kProbe, lost);
  ASSERT_EQ(Register(), absl::OkStatus());
  EXPECT_EQ(uploads_, 2);
  EXPECT_EQ(server_->calls(kProbe), 2);
}

TEST(RestartTest, AHomeThatHasRestartedIsUsedWithoutAPause) {
  HostileServer servers[2];
  for (HostileServer& server : servers) Boot(&server, 1);
  client::ClientOptions options;
  options.renew_leases = false;
  client::ClusterOptions cluster;
  cluster.home = servers[0].target();
  const auto connected = ClusterClient::Connect(
      absl::StrCat(servers[0].target(), ",", servers[1].target()), options, cluster);
  ASSERT_TRUE(connected.ok()) << connected.status();
  ClusterClient& client = **connected;
  const v1::ModelSpec spec = SpecOf(Dims(), kModel);
  ASSERT_EQ(client.RegisterModel(spec).status(), absl::OkStatus());
  const auto open = [&client] {
    auto sequence = client.OpenSequence(kModel);
    if (sequence.ok()) sequence->Detach();
    return sequence.status();
  };
  for (uint64_t boot_id = 2; boot_id < 6; ++boot_id) {
    Boot(&servers[0], boot_id);
    // One call or the other is the first that the new process gets.
    if (boot_id % 2 == 0) {
      EXPECT_EQ(client.RegisterModel(spec).status(), absl::OkStatus());
    }
    EXPECT_EQ(open(), absl::OkStatus());
    EXPECT_EQ(open(), absl::OkStatus());
  }
  EXPECT_EQ(servers[1].calls(kRegister), 0);
  EXPECT_EQ(servers[1].calls(kOpen), 0);
}

TEST(LeasesTest, AServerThatFailsKeepsNoOtherFromRenewal) {
  constexpr char kRenew[] = "/mla.v1.Sequences/RenewLease";
  v1::GetServerInfoReply info;
  info.set_boot_id(1);
  HostileAnswer answer;
  answer.messages = {info.SerializeAsString()};
  HostileServer servers[2];  // RenewLease is UNIMPLEMENTED
  for (HostileServer& server : servers) server.Answer("/mla.v1.Admin/GetServerInfo", answer);
  client::ClientOptions options;
  options.renew_leases = false;
  const auto client =
      ClusterClient::Connect(absl::StrCat(servers[0].target(), ",", servers[1].target()), options);
  ASSERT_TRUE(client.ok()) << client.status();
  for (const HostileServer& server : servers) {
    const auto there = (*client)->ServerAt(server.target());
    ASSERT_TRUE(there.ok()) << there.status();
  }
  EXPECT_EQ((*client)->RenewLeases().status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(servers[0].calls(kRenew), 1);
  EXPECT_EQ(servers[1].calls(kRenew), 1);
}

}  // namespace
}  // namespace mla::integration
