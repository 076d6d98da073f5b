// How chunks of a row in shared memory are permuted on gfx942. LDS has 32 banks, as wide as a row
// of 128 bytes, so eight rows at one chunk touch all banks once.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX942_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX942_H_

namespace mla::kernels::hip::tile {

// The 16-byte chunk c of row r of a column block lies at position c ^ swizzle(r).
constexpr int swizzle(int row) { return row & 7; }
constexpr int written_swizzle(int row) {
  return row & 7;
}  // for a tile that lanes write
   // themselves

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX942_H_
