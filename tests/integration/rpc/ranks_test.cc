// Tensor-parallel ranks through a real server: each a client of its own with a share of the heads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

#include "client/cpp/streams/errors.h"
#include "tests/integration/dense_model.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

constexpr int kSteps = 4;
constexpr uint32_t kRows = 2;
constexpr double kTolerance = 0.01;

Dims RankDims() {
  Dims dims;
  dims.heads = 16;
  return dims;
}

class RankGroup {
 public:
  RankGroup(const TestServer& server, int ranks, uint64_t first_step = 100,
            const client::ClientOptions& options = {})
      : dims_(RankDims()), random_(17), step_id_(first_step) {
    for (int i = 0; i < ranks; ++i) {
      clients_.push_back(server.Connect(options));
      sessions_.push_back(*clients_.back()->OpenSession());
    }
    EXPECT_TRUE(clients_[0]->RegisterModel(SpecOf(dims_, "m")).ok());
    sequence_ = std::make_unique<client::Sequence>(*clients_[0]->OpenSequence("m"));
  }

  int ranks() const { return static_cast<int>(sessions_.size()); }
  int heads() const { return dims_.heads / ranks(); }
  client::Client& client() { return *clients_[0]; }
  // Ends a rank as a crash would: its stream is closed.
  void Lose(int rank) {
    steps_[static_cast<size_t>(rank)].reset();
    sessions_[static_cast<size_t>(rank)].reset();
  }

  absl::Status Begin() {
    client::BeginOptions options;
    options.step_id = ++step_id_;
    options.participants = static_cast<uint32_t>(ranks());
    steps_.clear();
    for (const auto& session : sessions_) {
      auto step = session->Begin("m", {{sequence_.get(), kRows}}, options);
      if (!step.ok()) return step.status();
      steps_.push_back(*std::move(step));
    }
    return absl::OkStatus();
  }

  // Sends the slices of all ranks except `missing`; rank 0 sends last, with the KV rows.
  void Send(uint32_t layer, int missing = -1) {
    if (cache_.size() <= layer) cache_.resize(layer + 1);
    kv_ = RandomBf16(kRows * static_cast<size_t>(dims_.row()), &random_);
    cache_[layer].insert(cache_[layer].end(), kv_.begin(), kv_.end());
    calls_.clear();
    calls_.resize(sessions_.size());
    for (int i = ranks() - 1; i >= 0; --i) {
      if (i != missing) SendOne(layer, i);
    }
  }
  void SendOne(uint32_t layer, int rank) {
    Slice& slice = calls_[static_cast<size_t>(rank)];
    const auto packed = kRows * static_cast<size_t>(heads());
    slice.q = RandomBf16(packed * static_cast<size_t>(dims_.row()), &random_);
    slice.o.assign(packed * static_cast<size_t>(dims_.lora), -1.0f);
    slice.lse.assign(packed, -1.0f);
    client::AttendCall call;
    call.layer = layer;
    call.row_count = kRows;
    call.head_offset = static_cast<uint32_t>(rank * heads());
    call.num_heads = static_cast<uint32_t>(heads());
    call.profile = v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = rank == 0 ? kv_.data() : nullptr;
    call.q = slice.q.data();
    call.o = slice.o.data();
    call.lse = slice.lse.data();
    slice.pending = std::make_unique<client::PendingAttend>(
        steps_[static_cast<size_t>(rank)]->AttendAsync(call));
  }
  absl::Status Wait(int rank) { return calls_[static_cast<size_t>(rank)].pending->Wait().status(); }
  // Largest difference between a rank's outputs and the dense model's.
  double Error(uint32_t layer, int rank) const {
    const Slice& slice = calls_[static_cast<size_t>(rank)];
    const size_t row_dim = static_cast<size_t>(dims_.row());
    const size_t lora = static_cast<size_t>(dims_.lora);
    const size_t rows = cache_[layer].size() / row_dim;
    double worst = 0;
    for (size_t p = 0; p < slice.lse.size(); ++p) {
      std::vector<double> q(row_dim);
      for (size_t d = 0; d < row_dim; ++d) q[d] = FromBf16(slice.q[p * row_dim + d]);
      const int position = static_cast<int>(rows - kRows + p / static_cast<size_t>(heads()));
      double lse = 0;
      const std::vector<double> want = DenseAbsorbed(dims_, cache_[layer], position, q, &lse);
      worst = std::max(worst, std::abs(lse - double{slice.lse[p]}));
      for (size_t d = 0; d < lora; ++d) {
        worst = std::max(worst, std::abs(want[d] - double{slice.o[p * lora + d]}));
      }
    }
    return worst;
  }
  absl::Status End() { return steps_[0]->End().status(); }
  const client::Sequence& sequence() const { return *sequence_; }

 private:
  struct Slice {
    std::vector<uint16_t> q;
    std::vector<float> o, lse;
    std::unique_ptr<client::PendingAttend> pending;
  };

  const Dims dims_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<client::Client>> clients_;
  std::vector<std::unique_ptr<client::Session>> sessions_;
  std::unique_ptr<client::Sequence> sequence_;
  std::vector<std::unique_ptr<client::Step>> steps_;
  std::vector<Slice> calls_;
  std::vector<uint16_t> kv_;
  std::vector<std::vector<uint16_t>> cache_;  // by layer
  uint64_t step_id_;
};

