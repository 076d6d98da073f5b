// Two servers with mutual TLS. One has sequences and drains to the other.
#ifndef MLA_TESTS_INTEGRATION_HAND_OVER_HAND_OVER_FIXTURE_H_
#define MLA_TESTS_INTEGRATION_HAND_OVER_HAND_OVER_FIXTURE_H_

#include <gtest/gtest.h>

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
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {

inline constexpr uint32_t kHandOverRows = 200;  // rows of each sequence
inline constexpr uint32_t kDrainMs = 20000;

class HandOverTest : public ::testing::Test {
 protected:
  using Change = std::function<void(server::Config&)>;

  std::unique_ptr<TestServer> Serve(const Change& change = {},
                                    scheduler::testing::FaultyBackend** faults = nullptr) {
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
          auto backend = std::make_unique<scheduler::testing::FaultyBackend>(
              std::make_unique<kernels::ReferenceBackend>());
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

  // Starts the server that drains, with red's worker and sequences of some rows.
  void Fill(int sequences) {
    a_ = Serve();
    red_ = Connect(*a_, "red");
    blue_ = Connect(*a_, "blue");
    worker_ = std::make_unique<Worker>(red_.get(), Dims(), "m", 1);
    for (int i = 0; i < sequences; ++i) {
      tracks_.push_back(*worker_->Open());
      ASSERT_EQ(worker_->Step({&tracks_.back()}, {kHandOverRows}, v1::PROFILE_ABSORBED),
                absl::OkStatus());
    }
  }
  absl::StatusOr<v1::DrainReply> Drain(const std::string& to, uint32_t deadline_ms = kDrainMs) {
    return blue_->Drain(deadline_ms, false, {to});
  }
  // Starts a drain; returns while launches of the peer are held and a sequence is being moved
  // there.
  std::future<absl::StatusOr<v1::DrainReply>> DrainHeld(const TestServer& peer,
                                                        scheduler::testing::FaultyBackend* faults) {
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
  // Expects the sequence here, unchanged.
  void ExpectHere(Track* track) {
    EXPECT_EQ(worker_->Step({track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  // Expects the sequence there, unchanged; calls that name it here must be told where it is.
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
    for (int i = 0; i < 1000 && !condition(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return condition();
  }
  // Sets how many sequences red may have.
  void SetSequences(const TestServer& server, uint64_t most) {
    v1::SetQuotaRequest quota;
    quota.set_tenant("red");
    v1::QuotaBound* const bound = quota.add_bounds();
    bound->set_resource(v1::QUOTA_RESOURCE_SEQUENCES);
    bound->set_bound(most);
    ASSERT_TRUE(Connect(server, "blue")->SetQuota(quota).ok());
  }
  // Imports and other uploads under way at the server.
  uint64_t UploadsOf(const TestServer& server) {
    const auto quota = Connect(server, "blue")->GetQuota();
    for (const v1::QuotaUsage& usage : quota->server()) {
      if (usage.resource() == v1::QUOTA_RESOURCE_UPLOADS) return usage.used();
    }
    return 0;
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

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_HAND_OVER_HAND_OVER_FIXTURE_H_
