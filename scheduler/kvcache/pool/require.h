// Checks, in every build, the conditions on which the isolation of tenants rests. Wrong accounts
// would hand pages of one tenant to another, so the process ends at once instead.
#ifndef MLA_SCHEDULER_KVCACHE_POOL_REQUIRE_H_
#define MLA_SCHEDULER_KVCACHE_POOL_REQUIRE_H_

#include <cstdio>
#include <cstdlib>

namespace mla::kvcache {

// Ends the process with SIGABRT, and prints `what` to stderr, if the condition does not hold.
inline void Require(bool holds, const char* what) {
  if (holds) [[likely]]
    return;
  std::fprintf(stderr, "KV cache: %s\n", what);
  std::abort();
}

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_POOL_REQUIRE_H_
