// Requests of several clients that are handed over before their tensors are there.
#include <memory>
#include <utility>
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

// Several clients, each with one sequence and a step of its own.
class ClientsAheadTest : public EngineCoreTest {
 protected:
  ClientsAheadTest() : EngineCoreTest(Options()) {}
  static HarnessOptions Options() {
    Limits limits = testing::TinyLimits();
    limits.ahead_us = 200;
    auto backend = std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
    backend->SetWaitsForWords();
    return {limits, testing::TinyModel(), std::move(backend)};
  }
  struct Client {
    StreamId stream = 0;
    StepId step = 0;
    uint32_t ready = 0, done = 0;
    std::unique_ptr<TestRequest> request;
  };
  std::unique_ptr<Client> Connect(StepId step) {
    auto client = std::make_unique<Client>();
    client->stream = h_.core().steps().OpenStream(h_.tenant());
    client->step = step;
    const SequenceInfo sequence = h_.Open();
    EXPECT_TRUE(h_.Begin(client->stream, step, {{sequence.id, 1, 0, 2}})->status.ok());
    return client;
  }
  // Submits the client's rows of a layer, which wait for its word to be layer + 1.
  void Send(Client* client, int layer) {
    client->request =
        h_.Unsent(client->stream, client->step, layer, 0, 2, Rows(2, 1 + layer), 0, 2, kQueryKey);
    client->request->attend.ready = {&client->ready, static_cast<uint32_t>(layer) + 1};
    client->request->attend.done = {&client->done, static_cast<uint32_t>(layer) + 1};
    h_.Submit(client->request.get());
  }
  // As the client's ring does it once the tensors are there.
  void SendAgain(Client* client) {
    client->request->attend.ready = {};
    h_.Submit(client->request.get());
    h_.Run();
  }
  void ExpectComputed(const TestRequest& request, int layer) {
    ASSERT_TRUE(request.status.ok()) << request.status;
    EXPECT_EQ(request.handed_back, HandedBack::kNo);
    const std::vector<Row> rows = Rows(2, 1 + layer);
    EXPECT_LT(h_.Error(request, Pointers(rows), {1, 2}, kQueryKey), kTolerance);
  }
  bool Launch() { return h_.core().launches().Start(); }
  bool Complete() { return h_.core().launches().Complete(/*wait=*/true); }

  std::unique_ptr<Client> a_ = Connect(11), b_ = Connect(12), c_ = Connect(13);
};

TEST_F(ClientsAheadTest, EachHasALaunchThatWaitsForItAlone) {
  for (int layer = 0; layer < 2; ++layer) {
    const auto reached = static_cast<uint32_t>(layer) + 1;
    Send(a_.get(), layer);
    EXPECT_TRUE(Launch());
    Send(b_.get(), layer);
    EXPECT_EQ(b_->request->answers, 0);
    EXPECT_TRUE(Launch());
    a_->ready = reached;
    EXPECT_TRUE(Complete());
    EXPECT_EQ(a_->done, reached);
    EXPECT_EQ(b_->done, reached - 1);
    b_->ready = reached;
    EXPECT_TRUE(Complete());
    EXPECT_EQ(b_->done, reached);
    ExpectComputed(*a_->request, layer);
    ExpectComputed(*b_->request, layer);
  }
  EXPECT_EQ(h_.core().Stats().launches_ahead, 4u);
  EXPECT_EQ(h_.core().Stats().launches_mixed_clients, 0u);
  EXPECT_EQ(h_.core().Stats().requests_handed_back, 0u);
  EXPECT_TRUE(h_.End(a_->stream, a_->step)->status.ok());
  EXPECT_TRUE(h_.End(b_->stream, b_->step)->status.ok());
}

