// Requests that are handed over before their tensors are there: launched ahead, or handed back.
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/batching/ahead_pauses.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/testing/engine_fixture.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::scheduler {
namespace {

using testing::EngineCoreTest;
using testing::FaultyBackend;
using testing::HarnessOptions;
using testing::kTolerance;
using testing::Pointers;
using testing::Row;
using testing::Rows;
using testing::TestRequest;

constexpr uint64_t kQueryKey = 5;

class EngineAheadTest : public EngineCoreTest {
 protected:
  EngineAheadTest() : EngineAheadTest(Backend(true)) {}
  explicit EngineAheadTest(std::unique_ptr<FaultyBackend> backend)
      : EngineAheadTest(backend.get(), backend) {}
  EngineAheadTest(FaultyBackend* device, std::unique_ptr<FaultyBackend>& backend)
      : EngineCoreTest(HarnessOptions{AheadLimits(), testing::TinyModel(), std::move(backend)}),
        device_(device) {
    const SequenceInfo a = h_.Open();
    EXPECT_TRUE(h_.Begin(stream_, 1, {{a.id, 1, 0, 2}})->status.ok());
  }
  static Limits AheadLimits() {
    Limits limits = testing::TinyLimits();
    limits.ahead_us = kAheadUs;
    return limits;
  }
  static std::unique_ptr<FaultyBackend> Backend(bool waits) {
    auto made = std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
    if (waits) made->SetWaitsForWords();
    return made;
  }
  // A request for both rows of a layer that waits for `ready_` to be layer + 1.
  std::unique_ptr<TestRequest> Unready(int layer) {
    auto request = h_.Unsent(stream_, 1, layer, 0, 2, Rows(2, 1 + layer), 0, 2, kQueryKey);
    request->attend.ready = {&ready_, static_cast<uint32_t>(layer) + 1};
    request->attend.done = {&done_, static_cast<uint32_t>(layer) + 1};
    return request;
  }
  // As what holds it does once the tensors are there.
  void HandOverAgain(TestRequest* request) {
    request->attend.ready = {};
    h_.Submit(request);
    h_.Run();
  }
  void ExpectComputed(const TestRequest& request, int layer) {
    ASSERT_TRUE(request.status.ok()) << request.status;
    EXPECT_EQ(request.handed_back, HandedBack::kNo);
    const std::vector<Row> rows = Rows(2, 1 + layer);
    EXPECT_LT(h_.Error(request, Pointers(rows), {1, 2}, kQueryKey), kTolerance);
  }
  void ExpectCommits() {
    auto other = h_.Attend(stream_, 1, 1, 0, Rows(2, 2), kQueryKey);
    h_.Run();
    EXPECT_TRUE(other->status.ok()) << other->status;
    EXPECT_TRUE(h_.End(stream_, 1)->status.ok());
    EXPECT_EQ(h_.core().answers().owned(), 0);
    EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
  }

  static constexpr int64_t kAheadUs = 200;
  uint32_t ready_ = 0, done_ = 0;
  FaultyBackend* const device_;
};

TEST_F(EngineAheadTest, ALaunchWaitsForTheTensorsOnTheDevice) {
  auto request = Unready(0);
  h_.Submit(request.get());
  EXPECT_TRUE(h_.core().launches().Start());
  EXPECT_EQ(request->answers, 0);
  ready_ = 1;
  EXPECT_TRUE(h_.core().launches().Complete(/*wait=*/true));
  EXPECT_EQ(request->answers, 1);
  EXPECT_EQ(done_, 1u);
  ExpectComputed(*request, 0);
  EXPECT_EQ(h_.core().Stats().launches_ahead, 1u);
  EXPECT_EQ(h_.core().Stats().launches_late, 0u);
  ExpectCommits();
}

TEST_F(EngineAheadTest, TheNextOneIsLaunchedWhileOneRuns) {
  auto first = Unready(0), second = Unready(1);
  h_.Submit(first.get());
  EXPECT_TRUE(h_.core().launches().Start());
  ready_ = 1;
  h_.Submit(second.get());
  EXPECT_EQ(second->answers, 0);
  EXPECT_TRUE(h_.core().launches().Start());
  EXPECT_TRUE(h_.core().launches().Complete(/*wait=*/true));
  EXPECT_EQ(done_, 1u);
  ready_ = 2;
  EXPECT_TRUE(h_.core().launches().Complete(/*wait=*/true));
  ExpectComputed(*first, 0);
  ExpectComputed(*second, 1);
  EXPECT_TRUE(h_.End(stream_, 1)->status.ok());
}

// A server uses its messages again, for other steps too.
TEST_F(EngineAheadTest, ARequestThatWasOfAStepThatIsGoneGoesAhead) {
  Step gone;  // as StepTable leaves it
  auto request = Unready(0);
  request->attend.profile = Profile::kExpanded;
  request->engine.step = &gone;
  h_.Submit(request.get());
  EXPECT_EQ(request->answers, 1);
  EXPECT_EQ(request->handed_back, HandedBack::kNo);
  EXPECT_EQ(request->detail.reason, "weights_missing") << request->status;
}

// As a ring hands over a request whose tensors are there, and the next at once.
TEST_F(EngineAheadTest, WhatWaitsGoesFirst) {
  auto first = Unready(0), second = Unready(1);
  ready_ = 1;
  h_.Submit(first.get());
  h_.Submit(second.get());
  EXPECT_EQ(second->answers, 0);
  EXPECT_TRUE(h_.core().launches().Start());
  EXPECT_EQ(h_.core().Stats().launches_ahead, 1u);
  EXPECT_TRUE(h_.core().launches().Complete(/*wait=*/true));
  ready_ = 2;
  EXPECT_TRUE(h_.core().launches().Complete(/*wait=*/true));
  ExpectComputed(*first, 0);
  ExpectComputed(*second, 1);
  EXPECT_EQ(h_.core().Stats().requests_handed_back, 0u);
}

TEST_F(EngineAheadTest, OfALaunchThatWaitedTooLongNothingHasCome) {
  auto request = Unready(0);
  h_.Submit(request.get());
  h_.Run();
  EXPECT_EQ(request->answers, 1);
  EXPECT_EQ(request->handed_back, HandedBack::kLate);
  EXPECT_EQ(done_, 0u);
  EXPECT_EQ(h_.core().answers().owned(), 0);
  EXPECT_EQ(h_.core().Stats().launches_late, 1u);
  EXPECT_EQ(h_.core().Stats().requests_failed, 0u);
  // Its rows have not been stored.
  auto end = h_.End(stream_, 1);
  EXPECT_EQ(end->detail.reason, "rows_missing");
  // The tensors have changed since.
  const std::vector<Row> rows = Rows(2, 1);
  HandOverAgain(request.get());
  EXPECT_EQ(request->answers, 2);
  ExpectComputed(*request, 0);
  EXPECT_EQ(done_, 1u);
  ExpectCommits();
}

TEST_F(EngineAheadTest, NoLaunchWaitsForAClientWhileOthersWait) {
  const SequenceInfo b = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 2, {{b.id, 1, 0, 2}})->status.ok());
  // One that waits, for KV rows, when the other comes, and the other way round.
  auto waits = h_.Query(stream_, 2, 0, 0, 2, 0, 2, kQueryKey);
  auto request = Unready(0);
  h_.Submit(request.get());
  EXPECT_EQ(request->handed_back, HandedBack::kBusy);
  auto rows = h_.AppendOnly(stream_, 2, 0, 0, Rows(2, 8));
  h_.Run();
  EXPECT_TRUE(waits->status.ok());
  h_.Submit(request.get());
  EXPECT_EQ(request->answers, 1);
  auto comes = h_.Attend(stream_, 2, 1, 0, Rows(2, 9), kQueryKey);
  h_.Run();
  EXPECT_TRUE(comes->status.ok());
  EXPECT_EQ(request->answers, 2);
  EXPECT_EQ(request->handed_back, HandedBack::kBusy);
  EXPECT_EQ(h_.core().Stats().launches_ahead, 0u);
  EXPECT_EQ(h_.core().Stats().requests_handed_back, 2u);
  ready_ = 1;  // which is noticed, too
  h_.Submit(request.get());
  h_.Run();
  ExpectComputed(*request, 0);
  ExpectCommits();
}

