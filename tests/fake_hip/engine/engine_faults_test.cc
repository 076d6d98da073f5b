// Tests device faults during steps of the EXPANDED profile, on the fake HIP runtime. Each test
// checks which steps a fault ends and which steps continue.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "server/lifecycle/server_state.h"
#include "server/lifecycle/watchdog.h"
#include "tests/fake_hip/engine/expanded_engine.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;
using TestRequest = scheduler::testing::TestRequest;

struct FailingCall {
  const char* call;
  int after;  // number of these calls that succeed first
};
void PrintTo(const FailingCall& c, std::ostream* out) { *out << c.call << " " << c.after; }

class FailingCallTest : public EngineExpandedTest,
                        public ::testing::WithParamInterface<FailingCall> {};

TEST_P(FailingCallTest, FailsTheStepsOfItsLaunchAlone) {
  ExpandedEngine reference(nullptr);
  ExpandedEngine gpu(CopyingGpu());
  const auto a = gpu.harness().Open();
  const auto b = gpu.harness().Open();
  ASSERT_TRUE(gpu.Begin(1, a, 0, 130).ok());
  ASSERT_TRUE(gpu.Begin(2, b, 0, 140).ok());
  const auto hit = gpu.Attend(1, 0, 130, 1);
  control_->FailOnce(GetParam().call, GetParam().after);
  gpu.Settle();
  EXPECT_GT(control_->fail_seen, GetParam().after) << "the call was not reached";
  ASSERT_EQ(hit->answers, 1);
  EXPECT_EQ(hit->status.code(), absl::StatusCode::kInternal) << hit->status;
  EXPECT_EQ(hit->detail.reason, "launch_failed");
  EXPECT_THAT(hit->status.message(), HasSubstr("invalid argument (1)"));
  EXPECT_TRUE(hit->step_aborted);
  // The other step is still open, and both sequences continue normally.
  EXPECT_TRUE(gpu.harness().Get(b.id).in_step);
  ASSERT_TRUE(gpu.Begin(3, a, 0, 135).ok());
  const auto beside = gpu.Attend(2, 0, 140, 2);
  const auto again = gpu.Attend(3, 0, 135, 3);
  gpu.Settle();
  const auto of_a = reference.harness().Open();
  const auto of_b = reference.harness().Open();
  ASSERT_TRUE(reference.Begin(2, of_b, 0, 140).ok());
  ASSERT_TRUE(reference.Begin(3, of_a, 0, 135).ok());
  const auto want_beside = reference.Attend(2, 0, 140, 2);
  const auto want_again = reference.Attend(3, 0, 135, 3);
  reference.Settle();
  ExpectSame(*beside, *want_beside);
  ExpectSame(*again, *want_again);
  EXPECT_EQ(gpu.harness().core().answers().owned(), 0);
  EXPECT_EQ(gpu.harness().core().cache().CheckInvariants(), "");
}

// Copies of metadata and inputs; the append, expand and attend kernels; copies of outputs; and the
// events between them.
INSTANTIATE_TEST_SUITE_P(
    Calls, FailingCallTest,
    ::testing::Values(FailingCall{"hipMemcpyHtoDAsync", 0}, FailingCall{"hipMemcpyHtoDAsync", 1},
                      FailingCall{"hipModuleLaunchKernel", 0},
                      FailingCall{"hipModuleLaunchKernel", 1},
                      FailingCall{"hipModuleLaunchKernel", 2}, FailingCall{"hipMemcpyDtoHAsync", 0},
                      FailingCall{"hipEventRecord", 0}, FailingCall{"hipEventRecord", 1},
                      FailingCall{"hipEventRecord", 2}, FailingCall{"hipStreamWaitEvent", 0}));

