// Reflection and channelz, on and off; calls of unknown methods; two servers in one process.
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

struct Answer {
  grpc::Status status;
  std::string bytes;
};

// One message each way, as raw bytes; also for a bidirectional method with one reply a request.
Answer CallRaw(const std::string& target, const std::string& method, const std::string& message) {
  const auto channel = grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  const grpc::Slice slice(message);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer reply;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, method, {}, &request, &reply,
                 [&done](grpc::Status status) { done.set_value(std::move(status)); });
  Answer answer;
  answer.status = done.get_future().get();
  std::vector<grpc::Slice> slices;
  if (reply.Valid() && reply.Dump(&slices).ok()) {
    for (const grpc::Slice& part : slices) {
      answer.bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
    }
  }
  return answer;
}

constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
constexpr char kChannelz[] = "/grpc.channelz.v1.Channelz/GetServers";
const std::string kListServices("\x3a\x00", 2);  // ServerReflectionRequest{list_services: ""}

TEST(IntrospectionTest, OnWhereEveryListenerIsLocal) {
  const TestServer server;
  const Answer services = CallRaw(server.unix_target(), kReflection, kListServices);
  ASSERT_TRUE(services.status.ok()) << services.status.error_message();
  for (const char* name : {"mla.v1.Attention", "mla.v1.Sequences", "mla.v1.Models", "mla.v1.Admin",
                           "grpc.health.v1.Health"}) {
    EXPECT_NE(services.bytes.find(name), std::string::npos) << name;
  }
  const Answer servers = CallRaw(server.unix_target(), kChannelz, "");
  EXPECT_TRUE(servers.status.ok()) << servers.status.error_message();
  EXPECT_FALSE(servers.bytes.empty());
}

TEST(IntrospectionTest, OffWhenAskedOrBeyondLoopback) {
  const TestServer off([](server::Config& config) { config.listen.reflection = "off"; });
  const TestServer exposed([](server::Config& config) {
    config.listen.address = "0.0.0.0:0";
    config.listen.insecure = true;
  });
  for (const TestServer* server : {&off, &exposed}) {
    for (const char* method : {kReflection, kChannelz}) {
      EXPECT_EQ(CallRaw(server->unix_target(), method, kListServices).status.error_code(),
                grpc::StatusCode::UNIMPLEMENTED)
          << method;
    }
    EXPECT_TRUE(*server->Connect()->IsServing());
  }
}

TEST(IntrospectionTest, UnknownCallsAreUnimplemented) {
  const TestServer server;
  for (const char* method : {"/mla.v1.Attention/Nothing", "/mla.v2.Attention/Attend", "/x/y"}) {
    EXPECT_EQ(CallRaw(server.unix_target(), method, "").status.error_code(),
              grpc::StatusCode::UNIMPLEMENTED)
        << method;
  }
}

TEST(IntrospectionTest, BothListenersServe) {
  const TestServer server;
  const auto over_tcp = client::Client::Connect(server.tcp_target(), {});
  ASSERT_TRUE(over_tcp.ok()) << over_tcp.status();
  EXPECT_EQ((*over_tcp)->info().boot_id(), server.Connect()->info().boot_id());
}

TEST(IntrospectionTest, ALivingServersAddressesAreNotTaken) {
  TestServer server;
  server::Config config = SmallConfig();
  config.listen.address = server.tcp_target();
  EXPECT_TRUE(absl::IsUnavailable(server::Server::Start({config, {}}).status()));
  config = SmallConfig();
  config.listen.address = "";
  config.listen.unix_path = server.folder().File("mla.sock");
  EXPECT_TRUE(absl::IsUnavailable(server::Server::Start({config, {}}).status()));
  config.listen.unix_path = "";
  config.listen.address = "127.0.0.1:0";
  config.ops.address = "127.0.0.1:" + std::to_string(server.server().ops_port());
  EXPECT_TRUE(absl::IsUnavailable(server::Server::Start({config, {}}).status()));
  EXPECT_TRUE(*server.Connect()->IsServing());
}

}  // namespace
}  // namespace mla::integration
