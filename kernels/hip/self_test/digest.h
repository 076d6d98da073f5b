// Tests page transfers with digests. Internal to self_test.cc.
#ifndef MLA_KERNELS_HIP_SELF_TEST_DIGEST_H_
#define MLA_KERNELS_HIP_SELF_TEST_DIGEST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/attention_backend.h"

namespace mla::kernels::hip::self_test {

inline constexpr int64_t kDigestedBytes = 2 * kDigestPartBytes + 3 * kPageGranuleBytes;

// Moves two whole parts and a short one into the pool and out of it. `memory` has room for both
// copies; `first` sets what they hold.
inline absl::Status CheckDigestsOf(AttentionBackend& backend, std::span<std::byte> memory,
                                   size_t first) {
  constexpr int64_t kParts = DigestParts(kDigestedBytes);
  for (size_t i = 0; i < memory.size(); ++i) {
    memory[i] = static_cast<std::byte>(first + i * 7 + i / 251);
  }
  PartDigest in[kParts], out[kParts];
  const PageTransfer write{kPageGranuleBytes, kDigestedBytes, memory.data(), in};
  const PageTransfer read{kPageGranuleBytes, kDigestedBytes, memory.data() + kDigestedBytes, out};
  Launch launch;
  launch.page_writes = {&write, 1};
  launch.page_reads = {&read, 1};
  absl::Status s = backend.Submit(0, launch);
  if (s.ok()) s = backend.Wait(0).status();
  if (!s.ok()) return s;
  for (int64_t part = 0; part < kParts; ++part) {
    const int64_t at = part * kDigestPartBytes;
    const auto size = static_cast<size_t>(std::min(kDigestPartBytes, kDigestedBytes - at));
    const PartDigest want = DigestOfPart(memory.subspan(static_cast<size_t>(at), size));
    if (in[part] == want && out[part] == want) continue;
    return absl::InternalError(absl::StrCat("the digest of part ", part, " of a transfer ",
                                            in[part] == want ? "out of" : "into",
                                            " the pool is another one"));
  }
  return absl::OkStatus();
}

// Checks two contents, because a kernel that stores nothing leaves what was there before it: the
// memory may hold the right digests of one of them, from an earlier test.
inline absl::Status CheckDigests(AttentionBackend& backend) {
  MLA_ASSIGN_OR_RETURN(const auto memory, backend.AllocateHost(2 * kDigestedBytes));
  absl::Status s = CheckDigestsOf(backend, memory->bytes(), 0);
  if (s.ok()) s = CheckDigestsOf(backend, memory->bytes(), 1);
  return s;
}

}  // namespace mla::kernels::hip::self_test

#endif  // MLA_KERNELS_HIP_SELF_TEST_DIGEST_H_
