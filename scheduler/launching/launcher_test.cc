// Launches whose plans have fixed cuts: bounded buffers suffice for every batch, and answers do not
// depend on the rest of the batch. Layers also keep the records of the layer before.
#include "scheduler/launching/launch_sizes.h"

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/host_memory/host_backend.h"
#include "scheduler/launching/launcher.h"
#include "scheduler/planning/planner.h"
#include "scheduler/testing/engine_harness.h"
#include "scheduler/testing/heap_buffers.h"

namespace mla::scheduler {
namespace {

std::unique_ptr<kernels::CpuBackend> Deterministic() {
  kernels::BackendOptions options;
  options.threads = 2;
  options.pin_threads = false;
  options.deterministic = true;
  return *kernels::CpuBackend::Create(options);
}

TEST(LauncherTest, DefaultLimitsTakeBoundedMemoryWithFixedCuts) {
  const auto backend = Deterministic();
  const Limits limits;
  const EngineBytes bytes = Engine::CountBytes(limits, *backend);
  // A CPU that multiplies fp32 alone holds weights as such.
  const bool wide = backend->Info().absorbed_q_of_bf16 == kernels::DType::kF32;
  const int64_t weights = limits.weights_bytes * (wide ? 2 : 1);
  EXPECT_LT(bytes.host, limits.kv_cache_bytes + weights + (int64_t{1} << 30));
  const PieceBudget budget = PieceBudgetOf(limits, *backend);
  EXPECT_EQ(budget.split_rows, 2048);
  EXPECT_EQ(budget.piece_rows, limits.launch_packed_rows);
  EXPECT_EQ(PlanCapacityOf(limits, *backend).partial_rows, budget.piece_rows);
}

// Fills a batch with random requests as BatchPolicy would, until nothing more fits.
std::vector<PlanSegment> RandomBatch(const Limits& limits, const PieceBudget& budget,
                                     std::mt19937& random) {
  const auto below = [&random](int64_t n) { return static_cast<int64_t>(random() % n); };
  std::vector<PlanSegment> batch;
  int64_t rows = 0, packed = 0, pieces = 0;
  const int64_t longest = below(4) == 0 ? limits.max_sequence_rows : 1 + below(3 * 2048);
  const int64_t most_rows = below(2) == 0 ? 1 : 1 + below(limits.launch_rows);
  const bool equal = below(2) == 0;
  for (int tries = 0; tries < 2000 && static_cast<int>(batch.size()) < limits.launch_requests;
       ++tries) {
    PlanSegment request;
    request.num_heads =
        static_cast<int32_t>(equal ? limits.max_heads : 1 + below(limits.max_heads));
    request.kv_rows = static_cast<int32_t>(equal ? longest : 1 + below(longest));
    const int64_t row_pieces = request.num_heads * budget.pieces(request.kv_rows);
    int64_t fit =
        std::min<int64_t>({1 + below(most_rows), request.kv_rows, limits.launch_rows - rows,
                           (limits.launch_packed_rows - packed) / request.num_heads});
    if (row_pieces > 0) fit = std::min(fit, (budget.piece_rows - pieces) / row_pieces);
    if (fit <= 0) continue;
    request.q_rows = static_cast<int32_t>(fit);
    rows += fit;
    packed += fit * request.num_heads;
    pieces += fit * row_pieces;
    batch.push_back(request);
  }
  return batch;
}

TEST(LauncherTest, PlansOfAnyBatchWithinTheBudgetFit) {
  std::mt19937 random(11);
  const auto backend = Deterministic();
  int64_t cut = 0;
  for (int round = 0; round < 300; ++round) {
    Limits limits;
    limits.max_heads = 1 << random() % 8;
    limits.launch_rows = 1 + static_cast<int32_t>(random() % 4096);
    limits.launch_packed_rows =
        limits.max_heads + static_cast<int32_t>(random() % (16 * limits.launch_rows));
    limits.launch_requests = 1 + static_cast<int32_t>(random() % 512);
    limits.max_sequence_rows = 1 + static_cast<int32_t>(random() % 163840);
    const PieceBudget budget = PieceBudgetOf(limits, *backend);
    ASSERT_GE(budget.piece_rows, limits.max_heads * budget.pieces(limits.max_sequence_rows));
    const PlanCapacity capacity = PlanCapacityOf(limits, *backend);
    const auto buffers = testing::MakeBuffers(capacity);
    Planner planner;
    for (int i = 0; i < 4; ++i) {
      const std::vector<PlanSegment> batch = RandomBatch(limits, budget, random);
      for (const auto form :
           {kernels::AttentionForm::kAbsorbed, kernels::AttentionForm::kExpanded}) {
        kernels::AttentionDesc desc;
        desc.form = form;
        const auto view = planner.Build(batch, backend->Traits(desc), *buffers);
        ASSERT_TRUE(view.ok()) << view.status() << " in round " << round;
        cut += !view->reduce_final_map.empty();
      }
    }
  }
  EXPECT_GT(cut, 300);
}

// Cuts tiles for many units where products are of 8 bits, and for one else.
class ManyUnitsForProducts final : public kernels::HostBackend {
 public:
  ManyUnitsForProducts() {
    info_.fp8_products = true;
    info_.kv_formats = {kernels::KvFormat::kBf16, kernels::KvFormat::kFp8Row};
  }
  const kernels::BackendInfo& Info() const override { return info_; }
  kernels::PlanTraits Traits(const kernels::AttentionDesc& desc) const override {
    kernels::PlanTraits traits;
    traits.units = desc.products == kernels::DType::kFp8E4m3 ? 64 : 1;
    return traits;
  }
  int32_t ExpandedFormMinRows(const kernels::Geometry&) const override { return 1 << 30; }

