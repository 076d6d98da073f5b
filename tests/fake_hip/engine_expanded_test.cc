// The EXPANDED profile from the engine down to the GPU's kernels, on the fake HIP runtime: prompts
// in the expanded form, decode and extend in the absorbed one, against the reference backend; and
// what each fault of the device takes down on that path, and what it must not.
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
#include "tests/fake_hip/backend_fixture.h"
#include "tests/fake_hip/expanded_engine.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;
using TestRequest = scheduler::testing::TestRequest;

class EngineExpandedTest : public BackendOnFakeTest {
 protected:
  static std::unique_ptr<HipBackend> Gpu(int64_t expanded_workspace_bytes = 64 << 20,
                                         Vendor vendor = Vendor::kAmd,
                                         int32_t most_rounds = kMostRounds) {
    return Made(Options(), expanded_workspace_bytes, vendor, most_rounds);
  }
  // Every tensor is copied.
  static std::unique_ptr<HipBackend> CopyingGpu() {
    HipBackendOptions options = Options();
    options.reach_host = false;
    return Made(std::move(options), 64 << 20, Vendor::kAmd, kMostRounds);
  }
  static std::unique_ptr<HipBackend> Made(HipBackendOptions options,
                                          int64_t expanded_workspace_bytes, Vendor vendor,
                                          int32_t most_rounds) {
    options.most_rounds = most_rounds;
    options.images.push_back(Image("sm_90", kImage90));
    options.vendor = vendor;
    options.expanded_workspace_bytes = expanded_workspace_bytes;
    auto backend = HipBackend::Create(options);
    EXPECT_TRUE(backend.ok()) << backend.status();
    return *std::move(backend);
  }
};

// Prompts that are cut into launches, so that the later ones have a context; a prompt beside a
// decode and an extend; and a prompt of one launch.
std::vector<std::unique_ptr<TestRequest>> RunScript(ExpandedEngine& engine) {
  std::vector<std::unique_ptr<TestRequest>> requests;
  const auto a = engine.harness().Open();
  const auto b = engine.harness().Open();
  const auto c = engine.harness().Open();
  EXPECT_TRUE(engine.Begin(1, a, 0, 300).ok());
  requests.push_back(engine.Attend(1, 0, 300, 1));
  engine.Settle();
  EXPECT_TRUE(engine.End(1).ok());
  EXPECT_TRUE(engine.Begin(2, b, 0, 131).ok());
  requests.push_back(engine.Attend(2, 0, 131, 2));
  engine.Settle();
  EXPECT_TRUE(engine.End(2).ok());
  EXPECT_TRUE(engine.Begin(3, a, 300, 1).ok());
  EXPECT_TRUE(engine.Begin(4, b, 131, 20).ok());
  EXPECT_TRUE(engine.Begin(5, c, 0, 130).ok());
  requests.push_back(engine.Attend(3, 0, 1, 3));
  requests.push_back(engine.Attend(4, 0, 20, 4));
  requests.push_back(engine.Attend(5, 0, 130, 5));
  engine.Settle();
  return requests;
}

// Workspaces for the keys and values of all heads, of some, and of less than one context.
TEST_F(EngineExpandedTest, PromptsDecodesAndExtendsEqualTheReference) {
  ExpandedEngine reference(nullptr);
  const auto want = RunScript(reference);
  for (const int64_t workspace : {int64_t{64} << 20, int64_t{200000}}) {
    for (const char* arch : {"gfx950", "gfx942"}) {
      SCOPED_TRACE(arch + (" " + std::to_string(workspace)));
      control_->arch = arch;
      control_->expanded_launches = 0;
      ExpandedEngine gpu(Gpu(workspace));
      const auto got = RunScript(gpu);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        SCOPED_TRACE(i);
        ExpectSame(*got[i], *want[i]);
      }
      // At least the pieces of the four prompts that are long enough: 160 + 140, 131, 130. A
      // context that does not fit is worked through in more rounds than it has launches.
      EXPECT_GE(control_->expanded_launches, workspace < 1 << 20 ? 8 : 4);
      EXPECT_TRUE(gpu.harness().core().backend().Healthy().ok());
    }
  }
}

