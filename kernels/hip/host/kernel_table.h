// Ends the translation unit of an architecture on the host: after device_code.hip, whose kernels it
// makes an image of. MLA_HOST_ARCH is the architecture's name.
#ifndef MLA_KERNELS_HIP_HOST_KERNEL_TABLE_H_
#define MLA_KERNELS_HIP_HOST_KERNEL_TABLE_H_

#include "kernels/hip/host/block/block.h"
#include "kernels/hip/host/block/image.h"

namespace mla::gpu::host {
namespace {

template <class Arguments, void (*kKernel)(Arguments)>
void RunLane(const void* arguments) {
  kKernel(*static_cast<const Arguments*>(arguments));
}
template <class Arguments>
struct OfArguments {
  template <void (*kKernel)(Arguments)>
  static constexpr Kernel Make(const char* name) {
    return {name, sizeof(Arguments), RunLane<Arguments, kKernel>};
  }
};
template <class Arguments>
constexpr OfArguments<Arguments> ArgumentsOf(void (*)(Arguments)) {
  return {};
}
#define MLA_HOST_KERNEL(kernel) decltype(ArgumentsOf(kernel))::Make<kernel>(#kernel)

constexpr Kernel kKernels[] = {
#if MLA_SM90
    MLA_HOST_KERNEL(mla_attend_16),
#endif
    MLA_HOST_KERNEL(mla_attend_64),
#if MLA_GFX950
    MLA_HOST_KERNEL(mla_attend_128),
#endif
    MLA_HOST_KERNEL(mla_expand),     MLA_HOST_KERNEL(mla_attend_expanded),
    MLA_HOST_KERNEL(mla_move),       MLA_HOST_KERNEL(mla_append_kv),
    MLA_HOST_KERNEL(mla_combine),    MLA_HOST_KERNEL(mla_project),
};

const char* RunGrid(const Kernel& kernel, const Grid& grid, const void* arguments) {
  return Run(kernel, tile::kWave, grid, arguments);
}
constexpr Image kImage = {MLA_HOST_ARCH, tile::kWave, kKernels, sizeof(kKernels) / sizeof(Kernel),
                          RunGrid};

}  // namespace
}  // namespace mla::gpu::host

extern "C" __attribute__((visibility("default"))) const mla::gpu::host::Image* mla_host_image() {
  return &mla::gpu::host::kImage;
}

#endif  // MLA_KERNELS_HIP_HOST_KERNEL_TABLE_H_
