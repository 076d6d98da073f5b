// The device kernels by name, in reference semantics on host memory.
#ifndef MLA_TESTS_FAKE_HIP_FAKE_KERNELS_H_
#define MLA_TESTS_FAKE_HIP_FAKE_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace mla::fake_hip {

// Bytes of the kernel's argument structure; 0 when there is no kernel of that name.
size_t ArgumentBytes(const std::string& kernel);

// Runs a launch. `args` is the kernel's argument structure.
void RunKernel(const std::string& kernel, uint32_t grid_x, uint32_t grid_y, const void* args);

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_FAKE_KERNELS_H_
