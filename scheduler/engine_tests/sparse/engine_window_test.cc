// Sequences of a model with a window and compressed entries: which rows and entries their rows
// attend to while the window passes over pages, steps end and are aborted, drafts are rejected,
// sequences are forked and truncated.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

using testing::EngineHarness;
using testing::kTolerance;
using testing::MakeRow;
using testing::Row;
using testing::TestRequest;

constexpr int kWindow = 4, kRatio = 2, kDim = 12, kHeads = 2, kTailBytes = 24;

// A sequence as the test knows it: its committed rows at either layer, and the entries of layer 1.
struct Text {
  SequenceInfo info;
  std::vector<Row> rows[2];
  std::vector<Row> entries;
  int length() const { return static_cast<int>(rows[0].size()); }
};

class EngineWindowTest : public ::testing::Test {
 protected:
  static testing::HarnessOptions Options() {
    testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr, nullptr};
    options.model.attention = kernels::AttentionKind::kWindow;
    options.model.geometry.nope_dim = options.model.geometry.v_dim = 0;
    options.model.page_size = 4;
    options.model.window = kWindow;
    options.model.ratios = {0, kRatio};
    options.model.top_k = 8;
    options.model.tail_bytes = kTailBytes;
    return options;
  }

  EngineWindowTest() {
    const auto row = h_.core().tenants().Enter(h_.tenant());
    const auto model = h_.core().models().Find((*row)->key(), h_.model().id, "model_id");
    EXPECT_TRUE(h_.core().models().SetSinks(**model, {}, kSinks, "sinks").ok());
  }

  Text Open() {
    Text text;
    text.info = h_.Open();
    return text;
  }

  // A step of `rows` rows after the text's, of which `commit` are kept; -1: it is aborted.
  // `listed`: rows of layer 1 attend to some entries only. `tail` > 0: the bytes that it leaves as
  // the tail.
  void Step(Text* text, int rows, int commit, bool listed = false, uint8_t tail = 0) {
    const StepId step = ++last_step_;
    const auto begun =
        h_.Begin(stream_, step, {{text->info.id, text->info.epoch, text->length(), rows}});
    ASSERT_TRUE(begun->status.ok()) << begun->status;
    Text after = *text;
    const int whole = (text->length() + rows) / kRatio;
    while (static_cast<int>(after.entries.size()) < whole) {
      after.entries.push_back(MakeRow(++key_, kDim));
    }
    for (int layer = 0; layer < 2; ++layer) {
      std::vector<Row> fresh;
      for (int row = 0; row < rows; ++row) fresh.push_back(MakeRow(++key_, kDim));
      after.rows[layer].insert(after.rows[layer].end(), fresh.begin(), fresh.end());
      Attend(step, layer, fresh, *text, after, layer == 1 && listed);
    }
    if (commit < 0) {
      ASSERT_TRUE(h_.Abort(stream_, step)->status.ok());
      return;
    }
    std::vector<TailArgs> tails;
    if (tail > 0) tails.push_back({0, h_.MakeTail(kTailBytes, tail)});
    const auto end = h_.End(stream_, step, {commit}, std::move(tails));
    ASSERT_TRUE(end->status.ok()) << end->status;
    const int length = text->length() + commit;
    for (auto& of_layer : after.rows) of_layer.resize(static_cast<size_t>(length));
    after.entries.resize(static_cast<size_t>(length / kRatio));
    *text = std::move(after);
  }

  void Attend(StepId step, int layer, const std::vector<Row>& fresh, const Text& before,
              const Text& after, bool listed) {
    const auto rows = static_cast<int>(fresh.size());
    const uint64_t q_key = ++key_ * 4096;
    auto request = h_.Unsent(stream_, step, layer, 0, rows, fresh, 0, kHeads, q_key);
    if (layer == 1) {
      AddEntries({after.entries.begin() + static_cast<int64_t>(before.entries.size()),
                  after.entries.end()},
                 request.get());
    }
    std::vector<std::vector<int32_t>> lists;
    std::vector<int32_t> begin = {0}, list;
    for (int row = 0; row < rows; ++row) {
      const int visible = before.length() + row + 1, whole = layer == 0 ? 0 : visible / kRatio;
      std::vector<int32_t>& of_row = lists.emplace_back();
      for (int32_t entry = 0; entry < whole; ++entry) {
        if (!listed || (random_() % 3 == 0 && of_row.size() < 8)) of_row.push_back(entry);
      }
      list.insert(list.end(), of_row.begin(), of_row.end());
      begin.push_back(static_cast<int32_t>(list.size()));
    }
    if (listed) {
      request->attend.list = list.data();
      request->attend.list_begin = begin.data();
    }
    h_.Submit(request.get());
    h_.Run();
    ASSERT_TRUE(request->status.ok()) << request->status;
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < kHeads; ++head) {
        CheckRow(*request, layer, row, head, after, before.length() + row + 1, lists[row],
                 MakeRow(q_key + uint64_t(row) * 64 + head, kDim));
      }
    }
  }

  // Adds entries after the rows.
  static void AddEntries(const std::vector<Row>& entries, TestRequest* request) {
    for (const Row& entry : entries) {
      for (const float value : entry) request->kv_rows.push_back(kernels::ToBf16(value));
    }
    request->attend.kv = reinterpret_cast<const std::byte*>(request->kv_rows.data());
  }

  void CheckRow(const TestRequest& request, int layer, int row, int head, const Text& text,
                int visible, const std::vector<int32_t>& entries, const Row& q) {
    std::vector<const Row*> keys;
    for (int p = std::max(0, visible - kWindow); p < visible; ++p) {
      keys.push_back(&text.rows[layer][static_cast<size_t>(p)]);
    }
    for (const int32_t entry : entries) {
      keys.push_back(&text.entries[static_cast<size_t>(entry)]);
    }
    std::vector<double> weights;
    double sum = 0;
    for (const Row* key : keys) {
      double dot = 0;
      for (int i = 0; i < kDim; ++i) dot += double{q[i]} * (*key)[i];
      weights.push_back(std::exp(dot * h_.model().softmax_scale));
      sum += weights.back();
    }
    const size_t packed = size_t(row) * kHeads + head;
    EXPECT_NEAR(request.lse[packed], std::log(sum), kTolerance);
    const double with_sink = sum + std::exp(double{kSinks[size_t(layer) * kHeads + head]});
    for (int i = 0; i < kDim; ++i) {
      double want = 0;
      for (size_t k = 0; k < keys.size(); ++k) want += weights[k] / with_sink * (*keys[k])[i];
      ASSERT_NEAR(request.output[packed * kDim + i], want, kTolerance)
          << "layer " << layer << " row " << row << " of " << visible;
    }
  }

  // Position and first byte of the tail; {-1, 0} without a tail.
  std::pair<int64_t, int> TailOf(const SequenceInfo& info) {
    const auto read = h_.core().sequences().ReadTail(h_.tenant(), info.id, info.epoch);
    const std::optional<int64_t> shown = h_.Get(info.id).tail_position;
    EXPECT_EQ(shown.has_value(), read.ok());
    if (!read.ok()) {
      EXPECT_EQ(DetailOf(read.status()).reason, "no_tail") << read.status();
      return {-1, 0};
    }
    EXPECT_EQ(*shown, read->position);
    EXPECT_EQ(read->tail->size, size_t{kTailBytes});
    return {read->position, static_cast<int>(read->tail->data[kTailBytes - 1])};
  }
  int64_t TailBytes() { return h_.core().tenants().Usage(h_.tenant()).used[Resource::kTailBytes]; }

  const std::vector<float> kSinks = {0.5f, -1.0f, 2.0f, 0.0f};
  EngineHarness h_{Options()};
  StreamId stream_ = h_.core().steps().OpenStream(h_.tenant());
  StepId last_step_ = 0;
  uint64_t key_ = 100;
  std::mt19937_64 random_{5};
};

