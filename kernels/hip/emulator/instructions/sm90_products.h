// Emulates the warpgroup products of kernels/hip/device/sm90/wgmma.h and warpgroup.h on the host.
// Each warp of a group multiplies its own 16 rows. Products run when they are waited for, in the
// order of their start, so their operands in shared memory must not change before.
#ifndef MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_PRODUCTS_H_
#define MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_PRODUCTS_H_

#include "kernels/hip/emulator/block/warpgroup.h"
#include "kernels/hip/emulator/instructions/sm90_instructions.h"

namespace mla::kernels::hip::tile {

inline void wgmma_begin() {}
inline void wgmma_commit() { ++host::the_lane->product_group; }
template <int kPending>
void wgmma_wait() {
  host::FinishProducts(kPending);
}
inline void publish_shared() {}
template <int kCount>
void pin(float (&)[kCount]) {}

inline void wgmma_64x64(float (&c)[32], uint64_t a, uint64_t b, int accumulate) {
  host::StartProduct({c, 64, accumulate != 0, false, false, a, {}, b, 0});
}
inline void wgmma_64x256(float (&c)[128], uint64_t a, uint64_t b) {
  host::StartProduct({c, 256, true, false, true, a, {}, b, 0});
}
inline void wgmma_64x256(float (&c)[128], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                         uint64_t b) {
  host::StartProduct({c, 256, true, true, true, 0, {a0, a1, a2, a3}, b, 0});
}
inline void multiply_rows(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
  host::StartProduct({c, 128, accumulate != 0, false, false, a, {}, b, 0});
}
inline void multiply_rows(float (&c)[96], uint64_t a, uint64_t b, int accumulate) {
  host::StartProduct({c, 192, accumulate != 0, false, false, a, {}, b, 0});
}
inline void multiply_columns(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
  host::StartProduct({c, 128, accumulate != 0, false, true, a, {}, b, 0});
}
inline void multiply_turned(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
  host::Product product{c, 128, accumulate != 0, false, false, a, {}, b, 0};
  product.a_down = true;
  host::StartProduct(product);
}
inline void multiply_held(float (&c)[64], const uint32_t* a, uint64_t b) {
  host::StartProduct({c, 128, true, true, true, 0, {a[0], a[1], a[2], a[3]}, b, 0});
}

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_PRODUCTS_H_
