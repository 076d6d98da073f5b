// Makes all device kernels of the architecture that the including file has chosen an image.
#ifndef MLA_KERNELS_HIP_HOST_IMAGES_DEVICE_KERNELS_H_
#define MLA_KERNELS_HIP_HOST_IMAGES_DEVICE_KERNELS_H_

#include "kernels/hip/device/device_code.hip"
#include "kernels/hip/host_images/kernel_table.h"

namespace mla::kernels::hip {

#define MLA_HOST_ROW(kernel, ...) MLA_HOST_KERNEL(kernel),
constexpr host::Kernel kKernels[] = {
    MLA_ATTEND_VARIANTS(MLA_HOST_ROW) MLA_EXPAND_VARIANTS(MLA_HOST_ROW)
        MLA_EXPANDED_VARIANTS(MLA_HOST_ROW) MLA_HOST_KERNEL(mla_move),
    MLA_HOST_KERNEL(mla_digest),
    MLA_HOST_KERNEL(mla_copy_tensors),
    MLA_HOST_KERNEL(mla_gate),
    MLA_HOST_KERNEL(mla_signal),
    MLA_HOST_KERNEL(mla_append_kv),
    MLA_HOST_KERNEL(mla_combine),
    MLA_HOST_KERNEL(mla_project),
    MLA_HOST_KERNEL(mla_pack_rows),
    MLA_HOST_KERNEL(mla_row_product_few),
    MLA_HOST_KERNEL(mla_row_product_many),
    MLA_HOST_KERNEL(mla_row_product_few_e4m3),
    MLA_HOST_KERNEL(mla_row_product_many_e4m3),
    MLA_HOST_KERNEL(mla_finish_rows),
    MLA_HOST_KERNEL(mla_index_logits),
    MLA_HOST_KERNEL(mla_index_select),
#if MLA_SM90
    MLA_SPLIT_SM90(MLA_HOST_ROW) MLA_BOXES_SM90(MLA_HOST_ROW) MLA_STREAM_SM90(MLA_HOST_ROW)
        MLA_HOST_KERNEL(mla_widen_rows),
    MLA_HOST_KERNEL(mla_project_row_wide),
    MLA_HOST_KERNEL(mla_project_row_deep),
#endif
};
MLA_HOST_IMAGE(kKernels)

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_HOST_IMAGES_DEVICE_KERNELS_H_
