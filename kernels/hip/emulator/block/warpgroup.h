// Emulates asynchronous matrix products of a warp with operands in shared memory (wgmma of sm_90).
#ifndef MLA_KERNELS_HIP_EMULATOR_BLOCK_WARPGROUP_H_
#define MLA_KERNELS_HIP_EMULATOR_BLOCK_WARPGROUP_H_

#include <cstdint>

namespace mla::kernels::hip::host {

enum class Element : uint8_t { kBf16, kBinary16, kE4m3 };

// One product c [64 x cols] (+)= a [64 x depth] b [depth x cols] of a warpgroup, as one lane starts
// it. The lane's warp has 16 of the rows. The depth is 16, or 32 for e4m3. device/sm90/wgmma.h and
// device/sm90/e4m3_instructions.h describe the layouts and the descriptors.
struct Product {
  float* c;         // in the lane; must not move until the product is finished
  int cols;         // a multiple of 8, at most 256
  bool accumulate;  // otherwise c begins with zeros
  bool a_held;      // in registers, else in shared memory
  bool b_down;      // its depth runs down the rows of shared memory, else along them
  uint64_t a;       // descriptor
  uint32_t held[4];
  uint64_t b;
  uint64_t group;  // set by StartProduct
  Element of = Element::kBf16;
  bool a_down = false;  // as b_down, for bf16: 64 rows of a are the columns of shared memory
};

void StartProduct(Product product);
// Finishes all products of all warps of the warpgroup, except the `pending` groups that were
// committed last.
void FinishProducts(int pending);

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_WARPGROUP_H_
