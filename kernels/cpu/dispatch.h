// Finds the dispatch levels that this machine can run, and chooses one.
#ifndef MLA_KERNELS_CPU_DISPATCH_H_
#define MLA_KERNELS_CPU_DISPATCH_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/simd/kernel_set.h"

namespace mla::kernels::cpu {

// Returns the levels that this machine and its kernel support, the best first. For AMX this asks
// the kernel for permission to use tile state, once per process.
std::vector<const KernelSet*> UsableLevels();

// Returns the best usable level not above `highest` (empty: the best). The order, best first, is
// amx, avx512_bf16, avx512, avx2, portable. INVALID_ARGUMENT for an unknown name.
// FAILED_PRECONDITION, with the levels that the machine has, if `exact` and the level itself cannot
// run.
absl::StatusOr<const KernelSet*> SelectLevel(const std::string& highest, bool exact);

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_DISPATCH_H_
