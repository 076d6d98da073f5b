// A drain to several servers, all with mutual TLS: each sequence goes to the one with the most free
// bytes that takes it, and servers that cannot take any are passed over.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"
#include "scheduler/testing/faulty_backend.h"
#include "server/hand_over/hand_over.h"
#include "tests/integration/hand_over/cutting_proxy.h"
#include "tests/integration/hand_over/hand_over_fixture.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

static_assert(client::kMostDrainPeers == server::kMostDrainPeers);

class SeveralPeersTest : public HandOverTest {
 protected:
  absl::StatusOr<v1::DrainReply> DrainTo(const std::vector<std::string>& peers) {
    return blue_->Drain(kDrainMs, false, peers);
  }
  // A server with another size of KV cache than the others.
  std::unique_ptr<TestServer> ServeWith(int64_t kv_cache_bytes) {
    return Serve([&](server::Config& config) { config.limits.kv_cache_bytes = kv_cache_bytes; });
  }
  // How many sequences the answer says went to each address. Expects each of them there, whole.
  std::map<std::string, int> WhereTheyWent(
      const v1::DrainReply& reply, const std::map<std::string, const TestServer*>& servers) {
    std::map<std::string, int> went;
    for (Track& track : tracks_) {
      const v1::HandedOver& outcome = OutcomeOf(reply, track);
      EXPECT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_MOVED) << outcome.message();
      const auto server = servers.find(outcome.peer());
      if (server == servers.end()) {
        ADD_FAILURE() << "a sequence is at " << outcome.peer();
        continue;
      }
      ExpectMoved(&track, *server->second, outcome.peer());
      ++went[outcome.peer()];
    }
    return went;
  }
};

constexpr int64_t kMiB = int64_t{1} << 20;

TEST_F(SeveralPeersTest, SequencesGoToTheOneWithTheMostFreeBytes) {
  Fill(3);
  const auto b = Serve(), c = ServeWith(32 * kMiB);
  const auto drained = DrainTo({Address(*b), Address(*c)});
  ASSERT_TRUE(drained.ok()) << drained.status();
  const auto went = WhereTheyWent(*drained, {{Address(*b), b.get()}, {Address(*c), c.get()}});
  EXPECT_EQ(went, (std::map<std::string, int>{{Address(*c), 3}}));
  ASSERT_EQ(drained->peers_size(), 2);
  EXPECT_EQ(drained->peers(0).address(), Address(*b));
  EXPECT_EQ(drained->peers(0).free_bytes(), static_cast<uint64_t>(8 * kMiB));
  EXPECT_EQ(drained->peers(1).free_bytes(), static_cast<uint64_t>(32 * kMiB));
  EXPECT_EQ(drained->peers(0).reason(), "");
  // New sequences are told to go where there is room.
  const auto opened = red_->OpenSequence("m");
  EXPECT_EQ(client::DetailOf(opened.status())->peer(), Address(*c));
}

TEST_F(SeveralPeersTest, PeersWithAsMuchRoomGetEquallyMany) {
  Fill(6);
  const auto b = Serve(), c = Serve(), d = Serve();
  const auto drained = DrainTo({Address(*b), Address(*c), Address(*d)});
  ASSERT_TRUE(drained.ok()) << drained.status();
  const auto went = WhereTheyWent(
      *drained, {{Address(*b), b.get()}, {Address(*c), c.get()}, {Address(*d), d.get()}});
  ASSERT_EQ(went.size(), 3u);
  // Threads may choose at the same time.
  for (const auto& [address, count] : went) EXPECT_LE(count, 4) << address;
}

// No peer has room for all.
TEST_F(SeveralPeersTest, WhatOneHasNoRoomForGoesToTheNext) {
  Fill(5);
  const auto b = ServeWith(32 * kMiB), c = ServeWith(16 * kMiB), d = Serve();
  SetSequences(*b, 2);
  SetSequences(*c, 2);
  const auto drained = DrainTo({Address(*d), Address(*c), Address(*b)});
  ASSERT_TRUE(drained.ok()) << drained.status();
  const auto went = WhereTheyWent(
      *drained, {{Address(*b), b.get()}, {Address(*c), c.get()}, {Address(*d), d.get()}});
  EXPECT_EQ(went.at(Address(*b)), 2);
  EXPECT_EQ(went.at(Address(*c)), 2);
  EXPECT_EQ(went.at(Address(*d)), 1);
}

