// Permutes the chunks of a row in shared memory (LDS) on gfx942, so that reads of tiles do not
// conflict in its banks.
//
// A tile is stored in column blocks: rows of 128 bytes, eight chunks of 16 bytes each. LDS has 32
// banks of four bytes, which are one such row. So lanes that read the same chunk of eight
// consecutive rows use every bank once.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX942_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX942_H_

namespace mla::kernels::hip::tile {

// The 16-byte chunk c of row r of a column block lies at position c ^ swizzle(r).
constexpr int swizzle(int row) { return row & 7; }
// Returns the swizzle of tiles to which each lane writes a row.
constexpr int written_swizzle(int row) { return row & 7; }

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX942_H_