// The memory was taken at start, so nothing is allocated here.
TEST_F(EngineExpandedTest, WeightsThatCanNotBeCopiedAreRefusedAndMayComeAgain) {
  ExpandedEngine gpu(Gpu(), /*upload=*/false);
  constexpr int64_t kAddresses = 2 * sizeof(void*);  // of W_UK and W_UV of the one model
  constexpr int64_t kHead = int64_t{ExpandedEngine::kDim} * ExpandedEngine::kLora * 2;
  // The first copy carries addresses for the kernels, until one such copy has succeeded. W_UK and
  // W_UV of each head follow.
  const struct {
    int after;
    int64_t last_bytes;  // size of the copy before the failing one
  } failures[] = {{0, 0}, {1, kAddresses}, {1, kHead}, {2, kHead}};
  for (const auto& [after, last_bytes] : failures) {
    control_->last_copied_in_bytes = 0;
    control_->FailOnce("hipMemcpyHtoDAsync", after);
    const absl::Status refused = gpu.Upload(1);
    EXPECT_THAT(refused.message(), HasSubstr("invalid argument (1)"));
    EXPECT_EQ(control_->last_copied_in_bytes, last_bytes);
    EXPECT_TRUE(gpu.harness().core().backend().Healthy().ok());
  }
  control_->fail_call = "hipMalloc";
  control_->fail_after = 0;
  control_->fail_times = -1;
  ASSERT_TRUE(gpu.Upload(2).ok());
  ExpandedEngine reference(nullptr);
  std::vector<std::unique_ptr<TestRequest>> answers;
  for (ExpandedEngine* engine : {&gpu, &reference}) {
    const auto seq = engine->harness().Open();
    ASSERT_TRUE(engine->Begin(1, seq, 0, 130).ok());
    answers.push_back(engine->Attend(1, 0, 130, 1));
    engine->Settle();
  }
  ExpectSame(*answers[0], *answers[1]);
}