// More rounds than a launch may have: the absorbed form has none, and the answers are the same. Of
// the script's four launches with a prompt, three need two rounds and one four.
TEST_F(EngineExpandedTest, PromptsWithTooManyRoundsTakeTheAbsorbedForm) {
  ExpandedEngine reference(nullptr);
  const auto want = RunScript(reference);
  for (const char* arch : {"gfx950", "gfx942", "sm_90"}) {
    for (const int32_t most : {1, 3}) {
      SCOPED_TRACE(arch + (" " + std::to_string(most)));
      control_->arch = arch;
      control_->expanded_launches = 0;
      const bool nvidia = arch == std::string("sm_90");
      ExpandedEngine gpu(Gpu(200000, nvidia ? Vendor::kNvidia : Vendor::kAmd, most));
      const auto got = RunScript(gpu);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        SCOPED_TRACE(i);
        ExpectSame(*got[i], *want[i]);
      }
      EXPECT_EQ(gpu.harness().core().Stats().rounds_refused, most == 1 ? 4u : 1u);
      EXPECT_EQ(control_->expanded_launches > 0, most > 1);
      EXPECT_TRUE(gpu.harness().core().backend().Healthy().ok());
    }
  }
}

TEST_F(EngineExpandedTest, RowsBelowTheTurningPointTakeTheAbsorbedForm) {
  ExpandedEngine gpu(Gpu());
  control_->expanded_launches = 0;
  const auto seq = gpu.harness().Open();
  ASSERT_TRUE(gpu.Begin(1, seq, 0, 2 * kExpandedFormRows - 1).ok());
  const auto below = gpu.Attend(1, 0, kExpandedFormRows - 1, 1);
  gpu.Settle();
  ASSERT_TRUE(below->status.ok()) << below->status;
  EXPECT_EQ(control_->expanded_launches, 0);
  const auto at = gpu.Attend(1, kExpandedFormRows - 1, kExpandedFormRows, 1);
  gpu.Settle();
  ASSERT_TRUE(at->status.ok()) << at->status;
  EXPECT_GT(control_->expanded_launches, 0);
}

// Heads of 192/256 have kernels of their own, for which fewer blocks fit a unit on AMD. A server
// whose limits let them in has room for the blocks of the others too.
TEST_F(EngineExpandedTest, PromptsOfWiderHeadsTakeTheExpandedForm) {
  constexpr int kRows = kExpandedFormRowsWide;
  scheduler::Limits limits = ExpandedEngine::Limits(1);
  limits.max_v_dim = kDims256.value;
  limits.weights_bytes = int64_t{kDims256.nope + kDims256.value} * ExpandedEngine::kLora * 2;
  limits.launch_rows = limits.launch_packed_rows = limits.prefill_rows = kRows;
  const auto run = [&](std::unique_ptr<AttentionBackend> backend, const ExpandedDims& dims) {
    ExpandedEngine engine(std::move(backend), 1, limits, /*upload=*/true, dims);
    const auto seq = engine.harness().Open();
    EXPECT_TRUE(engine.Begin(1, seq, 0, kRows).ok());
    auto request = engine.Attend(1, 0, kRows, 1);
    engine.Settle();
    return request;
  };
  for (const char* arch : {"sm_90", "gfx950", "gfx942"}) {
    for (const ExpandedDims& dims : {kDims256, kDims128}) {
      SCOPED_TRACE(arch + (" " + std::to_string(dims.value)));
      control_->arch = arch;
      control_->expanded_launches = 0;
      const bool nvidia = arch == std::string("sm_90");
      const auto got = run(Gpu(640 << 20, nvidia ? Vendor::kNvidia : Vendor::kAmd), dims);
      EXPECT_EQ(control_->expanded_launches, 1);
      ExpectSame(*got, *run(nullptr, dims));
    }
  }
}

// The rounds of a plan are found again by its lengths, on the host and on the device.
TEST_F(EngineExpandedTest, APromptOfTheSameLengthsUploadsNoRounds) {
  ExpandedEngine gpu(CopyingGpu());
  constexpr int kRows = 160;
  int64_t copies[2], bytes[2];
  for (const int i : {0, 1}) {
    const auto seq = gpu.harness().Open();
    const auto step = static_cast<scheduler::StepId>(i) + 1;
    ASSERT_TRUE(gpu.Begin(step, seq, 0, kRows).ok());
    copies[i] = control_->copies_in;
    bytes[i] = control_->bytes_in;
    const auto prompt = gpu.Attend(step, 0, kRows, 1);
    gpu.Settle();
    ASSERT_TRUE(prompt->status.ok()) << prompt->status;
    copies[i] = control_->copies_in - copies[i];
    bytes[i] = control_->bytes_in - bytes[i];
    ASSERT_TRUE(gpu.End(step).ok());
  }
  EXPECT_EQ(copies[0], 3);  // the plan, metadata, and what is staged
  EXPECT_EQ(copies[1], 2);
  // Two tiles of rows of each of two heads.
  EXPECT_GE(bytes[0] - bytes[1], 4 * int64_t{sizeof(ExpandedItem)});
}

