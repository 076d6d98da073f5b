#include "kernels/launch_layout.h"

#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels {
namespace {

struct Regions {
  std::vector<std::byte> inputs = std::vector<std::byte>(1024);
  std::vector<std::byte> outputs = std::vector<std::byte>(1024);
  std::vector<std::byte> workspace = std::vector<std::byte>(1024);
  SlotMemory memory() { return {inputs, outputs, workspace}; }
};

TEST(LaunchLayoutTest, UnifiedMemoryIsUsedInPlace) {
  Regions regions;
  LaunchLayout layout(true, regions.memory());
  std::vector<std::byte> host(5000);  // more than any region holds
  EXPECT_EQ(*layout.Input(host.data(), 5000), host.data());
  EXPECT_EQ(*layout.Output(host.data(), 5000), host.data());
  ASSERT_EQ(layout.inputs().size(), 1u);
  ASSERT_EQ(layout.outputs().size(), 1u);
  EXPECT_TRUE(layout.inputs()[0].in_place() && layout.outputs()[0].in_place());
  EXPECT_EQ(*layout.Workspace(100), regions.workspace.data());
}

TEST(LaunchLayoutTest, UnifiedPartsMeetInTheWorkspace) {
  Regions regions;
  LaunchLayout layout(true, regions.memory());
  std::byte host[64];
  const InputPart parts[] = {{host, 16}, {host + 32, 8}};
  EXPECT_EQ(*layout.InputParts(2, parts), regions.workspace.data());
  ASSERT_EQ(layout.inputs().size(), 2u);
  const HostInput& second = layout.inputs()[1];
  EXPECT_FALSE(second.in_place());
  EXPECT_EQ(second.host, host + 32);
  EXPECT_EQ(second.device, regions.workspace.data() + 16);
  EXPECT_EQ(second.row_bytes, 8);
  EXPECT_EQ(second.rows, 2);
  EXPECT_EQ(second.pitch, 24);
}

TEST(LaunchLayoutTest, ADeviceHasARegionForEachKind) {
  Regions regions;
  LaunchLayout layout(false, regions.memory());
  std::byte host[64];
  EXPECT_EQ(*layout.Input(host, 10), regions.inputs.data());
  EXPECT_EQ(*layout.Input(host, 10), regions.inputs.data() + kLaunchAlignment);
  const OutputPart parts[] = {{nullptr, 16}, {host, 8}};
  EXPECT_EQ(*layout.OutputParts(3, parts), regions.outputs.data());
  ASSERT_EQ(layout.outputs().size(), 1u);  // unneeded columns are not copied
  EXPECT_EQ(layout.outputs()[0].device, regions.outputs.data() + 16);
  EXPECT_EQ(layout.outputs()[0].pitch, 24);
}

TEST(LaunchLayoutTest, AFullRegionIsRefusedByItsName) {
  Regions regions;
  LaunchLayout layout(false, regions.memory());
  std::byte host[64];
  ASSERT_TRUE(layout.Input(host, 1000).ok());
  EXPECT_EQ(layout.Input(host, 1).status().message(),
            "staged input: 1024 bytes used, 1 wanted, limit 1024");
  EXPECT_EQ(layout.Workspace(1025).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(layout.Workspace(-1).status().code(), absl::StatusCode::kResourceExhausted);
  layout.Clear();
  EXPECT_TRUE(layout.inputs().empty());
  EXPECT_TRUE(layout.Input(host, 1024).ok());
}

}  // namespace
}  // namespace mla::kernels
