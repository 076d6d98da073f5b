// Makes an image of the kernels of a translation unit that is compiled for the host. The unit
// includes the kernels before this header, and ends with
//
//   constexpr mla::kernels::hip::host::Kernel kKernels[] = {MLA_HOST_KERNEL(name), ...};
//   MLA_HOST_IMAGE(kKernels)
//
// MLA_HOST_ARCH is the architecture's name.
#ifndef MLA_KERNELS_HIP_HOST_IMAGES_KERNEL_TABLE_H_
#define MLA_KERNELS_HIP_HOST_IMAGES_KERNEL_TABLE_H_

#include "kernels/hip/emulator/block/block.h"
#include "kernels/hip/emulator/block/image.h"

namespace mla::kernels::hip::host {
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
#define MLA_HOST_KERNEL(kernel) \
  decltype(mla::kernels::hip::host::ArgumentsOf(kernel))::Make<kernel>(#kernel)

}  // namespace
}  // namespace mla::kernels::hip::host

#define MLA_HOST_IMAGE(table)                                                               \
  extern "C" __attribute__((visibility("default"))) const mla::kernels::hip::host::Image*   \
  mla_host_image() {                                                                        \
    static constexpr mla::kernels::hip::host::Image kImage = {                              \
        MLA_HOST_ARCH,                                                                      \
        mla::kernels::hip::tile::kWave,                                                     \
        table,                                                                              \
        sizeof(table) / sizeof(*table),                                                     \
        [](const mla::kernels::hip::host::Kernel& kernel,                                   \
           const mla::kernels::hip::host::Grid& grid, const void* arguments,                \
           const mla::kernels::hip::host::Previous* previous) {                             \
          return mla::kernels::hip::host::Run(kernel, mla::kernels::hip::tile::kWave, grid, \
                                              arguments, previous);                         \
        },                                                                                  \
        mla::kernels::hip::host::Watch};                                                    \
    return &kImage;                                                                         \
  }

#endif  // MLA_KERNELS_HIP_HOST_IMAGES_KERNEL_TABLE_H_
