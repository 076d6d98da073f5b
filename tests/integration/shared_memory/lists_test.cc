// Index lists of sparse attention on every transport: replies equal attention over the rows that
// the lists name.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "client/cpp/session.h"
#include "client/cpp/streams/errors.h"
#include "tests/integration/dense_model.h"
#include "tests/integration/shared_memory/shared_memory_harness.h"

namespace mla::integration {
namespace {

using client::ClientOptions;
using Transport = client::ClientOptions::Transport;

constexpr uint32_t kTopK = 512;

class ListsTest : public ::testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    client_ = server_.Connect(Over(GetParam()));
    v1::ModelSpec spec = SpecOf(dims_, "m");
    spec.set_attention(v1::ATTENTION_KIND_SPARSE_V32);
    spec.set_top_k(kTopK);
    const auto registered = client_->RegisterModel(spec);
    ASSERT_TRUE(registered.ok()) << registered.status();
    EXPECT_EQ(registered->model().top_k(), kTopK);
    session_ = *client_->OpenSession();
  }

  // Runs one step of `rows` rows at every layer with these lists, and compares the replies.
  absl::Status Step(client::Sequence* sequence, DenseCache* cache, uint32_t rows,
                    const client::IndexLists& lists,
                    const std::vector<std::vector<int32_t>>& positions) {
    auto step = session_->Begin("m", {{sequence, rows}});
    if (!step.ok()) return step.status();
    for (int layer = 0; layer < dims_.layers; ++layer) {
      const auto kv = RandomBf16(size_t{rows} * dims_.row(), &random_);
      const auto q = RandomBf16(size_t{rows} * dims_.heads * dims_.row(), &random_);
      std::vector<float> o(size_t{rows} * dims_.heads * dims_.lora), lse(rows * dims_.heads);
      auto& cached = cache->layer[static_cast<size_t>(layer)];
      cached.insert(cached.end(), kv.begin(), kv.end());
      client::AttendCall call;
      call.layer = static_cast<uint32_t>(layer);
      call.row_count = rows;
      call.num_heads = static_cast<uint32_t>(dims_.heads);
      call.profile = v1::PROFILE_ABSORBED;
      call.o_dtype = v1::DTYPE_F32;
      call.kv = kv.data();
      call.q = q.data();
      call.o = o.data();
      call.lse = lse.data();
      const auto times = (*step)->AttendSparse(call, lists);
      if (!times.ok()) return times.status();
      messages_ = times->messages;
      for (uint32_t row = 0; row < rows; ++row) Compare(cached, positions[row], row, q, o, lse);
    }
    return (*step)->End().status();
  }

  void Compare(const std::vector<uint16_t>& cached, const std::vector<int32_t>& positions,
               uint32_t row, const std::vector<uint16_t>& q, const std::vector<float>& o,
               const std::vector<float>& lse) {
    const auto dim = static_cast<size_t>(dims_.row());
    std::vector<uint16_t> named;
    for (const int32_t position : positions) {
      const auto* const first = cached.data() + static_cast<size_t>(position) * dim;
      named.insert(named.end(), first, first + dim);
    }
    for (size_t head = 0; head < static_cast<size_t>(dims_.heads); ++head) {
      const size_t packed = size_t{row} * dims_.heads + head;
      if (positions.empty()) {
        EXPECT_EQ(lse[packed], -INFINITY);
        EXPECT_EQ(o[packed * dims_.lora], 0.0f);
        continue;
      }
      std::vector<double> query;
      for (size_t i = 0; i < dim; ++i) query.push_back(FromBf16(q[packed * dim + i]));
      double want_lse = 0;
      const auto want =
          DenseAbsorbed(dims_, named, static_cast<int>(positions.size()) - 1, query, &want_lse);
      EXPECT_NEAR(lse[packed], want_lse, 1e-5);
      for (int i = 0; i < dims_.lora; ++i) {
        EXPECT_NEAR(o[packed * dims_.lora + i], want[static_cast<size_t>(i)], 1e-5);
      }
    }
  }

  const TestServer server_;
  const Dims dims_;
  std::mt19937_64 random_{7};
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Session> session_;
  uint32_t messages_ = 0;
};

TEST_P(ListsTest, AnswersAreThoseOfTheRowsNamed) {
  client::Sequence sequence = *client_->OpenSequence("m");
  DenseCache cache(dims_.layers);
  const std::vector<int32_t> ragged = {0, 1, 0, 3, 1};
  const std::vector<int32_t> begins = {0, 1, 3, 3, 5};
  EXPECT_EQ(
      Step(&sequence, &cache, 4, {ragged.data(), 0, begins.data()}, {{0}, {1, 0}, {}, {3, 1}}),
      absl::OkStatus());
  const std::vector<int32_t> fixed = {-1, 4, 4, 0, 5, -1, 2, -1};
  EXPECT_EQ(Step(&sequence, &cache, 2, {fixed.data(), 4, nullptr}, {{4, 0}, {5, 2}}),
            absl::OkStatus());
}

