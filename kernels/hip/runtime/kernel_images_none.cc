#include "kernels/hip/runtime/kernel_images.h"

namespace mla::kernels::hip {

std::vector<KernelImage> BuiltInKernelImages() { return {}; }

}  // namespace mla::kernels::hip
