// Fills pages of a case with NaN before rows are stored in them. A kernel that reads beyond a
// request's rows is then found, even if it gives those values no weight.
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

// A byte for which latent values of a row filled with it are NaN, and so are the scales stored with
// them. With `alternate`, a second such byte if the format and the kind have two.
std::byte PoisonByte(kernels::KvFormat format, kernels::Fp8Kind kind, bool alternate);

// Fills `bytes` of the pool from `first` on, in launches of its own, and waits for them. It writes
// raw bytes, because appending NaN would store only one of its patterns, and other patterns may be
// numbers in 8 bits. `block` is host memory of at least min(bytes, kPoisonBlockBytes), overwritten.
absl::Status PoisonPages(kernels::AttentionBackend& backend, int32_t slot, int64_t first,
                         int64_t bytes, std::byte poison, std::span<std::byte> block);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_PAGES_POISON_H_
