// Windows, entries and sinks on every transport: answers equal attention over the rows and entries
// that a row sees.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/session.h"
#include "client/cpp/streams/errors.h"
#include "tests/integration/dense_model.h"
#include "tests/integration/shared_memory/shared_memory_harness.h"

namespace mla::integration {
namespace {

using Transport = client::ClientOptions::Transport;

constexpr uint32_t kWindow = 6, kTopK = 8;
constexpr uint32_t kTailBytes = 100'000;  // more than one reply brings
constexpr uint32_t kRatios[] = {0, 4};

class WindowTest : public ::testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    client_ = server_.Connect(Over(GetParam()));
    v1::ModelSpec spec = SpecOf(dims_, "w");
    spec.mutable_geometry()->set_nope_dim(0);
    spec.mutable_geometry()->set_v_dim(0);
    spec.set_attention(v1::ATTENTION_KIND_SPARSE_V4);
    spec.set_window(kWindow);
    for (const uint32_t ratio : kRatios) spec.add_ratios(ratio);
    spec.set_top_k(kTopK);
    spec.set_tail_bytes(kTailBytes);
    for (int i = 0; i < dims_.layers * dims_.heads; ++i) {
      sinks_.push_back(0.25f * static_cast<float>(i));
    }
    const auto registered = client_->RegisterModel(spec, 0, {}, sinks_);
    ASSERT_TRUE(registered.ok()) << registered.status();
    EXPECT_EQ(registered->model().window(), kWindow);
    session_ = *client_->OpenSession();
  }

  struct Layer {
    std::vector<uint16_t> rows, entries;
  };

  // A step of `rows` rows; `lists`: of layer 1, by row, or empty: all entries.
  void Step(client::Sequence* sequence, uint32_t rows,
            const std::vector<std::vector<int32_t>>& lists = {}) {
    const uint64_t first = sequence->length();
    auto step = session_->Begin("w", {{sequence, rows}});
    ASSERT_TRUE(step.ok()) << step.status();
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const uint64_t made = (*step)->EntriesOf(layer, 0, rows);
      EXPECT_EQ(made, layer == 0 ? 0 : (first + rows) / 4 - first / 4);
      const size_t dim = static_cast<size_t>(dims_.row());
      const auto kv = RandomBf16((rows + made) * dim, &random_);
      const auto q = RandomBf16(rows * dims_.heads * dim, &random_);
      Layer& cached = layers_[layer];
      const auto middle = kv.begin() + static_cast<int64_t>(rows * dim);
      cached.rows.insert(cached.rows.end(), kv.begin(), middle);
      cached.entries.insert(cached.entries.end(), middle, kv.end());
      std::vector<float> o(rows * dims_.heads * dim), lse(rows * dims_.heads);
      client::AttendCall call;
      call.layer = layer;
      call.row_count = rows;
      call.num_heads = static_cast<uint32_t>(dims_.heads);
      call.profile = v1::PROFILE_ABSORBED;
      call.o_dtype = v1::DTYPE_F32;
      call.kv = kv.data();
      call.q = q.data();
      call.o = o.data();
      call.lse = lse.data();
      std::vector<int32_t> entries, begin = {0};
      for (const auto& list : lists) {
        entries.insert(entries.end(), list.begin(), list.end());
        begin.push_back(static_cast<int32_t>(entries.size()));
      }
      const bool listed = layer == 1 && !lists.empty();
      if (listed) call.lists = {entries.data(), 0, begin.data()};
      const auto times = (*step)->Attend(call);
      ASSERT_TRUE(times.ok()) << times.status();
      messages_ = times->messages;
      for (uint32_t row = 0; row<rows; row += rows> 100 ? 17 : 1) {
        Compare(layer, first + row + 1, listed ? &lists[row] : nullptr,
                std::span(q).subspan(row * dims_.heads * dim), &o[row * dims_.heads * dim],
                &lse[row * dims_.heads]);
      }
    }
    ASSERT_TRUE((*step)->End().ok());
  }

  void Compare(uint32_t layer, uint64_t visible, const std::vector<int32_t>* list,
               std::span<const uint16_t> q, const float* o, const float* lse) {
    const auto dim = static_cast<size_t>(dims_.row());
    Dims wide = dims_;
    wide.lora = dims_.row();  // all of a row is value
    wide.rope = 0;
    const Layer& cached = layers_[layer];
    const size_t from = visible < kWindow ? 0 : (visible - kWindow) * dim;
    std::vector<uint16_t> keys(cached.rows.begin() + static_cast<int64_t>(from),
                               cached.rows.begin() + static_cast<int64_t>(visible * dim));
    const auto add = [&](uint64_t entry) {
      const auto at = cached.entries.begin() + static_cast<int64_t>(entry * dim);
      keys.insert(keys.end(), at, at + static_cast<int64_t>(dim));
    };
    for (uint64_t entry = 0; layer == 1 && list == nullptr && entry < visible / 4; ++entry) {
      add(entry);
    }
    if (list != nullptr) {
      for (const int32_t entry : *list) add(static_cast<uint64_t>(entry));
    }
    for (size_t head = 0; head < static_cast<size_t>(dims_.heads); ++head) {
      std::vector<double> query;
      for (size_t i = 0; i < dim; ++i) query.push_back(FromBf16(q[head * dim + i]));
      double want_lse = 0;
      const auto want =
          DenseAbsorbed(wide, keys, static_cast<int>(keys.size() / dim) - 1, query, &want_lse);
      EXPECT_NEAR(lse[head], want_lse, 1e-5);
      const double sink = sinks_[layer * dims_.heads + head];
      const double factor = 1 / (1 + std::exp(sink - want_lse));
      for (size_t i = 0; i < dim; ++i) EXPECT_NEAR(o[head * dim + i], want[i] * factor, 1e-5);
    }
  }

  // Rows of both layers, with their entries, to none of which anything attends.
  void AppendRows(client::Step* step) {
    const auto dim = static_cast<size_t>(dims_.row());
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const uint64_t rows = step->total_rows(), made = step->EntriesOf(layer, 0, rows);
      const std::vector<uint16_t> kv((rows + made) * dim);
      client::AttendCall call;
      call.layer = layer;
      call.row_count = static_cast<uint32_t>(rows);
      call.profile = v1::PROFILE_APPEND_ONLY;
      call.kv = kv.data();
      ASSERT_TRUE(step->Attend(call).ok());
    }
  }
  std::vector<std::byte> RandomTail() {
    std::vector<std::byte> tail(kTailBytes);
    for (std::byte& value : tail) value = static_cast<std::byte>(random_());
    return tail;
  }
  static std::string Text(const std::vector<std::byte>& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  const TempFolder folder_;
  const TestServer server_{[this](server::Config& config) {
    config.checkpoint.path = folder_.File("checkpoints");
    config.wire.message_bytes = 1 << 18;
    config.limits.tail_bytes = 4 * kTailBytes;  // of which a tenant may have seven eighths
  }};
  const Dims dims_;
  std::mt19937_64 random_{9};
  std::vector<float> sinks_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Session> session_;
  Layer layers_[2];
  uint32_t messages_ = 0;
};

