// Whether a caller learns from the time of its own calls what another one has in the prefix cache.
//
// In each trial a victim lets one of two prompts be cached, by chance; then an attacker runs both,
// in an order by chance, each as a worker does it: it opens a sequence with what the rows stand
// for and sends those that are not there. It takes the prompt for the victim's that was quicker.
// By guessing it is right in half of the trials.
//
// The attacker is better off than any over a network: the engine runs in its thread, and it reads
// that thread's processor time, which neither other processes nor the network disturb.
//
// It is of another tenant, or of the same with another salt: there it must not do better than
// guessing. In the control it is of the same tenant without salts, where rows are shared: there it
// must be right nearly always, or the test would show nothing. Trials of all three are interleaved.
// With MLA_TEST_LONG there are 160,000 of each.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::scheduler {
namespace {

using testing::EngineHarness;
using testing::TestRequest;

constexpr int32_t kRows = 45;  // of a prompt
constexpr int kLayers = 2;
// Standard deviations: of a two-sided interval of 99.9 %, and what guessing may be off by, which
// happens once in 15,000 runs.
constexpr double kInterval = 3.29, kGuessing = 4;

int Trials() { return std::getenv("MLA_TEST_LONG") != nullptr ? 160'000 : 4'000; }

Limits LimitsOfTest() {
  Limits limits = testing::TinyLimits();
  limits.max_models = 8;
  limits.max_step_rows = limits.launch_rows = limits.prefill_rows = 48;
  limits.launch_packed_rows = 96;
  return limits;
}

int64_t ThreadNanos() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

class Caller {
 public:
  Caller(EngineHarness* engine, const std::string& tenant, const std::string& salt)
      : engine_(*engine), tenant_(tenant), salt_(salt) {
    EngineCore& core = engine_.core();
    account_ = *core.tenants().Enter(tenant);
    EXPECT_TRUE(core.models().Register(account_->key(), engine_.model()).ok());
    stream_ = core.OpenStream(tenant);
    rows_.resize(kRows * static_cast<size_t>(engine_.model().geometry.kv_row_dim()));
  }

  // A prompt, from its tokens until its last row is stored; in nanoseconds of the thread. Its rows
  // stay in the cache.
  int64_t Run(uint32_t prompt) {
    OpenArgs args;
    args.tenant = tenant_;
    args.model_id = engine_.model().id;
    args.prefix.salt = salt_;
    args.prefix.max_rows = kRows - 1;
    args.prefix.token_ids.resize(kRows);
    std::iota(args.prefix.token_ids.begin(), args.prefix.token_ids.end(), prompt * kRows);
    std::vector<TestRequest> layers(kLayers);
    TestRequest begin, end;
    const int64_t start = ThreadNanos();
    const SequenceInfo sequence = Open(args);
    const auto missing = static_cast<int32_t>(kRows - sequence.length);
    begin.kind = RequestKind::kBeginStep;
    begin.begin.model_id = args.model_id;
    begin.begin.sequences = {{sequence.id, sequence.epoch, sequence.length, missing}};
    begin.begin.participants = 1;
    Submit(&begin);
    for (int layer = 0; layer < kLayers; ++layer) Append(layer, missing, &layers[layer]);
    engine_.Run();
    const int64_t nanos = ThreadNanos() - start;
    end.kind = RequestKind::kEndStep;
    Submit(&end);
    for (const TestRequest* request : {&begin, &layers[0], &layers[1], &end}) {
      EXPECT_TRUE(request->answered() && request->status.ok()) << request->status;
    }
    std::vector<SequenceId> absent;
    engine_.core().ReleaseSequences(tenant_, std::vector{sequence.id}, &absent);
    found_ += sequence.length;
    return nanos;
  }
  int64_t found() const { return found_; }  // rows, in all

 private:
  SequenceInfo Open(const OpenArgs& args) {
    EngineCore& core = engine_.core();
    PrefixPlan plan;
    plan.spec = (*core.models().Find(account_->key(), args.model_id, "model_id"))->spec;
    EXPECT_TRUE(planner_.Fill(tenant_, args.prefix, 0, 0, &plan).ok());
    auto opened = core.OpenSequence(args, plan);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return *opened;
  }
  void Submit(TestRequest* request) {
    request->stream = stream_;
    request->step_id = 1;
    engine_.Submit(request);
  }
  void Append(int layer, int32_t rows, TestRequest* request) {
    request->attend.layer = layer;
    request->attend.row_count = rows;
    request->attend.num_heads = engine_.model().geometry.num_heads;
    request->attend.profile = Profile::kAppendOnly;
    request->attend.has_kv = true;
    request->attend.kv = reinterpret_cast<const std::byte*>(rows_.data());
    Submit(request);
  }

  EngineHarness& engine_;
  const std::string tenant_, salt_;
  const PrefixPlanner planner_{kvcache::PrefixSecret{}, LimitsOfTest()};
  TenantRef account_;
  StreamId stream_ = 0;
  std::vector<kernels::Bf16> rows_;
  int64_t found_ = 0;
};

struct Arm {
  const char* name;
  Caller victim, attacker;
  int right = 0;

  // Prompts of a trial are of no other.
  void Try(uint32_t prompts, std::mt19937_64* random) {
    const uint32_t secret = (*random)() % 2, first = (*random)() % 2;
    victim.Run(prompts + secret);
    const int64_t first_ns = attacker.Run(prompts + first);
    const int64_t second_ns = attacker.Run(prompts + 1 - first);
    const uint32_t guess = first_ns < second_ns ? first : 1 - first;
    if (guess == secret) ++right;
  }
};

TEST(PrefixTimingTest, NothingIsLearntOfAnotherTenantsOrSaltsPrompts) {
  EngineHarness engine({LimitsOfTest(), testing::TinyModel(), nullptr, nullptr});
  std::vector<std::unique_ptr<Arm>> arms;
  arms.emplace_back(new Arm{"another tenant", {&engine, "one", ""}, {&engine, "two", ""}});
  arms.emplace_back(new Arm{"another salt", {&engine, "three", "a"}, {&engine, "three", "b"}});
  arms.emplace_back(new Arm{"control: shared", {&engine, "four", ""}, {&engine, "four", ""}});
  const int trials = Trials();
  std::mt19937_64 random(20);
  for (int trial = 0; trial < trials; ++trial) {
    for (const auto& arm : arms) arm->Try(2 * static_cast<uint32_t>(trial), &random);
  }
  const double deviation = 0.5 / std::sqrt(trials);
  for (const auto& arm : arms) {
    const double share = static_cast<double>(arm->right) / trials;
    const double half = kInterval * std::sqrt(share * (1 - share) / trials);
    std::printf("%s: right in %.2f %% of %d trials, 99.9 %% interval %.2f to %.2f\n", arm->name,
                100 * share, trials, 100 * (share - half), 100 * (share + half));
    if (arm == arms.back()) {
      EXPECT_GE(share - half, 0.9);
      EXPECT_EQ(arm->attacker.found(), int64_t{trials} * (kRows - 1));
    } else {
      EXPECT_LE(share + half, std::max(0.51, 0.5 + (kGuessing + kInterval) * deviation))
          << arm->name;
      EXPECT_GE(share, 0.5 - kGuessing * deviation) << arm->name;
      EXPECT_EQ(arm->attacker.found(), 0) << arm->name;
    }
  }
}

}  // namespace
}  // namespace mla::scheduler