TEST_F(EngineWindowTest, RowsAttendToTheWindowAndToEntries) {
  Text text = Open();
  Step(&text, 11, 11);  // a prompt of more rows than a launch has
  for (int i = 0; i < 12; ++i) Step(&text, 1, 1, i % 2 == 1);
  EXPECT_EQ(text.length(), 23);
  EXPECT_EQ(h_.Get(text.info.id).length, 23);
}

TEST_F(EngineWindowTest, AbortedStepsAndRejectedDraftsLeaveTheWindowAsItWas) {
  Text text = Open();
  Step(&text, 6, 6);
  for (int i = 0; i < 20; ++i) {
    Step(&text, 3, static_cast<int>(random_() % 4));
    if (i % 3 == 0) Step(&text, 4, -1);
  }
  EXPECT_GT(text.length(), 20);
}

TEST_F(EngineWindowTest, PagesBehindTheWindowComeBack) {
  Text text = Open();
  const auto used = [&] { return h_.core().Stats().page_groups_used; };
  Step(&text, 8, 8);
  for (int i = 0; i < 32; ++i) Step(&text, 1, 1);
  // 40 rows: 10 pages of entries, and the page with the last 4 rows.
  EXPECT_EQ(used(), 10 + 1);
  for (int i = 0; i < 3; ++i) Step(&text, 1, 1);
  EXPECT_EQ(used(), 11 + 2);
}