TEST_P(ListsTest, MessagesAreCutByTheBytesOfTheirLists) {
  client::Sequence sequence = *client_->OpenSequence("m");
  DenseCache cache(dims_.layers);
  constexpr uint32_t kRows = 560;
  std::vector<int32_t> fixed(size_t{kRows} * kTopK, -1);
  std::vector<std::vector<int32_t>> positions(kRows);
  for (uint32_t row = 0; row < kRows; ++row) {
    for (uint32_t i = 0; i < 5; ++i) {
      const auto position = static_cast<int32_t>((row * 7 + i * 131) % (row + 1));
      fixed[row * kTopK + (i * 97 + row) % kTopK] = position;
      if (std::find(positions[row].begin(), positions[row].end(), position) ==
          positions[row].end()) {
        positions[row].push_back(position);
      }
    }
  }
  EXPECT_EQ(Step(&sequence, &cache, kRows, {fixed.data(), kTopK, nullptr}, positions),
            absl::OkStatus());
  EXPECT_GE(messages_, 2u);
}

// An indexer of one head and one element, so that logits have the order of the keys.
TEST_P(ListsTest, TheServersIndexerChooses) {
  v1::ModelSpec spec = SpecOf(dims_, "i");
  spec.set_attention(v1::ATTENTION_KIND_SPARSE_V32);
  spec.set_top_k(3);
  spec.set_index_heads(1);
  spec.set_index_dim(1);
  ASSERT_TRUE(client_->RegisterModel(spec).ok());
  client::Sequence sequence = *client_->OpenSequence("i");
  const std::vector<float> sizes = {4, 1, 8, 8, 2, 8, 16, 0.5f};
  const std::vector<std::vector<int32_t>> want = {{0},       {0, 1},    {0, 1, 2}, {0, 2, 3},
                                                  {0, 2, 3}, {2, 3, 5}, {2, 3, 6}, {2, 3, 6}};
  constexpr uint32_t kRows = 8;
  const auto row_dim = static_cast<size_t>(dims_.row());
  auto step = session_->Begin("i", {{&sequence, kRows}});
  ASSERT_TRUE(step.ok()) << step.status();
  for (int layer = 0; layer < dims_.layers; ++layer) {
    const auto rows = RandomBf16(kRows * row_dim, &random_);
    const auto q = RandomBf16(kRows * dims_.heads * row_dim, &random_);
    std::vector<uint16_t> sent;  // rows, each followed by its key
    std::vector<uint16_t> index;
    for (size_t row = 0; row < kRows; ++row) {
      sent.insert(sent.end(), &rows[row * row_dim], &rows[row * row_dim] + row_dim);
      sent.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(sizes[row]) >> 16));
      index.insert(index.end(), {0x3f80, 0x0000, 0x3f80});  // a query of 1, its weight of 1.0f
    }
    std::vector<float> o(size_t{kRows} * dims_.heads * dims_.lora), lse(kRows * dims_.heads);
    std::vector<int32_t> chosen(kRows * 3);
    client::AttendCall call;
    call.layer = static_cast<uint32_t>(layer);
    call.row_count = kRows;
    call.num_heads = static_cast<uint32_t>(dims_.heads);
    call.profile = v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = sent.data();
    call.q = q.data();
    call.o = o.data();
    call.lse = lse.data();
    call.index_inputs = index.data();
    call.chosen = chosen.data();
    const auto times = (*step)->Attend(call);
    ASSERT_TRUE(times.ok()) << times.status();
    for (uint32_t row = 0; row < kRows; ++row) {
      std::vector<int32_t> padded = want[row];
      padded.resize(3, -1);
      EXPECT_EQ(std::vector<int32_t>(&chosen[row * 3], &chosen[row * 3] + 3), padded) << row;
      Compare(rows, want[row], row, q, o, lse);
    }
  }
  EXPECT_TRUE((*step)->End().ok());
}

TEST_P(ListsTest, PositionsThatTheRowDoesNotSeeAreRefused) {
  client::Sequence sequence = *client_->OpenSequence("m");
  DenseCache cache(dims_.layers);
  const std::vector<int32_t> fixed = {0, -1, 0, 2};
  const absl::Status status = Step(&sequence, &cache, 2, {fixed.data(), 2, nullptr}, {{0}, {0}});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client::DetailOf(status)->got(), "2 at row 1, slot 1 of the index lists");
  const std::vector<int32_t> good = {0};
  DenseCache empty(dims_.layers);
  EXPECT_EQ(Step(&sequence, &empty, 1, {good.data(), 1, nullptr}, {{0}}).code(),
            absl::StatusCode::kOk)
      << "the stream goes on, and the refused step left nothing";
}

INSTANTIATE_TEST_SUITE_P(Transports, ListsTest,
                         ::testing::Values(Transport::kInline, Transport::kShm, Transport::kRing,
                                           Transport::kUcx),
                         TransportName);

}  // namespace
}  // namespace mla::integration
