#include "client/cpp/cluster/owners.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>

namespace mla::client {
namespace {

// After that, the process may end, and gRPC with it.
TEST(OwnersTest, NothingIsHeldOnceTheyHaveEnded) {
  std::promise<void> go;
  const auto held = std::make_shared<int>();
  v1::Prefix prefix;  // it takes long to free, before the owner that the same thread holds
  for (int i = 0; i < 1'000'000; ++i) prefix.add_page_keys(std::string(16, 'k'));
  auto owners = std::make_unique<Owners>(
      [done = go.get_future().share()](const Member&) -> absl::StatusOr<std::unique_ptr<Client>> {
        done.wait();
        return absl::UnavailableError("away");
      },
      [held] { return 0.0; });
  EXPECT_FALSE(owners->Probe({"a:1"}, "m", prefix, 0.001)[0].probe.has_value());
  go.set_value();
  owners.reset();
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace mla::client
