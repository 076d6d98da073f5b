#include "kernels/hip/runtime/kernel_images.h"

// Written by tools/build_device_code.sh. An architecture whose compiler was missing has no bytes.
extern "C" {
extern const std::byte mla_image_gfx950_begin[], mla_image_gfx950_end[];
extern const std::byte mla_image_gfx942_begin[], mla_image_gfx942_end[];
extern const std::byte mla_image_sm_90_begin[], mla_image_sm_90_end[];
}

namespace mla::kernels::hip {

std::vector<KernelImage> BuiltInKernelImages() {
  std::vector<KernelImage> images;
  const auto add = [&images](const char* arch, const std::byte* begin, const std::byte* end) {
    if (end != begin) images.push_back({arch, {begin, static_cast<size_t>(end - begin)}});
  };
  add("gfx950", mla_image_gfx950_begin, mla_image_gfx950_end);
  add("gfx942", mla_image_gfx942_begin, mla_image_gfx942_end);
  add("sm_90", mla_image_sm_90_begin, mla_image_sm_90_end);
  return images;
}

}  // namespace mla::kernels::hip
