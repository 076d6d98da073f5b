#include "kernels/hip/kernel_images.h"

namespace mla::gpu {

std::vector<KernelImage> BuiltInKernelImages() { return {}; }

}  // namespace mla::gpu
