#define MLA_LANES 4
#define MLA_ACCUMULATORS 12

#include "kernels/cpu/simd/fp32_kernels.h"
#include "kernels/cpu/simd/fp8_rows.h"

namespace mla::kernels::cpu {
namespace {

void WidenFp8(const Fp8RowsArgs& args) { WidenRows(args, WidenByTable); }

}  // namespace

constinit const KernelSet kPortableKernels = Fp32KernelSet("portable", WidenFp8);

}  // namespace mla::kernels::cpu