TEST_F(EngineWindowTest, ForksAndTruncationGoBackAsFarAsRowsAreKept) {
  Text text = Open();
  Step(&text, 14, 14);  // pages of rows 8 to 11 and 12 to 13 are left
  const auto fork = [&](int64_t length) {
    ForkArgs args;
    args.tenant = h_.tenant();
    args.parent = text.info.id;
    args.expected_epoch = text.info.epoch;
    args.length = length;
    return h_.core().sequences().Fork(args);
  };
  const auto refused = fork(11);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(refused.status()).reason, "window_passed");
  const auto forked = fork(13);
  ASSERT_TRUE(forked.ok()) << forked.status();
  Text child = text;
  child.info = *forked;
  for (auto& of_layer : child.rows) of_layer.resize(13);
  child.entries.resize(6);
  for (int i = 0; i < 6; ++i) {
    Step(&child, 2, 1);
    Step(&text, 1, 1);
  }
  Step(&text, 1, 1);  // 21 rows: rows from 16 on are kept
  const int length = text.length() - 1;
  const auto refused_length =
      h_.core().sequences().Truncate(h_.tenant(), text.info.id, 3, text.info.epoch);
  EXPECT_EQ(DetailOf(refused_length.status()).reason, "window_passed");
  const auto cut =
      h_.core().sequences().Truncate(h_.tenant(), text.info.id, length, text.info.epoch);
  ASSERT_TRUE(cut.ok()) << cut.status();
  text.info = *cut;
  for (auto& of_layer : text.rows) of_layer.resize(static_cast<size_t>(length));
  text.entries.resize(static_cast<size_t>(length / kRatio));
  for (int i = 0; i < 6; ++i) Step(&text, 3, 2);
}

