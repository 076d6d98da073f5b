// Searches a vendor's GPU runtime, and says why it was not found.
#ifndef MLA_KERNELS_HIP_RUNTIME_RUNTIME_LIBRARY_H_
#define MLA_KERNELS_HIP_RUNTIME_RUNTIME_LIBRARY_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace mla::kernels::hip {

enum class Vendor { kAmd, kNvidia };

// Returns the names to try, in order. With an empty `path`: the library's name alone, which the
// loader searches in its own places; then for AMD the name below $ROCM_PATH/lib and /opt/rocm/lib,
// because packages of ROCm do not always register with the loader. Otherwise only `path`, which is
// a library or its folder.
std::vector<std::string> RuntimeLibraries(Vendor vendor, const std::string& path);

// Versions of ROCm as hipRuntimeGetVersion counts them (docs/kernels/rocm.md).
inline constexpr int kOldestHip = 60200000;
// From this version on, descriptors of memory are imported by value, as in CUDA.
inline constexpr int kHipImportsByValue = 70100000;
std::string RocmName(int version);  // "ROCm 7.2" of 70226015
// Returns the version from which on HIP lists devices of an architecture with kernels (gfx942,
// gfx950); 0 for others.
int HipSince(std::string_view arch);
// FAILED_PRECONDITION names `library` if the version is older than kOldestHip.
absl::Status CheckRocm(int version, const std::string& library);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_RUNTIME_LIBRARY_H_
