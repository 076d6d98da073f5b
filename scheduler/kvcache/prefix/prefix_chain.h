// The contents of a sequence's rows, as keys: each whole page of rows has a key that depends on the
// page's own tokens and, through its parent's key, on all rows before it.
#ifndef MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_CHAIN_H_
#define MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_CHAIN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace mla::kvcache {

// A keyed hash of 128 bits.
struct PrefixKey {
  uint64_t high = 0, low = 0;
  friend bool operator==(const PrefixKey&, const PrefixKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const PrefixKey& key) {
    return H::combine(std::move(h), key.high, key.low);
  }
};

// Immutable once a sequence has it; forks share it.
struct PrefixChain {
  int32_t page_size = 0;
  PrefixKey root;                // derived from the tenant, the model and the salt
  bool opaque = false;           // the client's own keys name the pages
  std::vector<PrefixKey> keys;   // of the whole pages
  std::vector<uint32_t> tokens;  // tokens of all rows; empty if opaque

  int32_t rows() const {
    return static_cast<int32_t>(opaque ? keys.size() * static_cast<size_t>(page_size)
                                       : tokens.size());
  }
  const PrefixKey& parent(int32_t page) const {
    return page == 0 ? root : keys[static_cast<size_t>(page) - 1];
  }
  // Returns the tokens of the page's first `rows` rows. REQUIRES: not opaque, and that many rows
  // are known.
  std::span<const uint32_t> page_tokens(int32_t page, int32_t rows) const {
    return std::span(tokens).subspan(static_cast<size_t>(page) * static_cast<size_t>(page_size),
                                     static_cast<size_t>(rows));
  }
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_CHAIN_H_