TEST_F(EngineAheadTest, OneLaunchAtATimeWaitsForAClient) {
  auto first = Unready(0), second = Unready(1);
  h_.Submit(first.get());
  EXPECT_TRUE(h_.core().launches().Start());
  h_.Submit(second.get());
  EXPECT_EQ(second->handed_back, HandedBack::kBusy);
  ready_ = 1;
  h_.Run();
  ExpectComputed(*first, 0);
}

// Rows of such a launch are not visible to others before the launch is known to be in time.
TEST_F(EngineAheadTest, QueriesWaitForRowsOfALaunchThatWaits) {
  auto request = Unready(0);
  h_.Submit(request.get());
  EXPECT_TRUE(h_.core().launches().Start());
  auto query = h_.Query(stream_, 1, 0, 0, 2, 0, 2, kQueryKey);
  EXPECT_FALSE(h_.core().launches().Start());
  EXPECT_TRUE(h_.core().launches().Complete(/*wait=*/true));  // too late
  EXPECT_EQ(request->handed_back, HandedBack::kLate);
  EXPECT_FALSE(h_.core().launches().Start());
  EXPECT_EQ(query->answers, 0);
  HandOverAgain(request.get());
  ExpectComputed(*request, 0);
  EXPECT_TRUE(query->status.ok()) << query->status;
}

