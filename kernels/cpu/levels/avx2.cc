#define MLA_LANES 8
#define MLA_ACCUMULATORS 12

#include "kernels/cpu/simd/fp32_kernels.h"
#include "kernels/cpu/simd/fp8_avx2.h"

namespace mla::kernels::cpu {

constinit const KernelSet kAvx2Kernels = Fp32KernelSet("avx2", WidenFp8);

}  // namespace mla::kernels::cpu