TEST_P(WindowTest, AnswersAreThoseOfWhatRowsSee) {
  client::Sequence sequence = *client_->OpenSequence("w");
  Step(&sequence, 7);
  Step(&sequence, 1);
  Step(&sequence, 3, {{1}, {}, {1, 0}});
  Step(&sequence, 9);
}

TEST_P(WindowTest, MessagesAreCutWithTheirEntries) {
  client::Sequence sequence = *client_->OpenSequence("w");
  Step(&sequence, 2);
  Step(&sequence, 1000);
  if (GetParam() == Transport::kInline) {
    EXPECT_GE(messages_, 2u);
  }
}

TEST_P(WindowTest, WhatTheWindowHasPassedIsRefused) {
  client::Sequence sequence = *client_->OpenSequence("w");
  Step(&sequence, 30);
  const auto forked = sequence.Fork(12);
  EXPECT_EQ(forked.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(client::DetailOf(forked.status())->reason(), "window_passed");
}

TEST_P(WindowTest, TailsComeBackAsTheyWereSent) {
  client::Sequence first = *client_->OpenSequence("w"), second = *client_->OpenSequence("w");
  EXPECT_EQ(client::DetailOf(first.ReadTail().status())->reason(), "no_tail");
  const auto tail = RandomTail(), other = RandomTail();
  auto step = *session_->Begin("w", {{&first, 3}, {&second, 2}});
  AppendRows(step.get());
  const std::vector<client::SequenceTail> both = {{0, tail}, {1, other}};
  const auto ended = step->End({1, 2}, both);
  ASSERT_TRUE(ended.ok()) << ended.status();
  const auto read = first.ReadTail();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->position, 1u);
  EXPECT_TRUE(read->bytes == Text(tail));
  EXPECT_EQ(second.ReadTail()->position, 2u);
  EXPECT_TRUE(second.ReadTail()->bytes == Text(other));

  step = *session_->Begin("w", {{&first, 1}, {&second, 1}});
  AppendRows(step.get());
  const std::vector<client::SequenceTail> one = {{1, tail}};
  ASSERT_TRUE(step->End({}, one).ok());
  EXPECT_EQ(first.ReadTail()->position, 1u);
  EXPECT_EQ(second.ReadTail()->position, 3u);
  EXPECT_TRUE(second.ReadTail()->bytes == Text(tail));
  client::Sequence fork = *second.Fork();
  EXPECT_TRUE(fork.ReadTail()->bytes == Text(tail));
  ASSERT_TRUE(second.Truncate(2).ok());
  EXPECT_EQ(client::DetailOf(second.ReadTail().status())->reason(), "no_tail");
}

