#include "kernels/hip/runtime/runtime_library.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace mla::kernels::hip {
namespace {

// Newest first, because older versions may be installed next to it.
std::vector<std::string> Names(Vendor vendor) {
  if (vendor == Vendor::kAmd) return {"libamdhip64.so.7", "libamdhip64.so.6"};
  return {"libcuda.so.1"};
}

void AddFolder(const std::string& folder, Vendor vendor, std::vector<std::string>* names) {
  for (const std::string& name : Names(vendor)) {
    names->push_back(absl::StrCat(folder, "/", name));
  }
}

}  // namespace

std::vector<std::string> RuntimeLibraries(Vendor vendor, const std::string& path) {
  std::vector<std::string> names;
  std::error_code ignored;
  if (!path.empty()) {
    if (!std::filesystem::is_directory(path, ignored)) return {path};
    AddFolder(path, vendor, &names);
    return names;
  }
  names = Names(vendor);
  if (vendor != Vendor::kAmd) return names;
  if (const char* const rocm = std::getenv("ROCM_PATH"); rocm != nullptr && *rocm != '\0') {
    AddFolder(absl::StrCat(rocm, "/lib"), vendor, &names);
  }
  AddFolder("/opt/rocm/lib", vendor, &names);
  return names;
}

std::string RocmName(int version) {
  return absl::StrCat("ROCm ", version / 10'000'000, ".", version / 100'000 % 100);
}

int HipSince(std::string_view arch) {
  if (arch == "gfx942") return 60000000;
  if (arch == "gfx950") return 70000000;
  return 0;
}

absl::Status CheckRocm(int version, const std::string& library) {
  if (version >= kOldestHip) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      RocmName(version), " is too old: the oldest that is supported is ", RocmName(kOldestHip),
      " (", library, ", whose hipRuntimeGetVersion says ", version, ")"));
}

}  // namespace mla::kernels::hip
