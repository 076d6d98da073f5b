// Copies bytes between a pool in host memory and other host memory (Launch::page_writes,
// page_reads).
#ifndef MLA_KERNELS_HOST_MEMORY_TRANSFERS_H_
#define MLA_KERNELS_HOST_MEMORY_TRANSFERS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/types/launch.h"

namespace mla::kernels {

// Returns the bytes [begin, begin + bytes) of a transfer; `begin` is a multiple of
// kDigestPartBytes.
inline PageTransfer PieceOf(const PageTransfer& transfer, int64_t begin, int64_t bytes) {
  PageTransfer piece = transfer;
  piece.pool_offset += begin;
  piece.bytes = bytes;
  piece.host += begin;
  if (piece.digests != nullptr) piece.digests += begin / kDigestPartBytes;
  return piece;
}

// Carry out one transfer. With digests, each part is read from memory once, for its copy and its
// digest. Its stores bypass the caches, because moved pages are not read soon. Any thread. Another
// thread sees all bytes once it has learnt from this one that the call has returned.
void WritePages(std::byte* pool, const PageTransfer& transfer);
void ReadPages(const std::byte* pool, const PageTransfer& transfer);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_HOST_MEMORY_TRANSFERS_H_
