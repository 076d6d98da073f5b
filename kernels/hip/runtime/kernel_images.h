// Holds the device code that was built into this binary: one image an architecture, compiled ahead
// of time from device_code.hip. A build without device compilers has none.
#ifndef MLA_KERNELS_HIP_RUNTIME_KERNEL_IMAGES_H_
#define MLA_KERNELS_HIP_RUNTIME_KERNEL_IMAGES_H_

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace mla::kernels::hip {

struct KernelImage {
  std::string arch;  // "gfx950", "gfx942", "sm_90"
  std::span<const std::byte> bytes;
};

// Returns the images whose compiler was present at build time; their bytes live as long as the
// process.
std::vector<KernelImage> BuiltInKernelImages();

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_KERNEL_IMAGES_H_