TEST_F(SeveralPeersTest, WhatNobodyTakesStaysAndIsNamedOnce) {
  Fill(3);
  const auto b = Serve(), c = Serve();
  SetSequences(*b, 1);
  SetSequences(*c, 1);
  const auto drained = blue_->Drain(kDrainMs, /*exit=*/true, {Address(*b), Address(*c)});
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_FALSE(drained->exits());
  EXPECT_EQ(drained->handed_over_size(), 3);
  ASSERT_TRUE(blue_->CancelDrain().ok());
  int stayed = 0;
  for (Track& track : tracks_) {
    const v1::HandedOver& outcome = OutcomeOf(*drained, track);
    if (outcome.outcome() == v1::HAND_OVER_OUTCOME_MOVED) continue;
    ++stayed;
    EXPECT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_REFUSED);
    EXPECT_EQ(outcome.reason(), "sequences_exhausted");
    EXPECT_NE(outcome.message().find("; none of 2 servers has taken it"), std::string::npos)
        << outcome.message();
    EXPECT_EQ(outcome.peer(), "");
    ExpectHere(&track);
  }
  EXPECT_EQ(stayed, 1);
}

// The list of a set of servers has this one, too, and some that are away or strange.
TEST_F(SeveralPeersTest, ServersThatCannotTakeSequencesArePassedOver) {
  Fill(2);
  const auto b = Serve();
  const auto stranger = Serve([](server::Config& config) { config.listen.operators = "blue"; });
  CuttingProxy same(b->server().tcp_port(), kMiB, b->server().tcp_port());
  const auto drained =
      DrainTo({Address(*a_), "localhost:1", Address(*stranger), Address(*b), Address(same.port())});
  ASSERT_TRUE(drained.ok()) << drained.status();
  const auto went = WhereTheyWent(*drained, {{Address(*b), b.get()}});
  EXPECT_EQ(went.at(Address(*b)), 2);
  ASSERT_EQ(drained->peers_size(), 5);
  const char* const reasons[] = {"out_of_range", "peer_unreachable", "peer_refuses", "",
                                 "out_of_range"};
  for (int i = 0; i < 5; ++i) {
    const v1::DrainPeer& peer = drained->peers(i);
    EXPECT_EQ(peer.reason(), reasons[i]) << peer.message();
    const std::string field = i == 0 ? "to: " : absl::StrCat("also_to[", i - 1, "]: ");
    if (*reasons[i] != 0) {
      EXPECT_EQ(peer.message().substr(0, field.size()), field);
    }
  }
  EXPECT_NE(drained->peers(4).message().find("the same server as"), std::string::npos);
}

TEST_F(SeveralPeersTest, WithoutAnyThatFitsTheServerServesOn) {
  Fill(1);
  const auto refused = DrainTo({"localhost:1", Address(*a_)});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable) << refused.status();
  const auto detail = client::DetailOf(refused.status());
  ASSERT_TRUE(detail.has_value());
  EXPECT_EQ(detail->field(), "to");
  EXPECT_EQ(detail->reason(), "peer_unreachable");
  EXPECT_NE(refused.status().message().find("also_to[0]: "), std::string::npos);
  // Addresses are checked before any server is asked.
  const auto bad = DrainTo({"localhost:1", "localhost:2", "unix:/tmp/x"});
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client::DetailOf(bad.status())->field(), "also_to[1]");
  const auto many = DrainTo(std::vector<std::string>(server::kMostDrainPeers + 1, "localhost:1"));
  EXPECT_EQ(many.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client::DetailOf(many.status())->field(), "also_to");
  EXPECT_EQ(client::DetailOf(many.status())->limit(), "at most 15 entries");
  EXPECT_TRUE(*red_->IsServing());
  ExpectHere(&tracks_[0]);
}

// A peer is cut off in the middle: its sequences go to the other one.
TEST_F(SeveralPeersTest, APeerThatFailsOnTheWayIsReplacedByTheNext) {
  int passed_on = 0;
  for (const int64_t bytes : {9000, 18000, 30000, 60000}) {
    tracks_.clear();
    Fill(3);
    const auto b = ServeWith(32 * kMiB), c = Serve(), stranger = Serve();
    CuttingProxy proxy(b->server().tcp_port(), bytes, stranger->server().tcp_port());
    const std::string first = Address(proxy.port());
    const auto drained = DrainTo({first, Address(*c)});
    ASSERT_TRUE(drained.ok()) << drained.status();
    ASSERT_TRUE(blue_->CancelDrain().ok());
    uint64_t at_c = 0;
    for (Track& track : tracks_) {
      const v1::HandedOver& outcome = OutcomeOf(*drained, track);
      if (outcome.outcome() != v1::HAND_OVER_OUTCOME_MOVED) {
        ExpectHere(&track);  // the first peer may have it, and cannot be told
      } else if (outcome.peer() == first) {
        ExpectMoved(&track, *b, first);
      } else {
        ++at_c;
        ExpectMoved(&track, *c, Address(*c));
      }
    }
    passed_on += at_c > 0;
    EXPECT_EQ(SequencesOf(*c), at_c);
    EXPECT_EQ(SequencesOf(*stranger), 0u);
  }
  EXPECT_GE(passed_on, 3);
}

}  // namespace
}  // namespace mla::integration
