// Permutes the chunks of a row in shared memory (LDS) on gfx950, so that reads of tiles do not
// conflict in its banks.
//
// A tile is stored in column blocks: rows of 128 bytes, eight chunks of 16 bytes each. LDS has 64
// banks of four bytes, which are two such rows. So bit 0 of a row's number chooses a half of the
// banks, and the position of a chunk chooses the banks within the half.
//
// The device serves a read in phases of some lanes each. Lanes of a phase whose chunks lie in the
// same banks wait for each other. When each lane reads one chunk of its own row, a phase of
// ds_read_b128 has the rows 0 to 3, 12 to 15 and 20 to 27 of 32, or all others. A phase of
// ds_read_b64_tr_b16 reads four rows of four chunks, or eight rows of two, depending on the tile's
// reader. Bits 1, 2 and 4 of the row give different positions to the rows of a phase that share a
// half. tools/lds_banks.py counts the conflicts. Panels of the expanded form in device memory have
// the same order, so that a tile is one copy.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX950_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX950_H_

namespace mla::kernels::hip::tile {

// The 16-byte chunk c of row r of a column block lies at position c ^ swizzle(r). REQUIRES: a tile
// is written and read by the same function.
constexpr int swizzle(int row) { return (row & 2) << 1 | (row & 4) >> 1 | (row >> 4 & 1); }
// Returns the swizzle of tiles to which each lane writes a row by ds_write_b128. A phase of that
// instruction has 16 consecutive rows, so bits 1 to 3 spread them.
constexpr int written_swizzle(int row) { return row >> 1 & 7; }

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX950_H_
