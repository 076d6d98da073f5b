// What pages of a case hold before rows are stored there: NaN, so that a kernel which reads beyond
// the rows that a request has is found, even where it gives what it reads no weight.
#ifndef MLA_TESTS_CONFORMANCE_PAGES_POISON_H_
#define MLA_TESTS_CONFORMANCE_PAGES_POISON_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/formats/kv_format.h"

namespace mla::conformance {

inline constexpr int64_t kPoisonBlockBytes = int64_t{1} << 20;

// Latent values of a row of such bytes alone are NaN, and so are the scales that lie with them.
// With `alternate`, another such byte where the format and the kind have two.
std::byte PoisonByte(kernels::KvFormat format, kernels::Fp8Kind kind, bool alternate);

// Fills `bytes` of the pool from `first` on, in launches of their own, and waits for them. The
// bytes come as they are: what is appended as NaN becomes one pattern of it, which may be a number
// in 8 bits. `block` is host memory of min(bytes, kPoisonBlockBytes) at least, overwritten.
absl::Status PoisonPages(kernels::AttentionBackend& backend, int32_t slot, int64_t first,
                         int64_t bytes, std::byte poison, std::span<std::byte> block);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_PAGES_POISON_H_
