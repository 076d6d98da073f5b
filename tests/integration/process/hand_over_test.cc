// A drain to another server, both with mutual TLS: what moves, what stays, and that nothing is lost
// or in two places when the peer refuses, dies or the drain is cancelled.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/testing/faulty_backend.h"
#include "tests/integration/process/authority.h"
#include "tests/integration/process/cutting_proxy.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using scheduler::testing::FaultyBackend;
using std::chrono::milliseconds;

constexpr uint32_t kRows = 200;
constexpr uint32_t kDeadlineMs = 20000;

class HandOverTest : public ::testing::Test {
 protected:
  using Change = std::function<void(server::Config&)>;

  std::unique_ptr<TestServer> Serve(const Change& change = {}, FaultyBackend** faults = nullptr) {
    return std::make_unique<TestServer>(
        [&](server::Config& config) {
          config.tls.cert = authority_.File("server.pem");
          config.tls.key = authority_.File("server.key");
          config.tls.client_ca = authority_.File("ca.pem");
          config.listen.operators = "blue,localhost";
          config.listen.unix_path = "";
          if (change) change(config);
        },
        [faults] {
          auto backend =
              std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
          if (faults != nullptr) *faults = backend.get();
          return backend;
        });
  }
  std::unique_ptr<client::Client> Connect(const TestServer& server, const std::string& name) {
    client::ClientOptions options = authority_.As(name);
    options.client_id = "worker";
    options.sequence_lease_ms = 60000;
    auto client = client::Client::Connect(server.tcp_target(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  static std::string Address(int port) { return absl::StrCat("localhost:", port); }
  static std::string Address(const TestServer& server) {
    return Address(server.server().tcp_port());
  }

  // Red's worker on the server that drains, with sequences of some rows.
  void Fill(int sequences) {
    a_ = Serve();
    red_ = Connect(*a_, "red");
    blue_ = Connect(*a_, "blue");
    worker_ = std::make_unique<Worker>(red_.get(), Dims(), "m", 1);
    for (int i = 0; i < sequences; ++i) {
      tracks_.push_back(*worker_->Open());
      ASSERT_EQ(worker_->Step({&tracks_.back()}, {kRows}, v1::PROFILE_ABSORBED), absl::OkStatus());
    }
  }
  absl::StatusOr<v1::DrainReply> Drain(const std::string& to, uint32_t deadline_ms = kDeadlineMs) {
    return blue_->Drain(deadline_ms, false, to);
  }
  // Returns while launches of the peer are held and a sequence is on its way there.
  std::future<absl::StatusOr<v1::DrainReply>> DrainHeld(const TestServer& peer,
                                                        FaultyBackend* faults) {
    faults->HoldLaunches();
    auto drained = std::async(std::launch::async, [this, to = Address(peer)] { return Drain(to); });
    EXPECT_TRUE(Eventually([&] { return faults->holds_launch(); }));
    return drained;
  }
  const v1::HandedOver& OutcomeOf(const v1::DrainReply& reply, const Track& track) {
    for (const v1::HandedOver& one : reply.handed_over()) {
      if (one.sequence_id() == track.sequence.id()) return one;
    }
    ADD_FAILURE() << "no outcome of a sequence";
    return v1::HandedOver::default_instance();
  }
  // The sequence is here, and what it was.
  void ExpectHere(Track* track) {
    EXPECT_EQ(worker_->Step({track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  // The sequence is there, and what it was; here calls that name it are told where.
  void ExpectMoved(Track* track, const TestServer& there, const std::string& address) {
    const absl::Status here = worker_->Step({track}, {1}, v1::PROFILE_ABSORBED);
    EXPECT_EQ(here.code(), absl::StatusCode::kNotFound) << here;
    const auto detail = client::DetailOf(here);
    ASSERT_TRUE(detail.has_value());
    EXPECT_EQ(detail->reason(), "moved");
    EXPECT_EQ(detail->peer(), address);
    const auto attached = red_->Attach(track->sequence.id());
    EXPECT_EQ(client::DetailOf(attached.status())->peer(), address);
    const auto client = Connect(there, "red");
    Worker worker(client.get(), Dims(), "m", 2);
    auto sequence = client->Attach(track->sequence.id());
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    EXPECT_EQ(sequence->length(), track->sequence.length());
    EXPECT_EQ(client->GetSequences({}, /*own_only=*/true)->sequences(0).client_id(), "worker");
    Track copy{*std::move(sequence), track->cache};
    for (const uint32_t rows : {1, 3}) {
      EXPECT_EQ(worker.Step({&copy}, {rows}, v1::PROFILE_ABSORBED), absl::OkStatus());
    }
    copy.sequence.Detach();
  }
  static bool Eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 1000 && !condition(); ++i) std::this_thread::sleep_for(milliseconds(10));
    return condition();
  }
  uint64_t SequencesOf(const TestServer& server) {
    return Connect(server, "blue")->GetStats()->sequences();
  }

  Authority authority_;
  std::unique_ptr<TestServer> a_;
  std::unique_ptr<client::Client> red_, blue_;
  std::unique_ptr<Worker> worker_;
  std::vector<Track> tracks_;
};

TEST_F(HandOverTest, SequencesMoveAsTheirTenantsAndUnderTheirIds) {
  Fill(3);
  const auto b = Serve();
  const Track empty = *worker_->Open();
  const auto drained = Drain(Address(*b));
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_TRUE(drained->drained());
  EXPECT_EQ(drained->handed_over_size(), 4);
  EXPECT_EQ(OutcomeOf(*drained, empty).reason(), "nothing_to_save");
  for (Track& track : tracks_) {
    const v1::HandedOver& outcome = OutcomeOf(*drained, track);
    EXPECT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_MOVED) << outcome.message();
    EXPECT_EQ(outcome.tenant(), "red");
    EXPECT_EQ(outcome.rows(), kRows);
    ExpectMoved(&track, *b, Address(*b));
  }
  EXPECT_EQ(SequencesOf(*a_), 1u);
  EXPECT_EQ(SequencesOf(*b), 3u);
  size_t preempted = 0;
  ASSERT_TRUE(red_->WatchEvents(0,
                                [&](const v1::WatchEventsReply& events) {
                                  for (const v1::CacheEvent& event : events.events()) {
                                    preempted += event.kind() == v1::CACHE_EVENT_KIND_PREEMPTED;
                                  }
                                  return preempted < tracks_.size();
                                })
                  .ok());
  EXPECT_EQ(preempted, tracks_.size());
  const auto others = Connect(*b, "blue")->GetSequences({tracks_[0].sequence.id()}, false);
  EXPECT_EQ(others->not_found_size(), 1);
  // What is new is told where to go, too.
  const auto opened = red_->OpenSequence("m");
  EXPECT_EQ(client::DetailOf(opened.status())->reason(), "draining");
  EXPECT_EQ(client::DetailOf(opened.status())->peer(), Address(*b));
}

TEST_F(HandOverTest, WithoutTlsItIsRefused) {
  const TestServer plain;
  const auto client = plain.Connect();
  const auto refused = client->Drain(100, false, "localhost:1");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_EQ(client::DetailOf(refused.status())->reason(), "no_tls");
  EXPECT_TRUE(*client->IsServing());
  // Callers of the host are operators here, and still name no tenants.
  v1::ImportTarget target;
  target.set_model_id("m");
  target.set_tenant("red");
  for (const std::string& socket : {plain.unix_target(), plain.tcp_target()}) {
    const auto other = *client::Client::Connect(socket, {});
    const auto imported = other->ImportPages(
        target, []() -> absl::StatusOr<std::optional<v1::PagesPart>> { return std::nullopt; });
    EXPECT_EQ(imported.status().code(), absl::StatusCode::kPermissionDenied) << imported.status();
  }
}

TEST_F(HandOverTest, APeerThatDoesNotFitLeavesTheServerServing) {
  Fill(1);
  const auto stranger = Serve([](server::Config& config) { config.listen.operators = "blue"; });
  EXPECT_EQ(Drain(Address(*stranger)).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Drain(Address(*a_)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Drain("localhost:1").status().code(), absl::StatusCode::kUnavailable);
  // Not what the client library makes of them: other ports, sockets of this host, several servers.
  for (const char* const address :
       {"localhost", "localhost:", ":50551", "localhost:0", "localhost:65536", "localhost:1x",
        "unix:/tmp/x:1", "dns:localhost:1", "dns:///localhost:1", "ipv4:127.0.0.1:1,127.0.0.2:1",
        "::1:50551", "[::1:50551", "a b:1"}) {
    const auto refused = Drain(address);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << address;
  }
  // Its certificate must be of the name that was given.
  const std::string other = absl::StrCat("127.0.0.2:", stranger->server().tcp_port());
  EXPECT_EQ(Drain(other).status().code(), absl::StatusCode::kUnavailable);
  // ... and of the authority.
  authority_.Make("server", "other", "/CN=localhost", "DNS:localhost", 30);
  const TestServer foreign([this](server::Config& config) {
    config.tls.cert = authority_.File("server.pem");
    config.tls.key = authority_.File("server.key");
    config.tls.client_ca = authority_.File("ca.pem");
    config.listen.unix_path = "";
  });
  EXPECT_EQ(Drain(Address(foreign)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(*red_->IsServing());
  ExpectHere(&tracks_[0]);
  // Tenants do not drain, and do not import for others.
  EXPECT_EQ(red_->Drain(100, false, Address(*stranger)).status().code(),
            absl::StatusCode::kPermissionDenied);
  v1::ImportTarget target;
  target.set_model_id("m");
  target.set_tenant("blue");
  const auto imported = red_->ImportPages(
      target, []() -> absl::StatusOr<std::optional<v1::PagesPart>> { return std::nullopt; });
  EXPECT_EQ(client::DetailOf(imported.status())->reason(), "not_an_operator");
}

TEST_F(HandOverTest, WhatThePeerHasNoRoomForStays) {
  Fill(3);
  const auto b = Serve();
  v1::SetQuotaRequest quota;
  quota.set_tenant("red");
  v1::QuotaBound* const bound = quota.add_bounds();
  bound->set_resource(v1::QUOTA_RESOURCE_SEQUENCES);
  bound->set_bound(2);
  ASSERT_TRUE(Connect(*b, "blue")->SetQuota(quota).ok());
  // What a tenant has used up here keeps nothing from leaving.
  bound->set_bound(3);
  ASSERT_TRUE(blue_->SetQuota(quota).ok());
  const auto drained = Drain(Address(*b));
  ASSERT_TRUE(drained.ok()) << drained.status();
  ASSERT_TRUE(blue_->CancelDrain().ok());
  int moved = 0;
  for (Track& track : tracks_) {
    const v1::HandedOver& outcome = OutcomeOf(*drained, track);
    if (outcome.outcome() == v1::HAND_OVER_OUTCOME_MOVED) {
      ++moved;
      ExpectMoved(&track, *b, Address(*b));
      continue;
    }
    EXPECT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_REFUSED);
    EXPECT_EQ(outcome.reason(), "sequences_exhausted") << outcome.message();
    ExpectHere(&track);
  }
  EXPECT_EQ(moved, 2);
}

TEST_F(HandOverTest, OpenStepsAreWaitedForUntilTheDeadline) {
  Fill(2);
  const auto b = Serve();
  const auto session = *red_->OpenSession();
  auto step = session->Begin("m", {{&tracks_[0].sequence, 1}});
  ASSERT_TRUE(step.ok()) << step.status();
  const auto drained = Drain(Address(*b), 500);
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_FALSE(drained->drained());
  EXPECT_EQ(drained->aborted_steps(), 1u);
  EXPECT_EQ(OutcomeOf(*drained, tracks_[0]).outcome(), v1::HAND_OVER_OUTCOME_KEPT);
  EXPECT_EQ(OutcomeOf(*drained, tracks_[0]).reason(), "stopped");
  ExpectMoved(&tracks_[1], *b, Address(*b));
  const auto again = Drain(Address(*b));
  EXPECT_EQ(client::DetailOf(again.status())->reason(), "draining");
  ASSERT_TRUE(blue_->CancelDrain().ok());
  ExpectHere(&tracks_[0]);
  auto other = session->Begin("m", {{&tracks_[0].sequence, 1}});
  ASSERT_TRUE(other.ok()) << other.status();
  std::thread ends([&] {
    EXPECT_TRUE(Eventually([&] { return !*red_->IsServing(); }));
    EXPECT_TRUE((*other)->Abort().ok());
  });
  const auto moved = Drain(Address(*b));
  ends.join();
  ASSERT_TRUE(moved.ok()) << moved.status();
  EXPECT_TRUE(moved->drained());
  ExpectMoved(&tracks_[0], *b, Address(*b));
}

TEST_F(HandOverTest, WhatIsCutOrReleasedOnTheWayIsNotOnThePeer) {
  Fill(3);
  FaultyBackend* faults = nullptr;
  const auto b = Serve({}, &faults);
  auto drains = DrainHeld(*b, faults);
  // One of the three is on its way; the others go as they are by then.
  for (Track* const track : {&tracks_[0], &tracks_[1]}) {
    ASSERT_TRUE(track->sequence.Truncate(kRows / 2).ok());
    track->cache.Truncate(Dims(), kRows / 2);
  }
  ASSERT_TRUE(tracks_[2].sequence.Release().ok());
  faults->ReleaseLaunches();
  const absl::StatusOr<v1::DrainReply> drained = drains.get();
  ASSERT_TRUE(drained.ok()) << drained.status();
  ASSERT_TRUE(blue_->CancelDrain().ok());
  uint64_t moved = 0;
  for (Track* const track : {&tracks_[0], &tracks_[1]}) {
    const v1::HandedOver& outcome = OutcomeOf(*drained, *track);
    if (outcome.outcome() == v1::HAND_OVER_OUTCOME_MOVED) {
      ++moved;
      EXPECT_EQ(outcome.rows(), kRows / 2);
      ExpectMoved(track, *b, Address(*b));
    } else {
      ExpectHere(track);
    }
  }
  EXPECT_EQ(drained->handed_over_size(), 2) << drained->ShortDebugString();
  // One that is cut on its way is kept, and the next begins at once: all may be cut so.
  EXPECT_TRUE(Eventually([&] { return SequencesOf(*b) == moved; }));
}

TEST_F(HandOverTest, ACancelledDrainLeavesSequencesAsTheyWere) {
  Fill(2);
  FaultyBackend* faults = nullptr;
  const auto b = Serve({}, &faults);
  auto drains = DrainHeld(*b, faults);
  const auto second = *client::Client::Connect(a_->tcp_target(), authority_.As("blue"));
  EXPECT_TRUE(second->CancelDrain().ok());
  const absl::StatusOr<v1::DrainReply> drained = drains.get();
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_TRUE(drained->cancelled());
  EXPECT_EQ(drained->handed_over_size(), 2) << drained->ShortDebugString();
  for (Track& track : tracks_) {
    EXPECT_EQ(OutcomeOf(*drained, track).outcome(), v1::HAND_OVER_OUTCOME_KEPT);
    EXPECT_EQ(OutcomeOf(*drained, track).reason(), "stopped");
    ExpectHere(&track);
  }
  faults->ReleaseLaunches();
  EXPECT_TRUE(Eventually([&] { return SequencesOf(*b) == 0; }));
  // Another try takes them all.
  const auto moved = Drain(Address(*b));
  ASSERT_TRUE(moved.ok()) << moved.status();
  for (Track& track : tracks_) ExpectMoved(&track, *b, Address(*b));
}

TEST_F(HandOverTest, AConnectionThatIsCutLeavesEachSequenceInOnePlace) {
  int cuts = 0, kept = 0;
  for (const int64_t bytes : {6000, 12000, 30000, 40000, 41000, 60000, 82000, 90000}) {
    tracks_.clear();
    Fill(2);
    const auto b = Serve();
    CuttingProxy proxy(b->server().tcp_port(), bytes, b->server().tcp_port());
    const auto drained = Drain(Address(proxy.port()));
    cuts += proxy.cut();
    if (!drained.ok()) {
      EXPECT_EQ(drained.status().code(), absl::StatusCode::kUnavailable) << drained.status();
      for (Track& track : tracks_) ExpectHere(&track);
      continue;
    }
    ASSERT_TRUE(blue_->CancelDrain().ok());
    uint64_t moved = 0;
    for (Track& track : tracks_) {
      const v1::HandedOver& outcome = OutcomeOf(*drained, track);
      if (outcome.outcome() == v1::HAND_OVER_OUTCOME_MOVED) {
        ++moved;
        ExpectMoved(&track, *b, Address(proxy.port()));
      } else {
        ++kept;
        EXPECT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_KEPT) << outcome.message();
        ExpectHere(&track);
      }
    }
    EXPECT_TRUE(Eventually([&] { return SequencesOf(*b) == moved; })) << bytes;
  }
  EXPECT_GT(cuts, 4);
  EXPECT_GT(kept, 2);
}

// The connection ends, and the name that the operator gave leads to another server from then on.
TEST_F(HandOverTest, NothingGoesToAnotherServerThanTheOneThatWasAsked) {
  Fill(2);
  const auto b = Serve(), c = Serve();
  CuttingProxy proxy(b->server().tcp_port(), 30000, c->server().tcp_port());
  const auto drained = Drain(Address(proxy.port()));
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_TRUE(proxy.cut());
  ASSERT_TRUE(blue_->CancelDrain().ok());
  int changed = 0;
  for (Track& track : tracks_) {
    const v1::HandedOver& outcome = OutcomeOf(*drained, track);
    EXPECT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_KEPT) << outcome.message();
    changed += outcome.reason() == "peer_changed";
    ExpectHere(&track);
  }
  EXPECT_GE(changed, 1);
  EXPECT_EQ(SequencesOf(*c), 0u);
}

TEST_F(HandOverTest, APeerWhoseCertificateIsRevokedGetsNothing) {
  authority_.Make("peer", "ca", "/CN=localhost", "DNS:localhost", 30);
  authority_.Revoke("revoked.crl", "ca", {"peer"});
  a_ = Serve(
      [&](server::Config& config) { config.tls.client_crl = authority_.File("revoked.crl"); });
  const auto b = Serve([&](server::Config& config) {
    config.tls.cert = authority_.File("peer.pem");
    config.tls.key = authority_.File("peer.key");
  });
  blue_ = Connect(*a_, "blue");
  const auto refused = Drain(Address(*b));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kPermissionDenied) << refused.status();
  EXPECT_EQ(client::DetailOf(refused.status())->reason(), "peer_revoked");
  EXPECT_TRUE(*blue_->IsServing());
}

// Two processes, and the command of an operator; the one that gets the sequences is killed under
// it.
TEST_F(HandOverTest, APeerProcessThatIsKilledCostsNothing) {
  const std::vector<std::string> tls = {absl::StrCat("--tls-cert=", authority_.File("server.pem")),
                                        absl::StrCat("--tls-key=", authority_.File("server.key")),
                                        absl::StrCat("--client-ca=", authority_.File("ca.pem")),
                                        "--server-operators=localhost",
                                        "--server-listen=127.0.0.1:0",
                                        "--log-level=info"};
  const ServerProcess a(tls);
  client::ClientOptions options;
  options.tenant = "red";
  const auto red = *client::Client::Connect(a.target(), options);
  Worker worker(red.get(), Dims(), "m", 1);
  std::vector<Track> tracks;
  for (int i = 0; i < 8; ++i) {
    tracks.push_back(*worker.Open());
    ASSERT_TRUE(worker.Step({&tracks.back()}, {kRows}, v1::PROFILE_ABSORBED).ok());
  }
  const auto port_of = [](const ServerProcess& server) {
    const std::string log = server.Log();
    return std::stoi(log.substr(log.find("tcp_port=") + 9));
  };
  {
    const ServerProcess victim(tls);
    BackgroundCommand drain(a.Mlactl(absl::StrCat("drain --to=", Address(port_of(victim)))));
    Eventually([&] { return a.Log().find("handed_over") != std::string::npos; });
    victim.Signal(SIGKILL);
    drain.Finish();
  }
  ASSERT_EQ(Shell(a.Mlactl("cancel-drain")).code, 0);
  // Those that had not gone yet are as they were, and go to another server.
  const ServerProcess b(tls);
  int here = 0;
  for (Track& track : tracks) {
    const absl::Status status = worker.Step({&track}, {2}, v1::PROFILE_ABSORBED);
    here += status.ok();
    if (status.ok()) continue;
    EXPECT_EQ(client::DetailOf(status)->reason(), "moved") << status;
  }
  const Result drained = Shell(a.Mlactl(absl::StrCat("drain --to=", Address(port_of(b)))));
  EXPECT_EQ(drained.code, 0) << drained.output;
  EXPECT_NE(drained.output.find(absl::StrCat(here, " of ", here, " sequences moved")),
            std::string::npos)
      << drained.output;
  const auto there = *client::Client::Connect(b.target(), options);
  Worker other(there.get(), Dims(), "m", 2);
  for (Track& track : tracks) {
    auto sequence = there->Attach(track.sequence.id());
    if (!sequence.ok()) continue;
    --here;
    Track copy{*std::move(sequence), track.cache};
    EXPECT_EQ(other.Step({&copy}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  EXPECT_EQ(here, 0);
  // Both say who has moved rows of tenants.
  EXPECT_NE(a.Log().find("hand_over operator=default to=localhost:"), std::string::npos);
  EXPECT_NE(b.Log().find("taken_over operator=localhost tenant=red"), std::string::npos) << b.Log();
}

}  // namespace
}  // namespace mla::integration
