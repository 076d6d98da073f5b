// Rows out of the pool and into it: exports and imports between two sequences of the tiny model.
// Pages of 3 rows, 2 layers.
#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/kvcache/pool/group_pieces.h"
#include "scheduler/testing/engine_fixture.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::scheduler {
namespace {

using testing::kTolerance;
using testing::Pointers;
using testing::Row;
using testing::Rows;

constexpr int kPage = 3;

class EngineMovesTest : public testing::EngineCoreTest {
 protected:
  EngineMovesTest() = default;
  explicit EngineMovesTest(testing::HarnessOptions options) : EngineCoreTest(std::move(options)) {}

  using Payloads = std::vector<std::vector<std::byte>>;

  absl::StatusOr<MovingPages> BeginExport(const SequenceInfo& sequence, int64_t first = 0,
                                          std::optional<int64_t> end = {}) {
    return h_.core().transfers().BeginExport(
        {h_.tenant(), sequence.id, h_.Get(sequence.id).epoch, first, end});
  }
  ImportArgs To(const MovingPages& from, SequenceId id = 0) {
    ImportArgs args;
    args.tenant = h_.tenant();
    args.model_id = h_.model().id;
    args.id = id;
    args.expected_epoch = 1;
    args.tags = from.tags;
    return args;
  }
  // One part, until it is answered.
  absl::Status Move(PageMove* move) {
    bool done = false;
    absl::Status answer;
    move->tenant = h_.tenant();
    move->done = [&](const absl::Status& status) {
      done = true;
      answer = status;
    };
    MLA_RETURN_IF_ERROR(h_.core().transfers().Start(move));
    h_.Run();
    EXPECT_TRUE(done);
    return answer;
  }
  static int32_t RowsOf(const MovingPages& pages, int64_t group) {
    return static_cast<int32_t>(std::min<int64_t>(kPage, pages.tags.rows - group * kPage));
  }
  static int64_t Groups(const MovingPages& pages) { return (pages.tags.rows + kPage - 1) / kPage; }
  // All groups, in parts of `limit` bytes.
  absl::Status MoveAll(const MovingPages& pages, bool in, Payloads* payloads, int64_t limit) {
    payloads->resize(static_cast<size_t>(Groups(pages)));
    for (int64_t group = 0; group < Groups(pages); ++group) {
      const auto pieces = kvcache::GroupPieces(pages.layout, RowsOf(pages, group));
      auto& payload = (*payloads)[static_cast<size_t>(group)];
      payload.resize(static_cast<size_t>(kvcache::PayloadBytes(pieces)));
      const auto all = static_cast<int64_t>(payload.size());
      for (int64_t offset = 0, end = 0; offset < all; offset = end) {
        end = kvcache::PartEnd(pieces, offset, limit);
        PageMove move;
        move.id = pages.id;
        move.in = in;
        move.page = pages.tags.first_row / kPage + group;
        move.rows = RowsOf(pages, group);
        move.offset = offset;
        move.bytes = std::span(payload).subspan(static_cast<size_t>(offset),
                                                static_cast<size_t>(end - offset));
        MLA_RETURN_IF_ERROR(Move(&move));
      }
    }
    return absl::OkStatus();
  }
  Payloads Export(const SequenceInfo& sequence, MovingPages* pages, int64_t first = 0,
                  std::optional<int64_t> end = {}) {
    *pages = BeginExport(sequence, first, end).value();
    Payloads payloads;
    EXPECT_TRUE(MoveAll(*pages, false, &payloads, 40).ok());
    std::vector<SequenceId> absent;
    h_.core().sequences().Release(h_.tenant(), std::vector{pages->id}, &absent);
    EXPECT_TRUE(absent.empty());
    return payloads;
  }
  absl::StatusOr<SequenceInfo> Import(const ImportArgs& args, Payloads payloads,
                                      int64_t not_finite = Engine::kAllFinite) {
    MLA_ASSIGN_OR_RETURN(const MovingPages target, h_.core().sequences().BeginImport(args));
    MLA_RETURN_IF_ERROR(MoveAll(target, true, &payloads, 64));
    return h_.core().transfers().EndImport(h_.tenant(), target.id, not_finite);
  }
  // Appends a row to `rows` rows and compares its output with the dense one.
  void ExpectRows(const SequenceInfo& sequence, int rows, uint64_t key) {
    const auto fresh = Rows(1, 90);
    auto begin = h_.Begin(stream_, 7, {{sequence.id, sequence.epoch, rows, 1}});
    ASSERT_TRUE(begin->status.ok()) << begin->status;
    for (int layer = 0; layer < 2; ++layer) {
      auto attend = h_.Attend(stream_, 7, layer, 0, fresh, 700);
      h_.Run();
      ASSERT_TRUE(attend->status.ok()) << attend->status;
      const auto before = Rows(rows, key + static_cast<uint64_t>(layer));
      EXPECT_LT(h_.Error(*attend, Pointers(before, fresh), {rows + 1}, 700), kTolerance);
    }
    ASSERT_TRUE(h_.End(stream_, 7)->status.ok());
  }
};

TEST_F(EngineMovesTest, ImportedRowsAreComputedOnLikeTheirOriginals) {
  for (const int rows : {1, 3, 8}) {
    const SequenceInfo source = h_.Open();
    Fill(source, rows, 50);
    MovingPages pages;
    const Payloads payloads = Export(source, &pages);
    EXPECT_EQ(pages.tags.rows, rows);
    const SequenceInfo copy = Import(To(pages), payloads).value();
    EXPECT_NE(copy.id, source.id);
    EXPECT_EQ(copy.length, rows);
    ExpectRows(copy, rows, 50);
    EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
  }
}

TEST_F(EngineMovesTest, ARangeFollowsTheRowsThatAreThere) {
  const SequenceInfo source = h_.Open();
  Fill(source, 8, 50);
  MovingPages first, rest;
  const Payloads head = Export(source, &first, 0, 3);
  const Payloads tail = Export(source, &rest, 3);
  EXPECT_EQ(rest.tags.rows, 5);
  const SequenceInfo copy = Import(To(first), head).value();
  EXPECT_EQ(copy.length, 3);
  const SequenceInfo whole = Import(To(rest, copy.id), tail).value();
  EXPECT_EQ(whole.id, copy.id);
  ExpectRows(whole, 8, 50);
}

TEST_F(EngineMovesTest, AnExportKeepsItsRowsWhileTheSequenceGoesOnAndEnds) {
  const SequenceInfo source = h_.Open();
  Fill(source, 4, 50);
  const MovingPages pages = BeginExport(source).value();
  Fill(source, 4, 60);
  std::vector<SequenceId> absent;
  h_.core().sequences().Release(h_.tenant(), std::vector{source.id}, &absent);
  Payloads payloads;
  ASSERT_TRUE(MoveAll(pages, false, &payloads, 1000).ok());
  ExpectRows(Import(To(pages), payloads).value(), 4, 50);
}

TEST_F(EngineMovesTest, NothingCountsUntilTheEnd) {
  const SequenceInfo source = h_.Open();
  Fill(source, 4, 50);
  MovingPages pages;
  Payloads payloads = Export(source, &pages);
  const int64_t used = h_.core().Stats().page_groups_used;
  const MovingPages target = h_.core().sequences().BeginImport(To(pages)).value();
  EXPECT_EQ(h_.Get(target.id).length, 0);
  EXPECT_TRUE(h_.Get(target.id).in_step);
  ForkArgs fork;
  fork.tenant = h_.tenant();
  fork.parent = target.id;
  fork.expected_epoch = 1;
  EXPECT_EQ(DetailOf(h_.core().sequences().Fork(fork).status()).reason, "in_step");
  auto begin = h_.Begin(stream_, 8, {{target.id, 1, 0, 1}});
  ExpectCode(*begin, absl::StatusCode::kFailedPrecondition, "in_step");
  ASSERT_TRUE(MoveAll(target, true, &payloads, 64).ok());
  h_.core().transfers().AbortImport(h_.tenant(), target);
  EXPECT_EQ(h_.core().Stats().page_groups_used, used);
  EXPECT_EQ(h_.core().transfers().EndImport(h_.tenant(), target.id, 0).status().code(),
            absl::StatusCode::kNotFound);
  // Stored rows stay if a later import fails.
  const SequenceInfo copy = Import(To(pages), payloads).value();
  EXPECT_EQ(DetailOf(h_.core().sequences().BeginImport(To(pages, copy.id)).status()).reason,
            "position_mismatch");
  EXPECT_EQ(h_.Get(copy.id).length, 4);
  EXPECT_FALSE(h_.Get(copy.id).in_step);
}

TEST_F(EngineMovesTest, RowsOfAnotherMeaningAreRefused) {
  const SequenceInfo source = h_.Open();
  Fill(source, 3, 50);
  MovingPages pages;
  Export(source, &pages);
  const auto refused = [&](auto change) {
    ImportArgs args = To(pages);
    change(&args.tags);
    const absl::Status status = h_.core().sequences().BeginImport(args).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return DetailOf(status).field;
  };
  EXPECT_EQ(refused([](PageTags* t) { ++t->geometry.kv_lora_rank; }), "part.header.model.geometry");
  EXPECT_EQ(refused([](PageTags* t) { ++t->layers; }), "part.header.model.layers");
  EXPECT_EQ(refused([](PageTags* t) { ++t->page_size; }), "part.header.model.page_size");
  EXPECT_EQ(refused([](PageTags* t) { ++t->group_bytes; }), "part.header.group_bytes");
  EXPECT_EQ(refused([](PageTags* t) { t->kv_format = kernels::KvFormat::kFp8Row; }),
            "part.header.model.kv_format");
  EXPECT_EQ(refused([](PageTags* t) { t->weights_digest = std::string(32, 'd'); }),
            "part.header.model.weights_digest");
  EXPECT_EQ(refused([](PageTags* t) { t->kv_scales = {1.0f, 1.0f}; }), "part.header.kv_scales");
  EXPECT_EQ(refused([](PageTags* t) { t->first_row = 3; }), "part.header.first_row");
  EXPECT_EQ(h_.core().Stats().sequences, 1);
  ImportArgs many = To(pages);
  many.tags.rows = 97;
  EXPECT_EQ(DetailOf(h_.core().sequences().BeginImport(many).status()).field, "part.header.rows");
  EXPECT_EQ(h_.core().Stats().sequences, 1);
}

TEST_F(EngineMovesTest, RowsMayComeInTheOtherKindOfEightBits) {
  ModelSpec spec = h_.model();
  spec.id = "eight_bits";
  spec.kv_format = kernels::KvFormat::kFp8Row;
  const auto tenant = h_.core().FindTenant(h_.tenant());
  ASSERT_TRUE(h_.core().models().Register(tenant, spec).ok());
  const Model& model = **h_.core().models().Find(tenant, spec.id, "model_id");
  ImportArgs args;
  args.tenant = h_.tenant();
  args.model_id = spec.id;
  args.tags.geometry = spec.geometry;
  args.tags.layers = spec.layers;
  args.tags.page_size = model.spec->page_size;
  args.tags.rows = 1;
  args.tags.kv_format = spec.kv_format;
  args.tags.group_bytes =
      kvcache::PayloadBytes(kvcache::GroupPieces(model.contents->layout, model.spec->page_size));
  args.tags.weights_digest = model.spec->weights_digest;
  for (const auto kind : {kernels::Fp8Kind::kE4m3Fnuz, kernels::Fp8Kind::kE4m3Fn}) {
    args.tags.fp8 = kind;
    const absl::StatusOr<MovingPages> pages = h_.core().sequences().BeginImport(args);
    ASSERT_TRUE(pages.ok()) << pages.status();
    EXPECT_EQ(pages->tags.fp8, kind);
    h_.core().transfers().AbortImport(h_.tenant(), *pages);
  }
}

TEST_F(EngineMovesTest, AQuotaHoldsAndNothingIsLeft) {
  const SequenceInfo source = h_.Open();
  Fill(source, 8, 50);
  MovingPages pages;
  Export(source, &pages);
  const TenantUsage before = h_.core().tenants().Usage(h_.tenant());
  TenantQuota quota;
  quota.bounds[Resource::kKvBytes] = before.used[Resource::kKvBytes] * 5 / 3;
  ASSERT_TRUE(h_.core().tenants().SetQuota(h_.tenant(), quota, false).ok());
  const absl::Status status = h_.core().sequences().BeginImport(To(pages)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(DetailOf(status).field, "part.header.rows");
  EXPECT_EQ(DetailOf(status).resource, "kv_bytes");
  const TenantUsage after = h_.core().tenants().Usage(h_.tenant());
  EXPECT_EQ(after.used[Resource::kKvBytes], before.used[Resource::kKvBytes]);
  EXPECT_EQ(after.used[Resource::kSequences], before.used[Resource::kSequences]);
}

TEST_F(EngineMovesTest, PartsThatAreNoRowsAreRefused) {
  const SequenceInfo source = h_.Open();
  Fill(source, 4, 50);
  const MovingPages pages = BeginExport(source).value();
  std::vector<std::byte> bytes(24);
  PageMove move;
  move.id = pages.id;
  move.rows = 3;
  move.bytes = bytes;
  EXPECT_TRUE(Move(&move).ok());
  move.offset = 12;
  EXPECT_EQ(DetailOf(Move(&move)).reason, "payload_size");
  move.offset = 0;
  move.rows = 4;
  EXPECT_EQ(DetailOf(Move(&move)).reason, "changed_meanwhile");
  move.rows = 2;
  move.page = 1;  // it has one row
  EXPECT_EQ(DetailOf(Move(&move)).reason, "changed_meanwhile");
  move.rows = 1;
  move.in = true;  // not an import
  EXPECT_EQ(DetailOf(Move(&move)).reason, "changed_meanwhile");
  move.id = 12345;
  EXPECT_EQ(Move(&move).code(), absl::StatusCode::kNotFound);
}

TEST_F(EngineMovesTest, RowsThatMayBeNoNumbersAreKnownAndNotShared) {
  const SequenceInfo source = h_.Open();
  Fill(source, 6, 50);
  MovingPages pages;
  Payloads payloads = Export(source, &pages);
  const uint16_t nan = 0x7fc0;
  std::memcpy(payloads[1].data(), &nan, sizeof(nan));  // row 3, layer 0
  const SequenceInfo copy = Import(To(pages), payloads, 3).value();
  auto begin = h_.Begin(stream_, 7, {{copy.id, 1, 6, 1}});
  auto attend = h_.Attend(stream_, 7, 0, 0, Rows(1, 90), 700);
  h_.Run();
  EXPECT_TRUE(attend->status.ok()) << attend->status;  // NaN, as its rows are
}

TEST_F(EngineMovesTest, AReleasedSequenceEndsItsImport) {
  const SequenceInfo source = h_.Open();
  Fill(source, 4, 50);
  MovingPages pages;
  Payloads payloads = Export(source, &pages);
  const MovingPages target = h_.core().sequences().BeginImport(To(pages)).value();
  std::vector<SequenceId> absent;
  h_.core().sequences().Release(h_.tenant(), std::vector{target.id}, &absent);
  EXPECT_EQ(MoveAll(target, true, &payloads, 64).code(), absl::StatusCode::kNotFound);
  h_.core().transfers().AbortImport(h_.tenant(), target);
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
}

// Otherwise the second import would get the first one's rows and its end.
TEST_F(EngineMovesTest, AnIdIsNotRestoredWhileAnImportOfItHasNotEnded) {
  const SequenceInfo source = h_.Open();
  Fill(source, 4, 50);
  MovingPages pages;
  Payloads payloads = Export(source, &pages);
  ImportArgs args = To(pages);
  args.restored_id = 77;
  const MovingPages first = h_.core().sequences().BeginImport(args).value();
  std::vector<SequenceId> absent;
  h_.core().sequences().Release(h_.tenant(), std::vector{first.id}, &absent);
  EXPECT_EQ(DetailOf(h_.core().sequences().BeginImport(args).status()).reason, "sequence_open");
  EXPECT_FALSE(h_.core().transfers().EndImport(h_.tenant(), first.id, Engine::kAllFinite).ok());
  const MovingPages second = h_.core().sequences().BeginImport(args).value();
  EXPECT_EQ(second.id, 77u);
  ASSERT_TRUE(MoveAll(second, true, &payloads, 64).ok());
  const SequenceInfo restored =
      h_.core().transfers().EndImport(h_.tenant(), second.id, Engine::kAllFinite).value();
  ExpectRows(restored, 4, 50);
  // An import that is aborted frees the id, too.
  h_.core().sequences().Release(h_.tenant(), std::vector{restored.id}, &absent);
  h_.core().transfers().AbortImport(h_.tenant(), h_.core().sequences().BeginImport(args).value());
  EXPECT_TRUE(h_.core().sequences().BeginImport(args).ok());
}

TEST_F(EngineMovesTest, AMoveOutlivesItsSequenceAndKeepsItsGroup) {
  const SequenceInfo source = h_.Open();
  Fill(source, 3, 50);
  const MovingPages pages = BeginExport(source).value();
  std::vector<std::byte> bytes(24);
  bool done = false;
  PageMove move;
  move.tenant = h_.tenant();
  move.id = pages.id;
  move.rows = 3;
  move.bytes = bytes;
  move.done = [&](const absl::Status& status) { done = status.ok(); };
  ASSERT_TRUE(h_.core().transfers().Start(&move).ok());
  std::vector<SequenceId> absent;
  h_.core().sequences().Release(h_.tenant(), std::vector{pages.id, source.id}, &absent);
  EXPECT_EQ(h_.core().Stats().page_groups_pinned, 1);
  EXPECT_TRUE(h_.core().launches().MayStart());
  h_.Run();
  EXPECT_TRUE(done);
  EXPECT_EQ(h_.core().Stats().page_groups_pinned, 0);
}

TEST_F(EngineMovesTest, ADrainLetsRowsOutAndNoneIn) {
  const SequenceInfo source = h_.Open();
  Fill(source, 4, 50);
  h_.core().draining().Start();
  MovingPages pages;
  Export(source, &pages);
  EXPECT_EQ(DetailOf(h_.core().sequences().BeginImport(To(pages)).status()).reason, "draining");
}

// A page group is larger than what one launch carries.
class LargeGroupTest : public EngineMovesTest {
 protected:
  static constexpr int kPageRows = 2048;
  static constexpr int64_t kBytes = int64_t{kPageRows} * 1152 * 4;
  static_assert(kBytes > PageMover::kLaunchBytes && kBytes < 2 * PageMover::kLaunchBytes);

  LargeGroupTest()
      : LargeGroupTest(std::make_unique<testing::FaultyBackend>(
            std::make_unique<kernels::ReferenceBackend>())) {}

  // A sequence that waits for one page of rows.
  MovingPages Target() {
    const MovingPages empty = BeginExport(h_.Open()).value();
    ImportArgs args = To(empty);
    args.tags.rows = kPageRows;
    return h_.core().sequences().BeginImport(args).value();
  }
  PageMove Whole(const MovingPages& pages, bool in, std::vector<std::byte>* payload,
                 absl::Status* answer) {
    payload->resize(static_cast<size_t>(kBytes));
    *answer = absl::UnknownError("it is on its way");
    PageMove move;
    move.tenant = h_.tenant();
    move.id = pages.id;
    move.in = in;
    move.rows = kPageRows;
    move.bytes = *payload;
    move.done = [answer](const absl::Status& status) { *answer = status; };
    return move;
  }
  static std::vector<std::byte> Pattern(int seed) {
    std::vector<std::byte> bytes(static_cast<size_t>(kBytes));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 / 5 + seed);
    return bytes;
  }

  testing::FaultyBackend* const faults_;

 private:
  explicit LargeGroupTest(std::unique_ptr<testing::FaultyBackend> backend)
      : LargeGroupTest(backend.get(), std::move(backend)) {}
  LargeGroupTest(testing::FaultyBackend* faults, std::unique_ptr<testing::FaultyBackend>&& backend)
      : EngineMovesTest(Options(std::move(backend))), faults_(faults) {}

  static testing::HarnessOptions Options(std::unique_ptr<testing::FaultyBackend> backend) {
    testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(),
                                    std::move(backend)};
    options.model.geometry = {2, 512, 64, 6, 5};
    options.model.layers = 4;
    options.model.page_size = kPageRows;
    options.limits.max_row_dim = 576;
    options.limits.max_sequence_rows = kPageRows;
    options.limits.kv_cache_bytes = 4 * kBytes;
    return options;
  }
};