TEST_F(EngineAheadTest, RowsBehindThoseOfALateLaunchAreSentAgain) {
  const SequenceInfo b = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 2, {{b.id, 1, 0, 3}})->status.ok());
  const auto part = [&](int first, int rows) {
    auto request = h_.Unsent(stream_, 2, 0, first, rows, Rows(rows, 4 + first), 0, 2, kQueryKey);
    return request;
  };
  auto first = part(0, 1), second = part(1, 2);
  first->attend.ready = {&ready_, 1};
  h_.Submit(first.get());
  EXPECT_TRUE(h_.core().launches().Start());
  h_.Submit(second.get());
  EXPECT_TRUE(h_.core().launches().Complete(/*wait=*/true));
  EXPECT_EQ(first->handed_back, HandedBack::kLate);
  EXPECT_EQ(second->detail.reason, "rows_out_of_order");
  EXPECT_EQ(h_.End(stream_, 2)->detail.reason, "rows_missing");
  HandOverAgain(first.get());
  EXPECT_TRUE(first->status.ok()) << first->status;
  h_.Submit(second.get());
  h_.Run();
  EXPECT_TRUE(second->status.ok()) << second->status;
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
}

// The next request is handed over before anyone knows that the launch is late.
TEST_F(EngineAheadTest, WhatWaitsForItsTensorsBehindALateLaunchComesAgain) {
  const SequenceInfo b = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 2, {{b.id, 1, 0, 3}})->status.ok());
  auto first = h_.Unsent(stream_, 2, 0, 0, 1, Rows(1, 4), 0, 2, kQueryKey);
  auto second = h_.Unsent(stream_, 2, 0, 1, 2, Rows(2, 5), 0, 2, kQueryKey);
  first->attend.ready = {&ready_, 1};
  second->attend.ready = {&ready_, 2};
  h_.Submit(first.get());
  EXPECT_TRUE(h_.core().launches().Start());
  device_->EndGates();
  ready_ = 1;
  h_.Submit(second.get());
  EXPECT_TRUE(h_.core().launches().Complete(/*wait=*/true));
  EXPECT_EQ(first->handed_back, HandedBack::kLate);
  EXPECT_EQ(second->handed_back, HandedBack::kBusy) << second->status;
  HandOverAgain(first.get());
  EXPECT_TRUE(first->status.ok()) << first->status;
  HandOverAgain(second.get());
  EXPECT_TRUE(second->status.ok()) << second->status;
}

// The tensors of the calls after a late launch have arrived by then. All calls are handed back in
// the order of their rows, and handed over again in this order.
TEST_F(EngineAheadTest, WhatWaitsBehindALateLaunchComesAgainInOrder) {
  const SequenceInfo b = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 2, {{b.id, 1, 0, 3}})->status.ok());
  std::vector<int> order;
  std::unique_ptr<TestRequest> parts[3];
  for (int i = 0; i < 3; ++i) {
    parts[i] = h_.Unsent(stream_, 2, 0, i, 1, Rows(1, 4 + i), 0, 2, kQueryKey);
    parts[i]->attend.ready = {&ready_, static_cast<uint32_t>(i) + 1};
    parts[i]->on_done = [&order, i] { order.push_back(i); };
  }
  h_.Submit(parts[0].get());
  EXPECT_TRUE(h_.core().launches().Start());
  device_->EndGates();
  ready_ = 3;
  h_.Submit(parts[1].get());
  h_.Submit(parts[2].get());
  EXPECT_TRUE(h_.core().launches().Complete(/*wait=*/true));
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  // This one was on its way to the engine when the launch ended.
  h_.Submit(parts[1].get());
  for (const auto& part : parts) {
    EXPECT_NE(part->handed_back, HandedBack::kNo) << part->status;
  }
  for (const auto& part : parts) {
    part->attend.ready = {};
    h_.Submit(part.get());
  }
  h_.Run();
  for (const auto& part : parts) EXPECT_TRUE(part->status.ok()) << part->status;
}

TEST_F(EngineAheadTest, AStepMayBeAbortedWhileItsLaunchWaits) {
  auto request = Unready(0);
  h_.Submit(request.get());
  EXPECT_TRUE(h_.core().launches().Start());
  EXPECT_TRUE(h_.Abort(stream_, 1)->status.ok());
  EXPECT_EQ(request->handed_back, HandedBack::kLate);
  HandOverAgain(request.get());
  EXPECT_TRUE(request->step_aborted);
  EXPECT_EQ(h_.core().answers().owned(), 0);
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
}

