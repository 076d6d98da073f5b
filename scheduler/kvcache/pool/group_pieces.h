// The bytes of a page group that leave the pool or come back, in one string: the payload of the
// page-group format (docs/cache/page_groups.md).
//
//   payload:  [layer 0: plane 0 | plane 1 ...][layer 1: ...] ...
//
// A plane contributes the rows for the group's first `rows` tokens; if a row stands for several
// tokens, only complete rows. If scales follow the rows of a page, the whole plane moves. Bytes
// between planes do not move.
#ifndef MLA_SCHEDULER_KVCACHE_POOL_GROUP_PIECES_H_
#define MLA_SCHEDULER_KVCACHE_POOL_GROUP_PIECES_H_

#include <cstdint>
#include <vector>

#include "kernels/types/launch.h"
#include "scheduler/kvcache/pool/cache_layout.h"

namespace mla::kvcache {

struct GroupPiece {
  int64_t payload_offset = 0;
  int64_t group_offset = 0;  // counted from the beginning of the page group
  int64_t bytes = 0;
  // A payload may be cut only between units: a unit is a row, or a plane with its scales.
  int64_t unit = 0;
  int32_t layer = 0;
  int32_t plane = 0;
};

// Returns the pieces with a group's first `rows` tokens, in the order of the payload. REQUIRES: 1
// <= rows <= page_size.
std::vector<GroupPiece> GroupPieces(const GroupLayout& layout, int32_t rows);

inline int64_t PayloadBytes(const std::vector<GroupPiece>& pieces) {
  return pieces.empty() ? 0 : pieces.back().payload_offset + pieces.back().bytes;
}

// Returns the end of the longest part that begins at `offset` and has at most `limit` bytes. If one
// unit is longer than that, the end of this unit. REQUIRES: a unit begins at `offset`.
int64_t PartEnd(const std::vector<GroupPiece>& pieces, int64_t offset, int64_t limit);

// Returns true if [offset, offset + bytes) begins and ends at bounds of units, inside the payload.
bool IsPart(const std::vector<GroupPiece>& pieces, int64_t offset, int64_t bytes);

// Appends the transfers between bytes [offset, offset + bytes) of the payload, which are at `host`,
// and the group that begins at byte `group_at` of the pool. Neighbouring bytes make one transfer.
// REQUIRES: IsPart(pieces, offset, bytes).
void AddTransfers(const std::vector<GroupPiece>& pieces, int64_t offset, int64_t bytes,
                  int64_t group_at, std::byte* host, std::vector<kernels::PageTransfer>* transfers);

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_POOL_GROUP_PIECES_H_
