// Gives tokens to tests of the prefix cache. Each committed row has its own token, so tokens tell
// what rows must hold.
#ifndef MLA_SCHEDULER_KVCACHE_PREFIX_TOKEN_BOOK_H_
#define MLA_SCHEDULER_KVCACHE_PREFIX_TOKEN_BOOK_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "scheduler/kvcache/prefix/prefix_hasher.h"

namespace mla::kvcache {

class TokenBook {
 public:
  uint32_t New() { return next_++; }
  void Name(uint64_t row, uint32_t token) {
    token_of_[row] = token;
    row_of_[token] = row;
  }
  uint32_t Of(uint64_t row) const { return token_of_.at(row); }
  // 0: no row with this token was committed.
  uint64_t RowOf(uint32_t token) const {
    const auto found = row_of_.find(token);
    return found == row_of_.end() ? 0 : found->second;
  }
  std::shared_ptr<const PrefixChain> Chain(uint64_t tenant, int layout, int32_t page_size,
                                           const std::vector<uint32_t>& tokens) const {
    auto chain = std::make_shared<PrefixChain>();
    chain->page_size = page_size;
    const std::string root = std::to_string(tenant) + "/" + std::to_string(layout);
    const absl::string_view fields[] = {root};
    chain->root = hasher_.Root(fields);
    hasher_.AddTokens(tokens, chain.get());
    return chain;
  }

 private:
  const PrefixHasher hasher_{PrefixSecret{}};
  std::map<uint64_t, uint32_t> token_of_;
  std::map<uint32_t, uint64_t> row_of_;
  uint32_t next_ = 1;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PREFIX_TOKEN_BOOK_H_