// Messages hold fewer rows than the expanded form starts at; those that wait together make it.
TEST_F(EngineExpandedTest, RowsOfSeveralMessagesTakeTheExpandedFormTogether) {
  constexpr int kMessage = 50;
  static_assert(kMessage < kExpandedFormRows && 3 * kMessage >= kExpandedFormRows);
  std::vector<std::unique_ptr<TestRequest>> answers[2];
  for (const bool on_gpu : {true, false}) {
    std::unique_ptr<AttentionBackend> backend;
    if (on_gpu) backend = Gpu();
    ExpandedEngine engine(std::move(backend));
    control_->expanded_launches = 0;
    const auto seq = engine.harness().Open();
    ASSERT_TRUE(engine.Begin(1, seq, 0, 3 * kMessage).ok());
    for (int message = 0; message < 3; ++message) {
      answers[on_gpu ? 0 : 1].push_back(engine.Attend(1, message * kMessage, kMessage, 1));
    }
    engine.Settle();
    if (on_gpu) {
      EXPECT_GT(control_->expanded_launches, 0);
    }
  }
  for (int message = 0; message < 3; ++message) {
    SCOPED_TRACE(message);
    ASSERT_TRUE(answers[0][message]->status.ok()) << answers[0][message]->status;
    // The first row of the first message sees one key.
    ExpectSame(*answers[0][message], *answers[1][message], LargestOutput(*answers[1][0]));
  }
}

// As many projection records as a launch can have: a rank's slices fused into one record of
// attention, each with records of its own, beside a step of as many sequences as records are left.
TEST_F(EngineExpandedTest, ALaunchTakesARecordForEverySliceBesideThoseOfTheOthers) {
  constexpr int kRanks = 7;
  scheduler::Limits limits = ExpandedEngine::Limits(kRanks);
  limits.launch_requests = kRanks + 1;
  limits.max_participants = limits.max_step_sequences = kRanks;
  std::vector<std::unique_ptr<TestRequest>> answers[2];
  for (const bool on_gpu : {true, false}) {
    std::unique_ptr<AttentionBackend> backend;
    if (on_gpu) backend = Gpu();
    ExpandedEngine engine(std::move(backend), kRanks, limits);
    auto& h = engine.harness();
    std::vector<scheduler::StreamId> streams;
    for (int i = 0; i < kRanks; ++i) streams.push_back(h.core().OpenStream(h.tenant()));
    const auto shared = h.Open();
    for (const scheduler::StreamId stream : streams) {
      ASSERT_TRUE(h.Begin(stream, 1, {{shared.id, 1, 0, 2}}, kRanks)->status.ok());
    }
    std::vector<scheduler::StepSequenceArgs> sequences;
    for (int i = 0; i < kRanks; ++i) sequences.push_back({h.Open().id, 1, 0, 1});
    ASSERT_TRUE(h.Begin(engine.stream(), 2, sequences)->status.ok());
    std::vector<std::unique_ptr<TestRequest>>& own = answers[on_gpu ? 0 : 1];
    for (int i = 0; i < kRanks; ++i) {
      own.push_back(engine.Slice(streams[i], 1, 0, 2, i, 1, i == 0, 1));
    }
    own.push_back(engine.Slice(engine.stream(), 2, 0, kRanks, 0, kRanks, true, 2));
    for (const auto& request : own) h.Submit(request.get());
    engine.Settle();
    EXPECT_EQ(h.core().Stats().launches, 1u);
    EXPECT_EQ(h.core().Stats().slices_fused, uint64_t{kRanks});
  }
  for (size_t i = 0; i < answers[0].size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSame(*answers[0][i], *answers[1][i]);
  }
}

