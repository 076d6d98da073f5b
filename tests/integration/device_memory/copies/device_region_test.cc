#include "client/cpp/shared_memory/device_region.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "client/cpp/shared_memory/device_copy.h"
#include "tests/fake_hip/runtime/fake_control.h"

namespace mla::client {
namespace {

constexpr char kLibrary[] = "tests/fake_hip/libfake_hip.so";
constexpr uint64_t kBytes = 2 << 20;

// The server's side: memory of the fake device that its client maps.
class DeviceRegionTest : public ::testing::Test {
 protected:
  DeviceRegionTest() : library_(dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL)) {
    control_ = Function<fake_hip::Control*()>("fake_hip_control")();
    control_->devices = 2;
    Call<int(void**, size_t, const void*, unsigned long long)>("hipMemCreate", &handle_, kBytes,
                                                               nullptr, 0ULL);
    Call<int(int*, void*, int, unsigned long long)>("hipMemExportToShareableHandle", &descriptor_,
                                                    handle_, 1, 0ULL);
    Call<int(void**, unsigned)>("hipStreamCreateWithFlags", &stream_, 1U);
  }
  ~DeviceRegionTest() override {
    region_.reset();
    Call<int(void*)>("hipStreamDestroy", stream_);
    Call<int(void*)>("hipMemRelease", handle_);
    close(descriptor_);
    control_->devices = 1;
  }

  template <typename Signature>
  Signature* Function(const char* name) {
    return reinterpret_cast<Signature*>(dlsym(library_, name));
  }
  template <typename Signature, typename... Arguments>
  void Call(const char* name, Arguments... arguments) {
    ASSERT_EQ(Function<Signature>(name)(arguments...), 0) << name;
  }

  // Maps the memory, which device 0 has, in a process whose device is `device`.
  void Map(int device) {
    wire::DeviceHeader header{};
    header.magic = wire::kHandshakeMagic;
    header.nvidia = 1;
    header.kind = wire::kDeviceDescriptor;
    header.bytes = kBytes;
    Call<int(uint8_t*, int)>("hipDeviceGetUuid", header.uuid, 0);
    std::vector<std::byte> part(wire::DevicePartBytes(0));
    std::memcpy(part.data(), &header, sizeof(header));
    auto mapped = DeviceRegion::Map(part, descriptor_, 0, {device, kLibrary});
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    region_ = *std::move(mapped);
    const absl::Status status = region_->MapWords(words_.bytes);
    ASSERT_TRUE(status.ok()) << status;
  }

  // Copies, waits, and returns how many kernels that took.
  int64_t Kernels(std::vector<DeviceCopy> copies) {
    const int64_t before = control_->launches;
    const absl::Status status = region_->Copy(copies, stream_);
    EXPECT_TRUE(status.ok()) << status;
    Call<int(void*)>("hipStreamSynchronize", stream_);
    return control_->launches - before;
  }

  struct alignas(4096) Words {
    std::array<std::byte, 4096> bytes{};
  } words_;
  struct alignas(16) Tensor {
    std::array<std::byte, 8192> bytes{};
  } worker_;
  void* const library_;
  fake_hip::Control* control_ = nullptr;
  void* handle_ = nullptr;
  int descriptor_ = -1;
  void* stream_ = nullptr;
  std::unique_ptr<DeviceRegion> region_;
};

TEST_F(DeviceRegionTest, InputsAndOutputsAreCopiedByOneKernelEach) {
  Map(0);
  std::byte* const at = region_->memory().data();
  for (size_t i = 0; i < worker_.bytes.size(); ++i) worker_.bytes[i] = std::byte(i * 7 + i / 256);
  const Tensor given = worker_;
  EXPECT_EQ(Kernels({{at, worker_.bytes.data(), 4096, 1, 4096, 4096, true},
                     {at + 8192, worker_.bytes.data() + 4096, 48, 9, 64, 112, true}}),
            1);
  EXPECT_EQ(std::memcmp(at, given.bytes.data(), 4096), 0);
  for (int row = 0; row < 9; ++row) {
    EXPECT_EQ(std::memcmp(at + 8192 + row * 64, given.bytes.data() + 4096 + row * 112, 48), 0);
  }
  worker_ = {};
  EXPECT_EQ(Kernels({{worker_.bytes.data(), at, 4096, 1, 4096, 4096, true, true}}), 1);
  EXPECT_EQ(std::memcmp(worker_.bytes.data(), given.bytes.data(), 4096), 0);
}

TEST_F(DeviceRegionTest, OutputsForOtherMemoryAreTheDriversToCopy) {
  Map(0);
  std::byte* const at = region_->memory().data();
  std::fill_n(at, 4096, std::byte{0x5a});
  EXPECT_EQ(Kernels({{worker_.bytes.data(), at, 4096, 1, 4096, 4096}}), 0)
      << "of the host, it may be";
  EXPECT_EQ(std::memcmp(worker_.bytes.data(), at, 4096), 0);
  worker_ = {};
  EXPECT_EQ(Kernels({{worker_.bytes.data() + 8, at, 4096, 1, 4096, 4096, true, true}}), 0)
      << "not of aligned pieces";
  EXPECT_EQ(std::memcmp(worker_.bytes.data() + 8, at, 4096), 0);
}

TEST_F(DeviceRegionTest, OutputsOfAnotherDeviceAreTheDriversToCopy) {
  Map(1);
  std::byte* const at = region_->memory().data();
  std::fill_n(at, 4096, std::byte{0x5a});
  EXPECT_EQ(Kernels({{worker_.bytes.data(), at, 4096, 1, 4096, 4096, true, true}}), 0);
  EXPECT_EQ(std::memcmp(worker_.bytes.data(), at, 4096), 0);
}

}  // namespace
}  // namespace mla::client
