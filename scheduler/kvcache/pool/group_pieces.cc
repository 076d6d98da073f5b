#include "scheduler/kvcache/pool/group_pieces.h"

#include <algorithm>

namespace mla::kvcache {
namespace {

// Returns the place of the first byte after a plane: the begin of the next one in address order.
int64_t PlaneEnd(const GroupLayout& layout, const KvPlane& plane) {
  int64_t end = layout.bytes;
  for (const auto& layer : layout.layers) {
    for (const KvPlane& other : layer) {
      if (other.offset > plane.offset) end = std::min(end, other.offset);
    }
  }
  return end;
}

}  // namespace

std::vector<GroupPiece> GroupPieces(const GroupLayout& layout, int32_t rows) {
  std::vector<GroupPiece> pieces;
  int64_t payload = 0;
  for (size_t layer = 0; layer < layout.layers.size(); ++layer) {
    for (size_t p = 0; p < layout.layers[layer].size(); ++p) {
      const KvPlane& plane = layout.layers[layer][p];
      GroupPiece piece;
      piece.payload_offset = payload;
      piece.group_offset = plane.offset;
      piece.layer = static_cast<int32_t>(layer);
      piece.plane = static_cast<int32_t>(p);
      if (kernels::TraitsOf(plane.format).scales == kernels::KvScales::kInPage) {
        piece.bytes = piece.unit = PlaneEnd(layout, plane) - plane.offset;
      } else {
        piece.unit = plane.row_stride;
        piece.bytes = int64_t{rows / plane.token_ratio} * plane.row_stride;
      }
      payload += piece.bytes;
      pieces.push_back(piece);
    }
  }
  return pieces;
}

int64_t PartEnd(const std::vector<GroupPiece>& pieces, int64_t offset, int64_t limit) {
  int64_t end = offset;
  for (const GroupPiece& piece : pieces) {
    const int64_t piece_end = piece.payload_offset + piece.bytes;
    if (piece_end <= offset) continue;
    const int64_t units = (std::min(piece_end, offset + limit) - piece.payload_offset) / piece.unit;
    end = std::max(end, piece.payload_offset + units * piece.unit);
    if (end == offset) return offset + piece.unit;
    if (end < piece_end) return end;
  }
  return end;
}

bool IsPart(const std::vector<GroupPiece>& pieces, int64_t offset, int64_t bytes) {
  const int64_t all = PayloadBytes(pieces);
  if (offset < 0 || bytes < 1 || offset > all || bytes > all - offset) return false;
  const auto border = [&](int64_t at) {
    return at == all || std::any_of(pieces.begin(), pieces.end(), [at](const GroupPiece& piece) {
             const int64_t inside = at - piece.payload_offset;
             return inside >= 0 && inside < piece.bytes && inside % piece.unit == 0;
           });
  };
  return border(offset) && border(offset + bytes);
}

void AddTransfers(const std::vector<GroupPiece>& pieces, int64_t offset, int64_t bytes,
                  int64_t group_at, std::byte* host,
                  std::vector<kernels::PageTransfer>* transfers) {
  const size_t first = transfers->size();
  for (const GroupPiece& piece : pieces) {
    const int64_t begin = std::max(offset, piece.payload_offset);
    const int64_t end = std::min(offset + bytes, piece.payload_offset + piece.bytes);
    if (begin >= end) continue;
    const int64_t offset_in_pool = group_at + piece.group_offset + (begin - piece.payload_offset);
    if (transfers->size() > first) {
      kernels::PageTransfer& last = transfers->back();
      if (last.pool_offset + last.bytes == offset_in_pool) {
        last.bytes += end - begin;
        continue;
      }
    }
    transfers->push_back({offset_in_pool, end - begin, host + (begin - offset)});
  }
}

}  // namespace mla::kvcache
