// Checks of copies between host memory and the pool: Launch::page_writes and page_reads.
#ifndef MLA_TESTS_CONFORMANCE_PAGES_PAGE_CHECK_H_
#define MLA_TESTS_CONFORMANCE_PAGES_PAGE_CHECK_H_

#include <cstdint>
#include <string>

#include "kernels/attention_backend.h"

namespace mla::conformance {

// Returns "" or the first fault. Page transfers of any size and place must keep their bytes and the
// order of launches. Transfers that leave the pool must be refused, digests must describe the
// copied bytes, and a range of many places must fill only these. `pool_bytes` is the size of the
// configured backend's pool, at least 4 MiB, which is overwritten. Both launch slots must be idle.
std::string CheckPageTransfers(kernels::AttentionBackend& backend, int64_t pool_bytes);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_PAGES_PAGE_CHECK_H_
