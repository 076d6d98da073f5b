// Calls on sequences that drains have moved: each goes to where the sequence is now.
#include <gtest/gtest.h>

#include "absl/strings/str_join.h"
#include "tests/integration/cluster/fleet_worker.h"
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

class MovedTest : public ::testing::Test {
 protected:
  MovedTest() {
    for (int i = 0; i < 3; ++i) {
      servers_.push_back(std::make_unique<TestServer>([this](server::Config& config) {
        config.tls.cert = authority_.File("server.pem");
        config.tls.key = authority_.File("server.key");
        config.tls.client_ca = authority_.File("ca.pem");
        config.listen.operators = "blue,localhost";
        config.listen.unix_path = "";
      }));
      addresses_.push_back(absl::StrCat("localhost:", servers_.back()->server().tcp_port()));
    }
    client::ClusterOptions options;
    options.home = addresses_[0];
    worker_ = std::make_unique<FleetWorker>(absl::StrJoin(addresses_, ","), authority_.As("red"),
                                            options);
  }
  void Drain(size_t from, size_t to) {
    const auto drainer = client::Client::Connect(addresses_[from], authority_.As("blue"));
    ASSERT_TRUE(drainer.ok()) << drainer.status();
    const auto drained = (*drainer)->Drain(20000, false, {addresses_[to]});
    ASSERT_TRUE(drained.ok()) << drained.status();
  }
  // Open sequences of the worker's tenant on a server.
  int OpenAt(size_t server) {
    const auto client = client::Client::Connect(addresses_[server], authority_.As("red"));
    const auto reply = (*client)->GetSequences({}, false);
    return reply.ok() ? reply->sequences_size() : -1;
  }

  Authority authority_;
  std::vector<std::unique_ptr<TestServer>> servers_;
  std::vector<std::string> addresses_;
  std::unique_ptr<FleetWorker> worker_;
};

TEST_F(MovedTest, EveryCallFollowsOverTwoMoves) {
  std::vector<FleetTrack> tracks;
  for (int i = 0; i < 5; ++i) tracks.push_back(worker_->Open());
  std::vector<FleetTrack*> all;
  for (FleetTrack& track : tracks) all.push_back(&track);
  ASSERT_EQ(worker_->Step(all, {8, 8, 8, 8, 8}), absl::OkStatus());
  for (const FleetTrack& track : tracks) ASSERT_EQ(track.sequence.address(), addresses_[0]);
  Drain(0, 1);
  Drain(1, 2);

  auto child = tracks[0].sequence.Fork(5);
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ(child->address(), addresses_[2]);
  EXPECT_EQ(child->length(), 5u);
  EXPECT_EQ(tracks[0].sequence.address(), addresses_[2]);
  EXPECT_EQ(tracks[0].sequence.length(), 8u);

  ASSERT_EQ(tracks[1].sequence.Truncate(6), absl::OkStatus());
  EXPECT_EQ(tracks[1].sequence.address(), addresses_[2]);
  EXPECT_EQ(tracks[1].sequence.length(), 6u);

  const auto match = tracks[2].sequence.Match(PrefixOf(1, 8));
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_EQ(tracks[2].sequence.address(), addresses_[2]);

  ASSERT_EQ(tracks[3].sequence.Refresh(), absl::OkStatus());
  EXPECT_EQ(tracks[3].sequence.address(), addresses_[2]);

  EXPECT_EQ(OpenAt(2), 6);
  ASSERT_EQ(tracks[4].sequence.Release(), absl::OkStatus());
  EXPECT_EQ(OpenAt(2), 5);
  ASSERT_EQ(tracks[4].sequence.Release(), absl::OkStatus()) << "a second time does nothing";

  // The rows have not changed.
  worker_->Settle({all[0], all[1], all[2], all[3]});
  EXPECT_EQ(worker_->Step({all[0], all[1], all[2], all[3]}, {1, 2, 3, 4}), absl::OkStatus());
  FleetTrack forked{*std::move(child), tracks[0].cache};
  worker_->Settle({&forked});
  EXPECT_EQ(worker_->Step({&forked}, {2}), absl::OkStatus());
}

TEST_F(MovedTest, ACallSaysWhereItWouldHaveGoneIfThatServerIsAway) {
  FleetTrack track = worker_->Open();
  ASSERT_EQ(worker_->Step({&track}, {4}), absl::OkStatus());
  Drain(0, 1);
  servers_[1].reset();
  const absl::Status status = track.sequence.Truncate(1);
  EXPECT_EQ(ReasonIn(status), "moved") << status;
  EXPECT_EQ(client::DetailOf(status)->peer(), addresses_[1]);
  EXPECT_EQ(track.sequence.address(), addresses_[0]);
}

}  // namespace
}  // namespace mla::integration
