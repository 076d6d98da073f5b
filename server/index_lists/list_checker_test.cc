#include "server/index_lists/list_checker.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "gtest/gtest.h"
#include "server/grpc/request_validator.h"

namespace mla::server {
namespace {

using scheduler::StepSequenceArgs;

using Lists = std::vector<std::vector<int32_t>>;

// Rows 0..2 of one sequence at position 4 and rows 3..4 of another at 0.
const std::vector<StepSequenceArgs> kStep = {{1, 1, 4, 3}, {2, 1, 0, 2}};

// Memory with lists as they are sent, `room` in front of fixed ones.
struct Sent {
  SentLists shape;
  std::vector<int32_t> memory;
};

Sent Fixed(const Lists& lists, int32_t row_begin = 0) {
  Sent sent;
  const auto width = static_cast<int32_t>(lists[0].size());
  sent.shape = {row_begin, static_cast<int32_t>(lists.size()), width,
                width * static_cast<int32_t>(lists.size()), width};
  sent.memory.assign(lists.size() + 1, -77);
  for (const auto& list : lists) sent.memory.insert(sent.memory.end(), list.begin(), list.end());
  return sent;
}

Sent Ragged(const Lists& lists, int32_t row_begin = 0, int32_t top_k = 100) {
  Sent sent;
  std::vector<int32_t> entries;
  sent.memory.push_back(0);
  for (const auto& list : lists) {
    entries.insert(entries.end(), list.begin(), list.end());
    sent.memory.push_back(static_cast<int32_t>(entries.size()));
  }
  sent.memory.insert(sent.memory.end(), entries.begin(), entries.end());
  sent.shape = {row_begin, static_cast<int32_t>(lists.size()), 0,
                static_cast<int32_t>(entries.size()), top_k};
  return sent;
}

Lists Kept(const Sent& sent) {
  Lists kept;
  const int32_t* const entries = sent.memory.data() + sent.shape.rows + 1;
  for (int32_t row = 0; row < sent.shape.rows; ++row) {
    kept.emplace_back(entries + sent.memory[row], entries + sent.memory[row + 1]);
  }
  return kept;
}

TEST(ListCheckerTest, KeepsEachPositionOnceAndNothingElse) {
  const Lists lists = {{4, -1, 0, 4}, {-1, -1, -1, -1}, {0, 1, 2, 6}, {0, 0, 0, 0}, {1, 0, -1, 1}};
  const Lists want = {{4, 0}, {}, {0, 1, 2, 6}, {0}, {1, 0}};
  for (Sent sent : {Fixed(lists), Ragged(lists)}) {
    ListChecker checker(nullptr);
    EXPECT_EQ(checker.Check(sent.shape, kStep, sent.memory.data()), absl::OkStatus());
    EXPECT_EQ(Kept(sent), want);
  }
  Sent behind = Ragged({{5, 6}, {0}, {}}, 2);
  ListChecker checker(nullptr);
  EXPECT_EQ(checker.Check(behind.shape, kStep, behind.memory.data()), absl::OkStatus());
  EXPECT_EQ(Kept(behind), (Lists{{5, 6}, {0}, {}}));
}

TEST(ListCheckerTest, NamesRowAndSlotOfWhatTheRowDoesNotSee) {
  for (const int32_t bad : {6, 7, 1 << 30, std::numeric_limits<int32_t>::max(), -2,
                            std::numeric_limits<int32_t>::min()}) {
    for (size_t slot = 0; slot < 3; ++slot) {
      Lists lists = {{0, 1, 2}, {5, 0, -1}, {6, 5, 4}, {0, -1, -1}, {1, 0, -1}};
      lists[1][slot] = bad;
      for (Sent sent : {Fixed(lists), Ragged(lists)}) {
        ListChecker checker(nullptr);
        const absl::Status status = checker.Check(sent.shape, kStep, sent.memory.data());
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        const ErrorDetail detail = DetailOf(status);
        EXPECT_EQ(detail.reason, "list_position");
        EXPECT_EQ(detail.got, std::to_string(bad) + " at row 1, slot " + std::to_string(slot) +
                                  " of the index lists");
        EXPECT_EQ(detail.limit, "-1, or 0..5: the positions that the row sees");
      }
    }
  }
}

TEST(ListCheckerTest, RefusesOffsetsThatAreNone) {
  const Lists lists = {{0, 1}, {2}, {3, 4, 5}};
  const auto refused = [](Sent sent, size_t at, int32_t value) {
    sent.memory[at] = value;
    ListChecker checker(nullptr);
    const absl::Status status = checker.Check(sent.shape, kStep, sent.memory.data());
    EXPECT_EQ(DetailOf(status).reason, status.ok() ? "" : "list_offset") << status;
    return !status.ok();
  };
  for (size_t slot = 0; slot < 4; ++slot) {
    for (const int32_t value : {-1, 100, std::numeric_limits<int32_t>::max(),
                                std::numeric_limits<int32_t>::min(), slot == 3 ? 5 : 7}) {
      EXPECT_TRUE(refused(Ragged(lists), slot, value)) << slot << " " << value;
    }
  }
  EXPECT_TRUE(refused(Ragged(lists), 0, 1));
  EXPECT_TRUE(refused(Ragged(lists), 2, 1)) << "falls";
  EXPECT_TRUE(refused(Ragged(lists, 0, 2), 0, 0)) << "a list longer than top_k";
  EXPECT_FALSE(refused(Ragged(lists, 0, 3), 0, 0));
}

// The expected result of the checker for each entry. Returns false, with the slot, for an invalid
// entry.
bool KeptOf(const std::vector<int32_t>& list, int32_t visible, std::vector<int32_t>* kept,
            size_t* slot) {
  std::vector<bool> seen(static_cast<size_t>(visible));
  for (*slot = 0; *slot < list.size(); ++*slot) {
    const int32_t entry = list[*slot];
    if (entry == -1) continue;
    if (entry < 0 || entry >= visible) return false;
    if (!seen[static_cast<size_t>(entry)]) kept->push_back(entry);
    seen[static_cast<size_t>(entry)] = true;
  }
  return true;
}

// Parameters: the instructions of the passes, and the threads that check.
class ListCheckerPasses : public testing::TestWithParam<std::tuple<ListInstructions, int32_t>> {
 protected:
  wire::ThreadTeam team_{{std::get<1>(GetParam()), 100}};
  ListChecker checker_{&team_, std::get<0>(GetParam())};
};

// Long lists in any order, by all ways through the checker, are compared with a simple
// implementation. There are more rows than a byte counts, and contexts whose positions are marked
// by bytes, by bits, by both, and not at all.
TEST_P(ListCheckerPasses, LongListsInAnyOrder) {
  constexpr int32_t kRows = 700;
  std::mt19937 random(1);
  for (const int32_t seen : {3000, 8 * 1024 - 350, 3000, 60'000, 90'000}) {
    const std::vector<StepSequenceArgs> step = {{1, 1, seen, kRows}};
    Lists lists, want;
    for (int32_t row = 0; row < kRows; ++row) {
      std::vector<int32_t> list(static_cast<size_t>(200 + random() % 200)), kept;
      const auto visible = static_cast<uint32_t>(seen + row + 1);
      // Some lists draw from the last few positions, so that they repeat; others from all
      // positions.
      const uint32_t positions = row % 2 == 0 ? 500 : visible;
      for (int32_t& entry : list) {
        entry = static_cast<int32_t>(visible - 1 - random() % positions);
      }
      if (row % 3 == 0) std::sort(list.begin(), list.end());
      if (row % 4 == 0) list.erase(std::unique(list.begin(), list.end()), list.end());
      // One -1, some, or nearly all of them; or a tail of -1, as clients pad their lists.
      const uint32_t fills[] = {0, 1, 16, 2, 200};
      for (size_t i = 0; row % 5 > 1 && i < list.size(); ++i) {
        if (random() % 200 < fills[row % 5]) list[i] = -1;
      }
      if (row % 5 == 1) list[random() % list.size()] = -1;
      if (row % 7 == 0) std::fill(list.begin() + list.size() / 3, list.end(), -1);
      size_t slot = 0;
      ASSERT_TRUE(KeptOf(list, static_cast<int32_t>(visible), &kept, &slot));
      lists.push_back(list);
      want.push_back(kept);
    }
    Sent sent = Ragged(lists, 0, 400);
    EXPECT_EQ(checker_.Check(sent.shape, step, sent.memory.data()), absl::OkStatus());
    EXPECT_EQ(Kept(sent), want) << seen;
  }
}

// The first invalid entry is found wherever it stands, also after lists that have moved. Positions
// marked before it are not repeats for the next call.
TEST_P(ListCheckerPasses, NamesTheFirstOfLongListsThatIsNone) {
  std::mt19937 random(3);
  for (int round = 0; round < 400; ++round) {
    const int32_t seen = round % 2 == 0 ? 2000 : 50'000;
    const std::vector<StepSequenceArgs> step = {{1, 1, seen - 1, 1}, {2, 1, seen - 1, 1}};
    Lists lists(2);
    for (std::vector<int32_t>& list : lists) {
      std::vector<int32_t> all(static_cast<size_t>(seen));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random);
      list.assign(all.begin(), all.begin() + 300 + static_cast<int32_t>(random() % 100));
      for (int32_t& entry : list) entry = random() % 32 == 0 ? -1 : entry;
    }
    const Lists good = lists;
    const int32_t none[] = {seen, -2, std::numeric_limits<int32_t>::max(),
                            std::numeric_limits<int32_t>::min()};
    for (int i = 0; i < 2; ++i) lists[1][random() % lists[1].size()] = none[random() % 4];
    Sent sent = Ragged(lists, 0, 400);
    std::vector<int32_t> kept;
    size_t slot = 0;
    ASSERT_FALSE(KeptOf(lists[1], seen, &kept, &slot));
    EXPECT_EQ(DetailOf(checker_.Check(sent.shape, step, sent.memory.data())).got,
              absl::StrCat(lists[1][slot], " at row 1, slot ", slot, " of the index lists"));
    Sent next = Ragged(good, 0, 400);
    Lists want(2);
    for (size_t i = 0; i < 2; ++i) ASSERT_TRUE(KeptOf(good[i], seen, &want[i], &slot));
    EXPECT_EQ(checker_.Check(next.shape, step, next.memory.data()), absl::OkStatus());
    EXPECT_EQ(Kept(next), want);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ListCheckerPasses,
                         testing::Combine(testing::Values(ListInstructions::kPortable,
                                                          ListInstructions::kAvx2,
                                                          ListInstructions::kAvx512),
                                          testing::Values(1, 3)));

// Lists that helpers check: which row is named does not depend on who was first, and what rows in
// front of it had is not what later messages have.
TEST(ListCheckerTest, ATeamNamesTheFirstRowWithAnEntryThatIsNone) {
  constexpr int32_t kRows = 300, kWidth = 400, kSeen = 60'000;
  const std::vector<StepSequenceArgs> step = {{1, 1, kSeen - 1, 100}, {2, 1, kSeen - 1, 200}};
  wire::ThreadTeam team({4, 1000});
  ListChecker checker(&team), alone(nullptr);
  std::mt19937 random(4);
  Lists good(kRows, std::vector<int32_t>(kWidth));
  for (auto& list : good) {
    for (int32_t& entry : list) entry = static_cast<int32_t>(random() % kSeen);
    list[random() % kWidth] = random() % 2 == 0 ? -1 : list[0];
  }
  Sent want = Fixed(good);
  ASSERT_GE(want.shape.entries, ListChecker::kSharedEntries);
  ASSERT_EQ(alone.Check(want.shape, step, want.memory.data()), absl::OkStatus());
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (int round = 0; round < 50 || team.helped() == 0; ++round) {
    ASSERT_LT(std::chrono::steady_clock::now(), give_up) << "no helper came";
    Lists lists = good;
    int32_t first = kRows, slot = 0;
    for (int i = 0; i < 3; ++i) {
      const auto row = static_cast<int32_t>(random() % kRows);
      const auto at = static_cast<int32_t>(random() % kWidth);
      lists[row][at] = kSeen + 200;
      slot = row < first ? at : row == first ? std::min(slot, at) : slot;
      first = std::min(first, row);
    }
    for (Sent sent : {Fixed(lists), Ragged(lists, 0, kWidth)}) {
      EXPECT_EQ(
          DetailOf(checker.Check(sent.shape, step, sent.memory.data())).got,
          absl::StrCat(kSeen + 200, " at row ", first, ", slot ", slot, " of the index lists"));
    }
    for (Sent sent : {Fixed(good), Ragged(good, 0, kWidth)}) {
      ASSERT_EQ(checker.Check(sent.shape, step, sent.memory.data()), absl::OkStatus());
      ASSERT_EQ(Kept(sent), Kept(want));
    }
  }
}

// Lists that are short compared with what their row sees stand between long ones: marks of one list
// do not count for another.
TEST(ListCheckerTest, ShortListsOfLongSequencesBetweenLongLists) {
  constexpr int32_t kRows = 200;
  constexpr int32_t kSeen = 100'000;
  const std::vector<StepSequenceArgs> step = {{1, 1, kSeen, kRows}};
  std::mt19937 random(2);
  ListChecker checker(nullptr);
  Lists lists, want;
  for (int32_t row = 0; row < kRows; ++row) {
    std::vector<int32_t> list(row % 3 == 0 ? 2000 : 6), kept;
    // Few positions, so that lists share them and repeat them.
    for (int32_t& entry : list) entry = static_cast<int32_t>(random() % 1000) * (kSeen / 1000);
    for (const int32_t entry : list) {
      if (std::find(kept.begin(), kept.end(), entry) == kept.end()) kept.push_back(entry);
    }
    lists.push_back(list);
    want.push_back(kept);
  }
  // A list that is refused after it has marked positions leaves no marks.
  Sent refused = Ragged({lists[0]}, 0, 2000);
  refused.memory.back() = 2 * kSeen;
  EXPECT_EQ(DetailOf(checker.Check(refused.shape, step, refused.memory.data())).reason,
            "list_position");
  Sent sent = Ragged(lists, 0, 2000);
  EXPECT_EQ(checker.Check(sent.shape, step, sent.memory.data()), absl::OkStatus());
  EXPECT_EQ(Kept(sent), want);
}

TEST(SelectedListsTest, HaveAllThatARowSeesAndTopKAtMost) {
  std::vector<int32_t> begins(5);
  PlaceSelectedLists({1, 4, 0, 0, 6}, kStep, begins.data());
  EXPECT_EQ(begins, (std::vector<int32_t>{0, 6, 12, 13, 15}));
}

// --------------------------------------------------------------------- What a message may contain.

scheduler::ModelSpec SparseModel() {
  scheduler::ModelSpec model;
  model.id = "m";
  model.geometry = {4, 32, 8, 16, 16};
  model.layers = 2;
  model.softmax_scale = 0.5;
  model.page_size = 16;
  model.attention = kernels::AttentionKind::kSparse;
  model.top_k = 10;
  return model;
}

struct Parsed {
  absl::Status status;
  ErrorDetail detail;
  AttendSizes sizes;
};

Parsed Parse(const v1::Attend& message, const scheduler::ModelSpec& model,
             int64_t payload = kTensorsElsewhere) {
  Parsed parsed;
  scheduler::AttendArgs args;
  parsed.status = ParseAttend(message, model, 1 << 20, payload, 1 << 20, &args, &parsed.sizes);
  parsed.detail = DetailOf(parsed.status);
  return parsed;
}

v1::Attend ThreeRows(v1::IndexLists lists, uint32_t entries) {
  v1::Attend message;
  message.set_row_count(3);
  message.set_num_heads(1);
  message.set_profile(v1::PROFILE_ABSORBED);
  message.set_lists(lists);
  message.set_list_entries(entries);
  return message;
}

TEST(ListsOfAMessageTest, SizesFollowFromWhatItSays) {
  const auto bytes = [](v1::IndexLists lists, uint32_t entries) {
    return Parse(ThreeRows(lists, entries), SparseModel()).sizes.list_bytes;
  };
  EXPECT_EQ(bytes(v1::INDEX_LISTS_UNSPECIFIED, 0), 0);
  EXPECT_EQ(bytes(v1::INDEX_LISTS_FIXED, 4), 3 * 4 * 4);
  EXPECT_EQ(bytes(v1::INDEX_LISTS_FIXED, 0), 3 * 10 * 4) << "top_k";
  EXPECT_EQ(bytes(v1::INDEX_LISTS_RAGGED, 0), 4 * 4);
  EXPECT_EQ(bytes(v1::INDEX_LISTS_RAGGED, 30), (4 + 30) * 4);
  constexpr int64_t kQueries = 3 * 40 * 2;
  EXPECT_TRUE(Parse(ThreeRows(v1::INDEX_LISTS_FIXED, 4), SparseModel(), kQueries + 48).status.ok());
  const Parsed parsed = Parse(ThreeRows(v1::INDEX_LISTS_FIXED, 4), SparseModel(), kQueries);
  EXPECT_EQ(parsed.detail.field, "payload");
  EXPECT_NE(parsed.detail.limit.find("lists 48"), std::string::npos) << parsed.detail.limit;
}

TEST(ListsOfAMessageTest, IndexInputsAreForTheServersIndexer) {
  scheduler::ModelSpec model = SparseModel();
  v1::Attend message = ThreeRows(v1::INDEX_LISTS_SERVER, 0);
  EXPECT_EQ(Parse(message, model).detail.reason, "no_indexer");
  model.indexer = {5, 24};
  EXPECT_EQ(Parse(message, model).sizes.list_bytes, 3 * 5 * (24 * 2 + 4));
  EXPECT_EQ(Parse(message, model).sizes.lists_out_bytes, 0);
  message.set_want_lists(true);
  EXPECT_EQ(Parse(message, model).sizes.lists_out_bytes, 3 * 10 * 4);
  message.set_q_dtype(v1::DTYPE_F32);
  EXPECT_EQ(Parse(message, model).sizes.list_bytes, 3 * 5 * (24 * 4 + 4));
  message.set_list_entries(1);
  EXPECT_EQ(Parse(message, model).detail.field, "attend.list_entries");
  message.set_list_entries(0);
  message.set_has_kv(true);  // with its index key
  EXPECT_EQ(Parse(message, model).sizes.kv_bytes, 3 * (40 + 24) * 4);
  message.set_lists(v1::INDEX_LISTS_FIXED);
  EXPECT_EQ(Parse(message, model).detail.field, "attend.want_lists");
}

TEST(ListsOfAMessageTest, RefusesWhatIsOutOfRange) {
  const auto field = [](const v1::Attend& message, const scheduler::ModelSpec& model) {
    const Parsed parsed = Parse(message, model);
    EXPECT_EQ(parsed.status.code(), absl::StatusCode::kInvalidArgument);
    return parsed.detail.field;
  };
  const scheduler::ModelSpec sparse = SparseModel();
  EXPECT_EQ(field(ThreeRows(static_cast<v1::IndexLists>(4), 1), sparse), "attend.lists");
  EXPECT_EQ(field(ThreeRows(static_cast<v1::IndexLists>(-1), 1), sparse), "attend.lists");
  EXPECT_EQ(field(ThreeRows(v1::INDEX_LISTS_UNSPECIFIED, 1), sparse), "attend.list_entries");
  for (const uint32_t entries : {31u, 1u << 31, ~0u}) {
    EXPECT_EQ(field(ThreeRows(v1::INDEX_LISTS_RAGGED, entries), sparse), "attend.list_entries");
  }
  for (const uint32_t entries : {11u, 1u << 31, ~0u}) {
    EXPECT_EQ(field(ThreeRows(v1::INDEX_LISTS_FIXED, entries), sparse), "attend.list_entries");
  }
  scheduler::ModelSpec dense = sparse;
  dense.attention = kernels::AttentionKind::kDense;
  EXPECT_EQ(field(ThreeRows(v1::INDEX_LISTS_FIXED, 4), dense), "attend.lists");
  v1::Attend append = ThreeRows(v1::INDEX_LISTS_FIXED, 4);
  append.set_profile(v1::PROFILE_APPEND_ONLY);
  append.set_has_kv(true);
  EXPECT_EQ(field(append, sparse), "attend.lists");
  scheduler::ModelSpec wide = sparse;
  wide.top_k = 65536;
  v1::Attend many = ThreeRows(v1::INDEX_LISTS_FIXED, 65536);
  many.set_row_count(1 << 15);
  EXPECT_EQ(field(many, wide), "attend.row_count") << "more entries than 2^31 - 1";
}

TEST(ListsOfAMessageTest, ModelsSayWhatTheyAttendTo) {
  v1::ModelSpec message;
  message.set_model_id("m");
  message.mutable_geometry()->set_num_heads(4);
  message.mutable_geometry()->set_kv_lora_rank(32);
  message.set_layers(1);
  message.set_softmax_scale(1);
  message.set_rope_owner(v1::ROPE_OWNER_WORKER);
  const auto refused = [&](int kind, uint32_t top_k) {
    message.set_attention(static_cast<v1::AttentionKind>(kind));
    message.set_top_k(top_k);
    scheduler::ModelSpec spec;
    const absl::Status status = ParseModelSpec(message, scheduler::Limits(), &spec);
    const std::string field = DetailOf(status).field;
    EXPECT_EQ(status.ok(), field.empty()) << status;
    EXPECT_TRUE(!status.ok() || spec.top_k == static_cast<int32_t>(top_k));
    return field;
  };
  EXPECT_EQ(refused(0, 0), "");
  EXPECT_EQ(refused(1, 0), "");
  EXPECT_EQ(refused(1, 1), "model.top_k");
  EXPECT_EQ(refused(2, 1), "");
  EXPECT_EQ(refused(2, 2048), "");
  EXPECT_EQ(refused(2, 0), "model.top_k");
  EXPECT_EQ(refused(2, 2049), "model.top_k");
  EXPECT_EQ(refused(2, ~0u), "model.top_k");
  EXPECT_EQ(refused(3, 0), "model.window");
  EXPECT_EQ(refused(4, 0), "model.attention");
  EXPECT_EQ(refused(-1, 0), "model.attention");
}

TEST(TensorsOfAMessageTest, TensorsOf8BitsHaveTheirScalesBehindThem) {
  scheduler::ModelSpec model = SparseModel();
  model.geometry = {4, 32, 8, 16, 16};
  const int64_t kv = 3 * 40 * 2, kv_fp8 = 3 * (40 + 2 * 4), q_fp8 = 3 * 2 * (40 + 2 * 4);
  scheduler::AttendArgs args;
  AttendSizes sizes;
  const auto parse = [&](v1::Profile profile, v1::DType q, v1::DType rows, int64_t payload) {
    v1::Attend attend;
    attend.set_row_count(3);
    attend.set_num_heads(2);
    attend.set_profile(profile);
    attend.set_has_kv(true);
    attend.set_q_dtype(q);
    attend.set_kv_row_dtype(rows);
    return DetailOf(ParseAttend(attend, model, 4, payload, 1 << 20, &args, &sizes)).field;
  };
  constexpr auto kFp8 = v1::DTYPE_F8_E4M3;
  EXPECT_EQ(parse(v1::PROFILE_ABSORBED, kFp8, v1::DTYPE_UNSPECIFIED, kv + q_fp8), "");
  EXPECT_EQ(args.q_dtype, kernels::DType::kBf16);
  EXPECT_EQ(sizes.q_bytes, 3 * 2 * 40 * 2);  // decoded
  EXPECT_EQ(parse(v1::PROFILE_ABSORBED, kFp8, kFp8, kv + q_fp8), "payload");
  EXPECT_EQ(parse(v1::PROFILE_EXPANDED, kFp8, kFp8, kv_fp8 + 3 * 2 * (24 + 4)), "");
  EXPECT_EQ(parse(v1::PROFILE_EXPANDED, v1::DTYPE_F32, kFp8, kv_fp8 + 3 * 2 * 24 * 4), "");
  EXPECT_EQ(parse(v1::PROFILE_APPEND_ONLY, v1::DTYPE_F32, v1::DTYPE_BF16, kv),
            "attend.kv_row_dtype");
}

}  // namespace
}  // namespace mla::server
