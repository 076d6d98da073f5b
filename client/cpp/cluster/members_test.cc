#include "client/cpp/cluster/members.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "client/cpp/cluster/faults.h"

namespace mla::client {
namespace {

TEST(MemberTest, ReadsWhatAnnounceWrites) {
  const auto member = ParseMember(
      R"({"address":"a:1","boot_id":18446744073709551615,"bytes_cached":2,"bytes_free":3,)"
      R"("bytes_total":4,"device":"a gpu","draining":true,"models":["ab","cd"],"node":"n",)"
      R"("sequences":5,"socket":"/run/mla.sock","version":"1.0","of_a_later_release":[{}]})");
  ASSERT_TRUE(member.ok()) << member.status();
  EXPECT_EQ(member->address(), "a:1");
  EXPECT_EQ(member->boot_id(), UINT64_MAX);
  EXPECT_EQ(member->bytes_cached(), 2u);
  EXPECT_EQ(member->bytes_free(), 3u);
  EXPECT_EQ(member->bytes_total(), 4u);
  EXPECT_EQ(member->device(), "a gpu");
  EXPECT_TRUE(member->draining());
  EXPECT_EQ(member->models_size(), 2);
  EXPECT_EQ(member->node(), "n");
  EXPECT_EQ(member->sequences(), 5u);
  EXPECT_EQ(member->socket(), "/run/mla.sock");
  EXPECT_EQ(member->version(), "1.0");
}

TEST(MemberTest, RefusesWhatIsNoMember) {
  std::string deep = R"({"address":"a:1","x":)";
  for (int i = 0; i < 10000; ++i) deep += '[';
  std::string digests = "\"\"";
  for (int i = 0; i < kMostDigests; ++i) digests += ",\"ab\"";
  for (const std::string& text :
       {std::string("nonsense"), std::string("[]"), std::string("{}"), std::string(),
        std::string(R"({"address":""})"), std::string(R"({"address":"a","boot_id":-1})"),
        std::string(R"({"address":"a","boot_id":18446744073709551616})"),
        std::string(R"({"address":"a","draining":3})"), std::string(R"({"address":7})"),
        std::string(R"({"address":"a","device":"x\u0000y"})"), std::string(R"({"address":"a\nb"})"),
        absl::StrCat(R"({"address":")", std::string(kMostText + 1, 'a'), "\"}"),
        absl::StrCat(R"({"address":"a","models":[)", digests, "]}"), deep,
        absl::StrCat(R"({"address":"a"})", std::string(kMostValueBytes, ' '))}) {
    EXPECT_EQ(ParseMember(text).status().code(), absl::StatusCode::kInvalidArgument)
        << text.substr(0, 80);
  }
}

// A registry that says what the test wants.
struct FakeRegistry {
  absl::StatusOr<std::vector<Member>> answer = std::vector<Member>();
  double now = 0;
  std::vector<std::string> gone;

  MemberList List(double keep_s) {
    return MemberList([this] { return answer; },
                      [this](const std::vector<std::string>& addresses) { gone = addresses; },
                      {.refresh_s = 1, .keep_s = keep_s, .now = [this] { return now; }});
  }
};

Member With(const std::string& address, uint64_t boot_id) {
  Member member = MemberAt(address);
  member.set_boot_id(boot_id);
  return member;
}

TEST(MemberListTest, KeepsTheMembersWhileTheRegistryIsAway) {
  FakeRegistry registry;
  MemberList list = registry.List(600);
  EXPECT_EQ(ReasonOf(list.All().status()), kRegistryAway);
  registry.answer = std::vector<Member>{With("b:1", 2), With("a:1", 1)};
  ASSERT_EQ(list.Refresh(), absl::OkStatus());
  registry.answer = absl::UnavailableError("no etcd");
  registry.now = 600;
  EXPECT_FALSE(list.Refresh().ok());
  ASSERT_TRUE(list.All().ok());
  EXPECT_EQ(list.All()->at(0).address(), "a:1");
  EXPECT_EQ(list.All()->size(), 2u);
  registry.now = 600.1;
  const absl::Status away = list.All().status();
  EXPECT_EQ(away.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(away), kRegistryAway);
  EXPECT_NE(away.message().find("no etcd"), std::string::npos);
  EXPECT_TRUE(registry.gone.empty());
}

// client/python/tests/cluster/test_members.py has the same text.
TEST(MemberTest, IsWrittenAsPythonWritesIt) {
  Member member = With("node-1:50551", ~uint64_t{0});
  member.set_node("a \"quoted\" \\ name");
  member.set_socket("/run/mla.sock");
  member.set_device("MI355X");
  member.set_version("0.2.0");
  member.set_draining(true);
  member.set_bytes_free(3);
  member.set_bytes_cached(2);
  member.set_bytes_total(5);
  member.set_sequences(7);
  member.add_models("00ff");
  member.add_models("01");
  const std::string json = MemberJson(member);
  EXPECT_EQ(json, R"({"address":"node-1:50551","boot_id":18446744073709551615,"bytes_cached":2,)"
                  R"("bytes_free":3,"bytes_total":5,"device":"MI355X","draining":true,)"
                  R"("models":["00ff","01"],"node":"a \"quoted\" \\ name","sequences":7,)"
                  R"("socket":"/run/mla.sock","version":"0.2.0"})");
  const auto read = ParseMember(json);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->SerializeAsString(), member.SerializeAsString());
  EXPECT_TRUE(ParseMember(MemberJson(MemberAt("a:1"))).ok());
}

TEST(MemberListTest, SaysWhoHasLeftOrRestarted) {
  FakeRegistry registry;
  MemberList list = registry.List(600);
  registry.answer = std::vector<Member>{With("a:1", 1), With("b:1", 2), With("c:1", 0)};
  ASSERT_EQ(list.Refresh(), absl::OkStatus());
  // c's boot id was not known before.
  registry.answer = std::vector<Member>{With("b:1", 9), With("c:1", 3), With("d:1", 4)};
  ASSERT_EQ(list.Refresh(), absl::OkStatus());
  EXPECT_EQ(registry.gone, (std::vector<std::string>{"a:1", "b:1"}));
}

TEST(MemberListTest, RefusesAListThatIsTooLong) {
  FakeRegistry registry;
  MemberList list = registry.List(600);
  std::vector<Member> many;
  for (size_t i = 0; i <= kMostMembers; ++i) many.push_back(With(absl::StrCat("a:", i), 1));
  registry.answer = many;
  EXPECT_EQ(list.Refresh().code(), absl::StatusCode::kInvalidArgument);
  many.pop_back();
  registry.answer = many;
  EXPECT_EQ(list.Refresh(), absl::OkStatus());
  EXPECT_EQ(list.All()->size(), kMostMembers);
}

}  // namespace
}  // namespace mla::client
