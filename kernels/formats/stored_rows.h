// Rows that come as they are stored, and were not encoded here.
#ifndef MLA_KERNELS_FORMATS_STORED_ROWS_H_
#define MLA_KERNELS_FORMATS_STORED_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/formats/kv_format.h"

namespace mla::kernels {

// Makes NaN of what EncodeKvRow would not have stored (kernels/formats/dtype.h). Returns the first
// of `count` rows, `row_stride` bytes apart, in which something stands for NaN; `count`: none does.
// With scales behind the rows of a page, `rows` is a page that has room for `page_rows`.
int64_t PoisonRows(const KvRowLayout& at, Fp8Kind kind, std::byte* rows, int64_t row_stride,
                   int32_t page_rows, int64_t count);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_FORMATS_STORED_ROWS_H_
