// Tests page transfers with digests. Internal to self_test.cc.
#ifndef MLA_KERNELS_HIP_SELF_TEST_DIGEST_H_
#define MLA_KERNELS_HIP_SELF_TEST_DIGEST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/attention_backend.h"

namespace mla::kernels::hip::self_test {

// Moves two whole parts and a short one into the pool and out of it.
inline absl::Status CheckDigests(AttentionBackend& backend) {
  constexpr int64_t kBytes = 2 * kDigestPartBytes + 3 * kPageGranuleBytes;
  constexpr int64_t kParts = DigestParts(kBytes);
  auto memory = backend.AllocateHost(2 * kBytes);
  if (!memory.ok()) return memory.status();
  const std::span<std::byte> bytes = (*memory)->bytes();
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  PartDigest in[kParts], out[kParts];
  const PageTransfer write{kPageGranuleBytes, kBytes, bytes.data(), in};
  const PageTransfer read{kPageGranuleBytes, kBytes, bytes.data() + kBytes, out};
  Launch launch;
  launch.page_writes = {&write, 1};
  launch.page_reads = {&read, 1};
  absl::Status s = backend.Submit(0, launch);
  if (s.ok()) s = backend.Wait(0).status();
  if (!s.ok()) return s;
  for (int64_t part = 0; part < kParts; ++part) {
    const int64_t at = part * kDigestPartBytes;
    const auto size = static_cast<size_t>(std::min(kDigestPartBytes, kBytes - at));
    const PartDigest want = DigestOfPart(bytes.subspan(static_cast<size_t>(at), size));
    if (in[part] == want && out[part] == want) continue;
    return absl::InternalError(absl::StrCat("the digest of part ", part, " of a transfer ",
                                            in[part] == want ? "out of" : "into",
                                            " the pool is another one"));
  }
  return absl::OkStatus();
}

}  // namespace mla::kernels::hip::self_test

#endif  // MLA_KERNELS_HIP_SELF_TEST_DIGEST_H_
