#include "client/cpp/cluster/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/blake2b.h"
#include "client/cpp/cluster/owners.h"

namespace mla::client {
namespace {

constexpr char kGolden[] = "tests/cluster/placement_golden.txt";

using Words = std::vector<std::string>;

Words ListOf(const std::string& text) { return absl::StrSplit(text, ',', absl::SkipEmpty()); }

std::vector<uint32_t> NumbersOf(const std::string& text) {
  std::vector<uint32_t> numbers;
  for (const std::string& one : ListOf(text)) {
    EXPECT_TRUE(absl::SimpleAtoi(one, &numbers.emplace_back())) << one;
  }
  return numbers;
}

std::string Hex(const std::string& bytes) { return absl::BytesToHexString(bytes); }
std::string Bytes(const std::string& hex) { return absl::HexStringToBytes(hex); }

v1::Prefix TokensFrom(uint32_t first, uint32_t count) {
  v1::Prefix prefix;
  for (uint32_t i = 0; i < count; ++i) prefix.add_token_ids(first + i);
  return prefix;
}

Words Servers(int count) {
  Words addresses;
  for (int i = 0; i < count; ++i) addresses.push_back(absl::StrCat("server-", i, ":50551"));
  return addresses;
}

// The result of this client for a line of the golden file.
std::string Made(const Words& line) {
  if (line[0] == "key") {
    v1::Prefix prefix;
    prefix.set_salt(line[2]);
    for (const uint32_t token : NumbersOf(line[3])) prefix.add_token_ids(token);
    for (const std::string& one : ListOf(line[4])) prefix.add_page_keys(Bytes(one));
    return Hex(KeyOfPrefix(line[1], prefix));
  }
  if (line[0] == "order") return absl::StrJoin(ByHash(Bytes(line[1]), ListOf(line[2])), ",");
  if (line[0] == "subset") {
    return absl::StrJoin(SubsetOf(line[1], ListOf(line[2]), NumbersOf(line[3])[0]), ",");
  }
  if (line[0] == "hash") {
    Blake2b hash(NumbersOf(line[3])[0], Bytes(line[1]));
    const std::string bytes = Bytes(line[2]);
    hash.Add(bytes.substr(0, bytes.size() / 3));
    hash.Add(bytes.substr(bytes.size() / 3));
    return Hex(hash.Digest());
  }
  if (line[0] == "names") {
    const auto page_names = PageNames(NumbersOf(line[3]), NumbersOf(line[2])[0], Bytes(line[1]));
    if (!page_names.ok()) return page_names.status().ToString();
    Words names;
    for (const std::string& one : *page_names) names.push_back(Hex(one));
    return absl::StrJoin(names, ",");
  }
  return "no such kind: " + line[0];
}

TEST(PlacementTest, MakesTheBytesThatThePythonClientMakes) {
  std::ifstream file(kGolden);
  ASSERT_TRUE(file) << kGolden;
  std::set<std::string> kinds;
  for (std::string text; std::getline(file, text);) {
    if (text.starts_with("#")) continue;
    const Words line = absl::StrSplit(text, '\t');
    EXPECT_EQ(Made(line), line.back()) << text;
    kinds.insert(line[0]);
  }
  EXPECT_EQ(kinds, (std::set<std::string>{"hash", "key", "order", "subset", "names"}));
}

TEST(PlacementTest, NamesOfPagesNeedASaltAndPages) {
  const std::vector<uint32_t> tokens = {1, 2, 3};
  for (const std::string& salt : {std::string(), std::string(65, 's')}) {
    EXPECT_EQ(PageNames(tokens, 2, salt).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(PageNames(tokens, 0, "s").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PageNames(tokens, 2, "s")->size(), 1u);
}

TEST(PlacementTest, PassesOverServersFullerThanTheBound) {
  const Words addresses = Servers(64);
  Fills fills;
  for (const std::string& address : addresses) fills[address] = 0.4;
  fills[addresses[0]] = 0.51;
  EXPECT_EQ(Bounded(addresses, fills).size(), 63u);
  fills[addresses[0]] = 0.49;
  EXPECT_EQ(Bounded(addresses, fills), addresses);
  // At the beginning all are nearly empty.
  EXPECT_EQ(Bounded(addresses, {{addresses[0], kSlack}}), addresses);
}

TEST(PlacementTest, AsksTheLastOwnerTwoByHashAndTheEmptierOfTwo) {
  const Words addresses = Servers(12);
  const std::string key = KeyOfPrefix("m", TokensFrom(1, 300));
  const Words order = ByHash(key, addresses);
  const std::string last = order[7];
  std::mt19937_64 random(1);
  std::set<std::string> others;
  for (int i = 0; i < 50; ++i) {
    const Words asked = Candidates(key, addresses, {}, &random, last, addresses[0]);
    ASSERT_EQ(asked.size(), kMostCandidates);
    EXPECT_EQ(asked[0], last);
    EXPECT_EQ(asked[1], order[0]);
    EXPECT_EQ(asked[2], order[1]);
    others.insert(asked[3]);
  }
  EXPECT_GT(others.size(), 4u);
  // The emptier one of the two that are left.
  const Words four(order.begin(), order.begin() + 5);
  const Fills fills = {{order[3], 0.04}, {order[2], 0.03}};
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(Candidates(key, four, fills, &random, order[4], "")[3], order[2]);
  }
  // A server that is too full gets nothing new, and keeps the conversations that it has.
  Fills full;
  for (const std::string& address : addresses) full[address] = 0.3;
  for (const size_t place : {0, 1, 7}) full[order[place]] = 0.9;
  for (int i = 0; i < 20; ++i) {
    const Words asked = Candidates(key, addresses, full, &random, "", order[0]);
    EXPECT_EQ(asked.size(), 3u);
    EXPECT_EQ(asked[0], order[2]);
    EXPECT_EQ(asked[1], order[3]);
    for (const std::string& address : asked) EXPECT_LT(full[address], 0.5);
    EXPECT_EQ(Candidates(key, addresses, full, &random, last, order[0])[0], last);
  }
  // Without a key the candidates are the home and another one.
  EXPECT_EQ(Candidates({}, addresses, {}, &random, "", addresses[5])[0], addresses[5]);
  EXPECT_EQ(Candidates({}, addresses, {}, &random, "", addresses[5]).size(), 2u);
  EXPECT_TRUE(Candidates(key, {}, {}, &random, "gone", "gone").empty());
}

v1::ProbeReply ProbeOf(uint64_t rows, uint64_t free, uint64_t total) {
  v1::ProbeReply reply;
  reply.set_rows_in_pool(rows);
  reply.set_kv_bytes_free(free);
  reply.set_kv_bytes_total(total);
  return reply;
}

TEST(PlacementTest, CostsAreOfMissingRowsQueueFillAndDistance) {
  const Costs costs;
  EXPECT_EQ(CostOf({}, 10, 0, costs, true), kImpossible);
  v1::ProbeReply probe = ProbeOf(60, 50, 100);
  EXPECT_EQ(CostOf(probe, 100, 51, costs, true), kImpossible);
  EXPECT_DOUBLE_EQ(CostOf(probe, 100, 50, costs, true), 40 * 100e-6 + 0.25 * 6.0);
  EXPECT_DOUBLE_EQ(CostOf(probe, 10, 0, costs, false), 0.25 * 6.0 + 2e-3);
  probe.set_kv_bytes_cached(50);  // cached rows give way, and fill it nevertheless
  EXPECT_DOUBLE_EQ(FillOf(probe), 1.0);
  probe.set_rows_in_host(10);
  probe.set_rows_in_file(5);
  probe.set_wait_us(3);
  EXPECT_DOUBLE_EQ(CostOf(probe, 75, 0, costs, true), 10 * 4e-6 + 5 * 25e-6 + 3e-6 * 61 * 16 + 6.0);
  probe.set_draining(true);
  EXPECT_EQ(CostOf(probe, 75, 0, costs, true), kImpossible);
}

TEST(PlacementTest, RanksTheCheapestFirst) {
  const std::vector<Answer> answers = {
      {"away", {}, 0}, {"empty", ProbeOf(0, 100, 100), 0}, {"rows", ProbeOf(90, 100, 100), 0}};
  const std::vector<Choice> ranked = Ranked(answers, 100, Costs(), "");
  EXPECT_EQ(ranked[0].address, "rows");
  EXPECT_EQ(ranked[1].address, "empty");
  EXPECT_EQ(ranked[2].cost_s, kImpossible);
}

TEST(MarksTest, RememberWhoHadTheLongestBeginning) {
  Marks marks;
  marks.Remember("m", TokensFrom(0, 1024), "a");
  EXPECT_EQ(marks.Recall("m", TokensFrom(0, 5000)), "a");
  marks.Remember("m", TokensFrom(0, 2100), "b");
  EXPECT_EQ(marks.Recall("m", TokensFrom(0, 2048)), "b");
  EXPECT_EQ(marks.Recall("n", TokensFrom(0, 2048)), "");
  EXPECT_EQ(marks.Recall("m", TokensFrom(1, 2048)), "");
  EXPECT_EQ(marks.Recall("m", {}), "");
  marks.Remember("m", TokensFrom(9, 7), "c");  // shorter than a mark: all of it
  EXPECT_EQ(marks.Recall("m", TokensFrom(9, 7)), "c");
  EXPECT_EQ(marks.Recall("m", TokensFrom(9, 8)), "");
}

TEST(MarksTest, ForgetTheOldest) {
  Marks marks(2);
  for (uint32_t i = 0; i < 3; ++i) marks.Remember("m", TokensFrom(i * 10, 5), absl::StrCat(i));
  EXPECT_EQ(marks.Recall("m", TokensFrom(0, 5)), "");
  EXPECT_EQ(marks.Recall("m", TokensFrom(10, 5)), "1");
  EXPECT_EQ(marks.Recall("m", TokensFrom(20, 5)), "2");
}

}  // namespace
}  // namespace mla::client
