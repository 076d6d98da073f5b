// The device kernels by name, in reference semantics on host memory.
#ifndef MLA_TESTS_FAKE_HIP_FAKE_KERNELS_H_
#define MLA_TESTS_FAKE_HIP_FAKE_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "kernels/hip/common/expanded_args.h"
#include "tests/fake_hip/fake_control.h"

namespace mla::fake_hip {

// Bytes of the kernel's argument structure; 0 when there is no kernel of that name.
size_t ArgumentBytes(const std::string& kernel);

struct Grid {
  uint32_t x, y;
  uint32_t waves;       // of a block
  bool rounded_inputs;  // as Control
  Flaw flaw = Flaw::kNone;
};

// Runs a launch. `args` is the kernel's argument structure.
void RunKernel(const std::string& kernel, const Grid& grid, const void* args);

void RunExpand(const gpu::ExpandArgs& args, uint32_t blocks);
void RunAttendExpanded(const gpu::ExpandedArgs& args, uint32_t blocks, Flaw flaw);

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_FAKE_KERNELS_H_
