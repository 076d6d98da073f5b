#include "kernels/host_memory/transfers.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

namespace mla::kernels {
namespace {

#if defined(__SSE2__)
constexpr size_t kLine = 64;

// Stores bypass the caches. A store into a cache would first read the line that it overwrites.
void CopyPart(std::byte* destination, const std::byte* from, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(destination) % sizeof(__m128i) != 0) {
    std::memcpy(destination, from, bytes);
    return;
  }
  const size_t lines = bytes / kLine * kLine;
  for (size_t at = 0; at < lines; at += kLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + at);
    auto* const target = reinterpret_cast<__m128i*>(destination + at);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(destination + lines, from + lines, bytes - lines);
}

// Streaming stores are weakly ordered: a release store that tells another thread of them does not
// order them, only this fence does.
void EndCopies() { _mm_sfence(); }
#else
void CopyPart(std::byte* to, const std::byte* from, size_t bytes) { std::memcpy(to, from, bytes); }
void EndCopies() {}
#endif

void Copy(std::byte* destination, const std::byte* from, int64_t bytes, PartDigest* digests) {
  if (digests == nullptr) {
    std::memcpy(destination, from, static_cast<size_t>(bytes));
    return;
  }
  for (int64_t offset = 0; offset < bytes; offset += kDigestPartBytes) {
    const auto part = static_cast<size_t>(std::min(kDigestPartBytes, bytes - offset));
    CopyPart(destination + offset, from + offset, part);
    // Digests the source, which is in a near cache now. The digest is made before the caller may
    // change the source.
    *digests++ = DigestOfPart(std::span(from + offset, part));
  }
  EndCopies();
}

}  // namespace

void WritePages(std::byte* pool, const PageTransfer& transfer) {
  Copy(pool + transfer.pool_offset, transfer.host, transfer.bytes, transfer.digests);
}

void ReadPages(const std::byte* pool, const PageTransfer& transfer) {
  Copy(transfer.host, pool + transfer.pool_offset, transfer.bytes, transfer.digests);
}

}  // namespace mla::kernels