TEST_F(EngineWindowTest, ASequenceCountsForEachOfItsCaches) {
  const auto used = [&] {
    return h_.core().tenants().Usage(h_.tenant()).used[Resource::kSequences];
  };
  const SequenceInfo first = Open().info;
  EXPECT_EQ(used(), 2);
  ForkArgs fork;
  fork.tenant = h_.tenant();
  fork.parent = first.id;
  fork.expected_epoch = first.epoch;
  std::vector<SequenceId> open = {first.id};
  TenantQuota quota;
  quota.bounds[Resource::kSequences] = 7;
  ASSERT_TRUE(h_.core().tenants().SetQuota(h_.tenant(), quota, false).ok());
  absl::Status refused;
  while (refused.ok() && open.size() < 8) {
    const auto child = h_.core().sequences().Fork(fork);
    refused = child.status();
    if (child.ok()) open.push_back(child->id);
  }
  EXPECT_EQ(open.size(), 3u);
  EXPECT_EQ(DetailOf(refused).resource, "sequences") << refused;
  OpenArgs args;
  args.tenant = h_.tenant();
  args.model_id = h_.model().id;
  EXPECT_EQ(DetailOf(h_.core().sequences().Open(args).status()).resource, "sequences");
  std::vector<SequenceId> absent;
  h_.core().sequences().Release(h_.tenant(), open, &absent);
  EXPECT_EQ(used(), 0);
}

TEST_F(EngineWindowTest, RefusalsCountThePagesOfBothCaches) {
  constexpr int kSequences = 8, kRows = 96;
  testing::HarnessOptions options = Options();
  options.limits.kv_cache_bytes = 1 << 16;
  options.limits.max_step_sequences = kSequences;
  options.limits.max_step_rows = kSequences * kRows;
  EngineHarness small(std::move(options));
  const auto row = small.core().tenants().Enter(small.tenant());
  const auto model = small.core().models().Find((*row)->key(), small.model().id, "model_id");
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_TRUE(small.core().models().SetSinks(**model, {}, kSinks, "sinks").ok());
  std::vector<StepSequenceArgs> sequences;
  for (int i = 0; i < kSequences; ++i) sequences.push_back({small.Open().id, 1, 0, kRows});
  const int64_t wanted =
      kSequences * (kRows / small.model().page_size) *
      ((*model)->contents->layout.group_bytes() + (*model)->contents->window_layout.group_bytes());
  const StreamId stream = small.core().steps().OpenStream(small.tenant());
  const auto by_pool = small.Begin(stream, 1, sequences);
  EXPECT_EQ(by_pool->detail.bound_of, BoundOwner::kServer);
  EXPECT_EQ(by_pool->detail.wanted, wanted) << by_pool->status;
  EXPECT_LT(by_pool->detail.free, wanted);
  sequences.resize(1);
  TenantQuota quota;
  quota.bounds[Resource::kKvBytes] = wanted / kSequences - 1;
  ASSERT_TRUE(small.core().tenants().SetQuota(small.tenant(), quota, false).ok());
  const auto by_tenant = small.Begin(stream, 1, sequences);
  EXPECT_EQ(by_tenant->detail.bound_of, BoundOwner::kTenant);
  EXPECT_EQ(by_tenant->detail.wanted, wanted / kSequences) << by_tenant->status;
}

TEST_F(EngineWindowTest, TailsBelongToTheLengthThatIsCommitted) {
  using TailAt = std::pair<int64_t, int>;
  Text text = Open();
  EXPECT_EQ(TailOf(text.info), TailAt(-1, 0));
  Step(&text, 5, 5, false, 1);
  EXPECT_EQ(TailOf(text.info), TailAt(5, 1));
  Step(&text, 3, 1, false, 2);  // two rows of the draft are rejected
  EXPECT_EQ(TailOf(text.info), TailAt(6, 2));
  Step(&text, 3, -1);
  EXPECT_EQ(TailOf(text.info), TailAt(6, 2));
  Step(&text, 2, 2);
  EXPECT_EQ(TailOf(text.info), TailAt(6, 2));
  Step(&text, 2, 0, false, 3);
  EXPECT_EQ(TailOf(text.info), TailAt(8, 3));
  EXPECT_EQ(TailBytes(), kTailBytes);
}

