#include "server/hand_over/peer_server.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"

namespace mla::server {
namespace {

constexpr uint64_t kOwnBootId = 7;

// The server at the other end, as it answers on all streams.
struct Said {
  v1::GetServerInfoReply info;
  absl::Status answers, accepts;
  uint64_t free_bytes = 100;
  int told_to_forget = 0;
  bool reached = true;

  Said() {
    info.set_boot_id(9);
    info.add_capabilities("hand_over");
  }
};

class FakePeer final : public HandOverPeer {
 public:
  explicit FakePeer(Said* said) : said_(*said) {}
  absl::Status GetInfo(v1::GetServerInfoReply* info) override {
    *info = said_.info;
    return said_.answers;
  }
  absl::StatusOr<uint64_t> FreeBytes() override {
    if (!said_.accepts.ok()) return said_.accepts;
    return said_.free_bytes;
  }
  PeerImport Import(const v1::ImportTarget&, const SendParts&) override { return {}; }
  PeerWeights UploadWeights(const SendMessages&) override { return {}; }
  absl::StatusOr<uint32_t> Recall(const v1::EvictSequencesRequest&) override {
    if (!said_.reached) return absl::UnavailableError("cut");
    ++said_.told_to_forget;
    return 1;
  }
  void Cancel() override {}

 private:
  Said& said_;
};

class PeerServerTest : public ::testing::Test {
 protected:
  std::unique_ptr<PeerServer> Make(int streams = 2, const std::string& field = "also_to[3]") {
    std::vector<std::unique_ptr<HandOverPeer>> all;
    for (int i = 0; i < streams; ++i) all.push_back(std::make_unique<FakePeer>(&said_));
    return std::make_unique<PeerServer>("b:1", field, std::move(all));
  }
  scheduler::HeldWeights ModelOf(const std::string& tenant) {
    auto spec = std::make_shared<scheduler::ModelSpec>();
    spec->id = "m";
    scheduler::HeldWeights model;
    model.tenant = tenant;
    model.spec = spec;
    return model;
  }

  Said said_;
  HandOverCounters counters_;
};

TEST_F(PeerServerTest, WhyItCannotTakeSequencesNamesTheFieldAndTheServer) {
  const auto refused = [&] { return Make()->Check(kOwnBootId); };
  EXPECT_EQ(refused(), absl::OkStatus());
  said_.info.set_boot_id(kOwnBootId);
  EXPECT_EQ(refused().code(), absl::StatusCode::kInvalidArgument);
  said_.info.set_boot_id(0);
  EXPECT_EQ(DetailOf(refused()).reason, "peer_failed");
  said_.info.set_boot_id(9);
  said_.info.clear_capabilities();
  EXPECT_EQ(DetailOf(refused()).reason, "peer_too_old");
  said_.info.add_capabilities("hand_over");
  said_.accepts = absl::PermissionDeniedError("no operator");
  const absl::Status stranger = refused();
  EXPECT_EQ(stranger.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(DetailOf(stranger).reason, "peer_refuses");
  EXPECT_EQ(DetailOf(stranger).field, "also_to[3]");
  EXPECT_EQ(DetailOf(stranger).got, "b:1");
  EXPECT_EQ(stranger.message(), "also_to[3]: b:1: no operator");
  said_.answers = absl::UnavailableError("no connection");
  EXPECT_EQ(DetailOf(refused()).reason, "peer_unreachable");
}

TEST_F(PeerServerTest, AnotherServerAtItsAddressIsNotTakenForIt) {
  const auto peer = Make();
  ASSERT_EQ(peer->Check(kOwnBootId), absl::OkStatus());
  PeerServer::Use stream(peer.get());
  EXPECT_EQ(peer->Ask(*stream.get()), absl::OkStatus());
  said_.info.set_boot_id(10);
  EXPECT_EQ(DetailOf(peer->Ask(*stream.get())).reason, "peer_changed");
}

TEST_F(PeerServerTest, RoomIsWhatItSaidLessWhatWasPromised) {
  const auto peer = Make();
  ASSERT_EQ(peer->Check(kOwnBootId), absl::OkStatus());
  EXPECT_EQ(peer->free_bytes(), 100);
  peer->Promise(70);
  peer->Promise(-20);
  EXPECT_EQ(peer->free_bytes(), 50);
  peer->SetFull();
  EXPECT_EQ(peer->free_bytes(), 0);
  peer->Promise(70);
  peer->SetFull();
  EXPECT_EQ(peer->free_bytes(), -70);  // it goes on to be asked after those that have less to bear
  said_.free_bytes = UINT64_MAX;
  const auto liar = Make();
  ASSERT_EQ(liar->Check(kOwnBootId), absl::OkStatus());
  EXPECT_EQ(liar->free_bytes(), INT64_MAX);
}

TEST_F(PeerServerTest, AStreamIsUsedByOneAndTheLastOneDoesNotEnd) {
  const auto peer = Make(2);
  {
    PeerServer::Use first(peer.get());
    PeerServer::Use second(peer.get());
    ASSERT_NE(first.get(), nullptr);
    ASSERT_NE(second.get(), nullptr);
    EXPECT_NE(first.get(), second.get());
    EXPECT_TRUE(first.End());
    EXPECT_FALSE(second.End());
  }
  // One is left. A second user gets it when the first one has returned it.
  std::atomic<bool> got{false};
  std::thread waits;
  {
    PeerServer::Use only(peer.get());
    ASSERT_NE(only.get(), nullptr);
    waits = std::thread([&] {
      const PeerServer::Use after(peer.get());
      got = after.get() != nullptr;
    });
  }
  waits.join();
  EXPECT_TRUE(got);
}

TEST_F(PeerServerTest, TheEndOfADrainWakesThoseThatWaitForAStream) {
  const auto peer = Make(1);
  const PeerServer::Use only(peer.get());
  std::thread waits([&] { EXPECT_EQ(PeerServer::Use(peer.get()).get(), nullptr); });
  peer->Cancel();
  waits.join();
}

TEST_F(PeerServerTest, WeightsAreSentOnceAndOthersWaitForThem) {
  const auto peer = Make();
  EXPECT_TRUE(peer->BeginWeights(ModelOf("red")));
  EXPECT_TRUE(peer->BeginWeights(ModelOf("blue")));
  std::atomic<bool> sent{false};
  std::thread waits([&] {
    EXPECT_FALSE(peer->BeginWeights(ModelOf("red")));
    EXPECT_TRUE(sent);
  });
  sent = true;
  peer->EndWeights(ModelOf("red"));
  waits.join();
  EXPECT_FALSE(peer->BeginWeights(ModelOf("red")));
  // Blue's weights are under way when the drain ends.
  peer->Cancel();
  EXPECT_FALSE(peer->BeginWeights(ModelOf("blue")));
}

TEST_F(PeerServerTest, WhatWasGivenUpIsToldUntilItIsHeard) {
  const auto peer = Make();
  v1::EvictSequencesRequest request;
  request.add_sequence_ids(1);
  peer->GiveUp(request);
  peer->GiveUp(request);
  const PeerServer::Use stream(peer.get());
  said_.reached = false;
  EXPECT_FALSE(peer->Recall(*stream.get(), &counters_));
  said_.reached = true;
  EXPECT_TRUE(peer->Recall(*stream.get(), &counters_));
  EXPECT_EQ(said_.told_to_forget, 2);
  EXPECT_EQ(counters_.taken_back, 2u);
  EXPECT_TRUE(peer->Recall(*stream.get(), &counters_));
}

}  // namespace
}  // namespace mla::server
