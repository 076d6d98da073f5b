#define MLA_LANES 16
#define MLA_ACCUMULATORS 24

#include "kernels/cpu/simd/fp32_kernels.h"
#include "kernels/cpu/simd/fp8_avx512.h"

namespace mla::kernels::cpu {

constinit const KernelSet kAvx512Kernels = Fp32KernelSet("avx512", WidenFp8);

}  // namespace mla::kernels::cpu