 private:
  int64_t OwnWorkspaceSize(const kernels::BackendLimits&) const override { return 0; }
  absl::Status ConfigureOwn(const kernels::BackendLimits&) override { return absl::OkStatus(); }
  int64_t PackedWeightBytes(const kernels::Geometry&, int32_t) const override { return 0; }
  void PackWeights(const kernels::Geometry&, int32_t, const kernels::Bf16*, const kernels::Bf16*,
                   std::byte*) const override {}
  void UnpackWeights(const kernels::Geometry&, const std::byte*, kernels::Bf16*,
                     kernels::Bf16*) const override {}
  void Start(int32_t, const kernels::Launch&) override {}
  bool Finished(int32_t) override { return true; }
  absl::StatusOr<int64_t> Finish(int32_t) override { return 0; }

  kernels::BackendInfo info_;
};

TEST(LauncherTest, PlansForProductsOf8BitsFit) {
  const ManyUnitsForProducts backend;
  Limits limits;
  limits.max_heads = 16;
  limits.max_sequence_rows = 65536;
  const PlanCapacity capacity = PlanCapacityOf(limits, backend);
  const auto buffers = testing::MakeBuffers(capacity);
  Planner planner;
  for (const auto form : {kernels::AttentionForm::kAbsorbed, kernels::AttentionForm::kExpanded}) {
    kernels::AttentionDesc desc;
    desc.form = form;
    desc.kv_format = kernels::KvFormat::kFp8Row;
    desc.products = kernels::DType::kFp8E4m3;
    const std::vector<PlanSegment> batch = {{1, 65536, 16}, {3, 65536, 16}};
    const auto view = planner.Build(batch, backend.Traits(desc), *buffers);
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_FALSE(view->reduce_final_map.empty());
  }
}

TEST(LauncherTest, SeenKeysAreAveragedOverRowsAndHeads) {
  EXPECT_EQ(MeanSeenKeys({}), 0);
  kernels::SegmentRecord prefill{}, decode{};
  prefill.q_rows = prefill.kv_rows = 1000;
  prefill.num_heads = 4;
  prefill.causal = 1;
  decode.q_rows = 1;
  decode.kv_rows = 100000;
  decode.num_heads = 4000;
  EXPECT_EQ(MeanSeenKeys({&prefill, 1}), 500);
  const kernels::SegmentRecord both[] = {prefill, decode};
  EXPECT_EQ(MeanSeenKeys(both), (500 + 100000) / 2);
  prefill.causal = 0;
  EXPECT_EQ(MeanSeenKeys({&prefill, 1}), 1000);
}

constexpr int kHeads = 16;
constexpr int kRowDim = 80;

std::vector<testing::Row> Rows(int count, uint64_t key) {
  std::vector<testing::Row> rows;
  for (int i = 0; i < count; ++i) {
    rows.push_back(testing::MakeRow(key + static_cast<uint64_t>(i), kRowDim));
  }
  return rows;
}

// Outputs of 24 rows whose contexts end before and after the first cut. The launch also has
// `beside` rows of another sequence, before them.
std::vector<float> Answer(int beside) {
  testing::HarnessOptions options;
  options.limits = testing::TinyLimits();
  options.limits.kv_cache_bytes = 8 << 20;
  options.limits.default_page_size = 16;
  options.limits.max_sequence_rows = options.limits.max_step_rows = 4096;
  options.limits.max_pages_per_sequence = 256;
  options.limits.max_heads = kHeads;
  options.limits.max_row_dim = kRowDim;
  options.limits.launch_rows = options.limits.prefill_rows = 64;
  options.limits.launch_packed_rows = 64 * kHeads;
  options.model = testing::TinyModel();
  options.model.geometry = {kHeads, 64, kRowDim - 64, 6, 5};
  options.backend = Deterministic();
  testing::EngineHarness h(std::move(options));
  const StreamId stream = h.core().steps().OpenStream(h.tenant());
  std::vector<SequenceInfo> sequences = {h.Open(), h.Open()};
  constexpr int kCached = 2040;
  StepId step = 1;
  for (const SequenceInfo& sequence : sequences) {
    h.Begin(stream, step, {{sequence.id, 1, 0, kCached}});
    auto first = h.AppendOnly(stream, step, 0, 0, Rows(kCached, 1));
    auto second = h.AppendOnly(stream, step, 1, 0, Rows(kCached, 1));
    h.Run();
    EXPECT_TRUE(h.End(stream, step++)->status.ok());
  }
  std::unique_ptr<testing::TestRequest> other;
  if (beside > 0) {
    h.Begin(stream, step, {{sequences[0].id, 1, kCached, beside}});
    other = h.Attend(stream, step++, 0, 0, Rows(beside, 7000), 9);
  }
  h.Begin(stream, step, {{sequences[1].id, 1, kCached, 24}});
  auto request = h.Attend(stream, step, 0, 0, Rows(24, 5000), 7);
  h.Run();
  EXPECT_TRUE(request->answered() && request->status.ok()) << request->status;
  return request->output;
}

TEST(LauncherTest, WithFixedCutsAnAnswerDoesNotDependOnTheBatch) {
  const std::vector<float> alone = Answer(0);
  ASSERT_EQ(alone.size(), size_t{24} * kHeads * 64);
  for (const int beside : {30, 50, 59, 61, 64}) EXPECT_EQ(Answer(beside), alone) << beside;
}

// Outputs of steps of three sequences at all layers in turn. `disturbed`: the cache changes between
// launches, so that no launch keeps the records of the one before.
std::vector<float> Layers(bool disturbed) {
  testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr, nullptr};
  options.model.layers = 4;
  options.limits.launch_rows = options.limits.prefill_rows = 16;  // a layer is one launch
  testing::EngineHarness h(std::move(options));
  const StreamId stream = h.core().steps().OpenStream(h.tenant());
  std::vector<StepSequenceArgs> begin;
  for (const int rows : {1, 3, 2}) begin.push_back({h.Open().id, 1, 0, rows});
  std::vector<float> all;
  for (StepId step = 1; step <= 3; ++step) {
    EXPECT_TRUE(h.Begin(stream, step, begin)->status.ok());
    for (int layer = 0; layer < 4; ++layer) {
      const auto rows = testing::Rows(6, 10 * step + static_cast<uint64_t>(layer));
      const auto request = h.Attend(stream, step, layer, 0, rows, 5);
      h.Run();
      EXPECT_TRUE(request->answered() && request->status.ok()) << request->status;
      all.insert(all.end(), request->output.begin(), request->output.end());
      if (!disturbed) continue;
      const SequenceId other = h.Open().id;
      std::vector<SequenceId> not_found;
      EXPECT_EQ(h.core().sequences().Release(h.tenant(), {&other, 1}, &not_found), 1);
    }
    EXPECT_TRUE(h.End(stream, step)->status.ok());
    for (StepSequenceArgs& sequence : begin) sequence.start_position += sequence.rows;
  }
  return all;
}

TEST(LauncherTest, RecordsKeptForTheNextLayerGiveTheSameAnswers) {
  const std::vector<float> kept = Layers(false);
  ASSERT_EQ(kept.size(), size_t{3} * 4 * 6 * 2 * 8);
  EXPECT_EQ(kept, Layers(true));
}

}  // namespace
}  // namespace mla::scheduler
