// Tests which requests and steps a failing backend ends, and which it must not.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/read_rows.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/testing/engine_harness.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::scheduler {
namespace {

using testing::EngineHarness;
using testing::FaultPoint;
using testing::FaultyBackend;
using testing::Pointers;
using testing::Row;
using testing::Rows;

// An engine over a backend whose calls can be made to fail.
class FaultyEngine {
 protected:
  explicit FaultyEngine(bool two_slots) {
    auto faulty = std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
    if (two_slots) faulty->SetTwoSlots();
    backend_ = faulty.get();
    h_ = std::make_unique<EngineHarness>(testing::HarnessOptions{
        testing::TinyLimits(), testing::TinyModel(), std::move(faulty), nullptr});
    stream_ = h_->core().steps().OpenStream(h_->tenant());
  }

  FaultyBackend* backend_ = nullptr;
  std::unique_ptr<EngineHarness> h_;
  StreamId stream_ = 0;
};

class EngineFaultTest : public ::testing::TestWithParam<FaultPoint>, protected FaultyEngine {
 protected:
  EngineFaultTest() : FaultyEngine(/*two_slots=*/false) {}
};

TEST_P(EngineFaultTest, AFailedLaunchFailsItsStepsAndNothingElse) {
  const SequenceInfo a = h_->Open();
  const SequenceInfo b = h_->Open();
  const SequenceInfo c = h_->Open();
  ASSERT_TRUE(h_->Begin(stream_, 1, {{a.id, 1, 0, 2}})->status.ok());
  ASSERT_TRUE(h_->Begin(stream_, 2, {{b.id, 1, 0, 2}})->status.ok());
  ASSERT_TRUE(h_->Begin(stream_, 3, {{c.id, 1, 0, 2}})->status.ok());
  auto in_a = h_->Attend(stream_, 1, 0, 0, Rows(2, 1), 5);
  auto in_b = h_->Attend(stream_, 2, 1, 0, Rows(2, 2), 5);
  auto waits = h_->Query(stream_, 2, 0, 0, 1, 0, 2, 5);  // of step 2, and not in the launch
  backend_->FailAt(GetParam());
  h_->Run();
  for (const auto* request : {in_a.get(), in_b.get()}) {
    EXPECT_EQ(request->answers, 1);
    EXPECT_EQ(request->status.code(), absl::StatusCode::kInternal) << request->status;
    EXPECT_TRUE(request->step_aborted);
    EXPECT_EQ(request->detail.reason, "launch_failed");
  }
  EXPECT_TRUE(waits->step_aborted);
  EXPECT_FALSE(h_->Get(a.id).in_step);
  EXPECT_TRUE(h_->Get(c.id).in_step);
  EXPECT_EQ(h_->core().Stats().steps_aborted, 2u);
  EXPECT_EQ(h_->core().cache().CheckInvariants(), "");
  // The other step goes on, and the failed one may be begun again.
  auto in_c = h_->Attend(stream_, 3, 0, 0, Rows(2, 3), 5);
  ASSERT_TRUE(h_->Begin(stream_, 4, {{a.id, 1, 0, 2}})->status.ok());
  auto again = h_->Attend(stream_, 4, 0, 0, Rows(2, 4), 6);
  h_->Run();
  ASSERT_TRUE(in_c->status.ok()) << in_c->status;
  const std::vector<Row> rows_c = Rows(2, 3);
  EXPECT_LT(h_->Error(*in_c, Pointers(rows_c), {1, 2}, 5), 2e-5);
  ASSERT_TRUE(again->status.ok()) << again->status;
  const std::vector<Row> rows_a = Rows(2, 4);
  EXPECT_LT(h_->Error(*again, Pointers(rows_a), {1, 2}, 6), 2e-5);
  EXPECT_EQ(h_->core().answers().owned(), 0);
}

INSTANTIATE_TEST_SUITE_P(Points, EngineFaultTest,
                         ::testing::Values(FaultPoint::kSubmit, FaultPoint::kSubmitAppends,
                                           FaultPoint::kSubmitAttention, FaultPoint::kWait));

class EnginePageWorkTest : public EngineFaultTest {
 protected:
  absl::Status Read(const kernels::AppendRecord& where, kernels::Bf16* out) {
    return kernels::ReadRows(h_->core().backend(), 0, h_->core().page_tables(), where, out);
  }
};

// Pages that changed tenant must be zeroed even if the launch that should have done it fails.
TEST_P(EnginePageWorkTest, ScrubsOfAFailedLaunchAreDoneByTheNext) {
  const TenantRef other = *h_->core().tenants().Enter("tenant-b");
  ASSERT_TRUE(h_->core().models().Register(other->key(), h_->model()).ok());
  // Tenant A fills the whole pool once, so that every page has been its.
  for (int round = 0; round < 14; ++round) h_->Open();
  const SequenceList all = h_->core().sequences().Get({h_->tenant(), {}, ""});
  std::vector<SequenceId> ids;
  StepId step = 100;
  for (const SequenceInfo& sequence : all.sequences) {
    ids.push_back(sequence.id);
    ASSERT_TRUE(h_->Begin(stream_, ++step, {{sequence.id, 1, 0, 24}})->status.ok());
    auto x = h_->AppendOnly(stream_, step, 0, 0, Rows(24, 1));
    auto y = h_->AppendOnly(stream_, step, 1, 0, Rows(24, 1));
    h_->Run();
    ASSERT_TRUE(h_->End(stream_, step)->status.ok());
  }
  std::vector<SequenceId> absent;
  h_->core().sequences().Release(h_->tenant(), ids, &absent);

  OpenArgs open;
  open.tenant = "tenant-b";
  open.model_id = h_->model().id;
  const auto seq = h_->core().sequences().Open(open);
  ASSERT_TRUE(seq.ok()) << seq.status();
  const StreamId foreign = h_->core().steps().OpenStream("tenant-b");
  ASSERT_TRUE(h_->Begin(foreign, 1, {{seq->id, 1, 0, 5}})->status.ok());
  ASSERT_GT(h_->core().Stats().page_groups_scrubbed, 0u);
  backend_->FailAt(GetParam());
  auto lost = h_->AppendOnly(foreign, 1, 0, 0, Rows(1, 8));
  h_->Run();
  ASSERT_EQ(lost->status.code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(h_->Begin(foreign, 2, {{seq->id, 1, 0, 5}})->status.ok());
  auto kept = h_->AppendOnly(foreign, 2, 0, 0, Rows(1, 8));
  h_->Run();
  ASSERT_TRUE(kept->status.ok()) << kept->status;
  // Rows 1 and 2 of the page were never written by tenant B: they must read as zero.
  kernels::AppendRecord where{};
  where.row_stride = 24;
  where.page_size = 3;
  where.first_position = 1;
  where.rows = 2;
  where.row_dim = 12;
  // The sequence's table is the one whose first row is the row just appended.
  bool matches = false;
  for (int slot = 0; slot < 16 && !matches; ++slot) {
    where.page_table = slot * 32;
    std::vector<kernels::Bf16> row(12);
    kernels::AppendRecord first = where;
    first.first_position = 0;
    first.rows = 1;
    if (!Read(first, row.data()).ok()) continue;
    matches = kernels::ToFloat(row[0]) == Rows(1, 8)[0][0] &&
              kernels::ToFloat(row[5]) == Rows(1, 8)[0][5];
  }
  ASSERT_TRUE(matches);
  std::vector<kernels::Bf16> rest(24, 1);
  ASSERT_TRUE(Read(where, rest.data()).ok());
  EXPECT_THAT(rest, ::testing::Each(0));
}

INSTANTIATE_TEST_SUITE_P(Points, EnginePageWorkTest,
                         ::testing::Values(FaultPoint::kSubmitPages, FaultPoint::kSubmit));

// Steps that are abandoned before they have written a row copy none.
// The engine role is not held for it, however many rows are sent again.
TEST_F(EngineFaultTest, RowsThatAreSentAgainAreComparedByALaunch) {
  const SequenceInfo seq = h_->Open();
  ASSERT_TRUE(h_->Begin(stream_, 1, {{seq.id, 1, 0, 3}})->status.ok());
  auto first = h_->Attend(stream_, 1, 0, 0, Rows(3, 1), 5);
  h_->Run();
  auto again = h_->Attend(stream_, 1, 0, 0, Rows(3, 1), 5);
  std::vector<Row> changed = Rows(3, 1);
  changed[2].back() += 1;
  auto other = h_->Attend(stream_, 1, 0, 0, changed, 5);
  h_->Run();
  EXPECT_TRUE(first->status.ok()) << first->status;
  EXPECT_TRUE(again->status.ok()) << again->status;
  EXPECT_EQ(other->detail.reason, "kv_rows_differ") << other->status;
  EXPECT_EQ(other->detail.got, "other KV bytes at row 2");
  EXPECT_EQ(backend_->appended_rows(), 3);
  EXPECT_EQ(backend_->compared_rows(), 6);
  EXPECT_EQ(backend_->reads(), 0);
}

TEST_F(EngineFaultTest, AbandonedStepsLeaveNoPageWork) {
  const SequenceInfo parent = h_->Open();
  ASSERT_TRUE(h_->Begin(stream_, 1, {{parent.id, 1, 0, 2}})->status.ok());
  const auto first = h_->AppendOnly(stream_, 1, 0, 0, Rows(2, 1));
  const auto second = h_->AppendOnly(stream_, 1, 1, 0, Rows(2, 1));
  h_->Run();
  ASSERT_TRUE(h_->End(stream_, 1)->status.ok());
  constexpr int kRounds = 1200;
  for (int round = 0; round < kRounds; ++round) {
    ForkArgs fork;
    fork.tenant = h_->tenant();
    fork.parent = parent.id;
    fork.expected_epoch = 1;
    const auto child = h_->core().sequences().Fork(fork);
    ASSERT_TRUE(child.ok()) << child.status();
    const StepId step = 10 + static_cast<StepId>(round);
    ASSERT_TRUE(h_->Begin(stream_, step, {{child->id, 1, 2, 1}})->status.ok());
    ASSERT_TRUE(h_->Abort(stream_, step)->status.ok());
    const std::vector<SequenceId> ids = {child->id};
    std::vector<SequenceId> absent;
    h_->core().sequences().Release(h_->tenant(), ids, &absent);
  }
  EXPECT_EQ(h_->core().Stats().copies_on_write, 0u);
  EXPECT_EQ(h_->core().cache().work().queued(), 0);
  EXPECT_EQ(h_->core().cache().work().copies_open(), 0);
  ASSERT_TRUE(h_->Begin(stream_, 2, {{parent.id, 1, 2, 1}})->status.ok());
  auto next = h_->Attend(stream_, 2, 0, 0, Rows(1, 2), 5);
  h_->Run();
  ASSERT_TRUE(next->status.ok()) << next->status;
  const std::vector<Row> before = Rows(2, 1), last = Rows(1, 2);
  EXPECT_LT(h_->Error(*next, Pointers(before, last), {3}, 5), 2e-5);
}

// EXPANDED needs no kernel of that form: the absorbed one runs between the projections.
TEST_F(EngineFaultTest, ABackendWithoutTheExpandedFormStillTakesTheModel) {
  backend_->SetAbsorbedOnly();
  ModelSpec spec = h_->model();
  spec.id = "second";
  auto model = h_->core().models().Register(h_->core().FindTenant(h_->tenant()), spec);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_GT((*model)->expanded_min_rows, testing::TinyLimits().launch_rows);
}

TEST_F(EngineFaultTest, QueriesThatTheExpandedFormDoesNotTakeGoThroughTheAbsorbedOne) {
  backend_->SetExpandedBf16Only();
  ModelSpec spec = h_->model();
  spec.id = "second";
  auto model = h_->core().models().Register(h_->core().FindTenant(h_->tenant()), spec);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->ExpandedMinRows(kernels::DType::kBf16), FaultyBackend::kExpandedRows);
  EXPECT_GT((*model)->ExpandedMinRows(kernels::DType::kF32), testing::TinyLimits().launch_rows);
}

TEST_F(EngineFaultTest, AnUnhealthyBackendTakesNoNewSteps) {
  const SequenceInfo a = h_->Open();
  backend_->SetUnhealthy();
  auto begin = h_->Begin(stream_, 1, {{a.id, 1, 0, 1}});
  EXPECT_EQ(begin->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(begin->detail.reason, "backend_unhealthy");
}

// A device that takes two launches at a time.
class TwoSlotsTest : public ::testing::Test, protected FaultyEngine {
 protected:
  TwoSlotsTest() : FaultyEngine(/*two_slots=*/true) {}
};

// Launches of page work alone would fail for as long as a request waits for it.
TEST_F(EngineFaultTest, NothingGoesOnWaitingForADeviceThatIsLost) {
  const SequenceInfo a = h_->Open(), b = h_->Open();
  ASSERT_TRUE(h_->Begin(stream_, 1, {{a.id, 1, 0, 2}})->status.ok());
  ASSERT_TRUE(h_->Begin(stream_, 2, {{b.id, 1, 0, 2}})->status.ok());
  auto runs = h_->Attend(stream_, 1, 0, 0, Rows(2, 1), 5);
  auto waits = h_->Query(stream_, 2, 0, 0, 2, 0, 2, 5);  // its KV rows have not come
  backend_->SetUnhealthy();
  backend_->FailAt(FaultPoint::kWait);
  h_->Run();
  for (const auto* request : {runs.get(), waits.get()}) {
    ASSERT_EQ(request->answers, 1);
    EXPECT_EQ(request->detail.reason, "launch_failed") << request->status;
  }
  EXPECT_EQ(h_->core().Stats().open_steps, 0);
  EXPECT_EQ(h_->core().cache().CheckInvariants(), "");
}

TEST_F(TwoSlotsTest, LaunchThatDoesNotStartSparesTheOneThatRuns) {
  const SequenceInfo a = h_->Open();
  const SequenceInfo b = h_->Open();
  ASSERT_TRUE(h_->Begin(stream_, 1, {{a.id, 1, 0, 2}})->status.ok());
  ASSERT_TRUE(h_->Begin(stream_, 2, {{b.id, 1, 0, 2}})->status.ok());
  auto runs = h_->Attend(stream_, 1, 0, 0, Rows(2, 1), 5);
  ASSERT_TRUE(h_->core().launches().Start());
  auto lost = h_->Attend(stream_, 2, 0, 0, Rows(2, 2), 5);
  backend_->FailAt(FaultPoint::kSubmit);
  ASSERT_TRUE(h_->core().launches().Start());
  EXPECT_EQ(lost->status.code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(runs->answered());
  h_->Run();
  ASSERT_TRUE(runs->status.ok()) << runs->status;
  const std::vector<Row> rows = Rows(2, 1);
  EXPECT_LT(h_->Error(*runs, Pointers(rows), {1, 2}, 5), 2e-5);
  EXPECT_TRUE(h_->Get(a.id).in_step) << "its step goes on";
}

// The older launch completes on the way of the abort; its step must not be committed then.
TEST_F(TwoSlotsTest, StepWithAFailedRequestIsNotCommittedByWhatCompletesMeanwhile) {
  const SequenceInfo a = h_->Open();
  ASSERT_TRUE(h_->Begin(stream_, 1, {{a.id, 1, 0, 1}})->status.ok());
  auto layer0 = h_->AppendOnly(stream_, 1, 0, 0, Rows(1, 1));
  auto layer1 = h_->AppendOnly(stream_, 1, 1, 0, Rows(1, 2));
  ASSERT_TRUE(h_->core().launches().Start());
  auto lost = h_->Query(stream_, 1, 0, 0, 1, 0, 2, 5);
  auto end = h_->End(stream_, 1);
  EXPECT_FALSE(end->answered());
  backend_->FailAt(FaultPoint::kSubmit);
  ASSERT_TRUE(h_->core().launches().Start());
  EXPECT_EQ(lost->status.code(), absl::StatusCode::kInternal);
  h_->Run();
  EXPECT_TRUE(layer0->status.ok() && layer1->status.ok());
  EXPECT_EQ(end->status.code(), absl::StatusCode::kInternal) << end->status;
  EXPECT_TRUE(end->step_aborted);
  EXPECT_EQ(h_->Get(a.id).length, 0);
}

// The work of a launch that has run must not be done again: its copy would overwrite rows that the
// step has appended since with the shared ones.
TEST_F(TwoSlotsTest, PageWorkOfALaunchThatRanIsNotDoneAgain) {
  const SequenceInfo parent = h_->Open();
  ASSERT_TRUE(h_->Begin(stream_, 1, {{parent.id, 1, 0, 2}})->status.ok());
  const auto first = h_->AppendOnly(stream_, 1, 0, 0, Rows(2, 1));
  const auto second = h_->AppendOnly(stream_, 1, 1, 0, Rows(2, 1));
  h_->Run();
  ASSERT_TRUE(h_->End(stream_, 1)->status.ok());
  ForkArgs fork;
  fork.tenant = h_->tenant();
  fork.parent = parent.id;
  fork.expected_epoch = 1;
  const auto child = h_->core().sequences().Fork(fork);
  ASSERT_TRUE(child.ok()) << child.status();
  const SequenceInfo other = h_->Open();
  ASSERT_TRUE(h_->Begin(stream_, 2, {{child->id, 1, 2, 1}})->status.ok());
  ASSERT_TRUE(h_->Begin(stream_, 3, {{other.id, 1, 0, 1}})->status.ok());
  auto copied = h_->Attend(stream_, 2, 0, 0, Rows(1, 2), 5);
  ASSERT_TRUE(h_->core().launches().Start());
  auto lost = h_->Attend(stream_, 3, 0, 0, Rows(1, 3), 5);
  backend_->FailAt(FaultPoint::kSubmit);
  ASSERT_TRUE(h_->core().launches().Start());
  EXPECT_EQ(lost->status.code(), absl::StatusCode::kInternal);
  h_->Run();
  ASSERT_TRUE(copied->status.ok()) << copied->status;
  // The step goes on: its next layer, and a commit that reads its row again.
  auto layer1 = h_->Attend(stream_, 2, 1, 0, Rows(1, 2), 5);
  h_->Run();
  ASSERT_TRUE(layer1->status.ok()) << layer1->status;
  ASSERT_TRUE(h_->End(stream_, 2)->status.ok());
  ASSERT_TRUE(h_->Begin(stream_, 4, {{child->id, 1, 3, 1}})->status.ok());
  auto next = h_->Attend(stream_, 4, 0, 0, Rows(1, 4), 5);
  h_->Run();
  ASSERT_TRUE(next->status.ok()) << next->status;
  const std::vector<Row> shared = Rows(2, 1), own = Rows(1, 2), last = Rows(1, 4);
  std::vector<const Row*> all = Pointers(shared, own);
  all.push_back(&last[0]);
  EXPECT_LT(h_->Error(*next, all, {4}, 5), 2e-5);
}

}  // namespace
}  // namespace mla::scheduler
