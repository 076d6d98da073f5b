// Tests with the kernel's files about GPUs, in a folder that stands for the machine.
#include "kernels/hip/present_devices.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;

class PresentDevicesTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(root_); }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void AddNode(int number, int64_t version) const {
    Write("/sys/class/kfd/kfd/topology/nodes/" + std::to_string(number) + "/properties",
          "cpu_cores_count " + std::to_string(version == 0 ? 64 : 0) +
              "\nsimd_count 304\ngfx_target_version " + std::to_string(version) + "\n");
  }
  std::string Amd() const { return PresentDevices(Vendor::kAmd, root_); }
  std::string Nvidia() const { return PresentDevices(Vendor::kNvidia, root_); }

  const std::string root_ = ::testing::TempDir() + "/machine";
};

TEST_F(PresentDevicesTest, AMachineWithoutHasNone) {
  EXPECT_EQ(Amd(), "");
  EXPECT_EQ(Nvidia(), "");
  AddNode(0, 0);       // the CPUs
  AddNode(1, 110000);  // a GPU without kernels
  Write("/sys/bus/pci/devices/a/vendor", "0x1002\n");
  Write("/sys/bus/pci/devices/a/class", "0x030000\n");  // a desktop GPU
  EXPECT_EQ(Amd(), "");
}

TEST_F(PresentDevicesTest, AmdsAreCountedWithWhatKeepsFromThem) {
  AddNode(0, 0);
  for (int node = 1; node <= 8; ++node) AddNode(node, 90402);
  EXPECT_EQ(Amd(), "8 AMD GPUs (gfx942); /dev/kfd cannot be opened: No such file or directory");
  std::filesystem::create_directories(root_ + "/dev");
  std::filesystem::create_symlink("kfd", root_ + "/dev/kfd");
  EXPECT_THAT(Amd(), HasSubstr("; /dev/kfd cannot be opened: Too many levels"));
  std::filesystem::remove(root_ + "/dev/kfd");
  Write("/dev/kfd", "");
  EXPECT_EQ(Amd(), "8 AMD GPUs (gfx942)");
  AddNode(9, 90500);
  EXPECT_EQ(Amd(), "9 AMD GPUs (gfx942, gfx950)");
  EXPECT_EQ(Nvidia(), "");
}

TEST_F(PresentDevicesTest, ADriverThatIsNotLoadedIsNamed) {
  Write("/sys/bus/pci/devices/a/vendor", "0x1002\n");
  Write("/sys/bus/pci/devices/a/class", "0x120000\n");
  EXPECT_EQ(Amd(), "1 AMD GPU; the kernel's driver amdgpu is not loaded");
  Write("/sys/bus/pci/devices/b/vendor", "0x10de\n");
  Write("/sys/bus/pci/devices/b/class", "0x030200\n");
  EXPECT_EQ(Nvidia(), "1 NVIDIA GPU; the kernel's driver is not loaded");
}

TEST_F(PresentDevicesTest, NvidiasAreTheirFiles) {
  Write("/proc/driver/nvidia/version", "");
  Write("/sys/bus/pci/devices/b/vendor", "0x10de\n");
  Write("/sys/bus/pci/devices/b/class", "0x030200\n");
  EXPECT_EQ(Nvidia(), "");  // the GPU is in another container
  for (const char* file : {"nvidia0", "nvidia1", "nvidia-uvm", "nvidia"}) {
    Write(std::string("/dev/") + file, "");
  }
  EXPECT_EQ(Nvidia(), "2 NVIDIA GPUs; /dev/nvidiactl cannot be opened: No such file or directory");
  Write("/dev/nvidiactl", "");
  EXPECT_EQ(Nvidia(), "2 NVIDIA GPUs");
}

}  // namespace
}  // namespace mla::kernels::hip