// The matrix cores take bf16. Rounding absorbed queries would cost more than outputs may be off,
// so ABSORBED refuses fp32 ones before anything is staged; EXPANDED takes them.
TEST_F(EngineExpandedTest, Fp32QueriesAreTakenInExpandedAndRefusedInAbsorbed) {
  ExpandedEngine reference(nullptr);
  ExpandedEngine gpu(Gpu());
  std::vector<std::unique_ptr<TestRequest>> answers;
  std::vector<float> tensors[4];
  int next = 0;
  for (ExpandedEngine* engine : {&gpu, &reference}) {
    const auto seq = engine->harness().Open();
    ASSERT_TRUE(engine->Begin(1, seq, 0, 135).ok());
    answers.push_back(engine->AttendF32(1, 0, 131, 1, &tensors[next++]));
    answers.push_back(engine->AttendF32(1, 131, 4, 2, &tensors[next++]));
    engine->Settle();
  }
  ExpectSame(*answers[0], *answers[2]);
  ExpectSame(*answers[1], *answers[3]);

  std::vector<float> q(size_t{2} * ExpandedEngine::kRowDim, 0.5f);
  const auto absorbed = [&q](ExpandedEngine& engine) {
    auto request = engine.harness().Unsent(engine.stream(), 1, 0, 134, 1, {}, 0, 2, 5);
    request->attend.q_dtype = DType::kF32;
    request->attend.q = reinterpret_cast<const std::byte*>(q.data());
    engine.harness().Submit(request.get());
    engine.Settle();
    return request;
  };
  const auto taken = absorbed(reference);
  EXPECT_TRUE(taken->status.ok()) << taken->status;
  const int64_t launches = control_->launches;
  const auto refused = absorbed(gpu);
  EXPECT_EQ(control_->launches, launches);
  EXPECT_EQ(refused->status.code(), absl::StatusCode::kUnimplemented) << refused->status;
  for (const char* part : {"wanted: absorbed heads=2", "supported: ", "missing: this query dtype",
                           "device: Fake Instinct (gfx950)"}) {
    EXPECT_THAT(refused->status.message(), HasSubstr(part));
  }
  EXPECT_EQ(refused->detail.field, "attend.q_dtype");
  EXPECT_EQ(refused->detail.reason, "unsupported_dtype");
  EXPECT_FALSE(refused->step_aborted);
  EXPECT_TRUE(gpu.End(1).ok()) << "the step goes on";
}

struct FailingCall {
  const char* call;
  int after;  // such calls of the launch that succeed
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
  // The step beside it is still open, and both sequences go on as if nothing had been.
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
  EXPECT_EQ(gpu.harness().core().owned(), 0);
  EXPECT_EQ(gpu.harness().core().cache().CheckInvariants(), "");
}

// Metadata and inputs in; append, expand and attend; outputs; and the events between them.
INSTANTIATE_TEST_SUITE_P(
    Calls, FailingCallTest,
    ::testing::Values(FailingCall{"hipMemcpyHtoDAsync", 0}, FailingCall{"hipMemcpyHtoDAsync", 1},
                      FailingCall{"hipModuleLaunchKernel", 0},
                      FailingCall{"hipModuleLaunchKernel", 1},
                      FailingCall{"hipModuleLaunchKernel", 2}, FailingCall{"hipMemcpyDtoHAsync", 0},
                      FailingCall{"hipEventRecord", 0}, FailingCall{"hipEventRecord", 1},
                      FailingCall{"hipEventRecord", 2}, FailingCall{"hipStreamWaitEvent", 0}));

// No memory is allocated: it was taken at start.
TEST_F(EngineExpandedTest, WeightsThatCanNotBeCopiedAreRefusedAndMayComeAgain) {
  ExpandedEngine gpu(Gpu(), /*upload=*/false);
  constexpr int64_t kAddresses = 2 * sizeof(void*);  // of the one model's W_UK and W_UV
  constexpr int64_t kHead = int64_t{ExpandedEngine::kDim} * ExpandedEngine::kLora * 2;
  // Addresses, which are for the kernels, come first until they have been taken; then W_UK and W_UV
  // of a head follow one another.
  const struct {
    int after;
    int64_t last_bytes;  // of the copy before the one that fails
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

// The two ways to lose a device: it answers no more, or with the same error for ever.
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
  ASSERT_TRUE(gpu->harness().core().StartLaunch());
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
  // Nothing else has been failed: the other step is there, and so is its sequence.
  EXPECT_TRUE(gpu->harness().Get(b.id).in_step);
  EXPECT_EQ(gpu->harness().core().Stats().steps_aborted, 1u);
  // What is new is refused before it is staged.
  const auto begin = gpu->harness().Begin(gpu->stream(), 3, {{c.id, 1, 0, 1}});
  EXPECT_EQ(begin->status.code(), absl::StatusCode::kUnavailable) << begin->status;
  EXPECT_EQ(begin->detail.reason, "backend_unhealthy");
  control_->hang = control_->lost = false;  // the device is lost for good all the same
  const auto late = gpu->Attend(2, 0, 140, 2);
  gpu->Settle();
  EXPECT_EQ(late->status.code(), absl::StatusCode::kInternal) << late->status;
  EXPECT_EQ(gpu->harness().core().owned(), 0);
}

// From the engine's thread to the server's health: the watchdog reports it within its period.
TEST_P(LostDeviceTest, TurnsTheServersHealthOff) {
  scheduler::RealClock clock;
  scheduler::EngineOptions options;
  options.limits = ExpandedEngine::Limits();
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
  // So that the memory goes, which the fixture counts.
  control_->hang = control_->lost = false;
  engine->reset();
}

}  // namespace
}  // namespace mla::kernels::hip