// The device holds two launches. Requests of other clients wait for a free slot, and then do not
// share a launch either.
TEST_F(ClientsAheadTest, ThoseThatWaitForASlotDoNotShareALaunch) {
  for (const auto* client : {&a_, &b_, &c_}) Send(client->get(), 0);
  EXPECT_FALSE(Launch());  // the first two have been launched
  a_->ready = 1;
  const auto first = std::move(a_->request);
  Send(a_.get(), 1);
  EXPECT_TRUE(Complete());
  ExpectComputed(*first, 0);
  EXPECT_TRUE(Launch());  // one of the two that wait
  b_->ready = 1;
  EXPECT_TRUE(Complete());
  EXPECT_TRUE(Launch());
  c_->ready = 1;
  a_->ready = 2;
  EXPECT_TRUE(Complete());
  EXPECT_TRUE(Complete());
  EXPECT_EQ(h_.core().Stats().launches_ahead, 4u);
  EXPECT_EQ(h_.core().Stats().launches_mixed_clients, 0u);
  EXPECT_EQ(h_.core().Stats().requests_handed_back, 0u);
  ExpectComputed(*a_->request, 1);
  ExpectComputed(*b_->request, 0);
  ExpectComputed(*c_->request, 0);
}

TEST_F(ClientsAheadTest, ALateOneLeavesTheLaunchOfTheOther) {
  Send(a_.get(), 0);
  EXPECT_TRUE(Launch());
  Send(b_.get(), 0);
  EXPECT_TRUE(Launch());
  b_->ready = 1;
  EXPECT_TRUE(Complete());
  EXPECT_EQ(a_->request->handed_back, HandedBack::kLate);
  EXPECT_TRUE(Complete());
  ExpectComputed(*b_->request, 0);
  SendAgain(a_.get());
  ExpectComputed(*a_->request, 0);
}

TEST_F(ClientsAheadTest, NoneGoesAheadOfTensorsThatAreThere) {
  Send(a_.get(), 0);
  EXPECT_TRUE(Launch());
  Send(b_.get(), 0);
  EXPECT_TRUE(Launch());
  Send(c_.get(), 0);  // waits for a slot
  EXPECT_EQ(c_->request->answers, 0);
  const SequenceInfo sequence = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{sequence.id, 1, 0, 2}})->status.ok());
  auto there = h_.Attend(stream_, 1, 0, 0, Rows(2, 1), kQueryKey);
  a_->ready = b_->ready = 1;
  EXPECT_TRUE(Complete());
  EXPECT_TRUE(Launch());
  EXPECT_EQ(c_->request->handed_back, HandedBack::kBusy);
  EXPECT_EQ(h_.core().Stats().launches_ahead, 2u);
  h_.Run();
  ExpectComputed(*there, 0);
}

// A client whose word does not come gets no second launch that waits.
TEST_F(ClientsAheadTest, OneLaunchWaitsForAClient) {
  Send(a_.get(), 0);
  EXPECT_TRUE(Launch());
  const auto first = std::move(a_->request);
  Send(a_.get(), 1);
  EXPECT_EQ(a_->request->handed_back, HandedBack::kBusy);
  Send(b_.get(), 0);
  EXPECT_TRUE(Launch());
  const auto waits = std::move(b_->request);
  Send(b_.get(), 1);
  EXPECT_EQ(b_->request->handed_back, HandedBack::kBusy);
  a_->ready = b_->ready = 1;
  h_.Run();
  ExpectComputed(*first, 0);
  ExpectComputed(*waits, 0);
}

// The second launch was there before the tenant was known to be late.
TEST_F(ClientsAheadTest, TwoLateLaunchesAtATimeAreOneReasonToPause) {
  Send(a_.get(), 0);
  EXPECT_TRUE(Launch());
  Send(b_.get(), 0);
  EXPECT_TRUE(Launch());
  EXPECT_TRUE(Complete());
  EXPECT_TRUE(Complete());
  EXPECT_EQ(h_.core().Stats().launches_late, 2u);
  h_.AdvanceMicros(AheadPauses::kPauseNanos / 1000);
  h_.Submit(a_->request.get());
  EXPECT_EQ(h_.core().Stats().requests_handed_back, 0u);
  EXPECT_TRUE(Launch());
  a_->ready = 1;
  EXPECT_TRUE(Complete());
  ExpectComputed(*a_->request, 0);
}

}  // namespace
}  // namespace mla::scheduler