TEST_P(WindowTest, PartsOfTwoTailsOfOneLengthAreNotJoined) {
  client::Sequence sequence = *client_->OpenSequence("w");
  const std::vector<std::byte> tails[2] = {std::vector<std::byte>(kTailBytes, std::byte{0}),
                                           std::vector<std::byte>(kTailBytes, std::byte{1})};
  const auto replace = [&](int turn, uint32_t committed) {
    auto step = session_->Begin("w", {{&sequence, 1}});
    ASSERT_TRUE(step.ok()) << step.status();
    AppendRows(step->get());
    const std::vector<client::SequenceTail> own = {{0, tails[turn % 2]}};
    ASSERT_TRUE((*step)->End({committed}, own).ok());
  };
  replace(0, 1);
  // Steps come and go while the tail is read: what is read is one of the two, or nothing is.
  std::atomic<bool> done = false;
  std::thread reader([&] {
    while (!done) {
      const auto read = sequence.ReadTail();
      if (read.ok()) {
        EXPECT_EQ(read->bytes, std::string(kTailBytes, read->bytes[0]));
        continue;
      }
      const auto detail = client::DetailOf(read.status());
      EXPECT_TRUE(absl::IsAborted(read.status()) || (detail && detail->reason() == "in_step"))
          << read.status();
    }
  });
  for (int turn = 0; turn < 60; ++turn) replace(turn, 0);
  done = true;
  reader.join();
  EXPECT_EQ(sequence.ReadTail()->bytes, Text(tails[1]));
}

TEST_P(WindowTest, TailsThatCannotBeStoredLeaveTheStepOpen) {
  client::Sequence first = *client_->OpenSequence("w"), second = *client_->OpenSequence("w");
  const auto tail = RandomTail();
  const std::vector<client::SequenceTail> both = {{0, tail}, {1, tail}};
  auto step = *session_->Begin("w", {{&first, 1}, {&second, 1}});
  AppendRows(step.get());
  const auto refused = [&](const std::vector<client::SequenceTail>& tails) {
    const absl::Status status = step->End({}, tails).status();
    EXPECT_FALSE(status.ok());
    const auto detail = client::DetailOf(status);
    return detail ? *detail : v1::ErrorDetail();
  };
  EXPECT_EQ(refused({{2, tail}}).field(), "end_step.tails[0]");
  EXPECT_EQ(refused({{1u << 31, tail}}).field(), "end_step.tails[0]");
  EXPECT_EQ(refused({{1, tail}, {0, tail}}).field(), "end_step.tails[1]");
  EXPECT_EQ(refused({{0, std::span(tail).first(8)}}).field(), "");  // by the client
  ASSERT_TRUE(step->End({}, both).ok());
  step = *session_->Begin("w", {{&first, 1}, {&second, 1}});
  AppendRows(step.get());
  // The two that are there stay until the others take their place: room for four is needed.
  EXPECT_EQ(refused(both).reason(), "tails_exhausted");
  EXPECT_EQ(refused(both).resource(), "tail_bytes");
  ASSERT_TRUE(step->End().ok());
  EXPECT_EQ(first.ReadTail()->position, 1u);
}

TEST_P(WindowTest, SequencesMoveWithTheirEntriesAndTail) {
  client::Sequence sequence = *client_->OpenSequence("w");
  Step(&sequence, 7);
  Step(&sequence, 90);
  const auto tail = RandomTail();
  const std::vector<client::SequenceTail> own = {{0, tail}};
  auto step = *session_->Begin("w", {{&sequence, 1}});
  AppendRows(step.get());
  ASSERT_TRUE(step->End({0}, own).ok());
  std::vector<v1::PagesPart> parts;
  v1::ExportRequest request;
  request.set_sequence_id(sequence.id());
  request.set_expected_epoch(sequence.epoch());
  const absl::Status exported = client_->ExportPages(request, [&](const v1::PagesPart& part) {
    parts.push_back(part);
    return absl::OkStatus();
  });
  ASSERT_TRUE(exported.ok()) << exported;
  v1::ImportTarget target;
  target.set_model_id("w");
  size_t next = 0;
  using Part = std::optional<v1::PagesPart>;
  auto imported = client_->ImportPages(target, [&]() -> absl::StatusOr<Part> {
    return next == parts.size() ? Part() : parts[next++];
  });
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->length(), 97u);
  EXPECT_EQ(imported->ReadTail()->position, 97u);
  EXPECT_TRUE(imported->ReadTail()->bytes == Text(tail));
  EXPECT_EQ(client::DetailOf(imported->Fork(20).status())->reason(), "window_passed");
  Step(&*imported, 9, {});
  Step(&*imported, 1, {{24, 0, 3}});
}

