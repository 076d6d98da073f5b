// Kernels with a flaw. The correct kernel runs with changed arguments or memory, so that it
// computes what a kernel with the flaw would.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_FLAWS_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_FLAWS_H_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "kernels/hip/emulator/block/image.h"
#include "tests/fake_hip/runtime/fake_control.h"

namespace mla::fake_hip {

// Calls `run` with the kernel's arguments, which are changed if the flaw concerns this kernel.
// Memory that was changed is restored afterwards, except rounded inputs.
void RunFlawed(Flaw flaw, bool rounded_inputs, const std::string& kernel,
               const kernels::hip::host::Grid& grid, std::vector<std::byte> arguments,
               const std::function<void(const void* arguments)>& run);

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_FLAWS_H_