TEST_F(EngineWindowTest, ForksShareATailAndTruncationDropsIt) {
  using TailAt = std::pair<int64_t, int>;
  Text text = Open();
  Step(&text, 6, 6, false, 7);
  Step(&text, 1, 1);
  const auto fork = [&](int64_t length) {
    ForkArgs args;
    args.tenant = h_.tenant();
    args.parent = text.info.id;
    args.expected_epoch = text.info.epoch;
    args.length = length;
    return *h_.core().sequences().Fork(args);
  };
  EXPECT_EQ(TailOf(fork(7)), TailAt(6, 7));
  const SequenceInfo border_fork = fork(6), below = fork(5);
  EXPECT_EQ(TailOf(border_fork), TailAt(6, 7));
  EXPECT_EQ(TailOf(below), TailAt(-1, 0));
  EXPECT_EQ(TailBytes(), kTailBytes);  // once
  const auto cut = h_.core().sequences().Truncate(h_.tenant(), text.info.id, 6, text.info.epoch);
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(TailOf(*cut), TailAt(6, 7));
  const auto again = h_.core().sequences().Truncate(h_.tenant(), cut->id, 5, cut->epoch);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(TailOf(*again), TailAt(-1, 0));
  EXPECT_EQ(TailOf(border_fork), TailAt(6, 7));
  std::vector<SequenceId> ids, absent;
  for (const SequenceInfo& open : h_.core().sequences().Get({h_.tenant(), {}, ""}).sequences) {
    ids.push_back(open.id);
  }
  h_.core().sequences().Release(h_.tenant(), ids, &absent);
  EXPECT_EQ(TailBytes(), 0);
}

TEST_F(EngineWindowTest, TailsThatDoNotFitTheStepAreRefused) {
  const Text text = Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{text.info.id, 1, 0, 2}})->status.ok());
  const auto refused = [&](std::vector<TailArgs> tails) {
    const auto end = h_.End(stream_, 1, {0}, std::move(tails));
    return DetailOf(end->status);
  };
  EXPECT_EQ(refused({{1, h_.MakeTail(kTailBytes, 1)}}).field, "end_step.tails[0]");
  EXPECT_EQ(refused({{0, h_.MakeTail(kTailBytes, 1)}, {0, h_.MakeTail(kTailBytes, 1)}}).field,
            "end_step.tails[1]");
  EXPECT_EQ(refused({{0, h_.MakeTail(kTailBytes + 1, 1)}}).reason, "step_reused");
  EXPECT_EQ(refused({{0, nullptr}}).reason, "step_reused");
  EXPECT_EQ(TailBytes(), 0);
  TenantQuota quota;
  quota.bounds[Resource::kTailBytes] = kTailBytes - 1;
  ASSERT_TRUE(h_.core().tenants().SetQuota(h_.tenant(), quota, false).ok());
  EXPECT_EQ(h_.MakeTail(kTailBytes, 1), nullptr);
  EXPECT_TRUE(h_.End(stream_, 1, {0})->status.ok());  // the step was open all the time
}

