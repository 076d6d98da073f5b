// Windows, entries and sinks on every transport: replies equal attention over the rows and entries
// that a row sees.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/session.h"
#include "client/cpp/streams/errors.h"
#include "tests/integration/shared_memory/shared_memory_harness.h"
#include "tests/integration/window_worker.h"

namespace mla::integration {
namespace {

using Transport = client::ClientOptions::Transport;

constexpr uint32_t kTailBytes = 100'000;  // more than one reply holds

class WindowTest : public ::testing::TestWithParam<Transport> {
 protected:
  void SetUp() override {
    client_ = server_.Connect(Over(GetParam()));
    v1::ModelSpec spec = worker_.Spec("w");
    spec.set_tail_bytes(kTailBytes);
    const auto registered = client_->RegisterModel(spec, 0, {}, worker_.sinks());
    ASSERT_TRUE(registered.ok()) << registered.status();
    EXPECT_EQ(registered->model().window(), WindowWorker::kWindow);
    EXPECT_TRUE(registered->sinks_complete());
    session_ = *client_->OpenSession();
  }

  // `lists` are of layer 1, by row, or empty: all entries.
  void Step(client::Sequence* sequence, uint32_t rows,
            const std::vector<std::vector<int32_t>>& lists = {}) {
    ASSERT_EQ(worker_.Step(session_.get(), "w", sequence, &text_, rows, lists), absl::OkStatus());
  }

  // Appends rows of both layers with their entries, without attending.
  void AppendRows(client::Step* step) {
    const auto dim = static_cast<size_t>(worker_.dims().row());
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
    config.limits.tail_bytes = 4 * kTailBytes;  // a tenant may have seven eighths of it
  }};
  WindowWorker worker_{9};
  WindowText text_;
  std::mt19937_64 random_{9};
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Session> session_;
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
    EXPECT_GE(worker_.messages(), 2u);
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
  ASSERT_TRUE(step->End(one).ok());
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
  // Steps replace the tail while it is read. A read returns one of the two tails, or nothing.
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
    const absl::Status status = step->End(tails).status();
    EXPECT_FALSE(status.ok());
    const auto detail = client::DetailOf(status);
    return detail ? *detail : v1::ErrorDetail();
  };
  EXPECT_EQ(refused({{2, tail}}).field(), "end_step.tails[0]");
  EXPECT_EQ(refused({{1u << 31, tail}}).field(), "end_step.tails[0]");
  EXPECT_EQ(refused({{1, tail}, {0, tail}}).field(), "end_step.tails[1]");
  EXPECT_EQ(refused({{0, std::span(tail).first(8)}}).field(), "");  // refused by the client library
  ASSERT_TRUE(step->End(both).ok());
  step = *session_->Begin("w", {{&first, 1}, {&second, 1}});
  AppendRows(step.get());
  // The present two tails stay until the others replace them, so room for four is needed.
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

// Each number of a window, changed so that it becomes invalid.
TEST(WindowModelTest, RegistrationsAreChecked) {
  const TestServer server;
  const auto client = server.Connect();
  v1::RegisterRequest good;
  *good.mutable_model() = WindowWorker(1).Spec("window");
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
  refused("sinks[2]", [](auto& r) { r.set_sinks(2, std::numeric_limits<float>::infinity()); });
  refused("", [](auto& r) { r.set_sinks(2, -std::numeric_limits<float>::infinity()); });
  refused("model.window", [](auto& r) { r.mutable_model()->set_window(4097); });
  refused("model.tail_bytes", [](auto& r) { r.mutable_model()->set_tail_bytes((16u << 20) + 1); });
  refused("model.entry_format",
          [](auto& r) { r.mutable_model()->set_entry_format(static_cast<v1::KvFormat>(99)); });
  EXPECT_TRUE(client->UnregisterModel("window").ok());
  // The other attention kinds have no sinks.
  v1::ModelSpec dense = SpecOf({}, "dense");
  dense.set_needs_sinks(true);
  EXPECT_EQ(client::DetailOf(client->RegisterModel(dense).status())->field(), "model.needs_sinks");
}

// Ranks upload the sinks of their heads; rows wait until all are there.
TEST(WindowModelTest, SinksMayComeAfterTheRegistration) {
  const TestServer server;
  const auto client = server.Connect();
  EXPECT_THAT(client->info().capabilities(), ::testing::Contains("sinks"));
  WindowWorker worker(3);
  v1::ModelSpec spec = worker.Spec("w");
  spec.set_needs_sinks(true);
  const auto registered = client->RegisterModel(spec);
  ASSERT_TRUE(registered.ok()) << registered.status();
  EXPECT_TRUE(registered->model().needs_sinks());
  EXPECT_FALSE(registered->sinks_complete());
  EXPECT_FALSE(client->ListModels()->models(0).sinks_complete());
  const auto session = *client->OpenSession();
  client::Sequence sequence = *client->OpenSequence("w");
  const auto step = [&] {
    WindowText text;
    return worker.Step(session.get(), "w", &sequence, &text, 5);
  };
  const auto reason = [](const absl::Status& status) {
    const auto detail = client::DetailOf(status);
    return detail ? detail->reason() : status.ToString();
  };
  EXPECT_EQ(reason(step()), "sinks_missing");
  const std::vector<float>& all = worker.sinks();  // [2, 4]
  const std::vector<float> of_a_rank = {all[0], all[1], all[4], all[5]};
  const auto half = client->UploadSinks("w", of_a_rank, {.head_count = 2});
  ASSERT_TRUE(half.ok()) << half.status();
  EXPECT_FALSE(half->complete());
  EXPECT_THAT(half->missing_layers(), ::testing::ElementsAre(0, 1));
  EXPECT_EQ(reason(step()), "sinks_missing");
  const std::vector<float> of_the_other = {all[2], all[3], all[6], all[7]};
  const auto whole = client->UploadSinks("w", of_the_other, {.head_begin = 2});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_TRUE(whole->complete());
  EXPECT_TRUE(client->ListModels()->models(0).sinks_complete());
  EXPECT_EQ(step(), absl::OkStatus());
  EXPECT_TRUE(client->UploadSinks("w", all)->complete());
  EXPECT_TRUE(client->RegisterModel(spec, 0, {}, all)->sinks_complete());
  std::vector<float> other = all;
  other[7] += 1;
  EXPECT_EQ(reason(client->UploadSinks("w", other).status()), "sinks_differ");
  EXPECT_EQ(reason(client->RegisterModel(spec, 0, {}, other).status()), "sinks_differ");
  EXPECT_EQ(reason(client->UploadSinks("absent", all).status()), "model_not_found");
  ASSERT_TRUE(sequence.Release().ok());
  EXPECT_TRUE(client->UploadSinks("w", other).ok());
}

INSTANTIATE_TEST_SUITE_P(Transports, WindowTest,
                         ::testing::Values(Transport::kInline, Transport::kShm, Transport::kRing,
                                           Transport::kUcx),
                         TransportName);

}  // namespace
}  // namespace mla::integration
