// Lists the names under which a vendor's GPU runtime is searched for, and says which versions of
// ROCm are supported.
#ifndef MLA_KERNELS_HIP_RUNTIME_RUNTIME_LIBRARY_H_
#define MLA_KERNELS_HIP_RUNTIME_RUNTIME_LIBRARY_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace mla::kernels::hip {

enum class Vendor { kAmd, kNvidia };

// Returns the names to try, in order. With an empty `path` these are the names of the library,
// newest first, which the loader searches for in its own places; then, for AMD, the same names
// below $ROCM_PATH/lib and /opt/rocm/lib, because packages of ROCm do not always register with the
// loader. Otherwise only `path` is tried, which is a library or its folder.
std::vector<std::string> RuntimeLibraries(Vendor vendor, const std::string& path);

// The versions of ROCm as hipRuntimeGetVersion counts them (docs/kernels/rocm.md).
inline constexpr int kOldestHip = 60200000;
// From this version on, descriptors of memory are imported by value, as in CUDA.
inline constexpr int kHipImportsByValue = 70100000;
std::string RocmName(int version);  // "ROCm 7.2" of 70226015
// Returns the first version of HIP that lists devices of `arch`, if the server has kernels for it
// (gfx942, gfx950); else 0.
int HipSince(std::string_view arch);
// Returns FAILED_PRECONDITION, which names `library`, if the version is older than kOldestHip.
absl::Status CheckRocm(int version, const std::string& library);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_RUNTIME_LIBRARY_H_
