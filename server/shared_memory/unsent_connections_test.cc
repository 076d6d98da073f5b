#include "server/shared_memory/unsent_connections.h"

#include "gtest/gtest.h"

namespace mla::server {
namespace {

constexpr uid_t kFlood = 1000, kOther = 2000, kThird = 3000;

int DisplacedBy(const UnsentConnections& list, uid_t user) {
  const auto found = list.Displaced(user);
  return found ? found->descriptor : -1;
}

TEST(UnsentConnectionsTest, AUserDisplacesItsOwnOldest) {
  UnsentConnections list(8, 3);
  list.Add(1, kOther);
  for (int descriptor = 2; descriptor <= 4; ++descriptor) {
    EXPECT_EQ(DisplacedBy(list, kFlood), -1) << descriptor;
    list.Add(descriptor, kFlood);
  }
  EXPECT_EQ(DisplacedBy(list, kFlood), 2);
  EXPECT_EQ(DisplacedBy(list, kOther), -1);
  list.Remove(2);
  EXPECT_EQ(DisplacedBy(list, kFlood), -1);
  list.Add(5, kFlood);
  EXPECT_EQ(DisplacedBy(list, kFlood), 3);
}

TEST(UnsentConnectionsTest, WhenAllIsFullTheUserWithMostGivesWay) {
  UnsentConnections list(5, 4);
  list.Add(1, kOther);
  for (int descriptor = 2; descriptor <= 4; ++descriptor) list.Add(descriptor, kFlood);
  EXPECT_EQ(DisplacedBy(list, kThird), -1);
  list.Add(5, kOther);
  EXPECT_EQ(list.size(), 5u);
  EXPECT_EQ(DisplacedBy(list, kThird), 2);
  EXPECT_EQ(DisplacedBy(list, kOther), 2);
  EXPECT_EQ(DisplacedBy(list, kFlood), 2);
  list.Remove(2);
  list.Remove(2);
  EXPECT_EQ(list.size(), 4u);
  EXPECT_EQ(DisplacedBy(list, kThird), -1);
}

}  // namespace
}  // namespace mla::server
