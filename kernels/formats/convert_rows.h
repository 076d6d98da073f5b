// Rows that come from a pool of the other kind of 8-bit floats.
#ifndef MLA_KERNELS_FORMATS_CONVERT_ROWS_H_
#define MLA_KERNELS_FORMATS_CONVERT_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/formats/kv_format.h"

namespace mla::kernels {

// Makes `count` rows, the first at `rows` and `row_stride` bytes apart, such of the kind `to`; they
// are of the other one. Codes change by ToKind, and scales that lie with the rows by ScaleToKind;
// those of layers are the caller's. With scales behind the rows of a page, `rows` is a page that
// has room for `page_rows`.
//
// What EncodeKvRow has written stands for the same values then, bit by bit. Of rows from elsewhere,
// codes that it does not write become the nearest that it does, and scales below 2^-125 are
// rounded.
void ConvertRows(const KvRowLayout& at, Fp8Kind to, std::byte* rows, int64_t row_stride,
                 int32_t page_rows, int64_t count);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_FORMATS_CONVERT_ROWS_H_
