#include "kernels/hip/runtime/kernel_images.h"

namespace mla::gpu {

std::vector<KernelImage> BuiltInKernelImages() { return {}; }

}  // namespace mla::gpu
