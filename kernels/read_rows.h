// Reads rows of the KV cache as numbers through Launch::page_reads, for comparisons.
#ifndef MLA_KERNELS_READ_ROWS_H_
#define MLA_KERNELS_READ_ROWS_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/formats/dtype.h"

namespace mla::kernels {

// Reads the rows that `where` names and writes them to `out` [rows, row_dim] as bf16, rounded if
// the format holds other numbers. `page_tables` is as in Launch. Blocks: it submits launches in
// `slot`, which must be idle, and allocates. Fails as Submit and Wait do.
absl::Status ReadRows(AttentionBackend& backend, int32_t slot,
                      std::span<const uint32_t> page_tables, const AppendRecord& where, Bf16* out);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_READ_ROWS_H_
