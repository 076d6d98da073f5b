#include <gtest/gtest.h>

#include "client/mlactl/fleet/fleet_command.h"

namespace mla::mlactl {
namespace {

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

}  // namespace
}  // namespace mla::mlactl
