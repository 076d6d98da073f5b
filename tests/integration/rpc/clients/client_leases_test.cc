// The C++ client keeps its leases even if a renewal is lost.
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "client/cpp/client.h"
#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/sequence.grpc.pb.h"

namespace mla::integration {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kLeaseMs = 3000;

class Operation final : public v1::Admin::Service {
 public:
  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoReply* reply) override {
    reply->set_boot_id(1);
    reply->mutable_limits()->set_sequence_lease_ms(kLeaseMs);
    return grpc::Status::OK;
  }
};

// Never answers the first renewal.
class LosingRenewals final : public v1::Sequences::Service {
 public:
  grpc::Status RenewLease(grpc::ServerContext* context, const v1::RenewLeaseRequest*,
                          v1::RenewLeaseReply* reply) override {
    std::unique_lock lock(mutex_);
    ++renewals_;
    changed_.notify_all();
    while (renewals_ == 1 && !context->IsCancelled()) changed_.wait_for(lock, milliseconds(10));
    reply->set_boot_id(1);
    return grpc::Status::OK;
  }
  bool WaitFor(int renewals, milliseconds most) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, most, [&] { return renewals_ >= renewals; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int renewals_ = 0;
};

// The client's own deadline for a call is ten seconds, several times the lease.
TEST(ClientLeasesTest, ARenewalThatIsLostIsRepeatedWithinTheLease) {
  Operation admin;
  LosingRenewals sequences;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&admin);
  builder.RegisterService(&sequences);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  auto client = client::Client::Connect("127.0.0.1:" + std::to_string(port), {});
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE(sequences.WaitFor(1, milliseconds(10 * kLeaseMs)));
  EXPECT_TRUE(sequences.WaitFor(2, milliseconds(kLeaseMs)));
  client->reset();
  server->Shutdown();
}

// The wire carries 32 bits: 2^32 + 2000 would be a lease of 2 s that is renewed after 16 days.
TEST(ClientLeasesTest, ALeaseOutOfRangeIsRefused) {
  for (const int64_t lease_ms : {(int64_t{1} << 32) + 2000, int64_t{-1}}) {
    client::ClientOptions options;
    options.sequence_lease_ms = lease_ms;
    const auto client = client::Client::Connect("127.0.0.1:1", options);
    EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(client.status().message(),
              "sequence_lease_ms: got " + std::to_string(lease_ms) + ", limit 0..4294967295");
  }
}

}  // namespace
}  // namespace mla::integration