TEST_P(WindowTest, CheckpointsBringEntriesAndTailBack) {
  client::Sequence sequence = *client_->OpenSequence("w");
  Step(&sequence, 41);
  const auto tail = RandomTail();
  const std::vector<client::SequenceTail> own = {{0, tail}};
  auto step = *session_->Begin("w", {{&sequence, 1}});
  AppendRows(step.get());
  ASSERT_TRUE(step->End({0}, own).ok());
  const uint64_t id = sequence.id();
  const auto saved = client_->Checkpoint({id});
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_TRUE(sequence.Release().ok());
  auto restored = client_->Restore({id});
  ASSERT_TRUE(restored.ok()) << restored.status();
  client::Sequence& again = restored->front();
  EXPECT_EQ(again.id(), id);
  EXPECT_EQ(again.ReadTail()->position, 41u);
  EXPECT_TRUE(again.ReadTail()->bytes == Text(tail));
  Step(&again, 3, {{0}, {9, 1}, {}});
  Step(&again, 8);
}

TEST_P(WindowTest, RowsOfEightBitsAreRefused) {
  client::Sequence sequence = *client_->OpenSequence("w");
  auto step = session_->Begin("w", {{&sequence, 1}});
  ASSERT_TRUE(step.ok()) << step.status();
  const std::vector<std::byte> kv(1 << 10);
  client::AttendCall call;
  call.row_count = 1;
  call.profile = v1::PROFILE_APPEND_ONLY;
  call.kv_row_dtype = v1::DTYPE_F8_E4M3;
  call.kv = kv.data();
  const auto refused = (*step)->Attend(call).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client::DetailOf(refused)->reason(), "no_fp8_rows_here");
}

std::string TransportName(const ::testing::TestParamInfo<Transport>& info) {
  return info.param == Transport::kInline ? "inline"
         : info.param == Transport::kShm  ? "shm"
                                          : "ring";
}

// Each of a window's numbers, changed so that it fits no more.
TEST(WindowModelTest, RegistrationsAreChecked) {
  const TestServer server;
  const auto client = server.Connect();
  v1::RegisterRequest good;
  *good.mutable_model() = SpecOf({}, "window");
  good.mutable_model()->mutable_geometry()->set_nope_dim(0);
  good.mutable_model()->mutable_geometry()->set_v_dim(0);
  good.mutable_model()->set_attention(v1::ATTENTION_KIND_SPARSE_V4);
  good.mutable_model()->set_window(4);
  for (const uint32_t ratio : {0, 2}) good.mutable_model()->add_ratios(ratio);
  for (int i = 0; i < 8; ++i) good.add_sinks(0.5f);
  const auto refused = [&](const std::string& field, auto&& change) {
    v1::RegisterRequest request = good;
    change(request);
    const auto answer = client->RegisterModel(
        request.model(), 0, {}, {request.sinks().data(), size_t(request.sinks().size())});
    EXPECT_EQ(answer.ok(), field.empty()) << answer.status();
    if (field.empty()) return;
    EXPECT_EQ(client::DetailOf(answer.status())->field(), field);
  };
  refused("", [](v1::RegisterRequest&) {});
  refused("model.ratios", [](auto& r) { r.mutable_model()->add_ratios(2); });
  for (const uint32_t ratio : {3u, 4097u, ~0u}) {
    refused("model.ratios[1]", [&](auto& r) { r.mutable_model()->set_ratios(1, ratio); });
  }
  refused("sinks", [](auto& r) { r.add_sinks(0.5f); });
  refused("sinks[7]", [](auto& r) { r.set_sinks(7, std::nanf("")); });
  refused("model.window", [](auto& r) { r.mutable_model()->set_window(4097); });
  refused("model.tail_bytes", [](auto& r) { r.mutable_model()->set_tail_bytes((16u << 20) + 1); });
  refused("model.entry_format",
          [](auto& r) { r.mutable_model()->set_entry_format(static_cast<v1::KvFormat>(99)); });
  EXPECT_TRUE(client->UnregisterModel("window").ok());
}

INSTANTIATE_TEST_SUITE_P(Transports, WindowTest,
                         ::testing::Values(Transport::kInline, Transport::kShm, Transport::kRing),
                         TransportName);

}  // namespace
}  // namespace mla::integration
