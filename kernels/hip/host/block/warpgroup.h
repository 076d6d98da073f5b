// Asynchronous matrix products of a warp whose operands lie in shared memory (wgmma of sm_90).
#ifndef MLA_KERNELS_HIP_HOST_BLOCK_WARPGROUP_H_
#define MLA_KERNELS_HIP_HOST_BLOCK_WARPGROUP_H_

#include <cstdint>

namespace mla::kernels::hip::host {

// c [64 x cols] (+)= a [64 x 16] b [16 x cols], of which the lane's warp has 16 rows. Layouts and
// descriptors: kernels/hip/sm90/wgmma.h.
struct Product {
  float* c;         // of the lane; must stay where it is until the product is finished
  int cols;         // a multiple of 16, at most 256
  bool accumulate;  // else c begins with zeros
  bool a_held;      // in registers, else in shared memory
  bool b_down;      // its depth runs down the rows of shared memory, else along them
  uint64_t a;       // descriptor
  uint32_t held[4];
  uint64_t b;
  uint64_t group;            // set by StartProduct
  bool of_binary16 = false;  // else of bf16
};

void StartProduct(Product product);
// Finishes all products but those of the `pending` groups that were committed last, of all warps of
// the warpgroup.
void FinishProducts(int pending);

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_HOST_BLOCK_WARPGROUP_H_
