// Declares the dispatch levels whose instructions are emulated (see immintrin.h in this folder).
// They are compiled from the source of the real levels, for tests on machines that lack the
// instructions.
#ifndef MLA_KERNELS_CPU_EMULATION_EMULATED_LEVELS_H_
#define MLA_KERNELS_CPU_EMULATION_EMULATED_LEVELS_H_

#include "kernels/cpu/simd/kernel_set.h"

namespace mla::kernels::cpu {

extern const KernelSet kEmulatedAmxKernels;
extern const KernelSet kEmulatedAvx512Bf16Kernels;

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_EMULATION_EMULATED_LEVELS_H_
