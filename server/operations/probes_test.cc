#include "server/operations/probes.h"

#include "gtest/gtest.h"

namespace mla::server {
namespace {

class ProbesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Config config;
    config.restart_after_ms = 0;
    live_.Set(config);
  }

  ServerState state_;
  LiveSettings live_;
  const Probes probes_{&state_, &live_, nullptr, "GPU 0 is not used\n"};
};

TEST_F(ProbesTest, ReadyFollowsPhaseAndHealth) {
  EXPECT_EQ(probes_.Ready("").status, 503);
  state_.Move(Phase::kServing, 100, "serving");
  EXPECT_EQ(probes_.Ready("").status, 200);
  EXPECT_EQ(probes_.Ready("").body, "ready\n");
  state_.SetHealth(false, "no heartbeat");
  EXPECT_EQ(probes_.Ready("").status, 503);
  EXPECT_EQ(probes_.Ready("").body, "not ready\n");
}

TEST_F(ProbesTest, VerboseRepliesHaveTheReasons) {
  state_.Move(Phase::kServing, 100, "");
  live_.SetRefusal("kv_cache.bytes: no such key");
  state_.SetHealth(false, "no heartbeat");
  const std::string body = probes_.Ready("verbose").body;
  EXPECT_NE(body.find("configuration not in use: kv_cache.bytes: no such key\n"), std::string::npos)
      << body;
  EXPECT_NE(body.find("engine unhealthy\nno heartbeat\n"), std::string::npos) << body;
  EXPECT_TRUE(body.ends_with("GPU 0 is not used\n")) << body;
}

// A process whose device is only slow stays alive, and one whose device is lost does not.
TEST_F(ProbesTest, OnlyALostDeviceOrAHungLaunchEndsTheProcess) {
  state_.Move(Phase::kServing, 100, "serving");
  EXPECT_EQ(probes_.Alive().status, 200);
  state_.SetHealth(false, "no heartbeat");
  EXPECT_EQ(probes_.Alive().status, 200);  // restart_after_ms is 0: never
  state_.SetLost("device lost");
  EXPECT_EQ(probes_.Alive().status, 503);
  EXPECT_EQ(probes_.Alive().body, "restart this server: device lost\n");
}

}  // namespace
}  // namespace mla::server
