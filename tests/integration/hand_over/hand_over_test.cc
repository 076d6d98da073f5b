// A drain to another server, both with mutual TLS: what moves, what stays, and that no sequence is
// lost or in two places if the peer refuses or dies, or if the drain is cancelled.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"
#include "scheduler/testing/faulty_backend.h"
#include "server/hand_over/hand_over.h"
#include "tests/integration/hand_over/cutting_proxy.h"
#include "tests/integration/hand_over/hand_over_fixture.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using scheduler::testing::FaultyBackend;
using std::chrono::milliseconds;

constexpr uint32_t kRows = kHandOverRows;
const auto kStreams = static_cast<size_t>(server::Config().hand_over_streams);

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
  // New sequences are told where to go, too.
  const auto opened = red_->OpenSequence("m");
  EXPECT_EQ(client::DetailOf(opened.status())->reason(), "draining");
  EXPECT_EQ(client::DetailOf(opened.status())->peer(), Address(*b));
}

TEST_F(HandOverTest, WithoutTlsItIsRefused) {
  const TestServer plain;
  const auto client = plain.Connect();
  const auto refused = client->Drain(100, false, {"localhost:1"});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_EQ(client::DetailOf(refused.status())->reason(), "no_tls");
  EXPECT_TRUE(*client->IsServing());
  // Callers of this host are operators here, but still name no tenants.
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
  // Addresses that the client library would interpret: other ports, sockets of this host, several
  // servers.
  for (const char* const address :
       {"localhost", "localhost:", ":50551", "localhost:0", "localhost:65536", "localhost:1x",
        "unix:/tmp/x:1", "dns:localhost:1", "dns:///localhost:1", "ipv4:127.0.0.1:1,127.0.0.2:1",
        "::1:50551", "[::1:50551", "a b:1"}) {
    const auto refused = Drain(address);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << address;
  }
  // The peer's certificate must be for the given name.
  const std::string other = absl::StrCat("127.0.0.2:", stranger->server().tcp_port());
  EXPECT_EQ(Drain(other).status().code(), absl::StatusCode::kUnavailable);
  // It must also be issued by the authority.
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
  // Tenants may not drain, and may not import for others.
  EXPECT_EQ(red_->Drain(100, false, {Address(*stranger)}).status().code(),
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
  SetSequences(*b, 2);
  SetSequences(*a_, 3);  // a tenant's quota here keeps no sequence from leaving
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

TEST_F(HandOverTest, SequencesGoOverSeveralConnectionsAtATime) {
  Fill(6);
  scheduler::testing::FaultyBackend* faults = nullptr;
  const auto b = Serve({}, &faults);
  auto drained = DrainHeld(*b, faults);
  EXPECT_TRUE(Eventually([&] { return UploadsOf(*b) == kStreams; }));
  faults->ReleaseLaunches();
  const auto reply = drained.get();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->handed_over_size(), 6);
  for (Track& track : tracks_) ExpectMoved(&track, *b, Address(*b));
}

// Streams that the peer does not admit end, and their sequences go with the one that it admits.
TEST_F(HandOverTest, APeerOfOneUploadAtATimeGetsAllSequences) {
  Fill(6);
  const auto b = Serve([](server::Config& config) { config.wire.max_uploads = 1; });
  const auto drained = Drain(Address(*b));
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(drained->handed_over_size(), 6);
  for (Track& track : tracks_) {
    EXPECT_EQ(OutcomeOf(*drained, track).outcome(), v1::HAND_OVER_OUTCOME_MOVED)
        << OutcomeOf(*drained, track).message();
    ExpectMoved(&track, *b, Address(*b));
  }
}

// `exit` ends a server only if all its rows have moved.
TEST_F(HandOverTest, AServerThatIsToExitStaysWhileItHasRows) {
  Fill(3);
  Track empty = *worker_->Open();
  const auto b = Serve();
  SetSequences(*b, 2);
  const auto drain = blue_->Drain(kDrainMs, /*exit=*/true, {Address(*b)});
  ASSERT_TRUE(drain.ok()) << drain.status();
  EXPECT_TRUE(drain->drained());
  EXPECT_FALSE(drain->exits());
  EXPECT_NE(drain->message().find("the server stays, as 1 sequences"), std::string::npos)
      << drain->message();
  EXPECT_FALSE(a_->exit_requested());
  ASSERT_TRUE(blue_->CancelDrain().ok());
  SetSequences(*b, 3);
  const auto gone = blue_->Drain(kDrainMs, /*exit=*/true, {Address(*b)});
  ASSERT_TRUE(gone.ok()) << gone.status();
  EXPECT_TRUE(gone->exits()) << gone->message();
  EXPECT_TRUE(a_->exit_requested());
  for (Track& track : tracks_) ExpectMoved(&track, *b, Address(*b));
  EXPECT_TRUE(empty.sequence.Release().ok());
  const std::string here = HttpGet(a_->server().ops_port(), "/metrics");
  const std::string there = HttpGet(b->server().ops_port(), "/metrics");
  for (const char* const line : {"{outcome=\"moved\"} 3", "{outcome=\"refused\"} 1",
                                 "{outcome=\"empty\"} 2", "{outcome=\"changed\"} 0"}) {
    EXPECT_NE(here.find(absl::StrCat("mla_hand_over_sequences_total", line, "\n")),
              std::string::npos)
        << line << here;
  }
  EXPECT_NE(there.find("mla_hand_over_taken_total 3\n"), std::string::npos) << there;
  const auto bytes = [](const std::string& metrics, const std::string& direction) {
    const std::string name =
        absl::StrCat("mla_hand_over_bytes_total{direction=\"", direction, "\"} ");
    return std::stod(metrics.substr(metrics.find(name) + name.size()));
  };
  EXPECT_GT(bytes(here, "out"), 3.0 * kRows * 2);
  EXPECT_EQ(bytes(here, "out"), bytes(there, "in"));
  EXPECT_EQ(bytes(here, "in"), 0.0);
}

// An import may still be in progress when its caller has abandoned it over another connection.
TEST_F(HandOverTest, ATryThatWasGivenUpBringsNothing) {
  Fill(1);
  std::vector<v1::PagesPart> parts;
  v1::ExportRequest rows;
  rows.set_sequence_id(tracks_[0].sequence.id());
  rows.set_expected_epoch(tracks_[0].sequence.epoch());
  ASSERT_TRUE(red_->ExportPages(rows,
                                [&](const v1::PagesPart& part) {
                                  parts.push_back(part);
                                  return absl::OkStatus();
                                })
                  .ok());
  const auto b = Serve();
  const auto there = Connect(*b, "blue");
  const auto import = [&](uint64_t attempt) {
    v1::ImportTarget target;
    target.set_model_id("m");
    target.set_tenant("red");
    target.set_new_sequence_id(tracks_[0].sequence.id());
    target.set_attempt(attempt);
    size_t next = 0;
    return there->ImportPages(target, [&]() -> absl::StatusOr<std::optional<v1::PagesPart>> {
      if (next == parts.size()) return std::nullopt;
      return parts[next++];
    });
  };
  const auto give_up = [&](uint64_t attempt) {
    v1::EvictSequencesRequest request;
    request.set_tenant("red");
    request.add_sequence_ids(tracks_[0].sequence.id());
    request.set_attempt(attempt);
    return there->EvictSequences(request)->evicted();
  };
  EXPECT_EQ(give_up(7), 0u);
  EXPECT_EQ(import(7).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(SequencesOf(*b), 0u);
  auto sequence = import(8);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_EQ(SequencesOf(*b), 1u);
  EXPECT_EQ(give_up(8), 1u);
  EXPECT_EQ(SequencesOf(*b), 0u);
  sequence->Detach();
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
  const size_t kMoving = kStreams;
  Fill(kMoving + 2);
  FaultyBackend* faults = nullptr;
  const auto b = Serve({}, &faults);
  auto drains = DrainHeld(*b, faults);
  // The sequences with the least ids are being moved: they are sent, and the peer still owes its
  // replies. The others move later, as they are by then. A moving one is truncated last, because
  // after that the next move may begin.
  ASSERT_TRUE(Eventually([&] { return UploadsOf(*b) == kMoving; }));
  std::sort(tracks_.begin(), tracks_.end(),
            [](const Track& a, const Track& b) { return a.sequence.id() < b.sequence.id(); });
  ASSERT_TRUE(tracks_[kMoving + 1].sequence.Release().ok());
  for (Track* const track : {&tracks_[kMoving], &tracks_[0]}) {
    ASSERT_TRUE(track->sequence.Truncate(kRows / 2).ok());
    track->cache.Truncate(Dims(), kRows / 2);
  }
  faults->ReleaseLaunches();
  const absl::StatusOr<v1::DrainReply> drained = drains.get();
  ASSERT_TRUE(drained.ok()) << drained.status();
  ASSERT_TRUE(blue_->CancelDrain().ok());
  EXPECT_EQ(drained->handed_over_size(), kMoving + 1) << drained->ShortDebugString();
  EXPECT_EQ(OutcomeOf(*drained, tracks_[0]).outcome(), v1::HAND_OVER_OUTCOME_KEPT);
  ExpectHere(&tracks_[0]);
  const v1::HandedOver& cut = OutcomeOf(*drained, tracks_[kMoving]);
  EXPECT_EQ(cut.outcome(), v1::HAND_OVER_OUTCOME_MOVED);
  EXPECT_EQ(cut.rows(), kRows / 2);
  for (size_t i = 1; i <= kMoving; ++i) ExpectMoved(&tracks_[i], *b, Address(*b));
  EXPECT_TRUE(Eventually([&] { return SequencesOf(*b) == kMoving; }));
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
  // Another attempt moves all of them.
  const auto moved = Drain(Address(*b));
  ASSERT_TRUE(moved.ok()) << moved.status();
  for (Track& track : tracks_) ExpectMoved(&track, *b, Address(*b));
}

TEST_F(HandOverTest, AConnectionThatIsCutLeavesEachSequenceInOnePlace) {
  int cuts = 0, kept = 0;
  for (const int64_t bytes : {6000, 9000, 12000, 18000, 24000, 30000, 36000, 60000, 90000}) {
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

// The connection ends, and from then on the name that the operator gave leads to another server.
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

// Two processes and an operator's command. The process that receives the sequences is killed in
// between.
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
  // Sequences that had not moved are unchanged, and move to another server.
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
  // Both logs say who moved rows of tenants.
  EXPECT_NE(a.Log().find("hand_over operator=default to=localhost:"), std::string::npos);
  EXPECT_NE(b.Log().find("taken_over operator=localhost tenant=red"), std::string::npos) << b.Log();
}

}  // namespace
}  // namespace mla::integration
