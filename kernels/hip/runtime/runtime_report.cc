#include "kernels/hip/runtime/runtime_report.h"

#include <algorithm>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {
namespace {

// Returns the architectures with kernels (args/arch_traits.h).
std::vector<std::string> ArchitecturesOf(Vendor vendor) {
  if (vendor == Vendor::kNvidia) return {"sm_90"};
  return {"gfx942", "gfx950"};
}

bool HasCode(std::span<const KernelImage> images, const std::string& arch) {
  return std::any_of(images.begin(), images.end(),
                     [&](const KernelImage& image) { return image.arch == arch; });
}

bool Lists(const FoundRuntime& runtime, const std::string& arch) {
  return std::any_of(runtime.devices.begin(), runtime.devices.end(),
                     [&](const FoundRuntime::Device& device) { return device.arch == arch; });
}

// Returns why an architecture cannot be driven; "" if it can.
std::string Obstacle(Vendor vendor, const FoundRuntime& runtime,
                     std::span<const KernelImage> images, const std::string& arch) {
  if (!HasCode(images, arch)) return "no code for it was built in";
  // A device that is listed says more than the version.
  if (vendor == Vendor::kNvidia || Lists(runtime, arch)) return "";
  if (runtime.version == 0) return "the runtime does not say which version it is";
  if (runtime.version >= HipSince(arch)) return "";
  return absl::StrCat("runtimes know it from ", RocmName(HipSince(arch)), " on");
}

std::string DescribeLibrary(Vendor vendor, const FoundRuntime& runtime,
                            std::span<const KernelImage> images) {
  std::string line = runtime.library;
  if (runtime.version > 0) absl::StrAppend(&line, ", ", RocmName(runtime.version));
  if (absl::IsFailedPrecondition(runtime.usable)) {
    return absl::StrCat(line, ", can drive nothing: ", runtime.usable.message());
  }
  std::vector<std::string> can, cannot;
  for (const std::string& arch : ArchitecturesOf(vendor)) {
    const std::string obstacle = Obstacle(vendor, runtime, images, arch);
    if (obstacle.empty()) can.push_back(arch);
    if (!obstacle.empty()) cannot.push_back(absl::StrCat(arch, " (", obstacle, ")"));
  }
  absl::StrAppend(&line, ", can drive ", can.empty() ? "nothing" : absl::StrJoin(can, ", "));
  if (!cannot.empty()) absl::StrAppend(&line, "; cannot drive ", absl::StrJoin(cannot, ", "));
  if (!runtime.usable.ok()) absl::StrAppend(&line, "; ", runtime.usable.message());
  return line;
}

std::string DescribeDevice(const FoundRuntime::Device& device,
                           std::span<const KernelImage> images) {
  return absl::StrCat(
      device.arch, " (", device.name, "), ",
      HasCode(images, device.arch) ? "can be used" : "cannot be used: no code for it was built in");
}

}  // namespace

std::vector<std::string> DescribeRuntime(Vendor vendor, std::span<const std::string> libraries,
                                         std::span<const KernelImage> images) {
  const std::string prefix = vendor == Vendor::kAmd ? "AMD GPUs: " : "NVIDIA GPUs: ";
  const auto runtime = GpuRuntime::Find(vendor, libraries);
  if (!runtime.ok()) {
    return {absl::StrCat(prefix, "none of ", absl::StrJoin(ArchitecturesOf(vendor), ", "),
                         " can be driven: ", runtime.status().message())};
  }
  std::vector<std::string> lines = {
      absl::StrCat(prefix, DescribeLibrary(vendor, *runtime, images))};
  for (size_t i = 0; i < runtime->devices.size(); ++i) {
    lines.push_back(
        absl::StrCat(prefix, "device ", i, ": ", DescribeDevice(runtime->devices[i], images)));
  }
  return lines;
}

}  // namespace mla::kernels::hip
