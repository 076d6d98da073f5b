// Converts rows that come from a pool of the other kind of 8-bit floats.
#ifndef MLA_KERNELS_FORMATS_CONVERT_ROWS_H_
#define MLA_KERNELS_FORMATS_CONVERT_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/formats/kv_format.h"

namespace mla::kernels {

// Converts `count` rows of the other kind to kind `target` in place. The first row is at `rows`,
// and they lie `row_stride` bytes apart. Codes change by ToKind, and scales stored with the rows by
// ScaleToKind; the caller converts scales of layers. In formats that keep scales after the rows of
// a page, `rows` is a page with room for `page_rows`.
//
// Rows written by EncodeKvRow keep exactly their values. In rows from elsewhere, codes that
// EncodeKvRow does not write become the nearest that it does, and scales below 2^-125 are rounded.
void ConvertRows(const KvRowLayout& layout, Fp8Kind target, std::byte* rows, int64_t row_stride,
                 int32_t page_rows, int64_t count);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_FORMATS_CONVERT_ROWS_H_