TEST_F(EngineAheadTest, ALateLaunchKeepsItsTenantFromGoingAheadForAWhile) {
  auto first = Unready(0), second = Unready(1);
  h_.Submit(first.get());
  h_.Run();
  EXPECT_EQ(first->handed_back, HandedBack::kLate);
  h_.Submit(first.get());
  EXPECT_EQ(first->handed_back, HandedBack::kBusy);
  h_.AdvanceMicros(AheadPauses::kPauseNanos / 1000 - 1);
  h_.Submit(first.get());
  EXPECT_EQ(first->handed_back, HandedBack::kBusy);
  h_.AdvanceMicros(1);
  h_.Submit(first.get());
  EXPECT_TRUE(h_.core().launches().Start());
  ready_ = 1;
  h_.Run();
  ExpectComputed(*first, 0);
  EXPECT_EQ(h_.core().Stats().launches_ahead, 2u);
  ready_ = 2;
  HandOverAgain(second.get());
  EXPECT_TRUE(h_.End(stream_, 1)->status.ok());
}

// Two processes may use the device in turns: a launch that waits then keeps the process from the
// device that would end its wait.
TEST_F(EngineAheadTest, ATenantThatIsNeverInTimeWaitsSeldom) {
  auto request = Unready(0);
  constexpr int64_t kMillis = 60'000;
  for (int64_t ms = 0; ms < kMillis || request->handed_back != HandedBack::kLate; ++ms) {
    h_.Submit(request.get());
    h_.Run();
    h_.AdvanceMicros(1000);
  }
  const uint64_t late = h_.core().Stats().launches_late;
  EXPECT_LE(late, 10u + kMillis * 1'000'000 / AheadPauses::kLongestNanos + 1);
  EXPECT_GE(late, 40u);
  // One in time ends that.
  h_.AdvanceMicros(AheadPauses::kLongestNanos / 1000);
  h_.Submit(request.get());
  EXPECT_TRUE(h_.core().launches().Start());
  ready_ = 1;
  h_.Run();
  ExpectComputed(*request, 0);
  auto next = Unready(1);
  h_.Submit(next.get());
  h_.Run();
  EXPECT_EQ(next->handed_back, HandedBack::kLate);
  h_.AdvanceMicros(AheadPauses::kPauseNanos / 1000);
  h_.Submit(next.get());
  EXPECT_TRUE(h_.core().launches().Start());
  ready_ = 2;
  h_.Run();
  ExpectComputed(*next, 1);
  EXPECT_TRUE(h_.End(stream_, 1)->status.ok());
}

TEST_F(EngineAheadTest, ALaunchWhoseLogSumExpsAreCopiedWaitsForNothing) {
  auto request = Unready(0);
  request->attend.on_device = true;
  h_.Submit(request.get());
  EXPECT_EQ(request->handed_back, HandedBack::kBusy);
  request->attend.on_device = false;
  HandOverAgain(request.get());
  ExpectComputed(*request, 0);
}

// The time of a request that was handed back counts from its first arrival.
TEST_F(EngineAheadTest, TheTimeOfOneThatIsHandedBackGoesOn) {
  auto request = Unready(0);
  request->attend.timeout_us = 3000;
  h_.Submit(request.get());
  h_.Run();
  EXPECT_EQ(request->handed_back, HandedBack::kLate);
  h_.AdvanceMicros(2000);
  request->attend.ready = {};
  h_.Submit(request.get());  // and waits for a launch
  h_.AdvanceMicros(999);
  EXPECT_EQ(request->answers, 1);
  h_.AdvanceMicros(1);
  EXPECT_EQ(request->answers, 2);
  EXPECT_EQ(request->detail.reason, "deadline");
  EXPECT_EQ(request->detail.got, "3000");
  EXPECT_EQ(request->engine.total_ns, 3'000'000);
}

class EngineNeverAheadTest : public EngineAheadTest {
 protected:
  EngineNeverAheadTest() : EngineAheadTest(Backend(false)) {}
};

TEST_F(EngineNeverAheadTest, ABackendThatWaitsForNothingHasThemHandedBack) {
  auto request = Unready(0);
  h_.Submit(request.get());
  EXPECT_EQ(request->handed_back, HandedBack::kBusy);
  HandOverAgain(request.get());
  ExpectComputed(*request, 0);
  ExpectCommits();
}

}  // namespace
}  // namespace mla::scheduler
