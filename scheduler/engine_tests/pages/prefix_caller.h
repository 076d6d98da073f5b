// Runs prompts through the prefix cache as engines do, and counts what that costs.
#ifndef MLA_SCHEDULER_ENGINE_TESTS_PAGES_PREFIX_CALLER_H_
#define MLA_SCHEDULER_ENGINE_TESTS_PAGES_PREFIX_CALLER_H_

#include <time.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::scheduler::testing {

inline constexpr int32_t kPromptRows = 45;

inline Limits PrefixCallerLimits() {
  Limits limits = TinyLimits();
  limits.max_models = 8;
  limits.max_step_rows = limits.launch_rows = limits.prefill_rows = 48;
  limits.launch_packed_rows = 96;
  return limits;
}

// Work of the engine for one prompt.
struct PrefixWork {
  int64_t nanos = 0;  // processor time of the engine's thread
  uint64_t launches = 0, rows = 0, page_groups = 0;
};

class PrefixCaller {
 public:
  PrefixCaller(EngineHarness* engine, const std::string& tenant, const std::string& salt)
      : engine_(*engine), tenant_(tenant), salt_(salt) {
    EngineCore& core = engine_.core();
    account_ = *core.tenants().Enter(tenant);
    EXPECT_TRUE(core.models().Register(account_->key(), engine_.model()).ok());
    stream_ = core.steps().OpenStream(tenant);
    rows_.resize(kPromptRows * static_cast<size_t>(engine_.model().geometry.kv_row_dim()));
  }

  // Runs a prompt, from its tokens until its last row is stored. Its rows stay in the cache.
  PrefixWork Run(uint32_t prompt) {
    OpenArgs args;
    args.tenant = tenant_;
    args.model_id = engine_.model().id;
    args.prefix.salt = salt_;
    args.prefix.max_rows = kPromptRows - 1;
    args.prefix.token_ids.resize(kPromptRows);
    std::iota(args.prefix.token_ids.begin(), args.prefix.token_ids.end(), prompt * kPromptRows);
    std::vector<TestRequest> layers(kLayers);
    TestRequest begin, end;
    const EngineStats before = engine_.core().Stats();
    const int64_t start = ThreadNanos();
    const SequenceInfo sequence = Open(args);
    const auto missing = static_cast<int32_t>(kPromptRows - sequence.length);
    begin.kind = RequestKind::kBeginStep;
    begin.begin.model_id = args.model_id;
    begin.begin.sequences = {{sequence.id, sequence.epoch, sequence.length, missing}};
    begin.begin.participants = 1;
    Submit(&begin);
    for (int layer = 0; layer < kLayers; ++layer) Append(layer, missing, &layers[layer]);
    engine_.Run();
    PrefixWork work;
    work.nanos = ThreadNanos() - start;
    const EngineStats after = engine_.core().Stats();
    work.launches = after.launches - before.launches;
    work.rows = static_cast<uint64_t>(missing);
    work.page_groups = after.page_groups_taken - before.page_groups_taken;
    end.kind = RequestKind::kEndStep;
    Submit(&end);
    for (const TestRequest* request : {&begin, &layers[0], &layers[1], &end}) {
      EXPECT_TRUE(request->answered() && request->status.ok()) << request->status;
    }
    std::vector<SequenceId> absent;
    engine_.core().sequences().Release(tenant_, std::vector{sequence.id}, &absent);
    rows_found_ += sequence.length;
    return work;
  }
  int64_t found() const { return rows_found_; }  // rows, in all

 private:
  static constexpr int kLayers = 2;

  // Returns the processor time of this thread, which neither other processes nor the network
  // disturb.
  static int64_t ThreadNanos() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  }
  SequenceInfo Open(const OpenArgs& args) {
    EngineCore& core = engine_.core();
    PrefixPlan plan;
    plan.spec = (*core.models().Find(account_->key(), args.model_id, "model_id"))->spec;
    EXPECT_TRUE(planner_.Fill(tenant_, args.prefix, 0, 0, &plan).ok());
    auto opened = core.sequences().Open(args, plan);
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
  const PrefixPlanner planner_{kvcache::PrefixSecret{}, PrefixCallerLimits()};
  TenantRef account_;
  StreamId stream_ = 0;
  std::vector<kernels::Bf16> rows_;
  int64_t rows_found_ = 0;
};

}  // namespace mla::scheduler::testing

#endif  // MLA_SCHEDULER_ENGINE_TESTS_PAGES_PREFIX_CALLER_H_
