#define MLA_LANES 4
#define MLA_ACCUMULATORS 12

#include "kernels/cpu/simd/fp32_kernels.h"

namespace mla::kernels::cpu {

constinit const KernelSet kPortableKernels = Fp32KernelSet("portable");

}  // namespace mla::kernels::cpu
