// Exchanges the chunks of a row in shared memory on sm_90: eight rows at one chunk touch all 32
// banks once, and it is the 128-byte swizzle of the warpgroup products.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_SWIZZLE_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_SWIZZLE_H_

namespace mla::kernels::hip::tile {

// The 16-byte chunk c of row r of a column block lies at position c ^ swizzle(r).
constexpr int swizzle(int row) { return row & 7; }

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_SWIZZLE_H_
