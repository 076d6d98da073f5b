// Tests which versions of ROCm are refused, and the behaviour that all others share.
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;

class VersionsTest : public BackendOnFakeTest {
 protected:
  static std::string NoteOf(const HipBackend& backend, const std::string& name) {
    for (const BackendNote& note : backend.Info().notes) {
      if (note.name == name) return note.text;
    }
    return "no note";
  }
};

TEST_F(VersionsTest, OlderThanTheOldestIsRefusedByName) {
  control_->version = 60140091;
  const absl::Status status = HipBackend::Create(Options()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(),
            "ROCm 6.1 is too old: the oldest that is supported is ROCm 6.2 "
            "(tests/fake_hip/libfake_hip.so, whose hipRuntimeGetVersion says 60140091)");
  control_->version = kOldestHip - 1;
  EXPECT_FALSE(HipBackend::Create(Options()).ok());
  control_->version = kOldestHip;
  EXPECT_TRUE(HipBackend::Create(Options()).ok());
  control_->version = fake_hip::DefaultVersion();
  control_->FailOnce("hipRuntimeGetVersion");
  EXPECT_THAT(HipBackend::Create(Options()).status().message(),
              HasSubstr("GPU runtime version: invalid argument"));
}

TEST_F(VersionsTest, EachIsNamedAndUsesNoGraphsByItself) {
  for (const fake_hip::Version& version : fake_hip::kVersions) {
    control_->version = version.number;
    auto backend = HipBackend::Create(Options());
    ASSERT_TRUE(backend.ok()) << backend.status();
    EXPECT_EQ(NoteOf(**backend, "runtime"),
              std::string("tests/fake_hip/libfake_hip.so, ROCm ") + version.name);
    EXPECT_THAT(NoteOf(**backend, "graphs"), HasSubstr("off: HIP's take device memory"));
    ASSERT_TRUE((*backend)->Configure(Limits()).ok());
    const int64_t made = control_->graphs_made;
    for (int i = 0; i < 6; ++i) EXPECT_TRUE(AppendOnce(**backend).ok());
    EXPECT_EQ(control_->graphs_made, made) << version.name;
    EXPECT_EQ(control_->most_graph_argument_bytes, 0) << version.name;
  }
}

TEST_F(VersionsTest, AKeyTurnsGraphsOff) {
  HipBackendOptions options = Sm90Options();
  for (const GraphUse use : {GraphUse::kAuto, GraphUse::kOff}) {
    options.graphs = use;
    auto backend = HipBackend::Create(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    const bool on = use == GraphUse::kAuto;
    EXPECT_EQ(NoteOf(**backend, "graphs"), on ? "on" : "off: gpu.graphs");
    ASSERT_TRUE((*backend)->Configure(Limits()).ok());
    const int64_t made = control_->graphs_made;
    for (int i = 0; i < 6; ++i) EXPECT_TRUE(AppendOnce(**backend).ok());
    EXPECT_EQ(control_->graphs_made > made, on);
  }
}

// Before ROCm 7.1 the meaning of the descriptor was different, and a worker that does not know this
// crashes at the import. So these versions export a handle, and a descriptor only if the runtime
// has no handles.
TEST_F(VersionsTest, DeviceMemoryIsSharedByHandleBeforeDescriptorsAreValues) {
  for (const fake_hip::Version& version : fake_hip::kVersions) {
    control_->version = version.number;
    auto backend = HipBackend::Create(Options());
    ASSERT_TRUE(backend.ok()) << backend.status();
    const bool by_value = version.number >= kHipImportsByValue;
    auto shared = (*backend)->AllocateShared(100, 2);
    ASSERT_TRUE(shared.ok()) << shared.status();
    EXPECT_EQ((*shared)->exported().descriptor >= 0, by_value) << version.name;
    EXPECT_EQ((*shared)->bytes().size(), size_t{2} << 20);
    const bool handle = (*shared)->exported().memory != SharedDeviceMemory::Handle{};
    EXPECT_EQ(handle, !by_value) << version.name;
    shared->reset();
    EXPECT_EQ(control_->descriptors, 0);
    control_->FailOnce(by_value ? "hipMemCreate" : "hipIpcGetMemHandle");
    shared = (*backend)->AllocateShared(100, 2);
    ASSERT_TRUE(shared.ok()) << shared.status();
    EXPECT_EQ((*shared)->exported().descriptor >= 0, !by_value) << version.name;
    shared->reset();
    EXPECT_EQ(control_->descriptors, 0);
  }
}

TEST_F(VersionsTest, WithoutADescriptorLeftNoMemoryIsShared) {
  control_->version = kHipImportsByValue;
  control_->descriptor_limit = 1;
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  auto first = (*backend)->AllocateShared(100, 1);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_GE((*first)->exported().descriptor, 0);
  const auto second = (*backend)->AllocateShared(100, 1);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  first->reset();
  EXPECT_TRUE((*backend)->AllocateShared(100, 1).ok());
}

}  // namespace
}  // namespace mla::kernels::hip
