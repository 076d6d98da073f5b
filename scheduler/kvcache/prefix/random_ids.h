// Unpredictable numbers.
#ifndef MLA_SCHEDULER_KVCACHE_PREFIX_RANDOM_IDS_H_
#define MLA_SCHEDULER_KVCACHE_PREFIX_RANDOM_IDS_H_

#include <sys/random.h>

#include <cstdint>
#include <cstring>

#include "scheduler/kvcache/prefix/prefix_hasher.h"

namespace mla::kvcache {

inline uint64_t RandomId() {
  uint64_t id = 0;
  while (getrandom(&id, sizeof(id), 0) != static_cast<ssize_t>(sizeof(id))) {
  }
  return id;
}

inline PrefixSecret RandomSecret() {
  PrefixSecret secret;
  for (size_t at = 0; at < secret.size(); at += sizeof(uint64_t)) {
    const uint64_t random = RandomId();
    std::memcpy(secret.data() + at, &random, sizeof(random));
  }
  return secret;
}

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PREFIX_RANDOM_IDS_H_