std::function<void(server::Config&)> WithWait(int64_t us) {
  return [us](server::Config& config) {
    config.limits.max_participants = 8;
    config.limits.slice_wait_us = us;
  };
}

class RanksTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RanksTest, ::testing::Values(2, 4, 8));

// One step of two layers in which all ranks ask at once.
void RunStep(RankGroup* ranks) {
  ASSERT_EQ(ranks->Begin(), absl::OkStatus());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    ranks->Send(layer);
    for (int i = 0; i < ranks->ranks(); ++i) {
      ASSERT_EQ(ranks->Wait(i), absl::OkStatus()) << "rank " << i;
      EXPECT_LT(ranks->Error(layer, i), kTolerance) << "rank " << i << " layer " << layer;
    }
  }
  ASSERT_EQ(ranks->End(), absl::OkStatus());
}

TEST_P(RanksTest, OneCopyOfTheRowsServesAll) {
  // Long enough that a missing rank would show by the time it takes.
  const TestServer server(WithWait(1000000));
  RankGroup ranks(server, GetParam());
  const auto rows_of = [](const v1::GetStatsReply& stats) {
    return stats.rows_decode() + stats.rows_extend() + stats.rows_prefill();
  };
  const uint64_t warm_up = rows_of(*ranks.client().GetStats());
  for (int step = 0; step < kSteps; ++step) {
    ASSERT_NO_FATAL_FAILURE(RunStep(&ranks));
  }
  const auto stats = ranks.client().GetStats();
  ASSERT_TRUE(stats.ok());
  // Eight rows in pages of four, whichever rank sent them; each row is computed once a layer.
  EXPECT_EQ(stats->page_groups_used(), 2u);
  EXPECT_EQ(rows_of(*stats) - warm_up, 2u * kSteps * kRows);
  EXPECT_EQ(stats->slices_fused(), static_cast<uint64_t>(2 * kSteps * ranks.ranks()));
  EXPECT_EQ(stats->slice_waits_expired(), 0u);
}

// Slices are gathered even if the backend reads queries in place, because they must be adjacent to
// their siblings' slices.
TEST_P(RanksTest, SlicesOverGrpcAreGathered) {
  const TestServer server([](server::Config& config) {
    WithWait(1000000)(config);
    config.backend = "cpu";
  });
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kInline;
  RankGroup ranks(server, GetParam(), 100, options);
  const uint64_t before = ranks.client().GetStats()->copied_bytes();
  ASSERT_NO_FATAL_FAILURE(RunStep(&ranks));
  const auto stats = ranks.client().GetStats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->slices_fused(), static_cast<uint64_t>(2 * ranks.ranks()));
  const Dims dims = RankDims();
  const auto row_bytes = static_cast<uint64_t>(dims.row()) * 2;
  EXPECT_EQ(stats->copied_bytes() - before,
            2 * kRows * row_bytes * (1 + static_cast<uint64_t>(dims.heads)));
}

TEST_P(RanksTest, ALateRankCostsTheBoundAndOthersNothing) {
  using Clock = std::chrono::steady_clock;
  const TestServer server(WithWait(300000));
  RankGroup ranks(server, GetParam());
  RankGroup others(server, 2, 500);
  const int late = ranks.ranks() - 1;
  ASSERT_EQ(ranks.Begin(), absl::OkStatus());
  const auto sent = Clock::now();
  ranks.Send(0, late);
  // During that time another worker's ranks complete a step.
  ASSERT_EQ(others.Begin(), absl::OkStatus());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    others.Send(layer);
    for (int i = 0; i < 2; ++i) ASSERT_EQ(others.Wait(i), absl::OkStatus());
  }
  ASSERT_EQ(others.End(), absl::OkStatus());
  ASSERT_EQ(ranks.Wait(0), absl::OkStatus());
  const auto waited = Clock::now() - sent;
  EXPECT_GE(waited, std::chrono::milliseconds(290));
  EXPECT_LT(waited, std::chrono::seconds(5));  // shorter than kv_wait_ms or a lease
  EXPECT_LT(ranks.Error(0, 0), kTolerance);
  ranks.SendOne(0, late);
  ASSERT_EQ(ranks.Wait(late), absl::OkStatus());
  EXPECT_LT(ranks.Error(0, late), kTolerance);
  EXPECT_GE(ranks.client().GetStats()->slice_waits_expired(), 1u);
}

TEST_P(RanksTest, ALostRankEndsTheStepForAll) {
  const TestServer server(WithWait(1000000));
  RankGroup ranks(server, GetParam());
  ASSERT_EQ(ranks.Begin(), absl::OkStatus());
  const int lost = ranks.ranks() - 1;
  ranks.Send(0, lost);
  ranks.Lose(lost);
  for (int i = 0; i < lost; ++i) {
    const absl::Status status = ranks.Wait(i);
    EXPECT_TRUE(status.code() == absl::StatusCode::kCancelled ||
                status.code() == absl::StatusCode::kAborted)
        << status;
  }
  EXPECT_FALSE(ranks.End().ok());
  const auto list = ranks.client().GetSequences({ranks.sequence().id()}, false);
  ASSERT_TRUE(list.ok());
  EXPECT_EQ(list->sequences(0).length(), 0u);
  EXPECT_EQ(ranks.client().GetStats()->page_groups_used(), 0u);
}

}  // namespace
}  // namespace mla::integration
