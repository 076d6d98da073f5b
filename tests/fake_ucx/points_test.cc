// One end of a ring is killed, stopped for a while, or cut off from the other, at fourteen named
// points of an attend, with tensors in frames and with puts. Neither end sees a wrong row, other
// rings are served, nothing is written after a ring's end, and nothing is left over.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "tests/fake_ucx/fake_ucx.h"
#include "tests/fake_ucx/ring_pair.h"

namespace mla {
namespace {

using fake_ucx::RingPair;

constexpr uint64_t kBytes = 20'000;  // of inputs, and of outputs
constexpr int kMostRounds = 100'000;

enum class Fate { kKilled, kStopped, kCutOff };

struct Point {
  const char* name;
  bool client;        // it is the end that comes to this point
  const char* event;  // as of fake_ucx::StopAt; nullptr: while the server computes
  bool puts;
};

// Each is inside one attend.
constexpr Point kPoints[] = {
    {"request_has_left", true, "message", false},
    {"inputs_fetched_and_not_known", true, "sent", false},
    {"completion_has_come", true, "deliver", false},
    {"half_of_the_outputs_fetched", true, "pull", false},
    {"outputs_fetched_and_not_taken", true, "received", false},
    {"half_of_the_inputs_put", true, "put", true},
    {"inputs_put_without_a_frame", true, "flush", true},
    {"request_has_come", false, "deliver", false},
    {"half_of_the_inputs_fetched", false, "pull", false},
    {"inputs_fetched_and_not_handed_on", false, "received", false},
    {"server_computes", false, nullptr, false},
    {"completion_has_left", false, "message", false},
    {"half_of_the_outputs_put", false, "put", true},
    {"outputs_put_and_not_known", false, "put_done", true},
};

class PointsTest : public testing::TestWithParam<std::tuple<Point, Fate>> {
 protected:
  void SetUp() override {
    fake_ucx::Reset();
    ASSERT_EQ(ring_.Start(point().puts, point().puts), absl::OkStatus());
    ASSERT_EQ(other_.Start(true, true), absl::OkStatus());
    ASSERT_TRUE(ring_.Run(6, kBytes)) << ring_.fault();
    ASSERT_TRUE(other_.Run(6, kBytes)) << other_.fault();
    ASSERT_NO_FATAL_FAILURE(ComeToThePoint());
  }
  void TearDown() override {
    EXPECT_EQ(ring_.fault(), "");
    EXPECT_EQ(other_.fault(), "");
    other_.EndClient();
    other_.EndRelay();
    EXPECT_EQ(fake_ucx::counts().live_requests, 0u);
    EXPECT_EQ(fake_ucx::counts().registered, 0u);
    EXPECT_EQ(fake_ucx::counts().live_keys, 0u);
    EXPECT_EQ(fake_ucx::counts().refused_puts, 0u);
  }

  static const Point& point() { return std::get<0>(GetParam()); }

  void ComeToThePoint() {
    addresses_ = {ring_.memory()->address(), ring_.relay()->address()};
    ring_.computes = point().event != nullptr;
    if (ring_.computes) fake_ucx::StopAt(point().event, addresses_[point().client ? 0 : 1]);
    ASSERT_TRUE(ring_.Submit(kBytes));
    for (int round = 0; round < kMostRounds && !There(); ++round) {
      ring_.Step();
      if (There()) break;
      ASSERT_EQ(ring_.Take(), absl::OkStatus());
    }
    ASSERT_TRUE(There()) << "it did not come to the point";
  }
  bool There() {
    if (ring_.computes) return fake_ucx::Stopped();
    return ring_.ring().in_flight() > 0;
  }

  // The rounds of the end that lives on, until it has nothing to do.
  void RunTheOther() {
    for (int i = 0; i < 200; ++i) {
      if (point().client) {
        ring_.Step();
      } else {
        ring_.Take().IgnoreError();
      }
    }
  }

  void EndFromTheServer() {
    const std::vector<std::byte> before(ring_.ring().region().begin(), ring_.ring().region().end());
    ring_.EndRelay();
    // A client that had only been stopped goes on.
    fake_ucx::Continue();
    ring_.memory()->SetEnded(absl::UnavailableError("the ring has ended"));
    absl::Status ended;
    for (int i = 0; i < kMostRounds && ended.ok(); ++i) ended = ring_.Take();
    EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable);
    EXPECT_TRUE(std::equal(before.begin(), before.end(), ring_.ring().region().begin()))
        << "the region changed after the end of its ring";
    ring_.EndClient();
  }

  RingPair ring_, other_;
  std::vector<std::string> addresses_;
};

TEST_P(PointsTest, NoWrongRowAndOthersAreServed) {
  switch (std::get<1>(GetParam())) {
    case Fate::kKilled:
      RunTheOther();
      ASSERT_TRUE(other_.Run(20, kBytes)) << other_.fault();
      if (!point().client) {
        // The server sees the end of its relay, and ends the call.
        ring_.memory()->SetEnded(absl::UnavailableError("the relay has crashed"));
        absl::Status ended;
        for (int i = 0; i < kMostRounds && ended.ok(); ++i) ended = ring_.Take();
        EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable);
        ring_.EndClient();
        ring_.EndRelay();
      } else {
        EndFromTheServer();
      }
      break;
    case Fate::kStopped:
      RunTheOther();
      ASSERT_TRUE(other_.Run(20, kBytes)) << other_.fault();
      ring_.computes = true;
      fake_ucx::Continue();
      ASSERT_TRUE(ring_.Run(6, kBytes)) << ring_.fault() << ring_.relay()->status();
      EXPECT_EQ(ring_.taken(), 13u);
      ring_.EndClient();
      ring_.EndRelay();
      break;
    case Fate::kCutOff:
      for (const std::string& address : addresses_) fake_ucx::Cut(address);
      fake_ucx::Continue();
      ring_.computes = true;
      for (int i = 0; i < 200; ++i) {
        ring_.Step();
        ASSERT_EQ(ring_.Take(), absl::OkStatus());  // silence, not an error
      }
      ASSERT_TRUE(other_.Run(20, kBytes)) << other_.fault();
      EndFromTheServer();
      break;
  }
}

constexpr const char* kFates[] = {"killed", "stopped", "cut_off"};
INSTANTIATE_TEST_SUITE_P(
    Points, PointsTest,
    testing::Combine(testing::ValuesIn(kPoints),
                     testing::Values(Fate::kKilled, Fate::kStopped, Fate::kCutOff)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).client ? "client_" : "relay_") +
             std::get<0>(info.param).name + "_" + kFates[static_cast<int>(std::get<1>(info.param))];
    });

}  // namespace
}  // namespace mla
