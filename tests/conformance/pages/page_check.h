// Bytes on their way between host memory and the pool: Launch::page_writes and page_reads.
#ifndef MLA_TESTS_CONFORMANCE_PAGES_PAGE_CHECK_H_
#define MLA_TESTS_CONFORMANCE_PAGES_PAGE_CHECK_H_

#include <cstdint>
#include <string>

#include "kernels/attention_backend.h"

namespace mla::conformance {

// Empty if page transfers of any size and place keep their bytes and the order of launches,
// those that leave the pool are refused, digests are of what was copied, and a range of many places
// fills these alone; else what is wrong. `pool_bytes`: of the configured backend, at least 4 MiB,
// which it overwrites; its two launch slots must not run.
std::string CheckPageTransfers(kernels::AttentionBackend& backend, int64_t pool_bytes);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_PAGES_PAGE_CHECK_H_
