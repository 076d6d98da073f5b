// Code shared by tests of the same-host path: regions, and waiting for the server's figures.
#ifndef MLA_TESTS_INTEGRATION_SHARED_MEMORY_SHARED_MEMORY_HARNESS_H_
#define MLA_TESTS_INTEGRATION_SHARED_MEMORY_SHARED_MEMORY_HARNESS_H_

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "client/cpp/client.h"
#include "client/cpp/shared_memory/shared_memory.h"
#include "tests/integration/test_server.h"

namespace mla::integration {

inline client::ClientOptions Over(client::ClientOptions::Transport transport,
                                  const std::string& tenant = "") {
  client::ClientOptions options;
  options.transport = transport;
  options.tenant = tenant;
  return options;
}

// Names of tests with this parameter.
inline std::string TransportName(
    const ::testing::TestParamInfo<client::ClientOptions::Transport>& info) {
  switch (info.param) {
    case client::ClientOptions::Transport::kAuto:
      return "auto";
    case client::ClientOptions::Transport::kInline:
      return "inline";
    case client::ClientOptions::Transport::kShm:
      return "shm";
    case client::ClientOptions::Transport::kRing:
      return "ring";
    case client::ClientOptions::Transport::kUcx:
      return "ucx";
    case client::ClientOptions::Transport::kUcxPuts:
      return "ucx_puts";
    case client::ClientOptions::Transport::kUcxDevice:
      return "ucx_device";
  }
  return "other";
}

inline std::string ShmPathOf(const TestServer& server) {
  return server.folder().File("mla.sock.shm");
}

inline std::unique_ptr<client::SharedMemory> Region(const TestServer& server, bool ring,
                                                    const std::string& tenant = "",
                                                    uint64_t bytes = 1 << 20) {
  client::SharedMemoryOptions options;
  options.ring = ring;
  options.tenant = tenant;
  options.bytes = bytes;
  auto region = client::SharedMemory::Connect(ShmPathOf(server), options);
  EXPECT_TRUE(region.ok()) << region.status();
  return region.ok() ? *std::move(region) : nullptr;
}

// Waits until a figure of the server has the expected value, because connections end
// asynchronously.
inline bool Becomes(client::Client& client,
                    const std::function<bool(const v1::GetStatsReply&)>& holds) {
  for (int i = 0; i < 200; ++i) {
    if (const auto stats = client.GetStats(); stats.ok() && holds(*stats)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_SHARED_MEMORY_SHARED_MEMORY_HARNESS_H_
