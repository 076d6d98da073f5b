#define MLA_LANES 8
#define MLA_ACCUMULATORS 12

#include "kernels/cpu/simd/fp32_kernels.h"

namespace mla::kernels::cpu {

constinit const KernelSet kAvx2Kernels = Fp32KernelSet("avx2");

}  // namespace mla::kernels::cpu