// A device can be lost in two ways: it stops answering, or every call returns the same error.
class LostDeviceTest : public EngineExpandedTest, public ::testing::WithParamInterface<bool> {
 protected:
  void Lose() { (GetParam() ? control_->hang : control_->lost) = true; }
  std::string Reason() const {
    return GetParam() ? "the GPU has not ended a launch within 200 ms"
                      : "unspecified launch failure (719)";
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, LostDeviceTest, ::testing::Bool(),
                         [](const auto& hangs) { return hangs.param ? "Hang" : "StickyError"; });

TEST_P(LostDeviceTest, FailsWhatIsInFlightAndTakesNothingNew) {
  auto gpu = std::make_unique<ExpandedEngine>(Gpu());
  const auto a = gpu->harness().Open();
  const auto b = gpu->harness().Open();
  const auto c = gpu->harness().Open();
  ASSERT_TRUE(gpu->Begin(1, a, 0, 130).ok());
  ASSERT_TRUE(gpu->Begin(2, b, 0, 140).ok());
  const auto in_flight = gpu->Attend(1, 0, 130, 1);
  ASSERT_TRUE(gpu->harness().core().launches().Start());
  Lose();
  gpu->Settle();
  ASSERT_EQ(in_flight->answers, 1);
  EXPECT_EQ(in_flight->status.code(), absl::StatusCode::kInternal) << in_flight->status;
  EXPECT_EQ(in_flight->detail.reason, "launch_failed");
  EXPECT_THAT(in_flight->status.message(), HasSubstr(Reason()));
  EXPECT_TRUE(in_flight->step_aborted);
  const absl::Status health = gpu->harness().core().backend().Healthy();
  EXPECT_EQ(health.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(health.message(), HasSubstr("device lost: "));
  EXPECT_THAT(health.message(), HasSubstr(Reason()));
  // The fault failed nothing else: the other step and its sequence still exist.
  EXPECT_TRUE(gpu->harness().Get(b.id).in_step);
  EXPECT_EQ(gpu->harness().core().Stats().steps_aborted, 1u);
  // New work is refused before it is staged.
  const auto begin = gpu->harness().Begin(gpu->stream(), 3, {{c.id, 1, 0, 1}});
  EXPECT_EQ(begin->status.code(), absl::StatusCode::kUnavailable) << begin->status;
  EXPECT_EQ(begin->detail.reason, "backend_unhealthy");
  control_->hang = control_->lost = false;  // does not bring the lost device back
  const auto late = gpu->Attend(2, 0, 140, 2);
  gpu->Settle();
  EXPECT_EQ(late->status.code(), absl::StatusCode::kInternal) << late->status;
  EXPECT_EQ(gpu->harness().core().answers().owned(), 0);
}

// Tests the path from the engine's thread, which looks at launches without waiting for them, to the
// server's health, which the watchdog updates within its period.
TEST_P(LostDeviceTest, TurnsTheServersHealthOff) {
  scheduler::RealClock clock;
  scheduler::EngineOptions options;
  options.limits = ExpandedEngine::Limits();
  options.inline_work = 0;  // threads that submit wait for no launch
  auto engine = scheduler::Engine::Create(options, Gpu(), &clock);
  ASSERT_TRUE(engine.ok()) << engine.status();
  scheduler::ModelSpec model = scheduler::testing::TinyModel();
  model.geometry = {2, 512, 64, 128, 128};
  model.layers = 1;
  ASSERT_TRUE((*engine)->RegisterModel("t", model).ok());
  scheduler::OpenArgs open;
  open.tenant = "t";
  open.model_id = model.id;
  const auto seq = (*engine)->OpenSequence(open);
  ASSERT_TRUE(seq.ok()) << seq.status();
  server::ServerState state;
  state.Move(server::Phase::kServing, 100, "serving");
  const auto awaited = [&state](auto wanted) {
    server::ServerState::Snapshot now = state.Get();
    while (!wanted(now)) now = state.WaitForChange(now.version, std::chrono::seconds(10));
    return now;
  };
  {
    const server::Watchdog watchdog(
        [&engine] {
          return server::Heartbeat{(*engine)->Healthy(), (*engine)->Stats()};
        },
        &state, std::chrono::seconds(10), std::chrono::milliseconds(10));
    EXPECT_TRUE(state.Get().serving());
    Lose();
    const scheduler::StreamId stream = (*engine)->OpenStream("t");
    class Flag final : public scheduler::StreamRequest {
     public:
      void Done(const absl::Status& s) override {
        status = s;
        done = true;
      }
      absl::Status status;
      std::atomic<bool> done{false};
    };
    Flag begin, attend;
    begin.kind = scheduler::RequestKind::kBeginStep;
    begin.stream = attend.stream = stream;
    begin.step_id = attend.step_id = 1;
    begin.begin.model_id = model.id;
    begin.begin.sequences = {{seq->id, 1, 0, 1}};
    std::vector<std::byte> rows(576 * 2);
    attend.attend.row_count = 1;
    attend.attend.profile = scheduler::Profile::kAppendOnly;
    attend.attend.has_kv = true;
    attend.attend.kv = rows.data();
    ASSERT_TRUE((*engine)->Submit(&begin).ok());
    while (!begin.done) std::this_thread::yield();
    ASSERT_TRUE(begin.status.ok()) << begin.status;
    ASSERT_TRUE((*engine)->Submit(&attend).ok());
    const auto off = awaited([](const auto& now) { return !now.healthy; });
    EXPECT_FALSE(off.serving());
    EXPECT_THAT(off.message, HasSubstr(Reason()));
    while (!attend.done) std::this_thread::yield();
    EXPECT_EQ(attend.status.code(), absl::StatusCode::kInternal) << attend.status;
    (*engine)->CloseStream(stream);
  }
  // This lets the engine free its memory, which the fixture counts.
  control_->hang = control_->lost = false;
  engine->reset();
}

}  // namespace
}  // namespace mla::kernels::hip
