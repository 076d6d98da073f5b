#define MLA_LANES 4
#define MLA_ACCUMULATORS 12

#include "kernels/cpu/simd/fp32_kernels.h"

namespace mla::kernels::cpu {

const KernelSet kPortableKernels = {
    /*name=*/"portable",
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
