#include "kernels/hip/present_devices.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace mla::kernels::hip {
namespace {

// Linux's KFD topology encodes a GPU's architecture in decimal: gfx942 is 90402.
constexpr int64_t kGfx942 = 90402, kGfx950 = 90500;
constexpr char kAmdOnBus[] = "0x1002", kNvidiaOnBus[] = "0x10de";
// The PCI classes of devices that compute and drive no display.
constexpr char kAccelerator[] = "0x1200", kController3d[] = "0x0302";

std::vector<std::filesystem::path> Entries(const std::string& folder) {
  std::vector<std::filesystem::path> entries;
  std::error_code failed;
  for (std::filesystem::directory_iterator at(folder, failed), end; !failed && at != end;
       at.increment(failed)) {
    entries.push_back(at->path());
  }
  return entries;
}

std::string FirstWord(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string word;
  in >> word;
  return word;
}

// Counts devices on the bus of this vendor, whose class begins with `of_class`.
int CountOnBus(const std::string& root, const char* vendor, const char* of_class) {
  int count = 0;
  for (const auto& device : Entries(root + "/sys/bus/pci/devices")) {
    if (FirstWord(device / "vendor") == vendor &&
        FirstWord(device / "class").starts_with(of_class)) {
      ++count;
    }
  }
  return count;
}

std::string Several(int count, const char* vendor, const std::string& what) {
  return absl::StrCat(count, " ", vendor, count == 1 ? " GPU" : " GPUs", what);
}

// Says why this process cannot open the file for reading and writing; empty if it can.
std::string Obstacle(const std::string& root, const std::string& file) {
  const int opened = open((root + file).c_str(), O_RDWR | O_CLOEXEC);
  if (opened >= 0) {
    close(opened);
    return "";
  }
  const int why = errno;
  struct stat status;
  const bool of_group = why == EACCES && stat((root + file).c_str(), &status) == 0;
  return absl::StrCat("; ", file, " cannot be opened: ", std::strerror(why),
                      of_group ? absl::StrCat(" (it is of group ", status.st_gid, ")") : "");
}

std::string AmdDevices(const std::string& root) {
  const std::string nodes = root + "/sys/class/kfd/kfd/topology/nodes";
  std::error_code ignored;
  if (!std::filesystem::exists(nodes, ignored)) {
    const int count = CountOnBus(root, kAmdOnBus, kAccelerator);
    return count == 0 ? "" : Several(count, "AMD", "; the kernel's driver amdgpu is not loaded");
  }
  int count = 0;
  std::set<std::string> kinds;
  for (const auto& node : Entries(nodes)) {
    std::ifstream properties(node / "properties");
    std::string name, value;
    while (properties >> name >> value) {
      int64_t version = 0;
      if (name != "gfx_target_version" || !absl::SimpleAtoi(value, &version)) continue;
      if (version != kGfx942 && version != kGfx950) continue;
      ++count;
      kinds.insert(version == kGfx942 ? "gfx942" : "gfx950");
    }
  }
  if (count == 0) return "";
  return Several(count, "AMD", absl::StrCat(" (", absl::StrJoin(kinds, ", "), ")")) +
         Obstacle(root, "/dev/kfd");
}

// Matches "nvidia0", "nvidia1", ...
bool IsNvidiaDevice(const std::filesystem::path& file) {
  const std::string name = file.filename();
  constexpr size_t kPrefix = 6;
  return name.starts_with("nvidia") && name.size() > kPrefix &&
         std::all_of(name.begin() + kPrefix, name.end(),
                     [](char c) { return c >= '0' && c <= '9'; });
}

std::string NvidiaDevices(const std::string& root) {
  const auto files = Entries(root + "/dev");
  const auto count = static_cast<int>(std::count_if(files.begin(), files.end(), IsNvidiaDevice));
  if (count > 0) return Several(count, "NVIDIA", "") + Obstacle(root, "/dev/nvidiactl");
  std::error_code ignored;
  // With a driver but no file in /dev, the device belongs to another container.
  if (std::filesystem::exists(root + "/proc/driver/nvidia", ignored)) return "";
  const int on_bus = CountOnBus(root, kNvidiaOnBus, kController3d);
  return on_bus == 0 ? "" : Several(on_bus, "NVIDIA", "; the kernel's driver is not loaded");
}

}  // namespace

std::string PresentDevices(Vendor vendor, const std::string& root) {
  return vendor == Vendor::kAmd ? AmdDevices(root) : NvidiaDevices(root);
}

}  // namespace mla::kernels::hip
