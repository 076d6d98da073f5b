// Checks rows that arrive in their stored form, which this process did not encode.
#ifndef MLA_KERNELS_FORMATS_STORED_ROWS_H_
#define MLA_KERNELS_FORMATS_STORED_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/formats/kv_format.h"

namespace mla::kernels {

// Turns values that EncodeKvRow would not have stored (kernels/formats/dtype.h) into NaN. Returns
// the index of the first of `count` rows, `row_stride` bytes apart, that holds a NaN, or `count` if
// none does. In formats that keep scales after the rows of a page, `rows` is a page with room for
// `page_rows`.
int64_t PoisonRows(const KvRowLayout& layout, Fp8Kind kind, std::byte* rows, int64_t row_stride,
                   int32_t page_rows, int64_t count);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_FORMATS_STORED_ROWS_H_
