// How chunks of a row in shared memory are permuted on gfx950. LDS has 64 banks, as wide as two
// rows of 128 bytes, so bit 0 of a row alone chooses between halves of the banks. Bits 1, 2 and 4
// spread the rows of one phase of a read over the eight chunks of a half. With ds_read_b128 a phase
// reads rows 0 to 3, 12 to 15 and 20 to 27 of 32, or the others; with ds_read_b64_tr_b16 it reads
// four rows by four chunks, or eight by two. Two operands of a product of 32 rows, half its depth
// apart, then differ in constants alone. tools/lds_banks.py counts conflicts.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX950_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX950_H_

namespace mla::kernels::hip::tile {

// The 16-byte chunk c of row r of a column block lies at position c ^ swizzle(r).
constexpr int swizzle(int row) { return (row & 2) << 1 | (row & 4) >> 1 | (row >> 4 & 1); }
// For a tile that lanes write themselves, a row each: ds_write_b128 takes sixteen rows in order.
constexpr int written_swizzle(int row) { return row >> 1 & 7; }

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_SWIZZLE_GFX950_H_
