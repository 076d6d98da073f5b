#include "kernels/types/part_digest.h"

#include <xxhash.h>
#if defined(__x86_64__)
// Dispatches XXH3 to the widest vectors of the processor.
#include <xxh_x86dispatch.h>
#endif

namespace mla::kernels {

PartDigest DigestOfPart(std::span<const std::byte> part) {
  const XXH128_hash_t hash = XXH3_128bits(part.data(), part.size());
  return {hash.low64, hash.high64};
}

}  // namespace mla::kernels
