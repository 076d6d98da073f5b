#define MLA_LANES 16
#define MLA_ACCUMULATORS 24

#include "kernels/cpu/simd/fp32_kernels.h"

namespace mla::kernels::cpu {

constinit const KernelSet kAvx512Kernels = Fp32KernelSet("avx512");

}  // namespace mla::kernels::cpu
