// Keys of prefixes: SipHash-2-4 with 128 bits of output, under a secret of this process. Without
// the secret a client cannot choose tokens for a given key, so rows are found by their own tokens
// alone.
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

class PrefixHasher final {
 public:
  // Of a client's own key, which has either size.
  static constexpr size_t kPageKeyBytes = 32;
  static constexpr size_t kShortPageKeyBytes = 16;

  explicit PrefixHasher(const PrefixSecret& secret) : secret_(secret) {}

  // The key before the first page. `fields`: everything that tells apart rows which must not be
  // taken for each other; their order and their borders count.
  PrefixKey Root(std::span<const absl::string_view> fields) const;
  // Adds rows behind the chain's last, and the keys of the pages that they complete. REQUIRES: the
  // chain is not opaque.
  void AddTokens(std::span<const uint32_t> tokens, PrefixChain* chain) const;
  // The same for whole pages by keys of the client's. REQUIRES: an opaque chain, or one without
  // rows.
  void AddPageKeys(std::span<const std::string> page_keys, PrefixChain* chain) const;

 private:
  const PrefixSecret secret_;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_HASHER_H_
