#define MLA_LANES 16
#define MLA_ACCUMULATORS 24

#include "kernels/cpu/simd/fp32_kernels.h"

namespace mla::kernels::cpu {

const KernelSet kAvx512Kernels = {
    /*name=*/"avx512",
    /*bf16_operands=*/false,
    /*k_align=*/1,
    /*k_group=*/1,
    Gemm,
    Softmax,
    Accumulate,
    Probability,
    /*pack_values=*/nullptr,
    Widen,
    Narrow,
    /*split=*/nullptr,
    /*pack_rows=*/nullptr,
    WeightedSum,
    WeightedSumNarrow,
    /*enter_thread=*/nullptr,
    /*leave_thread=*/nullptr,
};

}  // namespace mla::kernels::cpu