TEST_F(LargeGroupTest, ItGoesWithSeveralLaunches) {
  const MovingPages target = Target();
  std::vector<std::byte> payload = Pattern(1), back;
  const std::vector<std::byte> before = payload;
  absl::Status answer;
  PageMove in = Whole(target, true, &payload, &answer);
  const uint64_t launches = h_.core().Stats().launches;
  ASSERT_TRUE(h_.core().transfers().Start(&in).ok());
  h_.Run();
  EXPECT_TRUE(answer.ok()) << answer;
  EXPECT_EQ(h_.core().Stats().launches, launches + 2);
  const auto sequence = h_.core().transfers().EndImport(h_.tenant(), target.id, Engine::kAllFinite);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  const MovingPages source = BeginExport(*sequence).value();
  PageMove out = Whole(source, false, &back, &answer);
  ASSERT_TRUE(h_.core().transfers().Start(&out).ok());
  h_.Run();
  EXPECT_TRUE(answer.ok()) << answer;
  EXPECT_EQ(h_.core().Stats().launches, launches + 4);
  EXPECT_TRUE(back == before);
}

TEST_F(LargeGroupTest, ALaunchThatFailsFailsItsOwnMovesAlone) {
  const MovingPages first = Target(), second = Target();
  std::vector<std::byte> one = Pattern(1), other = Pattern(2);
  absl::Status one_answer, other_answer;
  PageMove one_move = Whole(first, true, &one, &one_answer);
  PageMove other_move = Whole(second, true, &other, &other_answer);
  faults_->FailAt(testing::FaultPoint::kSubmit);
  ASSERT_TRUE(h_.core().transfers().Start(&one_move).ok());
  ASSERT_TRUE(h_.core().transfers().Start(&other_move).ok());
  h_.Run();
  EXPECT_EQ(DetailOf(one_answer).reason, "launch_failed") << one_answer;
  EXPECT_TRUE(other_answer.ok()) << other_answer;
}

}  // namespace
}  // namespace mla::scheduler
