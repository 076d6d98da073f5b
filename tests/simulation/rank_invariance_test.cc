// The heads that a rank gets from a fused launch equal the heads that it gets alone, and the heads
// of a request for all heads. They are equal bit by bit if the CPU backend is deterministic,
// otherwise within the bounds for any two batches.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::simulation {
namespace {

using scheduler::StreamId;
using scheduler::testing::EngineHarness;
using scheduler::testing::MakeRow;
using scheduler::testing::Row;
using scheduler::testing::TestRequest;

constexpr int kHeads = 16;
constexpr int kLora = 64;
constexpr int kRowDim = kLora + 16;

std::unique_ptr<EngineHarness> MakeHarness(bool deterministic) {
  kernels::BackendOptions options;
  options.threads = 2;
  options.deterministic = deterministic;
  auto backend = kernels::CpuBackend::Create(options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  scheduler::testing::HarnessOptions harness;
  harness.limits = scheduler::testing::TinyLimits();
  harness.limits.kv_cache_bytes = 8 << 20;
  harness.limits.default_page_size = 16;
  harness.limits.max_sequence_rows = harness.limits.max_step_rows = 2048;
  harness.limits.max_pages_per_sequence = 128;
  harness.limits.max_heads = kHeads;
  harness.limits.max_row_dim = kRowDim;
  harness.limits.max_participants = kHeads;
  harness.limits.launch_rows = harness.limits.prefill_rows = 2048;
  harness.limits.launch_packed_rows = 64 * kHeads;
  harness.model = scheduler::testing::TinyModel();
  harness.model.geometry = {kHeads, kLora, kRowDim - kLora, 6, 5};
  harness.backend = *std::move(backend);
  return std::make_unique<EngineHarness>(std::move(harness));
}

std::vector<Row> Rows(int count, uint64_t key) {
  std::vector<Row> rows;
  for (int i = 0; i < count; ++i) rows.push_back(MakeRow(key + i, kRowDim));
  return rows;
}

struct Case {
  int ranks, context, rows, neighbours;
};

// Outputs of heads [0, 16) of the step's rows when `ranks` streams each ask for their share.
std::vector<float> Answer(bool deterministic, const Case& c, int ranks) {
  auto h = MakeHarness(deterministic);
  std::vector<StreamId> streams;
  for (int i = 0; i < ranks; ++i) streams.push_back(h->core().steps().OpenStream(h->tenant()));
  const auto seq = h->Open();
  h->Begin(streams[0], 1, {{seq.id, 1, 0, c.context}});
  auto kv = h->AppendOnly(streams[0], 1, 0, 0, Rows(c.context, 1));
  auto above = h->AppendOnly(streams[0], 1, 1, 0, Rows(c.context, 1));
  h->Run();
  EXPECT_TRUE(h->End(streams[0], 1)->status.ok());
  for (const StreamId stream : streams) {
    EXPECT_TRUE(h->Begin(stream, 2, {{seq.id, 1, c.context, c.rows}}, ranks)->status.ok());
  }
  // With several ranks, other requests share the launch.
  std::vector<std::unique_ptr<TestRequest>> others;
  for (int i = 0; ranks > 1 && i < c.neighbours; ++i) {
    const auto other = h->Open();
    EXPECT_TRUE(h->Begin(streams[0], 10 + uint64_t(i), {{other.id, 1, 0, 3 + i}})->status.ok());
    others.push_back(h->Attend(streams[0], 10 + uint64_t(i), 0, 0, Rows(3 + i, 90), 11));
  }
  const int heads = kHeads / ranks;
  const std::vector<Row> fresh = Rows(c.rows, 5000);
  std::vector<std::unique_ptr<TestRequest>> slices;
  for (int i = 0; i < ranks; ++i) {
    slices.push_back(h->Slice(streams[i], 2, 0, 0, c.rows, i == 0 ? fresh : std::vector<Row>(),
                              i * heads, heads, 7));
  }
  h->Run();
  std::vector<float> all;
  for (int row = 0; row < c.rows; ++row) {
    for (const auto& slice : slices) {
      EXPECT_TRUE(slice->answered() && slice->status.ok()) << slice->status;
      const auto first = slice->output.begin() + row * heads * kLora;
      all.insert(all.end(), first, first + heads * kLora);
    }
  }
  EXPECT_EQ(h->core().Stats().slices_fused, ranks > 1 ? uint64_t(ranks) : 0u);
  return all;
}

TEST(RankInvariance, FusedHeadsAreThoseOfTheWholeRequest) {
  std::mt19937_64 random(17);
  for (int i = 0; i < 24; ++i) {
    Case c;
    c.ranks = 2 << random() % 3;
    c.context = 1 + static_cast<int>(random() % 1500);
    c.rows = 1 + static_cast<int>(random() % 4);
    c.neighbours = static_cast<int>(random() % 3);
    for (const bool deterministic : {false, true}) {
      const std::vector<float> whole = Answer(deterministic, c, 1);
      const std::vector<float> fused = Answer(deterministic, c, c.ranks);
      ASSERT_EQ(whole.size(), fused.size());
      if (deterministic) {
        EXPECT_EQ(whole, fused) << c.ranks << " ranks, context " << c.context;
        continue;
      }
      for (size_t first = 0; first < whole.size(); first += kLora) {
        double largest = 0, dot = 0, a = 0, b = 0, off = 0;
        for (size_t k = first; k < first + kLora; ++k) {
          largest = std::max(largest, std::abs(double{whole[k]}));
          off = std::max(off, std::abs(double{whole[k]} - fused[k]));
          dot += double{whole[k]} * fused[k];
          a += double{whole[k]} * whole[k];
          b += double{fused[k]} * fused[k];
        }
        EXPECT_LE(off, largest / 128);
        EXPECT_LT(1 - dot / std::sqrt(a * b), 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace mla::simulation