TEST_F(EngineWindowTest, RowsMoveElsewhereAsAWhole) {
  Text text = Open();
  Step(&text, 6, 6, false, 5);
  const auto begin = [&](int64_t first_row) {
    return h_.core().transfers().BeginExport(
        {h_.tenant(), text.info.id, h_.Get(text.info.id).epoch, first_row, {}});
  };
  EXPECT_EQ(DetailOf(begin(4).status()).reason, "window_not_moved");
  const auto exported = begin(0);
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(exported->tags.window, kWindow);
  EXPECT_EQ(exported->tags.tail_position, 6);
  EXPECT_EQ(exported->state.tail->size, size_t{kTailBytes});
  EXPECT_EQ(FirstWindowRow(*exported), 0);
  ImportArgs import;
  import.tenant = h_.tenant();
  import.model_id = text.info.model_id;
  import.tags = exported->tags;
  import.id = text.info.id;
  import.expected_epoch = text.info.epoch;
  EXPECT_EQ(DetailOf(h_.core().sequences().BeginImport(import).status()).reason,
            "window_not_moved");
  import.id = 0;
  const auto refused = [&](auto&& change) {
    ImportArgs other = import;
    change(other.tags);
    return DetailOf(h_.core().sequences().BeginImport(other).status()).field;
  };
  EXPECT_EQ(refused([](auto& tags) { tags.window = 5; }), "part.header.model.window");
  EXPECT_EQ(refused([](auto& tags) { tags.ratios = {2, 2}; }), "part.header.model.ratios");
  EXPECT_EQ(refused([](auto& tags) { tags.tail_bytes = 1; }), "part.header.model.tail_bytes");
  EXPECT_EQ(refused([](auto& tags) { tags.tail_position = 7; }), "part.header.tail_position");
  EXPECT_EQ(refused([](auto& tags) { tags.entry_format = kernels::KvFormat::kFp8Row; }),
            "part.header.model.entry_format");
  EXPECT_EQ(exported->tags.sinks, kSinks);
  EXPECT_EQ(refused([](auto& tags) { tags.sinks->back() += 1; }), "part.header.sinks");
  EXPECT_EQ(refused([](auto& tags) { tags.sinks->clear(); }), "part.header.sinks");
  import.tags.sinks.reset();  // as from a server without this field
  EXPECT_TRUE(h_.core().sequences().BeginImport(import).ok());
}

// Tests of the transports check what it attends to afterwards.
TEST_F(EngineWindowTest, AnImportTakesPagesOfTheWindowAlone) {
  Text text = Open();
  for (int i = 0; i < 4; ++i) Step(&text, 7, 7);
  ImportArgs import;
  import.tenant = h_.tenant();
  import.model_id = text.info.model_id;
  const auto exported =
      h_.core().transfers().BeginExport({h_.tenant(), text.info.id, text.info.epoch, 0, {}});
  ASSERT_TRUE(exported.ok()) << exported.status();
  import.tags = exported->tags;
  const auto used = h_.core().Stats().page_groups_used;
  const auto pages = h_.core().sequences().BeginImport(import);
  ASSERT_TRUE(pages.ok()) << pages.status();
  // 28 rows: 7 pages of entries, and the window begins at row 24 with a page.
  EXPECT_EQ(FirstWindowRow(*pages), 24);
  EXPECT_EQ(h_.core().Stats().page_groups_used, used + 7 + 1);
  h_.core().transfers().AbortImport(h_.tenant(), *pages);
  EXPECT_EQ(h_.core().Stats().page_groups_used, used);
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
  const auto again = h_.core().sequences().BeginImport(import);
  ASSERT_TRUE(again.ok()) << again.status();
  const auto ended = h_.core().transfers().EndImport(h_.tenant(), again->id, Engine::kAllFinite);
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(ended->length, 28);
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
  const auto cut = h_.core().sequences().Truncate(h_.tenant(), ended->id, 27, ended->epoch);
  EXPECT_EQ(DetailOf(cut.status()).reason, "window_passed");
}

TEST_F(EngineWindowTest, RowsSentAgainAreComparedWithTheirEntries) {
  Text text = Open();
  ASSERT_TRUE(h_.Begin(stream_, 50, {{text.info.id, 1, 0, 2}})->status.ok());
  const std::vector<Row> rows = {MakeRow(1, kDim), MakeRow(2, kDim)};
  uint64_t entry = 3;
  const auto send = [&] {
    auto request = h_.Unsent(stream_, 50, 1, 0, 2, rows, 0, kHeads, 9);
    AddEntries({MakeRow(entry, kDim)}, request.get());
    h_.Submit(request.get());
    h_.Run();
    return request->status;
  };
  EXPECT_TRUE(send().ok());
  EXPECT_TRUE(send().ok());
  entry = 4;
  EXPECT_EQ(send().code(), absl::StatusCode::kAlreadyExists);
}

}  // namespace
}  // namespace mla::scheduler
