// Device memory of an AMD server, and workers that map it, on each version of ROCm. HIP interprets
// descriptors in two ways; where a worker might use the wrong way, handles are used.
#include <functional>

#include "client/cpp/shared_memory/shared_memory.h"
#include "tests/integration/device_memory/device_server.h"

namespace mla::integration {
namespace {

std::function<void(fake_hip::Control&)> Amd(int version) {
  return [version](fake_hip::Control& control) {
    control.arch = "gfx950";
    control.version = version;
  };
}

// Returns how many descriptors of memory the process held while the worker was there.
int DescriptorsDuringSteps(DeviceServer& server) {
  const auto client = server.server().Connect(DeviceServer::Options());
  Worker worker(client.get(), DeviceDims(), "m", 1);
  EXPECT_EQ(worker.session().DeviceStatus(), absl::OkStatus());
  worker.UseDevice();
  auto track = worker.Open();
  EXPECT_EQ(worker.Step({&*track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&*track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  return server.control().descriptors;
}

TEST(RocmVersionsTest, WorkersMapTheMemoryOfEach) {
  for (const fake_hip::Version& version : fake_hip::kVersions) {
    SCOPED_TRACE(version.name);
    DeviceServer server({}, Amd(version.number));
    EXPECT_EQ(DescriptorsDuringSteps(server) > 0,
              version.number >= kernels::hip::kHipImportsByValue);
  }
}

// If the runtime has no handles, descriptors go to workers that know how HIP interprets them.
TEST(RocmVersionsTest, DescriptorsAreImportedAsEachTakesThem) {
  for (const fake_hip::Version& version : fake_hip::kVersions) {
    SCOPED_TRACE(version.name);
    DeviceServer server({}, Amd(version.number));
    server.control().fail_call = "hipIpcGetMemHandle";
    server.control().fail_after = 0;
    EXPECT_GT(DescriptorsDuringSteps(server), 0);
  }
}

}  // namespace
}  // namespace mla::integration
