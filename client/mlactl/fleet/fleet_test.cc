#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/mlactl/fleet/fleet_command.h"
#include "client/mlactl/fleet/fleet_top.h"
#include "client/mlactl/fleet/rates.h"
#include "client/mlactl/fleet/sequence_list.h"

namespace mla::mlactl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

fleet::ServerStatus Server(const std::string& address, uint32_t percent, uint64_t free,
                           const std::string& state = "serving") {
  fleet::ServerStatus status;
  status.set_address(address);
  status.set_kv_percent(percent);
  status.set_bytes_free(free);
  status.set_state(state);
  return status;
}

TEST(FleetTest, ServersAboveTheBoundGetNoNewSequences) {
  fleet::FleetStatus status;
  *status.add_servers() = Server("a", 40, 1);
  *status.add_servers() = Server("b", 60, 1);
  *status.add_servers() = Server("c", 20, 1);
  *status.add_servers() = Server("d", 99, 1, "draining");
  *status.add_servers() = Server("e", 0, 1, "away");
  Judge(&status);
  EXPECT_EQ(status.mean_percent(), 40u);
  EXPECT_EQ(status.bound_percent(), 50u);
  const bool expected[] = {true, false, true, false, false};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(status.servers(i).gets_new_sequences(), expected[i]) << i;
}

TEST(FleetTest, PeersOfADrainAreTheServingOnesWithTheMostRoomFirst) {
  fleet::FleetStatus status;
  *status.add_servers() = Server("a", 0, 5);
  *status.add_servers() = Server("b", 0, 7);
  *status.add_servers() = Server("c", 0, 9, "draining");
  *status.add_servers() = Server("d", 0, 9, "away");
  *status.add_servers() = Server("e", 0, 8);
  EXPECT_EQ(PeersFor(status, "e"), (std::vector<std::string>{"b", "a"}));
  EXPECT_EQ(PeersFor(status, ""), (std::vector<std::string>{"e", "b", "a"}));
}

TEST(FleetTest, SequencesAreListedByTenantTheOldestFirst) {
  v1::GetReply reply;
  const struct {
    const char* tenant;
    uint64_t id, age_ms;
    bool in_step;
    uint64_t open_step;
  } kGiven[] = {
      {"red", 1, 5'000, false, 0}, {"blue", 2, 3, true, 9}, {"red", 3, 7'260'000, true, 0}};
  for (const auto& one : kGiven) {
    v1::SequenceInfo* const info = reply.add_sequences();
    info->set_sequence_id(one.id);
    info->set_tenant(one.tenant);
    info->set_age_ms(one.age_ms);
    info->set_kv_bytes(2048);
    info->set_in_step(one.in_step);
    info->set_open_step(one.open_step);
  }
  fleet::FleetSequences list;
  AddSequences(reply, "", &list);
  OrderSequences(&list);
  std::vector<std::string> ids, states;
  for (const fleet::FleetSequence& row : list.sequences()) {
    ids.push_back(row.sequence_id().substr(15));
    states.push_back(row.state());
  }
  EXPECT_EQ(ids, (std::vector<std::string>{"2", "3", "1"}));
  EXPECT_EQ(states, (std::vector<std::string>{"step", "import", "idle"}));
  const std::string text = SequencesText(list, false);
  EXPECT_THAT(text, AllOf(HasSubstr("2 h 1 min"), HasSubstr("2.00 KiB"), HasSubstr("tenant"),
                          Not(HasSubstr("server")), Not(HasSubstr("epoch"))));
  EXPECT_THAT(SequencesText(list, true), AllOf(HasSubstr("7260000"), HasSubstr(" 2048 ")));
  // A server that does not tell ages, and one tenant.
  list.clear_sequences();
  reply.clear_sequences();
  reply.add_sequences()->set_sequence_id(1);
  AddSequences(reply, "a:1", &list);
  EXPECT_THAT(SequencesText(list, false),
              AllOf(HasSubstr("server"), Not(HasSubstr("tenant")), HasSubstr(" - ")));
}

TEST(FleetTest, RatesAreDifferencesOfCountersOverTheTime) {
  v1::GetStatsReply before, now;
  before.set_boot_id(1);
  before.set_requests_total(100);
  before.set_rows_decode(7);
  now = before;
  now.set_requests_total(400);
  now.set_kv_bytes_used(5);
  now.set_requests_waiting(3);
  fleet::ServerRates rates;
  SetRates(before, now, 2.0, &rates);
  EXPECT_EQ(rates.requests_per_s(), 150);
  EXPECT_EQ(rates.decode_rows_per_s(), 0);
  EXPECT_EQ(rates.bytes_used(), 5u);
  EXPECT_EQ(rates.requests_waiting(), 3u);
  now.set_boot_id(2);  // it has restarted: its counters began at nothing
  SetRates(before, now, 2.0, &rates);
  EXPECT_EQ(rates.requests_per_s(), 200);
  EXPECT_EQ(rates.decode_rows_per_s(), 3.5);
  SetRates(now, now, 0, &rates);
  EXPECT_EQ(rates.requests_per_s(), 0) << "the first look";
}

TEST(FleetTest, TheTotalIsOfTheServersThatAnswered) {
  fleet::FleetTop top;
  for (const char* address : {"a", "b", "c"}) {
    fleet::ServerRates* const one = top.add_servers();
    one->set_address(address);
    one->set_state("serving");
    one->set_requests_per_s(10);
    one->set_sequences(4);
    one->set_bytes_used(1);
    one->set_bytes_total(8);
  }
  top.mutable_servers(1)->set_state("away");
  top.mutable_servers(1)->set_why("no\nanswer");
  top.set_registry("etcd is away");
  SetTotal(&top);
  EXPECT_EQ(top.total().requests_per_s(), 20);
  EXPECT_EQ(top.total().sequences(), 8u);
  const std::string text = FleetTopText(top);
  EXPECT_THAT(text, ::testing::ContainsRegex("\na +12\\.5 +4 +0 +0 +10 "));
  EXPECT_THAT(text, ::testing::ContainsRegex("\nall +12\\.5 +8 +0 +0 +20 "));
  EXPECT_THAT(text, ::testing::HasSubstr("away: no\\u000aanswer\n"));
  EXPECT_THAT(text, ::testing::HasSubstr("the registry was not read: etcd is away"));
}

}  // namespace
}  // namespace mla::mlactl
