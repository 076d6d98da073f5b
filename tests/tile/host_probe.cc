// The probe kernels, compiled for the host. The build chooses the architecture; tools that parse
// this file alone see gfx950's.
#if !defined(MLA_ON_HOST)
#define MLA_ON_HOST 1
#define MLA_GFX950 1
#define MLA_HOST_ARCH "gfx950"
#endif
#include "kernels/hip/host_images/kernel_table.h"
#include "tests/tile/probe.hip"

namespace mla::tile_test {

constexpr kernels::hip::host::Kernel kKernels[] = {
    MLA_HOST_KERNEL(probe_scores_16),    MLA_HOST_KERNEL(probe_scores_32),
    MLA_HOST_KERNEL(probe_outputs_16),   MLA_HOST_KERNEL(probe_outputs_32),
    MLA_HOST_KERNEL(probe_chain_16),     MLA_HOST_KERNEL(probe_chain_32),
    MLA_HOST_KERNEL(probe_rows_16),      MLA_HOST_KERNEL(probe_rows_32),
    MLA_HOST_KERNEL(probe_copy),         MLA_HOST_KERNEL(probe_math),
    MLA_HOST_KERNEL(probe_lanes),
#if MLA_AMD
    MLA_HOST_KERNEL(probe_codes_32),     MLA_HOST_KERNEL(probe_code_outputs_32),
#endif
#if MLA_GFX942
    MLA_HOST_KERNEL(probe_codes_16),     MLA_HOST_KERNEL(probe_code_outputs_16),
#endif
#if MLA_SM90
    MLA_HOST_KERNEL(probe_wgmma_scores), MLA_HOST_KERNEL(probe_wgmma_outputs),
    MLA_HOST_KERNEL(probe_matrices),     MLA_HOST_KERNEL(probe_barriers),
    MLA_HOST_KERNEL(probe_e4m3),
#endif
};
MLA_HOST_IMAGE(kKernels)

}  // namespace mla::tile_test
