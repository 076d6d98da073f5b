#include "scheduler/tables/prefix_plan.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace mla::scheduler {
namespace {

using kvcache::PrefixChain;
using kvcache::PrefixKey;

// Pages whose keys a probe hashes before it looks them up in the directory.
constexpr size_t kPagesAtOnce = 32;

template <typename T>
absl::string_view BytesOf(const T* data, size_t count) {
  return {reinterpret_cast<const char*>(data), count * sizeof(T)};
}

// Returns a copy of the chain's first `rows` rows.
PrefixChain FirstRows(const PrefixChain& from, int32_t rows) {
  PrefixChain chain = from;
  chain.keys.resize(std::min(chain.keys.size(), static_cast<size_t>(rows / from.page_size)));
  if (!chain.opaque) chain.tokens.resize(static_cast<size_t>(rows));
  return chain;
}

// Returns true if two chains agree on the rows below `rows`, or on their whole pages if opaque.
bool Agree(const PrefixChain& a, const PrefixChain& b, int32_t rows) {
  if (a.root != b.root || a.opaque != b.opaque) return false;
  if (std::min(a.rows(), b.rows()) < rows) return false;
  const auto pages = static_cast<int64_t>(rows / a.page_size);
  if (!std::equal(a.keys.begin(), a.keys.begin() + pages, b.keys.begin())) return false;
  return a.opaque || std::equal(a.tokens.begin(), a.tokens.begin() + rows, b.tokens.begin());
}

}  // namespace

PrefixKey PrefixPlanner::RootOf(const std::string& tenant, const ModelSpec& spec,
                                const std::string& salt) const {
  // Models with equal contents share their rows if the client has given a digest of the weights.
  const std::string name = spec.weights_digest.empty() ? spec.id : "";
  const std::string contents = spec.ContentsText();
  const absl::string_view fields[] = {tenant, name, contents, salt};
  return hasher_.Root(fields);
}

absl::StatusOr<int64_t> PrefixPlanner::RowsOf(const PrefixArgs& args, int64_t first_row,
                                              int32_t page_size) const {
  const bool by_key = !args.page_keys.empty();
  const int64_t rows = by_key ? static_cast<int64_t>(args.page_keys.size()) * page_size
                              : static_cast<int64_t>(args.token_ids.size());
  if (first_row + rows <= limits_.max_sequence_rows) return rows;
  return RefuseField(by_key ? "prefix.page_keys" : "prefix.token_ids",
                     absl::StrCat("rows up to ", first_row + rows),
                     absl::StrCat("at most ", limits_.max_sequence_rows), "out_of_range");
}

absl::Status PrefixPlanner::CountHeld(const std::string& tenant, const ModelSpec& spec,
                                      const PrefixArgs& args,
                                      const kvcache::PageDirectory& directory,
                                      ProbeAnswer* answer) const {
  const bool by_key = !args.page_keys.empty();
  MLA_ASSIGN_OR_RETURN(const int64_t named, RowsOf(args, 0, spec.page_size));
  const int64_t rows = args.max_rows > 0 ? std::min(named, args.max_rows) : named;
  const auto pages = static_cast<size_t>(rows / spec.page_size);
  const auto page_size = static_cast<size_t>(spec.page_size);
  PrefixChain chain;
  chain.page_size = spec.page_size;
  chain.root = RootOf(tenant, spec, args.salt);
  kvcache::HeldPages held;
  bool all = true;
  for (size_t page = 0; page < pages && all; page += kPagesAtOnce) {
    const size_t some = std::min(kPagesAtOnce, pages - page);
    if (by_key) {
      hasher_.AddPageKeys(std::span(args.page_keys).subspan(page, some), &chain);
    } else {
      hasher_.AddTokens(std::span(args.token_ids).subspan(page * page_size, some * page_size),
                        &chain);
    }
    all = directory.Count(std::span(chain.keys).subspan(page), &held);
  }
  if (args.hashed) args.hashed();
  answer->rows_asked = static_cast<int64_t>(pages * page_size);
  answer->rows_in_pool = int64_t{held.pool} * spec.page_size;
  answer->rows_in_host = int64_t{held.host} * spec.page_size;
  answer->rows_in_file = int64_t{held.file} * spec.page_size;
  return absl::OkStatus();
}

absl::Status PrefixPlanner::Fill(const std::string& tenant, const PrefixArgs& args,
                                 int64_t first_row, int64_t committed, PrefixPlan* plan) const {
  const int32_t page_size = plan->spec->page_size;
  const bool by_key = !args.page_keys.empty();
  MLA_ASSIGN_OR_RETURN(const int64_t named, RowsOf(args, first_row, page_size));
  const int64_t rows = named;
  if (first_row > plan->declared || (by_key && first_row % page_size != 0)) {
    return RefuseField("first_row", absl::StrCat(first_row),
                       absl::StrCat("at most ", plan->declared, ", the rows declared so far",
                                    by_key ? ", and the first of a page" : ""),
                       "out_of_range");
  }
  PrefixChain chain;
  chain.page_size = page_size;
  chain.root = RootOf(tenant, *plan->spec, args.salt);
  if (first_row > 0) {
    if (chain.root != plan->before->root || by_key != plan->before->opaque) {
      return RefuseField("prefix", "another salt, or keys after tokens",
                         "of the kind that the rows before were declared in", "prefix_differs",
                         absl::StatusCode::kFailedPrecondition);
    }
    chain = FirstRows(*plan->before, static_cast<int32_t>(first_row));
  }
  if (by_key) {
    hasher_.AddPageKeys(args.page_keys, &chain);
  } else {
    hasher_.AddTokens(args.token_ids, &chain);
  }
  // The declared contents of committed rows may not change.
  const auto fixed = static_cast<int32_t>(std::min<int64_t>(plan->declared, committed));
  if (fixed > 0 && !Agree(chain, *plan->before, fixed)) {
    return RefuseField("prefix", "other contents of rows that are committed",
                       absl::StrCat("what was declared of rows 0..", fixed - 1), "prefix_differs",
                       absl::StatusCode::kFailedPrecondition);
  }
  // The last key covers the whole pages, so only the rest is hashed again.
  const PrefixKey last = chain.parent(static_cast<int32_t>(chain.keys.size()));
  const size_t in_pages = chain.opaque ? 0 : chain.keys.size() * static_cast<size_t>(page_size);
  const PrefixKey digest = hasher_.Root(std::vector<absl::string_view>{
      BytesOf(&last, 1), BytesOf(chain.tokens.data() + in_pages, chain.tokens.size() - in_pages),
      BytesOf(&rows, 1), BytesOf(&args.max_rows, 1)});
  plan->digest = std::string(BytesOf(&digest, 1));
  if (args.hashed) args.hashed();
  plan->max_rows = args.max_rows;
  plan->chain = std::make_shared<const PrefixChain>(std::move(chain));
  return absl::OkStatus();
}

}  // namespace mla::scheduler
