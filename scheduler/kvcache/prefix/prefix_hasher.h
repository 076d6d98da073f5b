// Computes keys of prefixes: SipHash-2-4 with 128 bits of output, under a secret of this process.
// Without the secret a client cannot find other tokens that give the same key, so rows are found
// only by their own tokens.
//
// Thread-safe: calls share nothing but the secret.
#ifndef MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_HASHER_H_
#define MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_HASHER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/strings/string_view.h"
#include "scheduler/kvcache/prefix/prefix_chain.h"

namespace mla::kvcache {

using PrefixSecret = std::array<std::byte, 16>;
PrefixSecret RandomSecret();

class PrefixHasher final {
 public:
  // Sizes of a client's own key: it has either of them.
  static constexpr size_t kPageKeyBytes = 32;
  static constexpr size_t kShortPageKeyBytes = 16;

  explicit PrefixHasher(const PrefixSecret& secret) : secret_(secret) {}

  // Returns the key before the first page. `fields`: everything that separates rows which must not
  // be confused; both their order and where one ends count.
  PrefixKey Root(std::span<const absl::string_view> fields) const;
  // Appends rows to the chain, and the keys of the pages that they complete. REQUIRES: the chain is
  // not opaque.
  void AddTokens(std::span<const uint32_t> tokens, PrefixChain* chain) const;
  // As AddTokens, for whole pages by the client's own keys. REQUIRES: an opaque chain, or one
  // without rows.
  void AddPageKeys(std::span<const std::string> page_keys, PrefixChain* chain) const;

 private:
  const PrefixSecret secret_;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_HASHER_H_
