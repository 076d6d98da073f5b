// Placement of KV rows. A page holds page_size tokens of one layer; a page group holds one page per
// layer of its model and is the unit of allocation, copy-on-write and scrubbing:
//
//   group:  [layer 0: planes][layer 1: planes] ... [pad to kPageGranuleBytes]
//
// A plane holds rows of one format. A layer has the plane of its KV rows, and may have others,
// whose rows stand for several tokens each.
#ifndef MLA_SCHEDULER_KVCACHE_POOL_CACHE_LAYOUT_H_
#define MLA_SCHEDULER_KVCACHE_POOL_CACHE_LAYOUT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/formats/kv_format.h"
#include "kernels/types/attention_params.h"

namespace mla::kvcache {

struct KvPlane {
  int64_t offset = 0;       // bytes from the page group's first
  int64_t row_stride = 0;   // bytes between rows
  int32_t rows = 0;         // of a page
  int32_t token_ratio = 1;  // tokens that a row stands for
  kernels::KvFormat format = kernels::KvFormat::kBf16;
  // Bytes that hold a page's first `tokens` tokens, if rows lead.
  int64_t bytes_of(int32_t tokens) const {
    return (int64_t{tokens} + token_ratio - 1) / token_ratio * row_stride;
  }
  friend bool operator==(const KvPlane&, const KvPlane&) = default;
};

struct GroupLayout {
  int32_t page_size = 0;                     // tokens a page, >= 1
  std::vector<std::vector<KvPlane>> layers;  // the planes of each; the KV rows' is the first
  int64_t bytes = 0;                         // of all planes
  // > 0: only this many of the last committed rows are kept, in whole pages.
  int32_t window = 0;

  const KvPlane& rows(int32_t layer) const { return layers[static_cast<size_t>(layer)].front(); }
  // REQUIRES that the layer has them.
  const KvPlane& index_keys(int32_t layer) const { return layers[static_cast<size_t>(layer)][1]; }
  // Bytes that the pool allocates for a group. REQUIRES bytes <= INT64_MAX - kPageGranuleBytes.
  int64_t group_bytes() const {
    const int64_t granule = kernels::kPageGranuleBytes;
    return (bytes + granule - 1) / granule * granule;
  }
  friend bool operator==(const GroupLayout&, const GroupLayout&) = default;
};

// Returns true if the first rows of every plane are its first bytes. Otherwise scales follow the
// rows of a page, and pages are copied whole.
bool RowsLead(const GroupLayout& layout);

// Layers that are all alike, each with one plane of a row a token.
struct UniformLayers {
  int64_t row_bytes = 0;  // from a row to the next one
  int32_t page_size = 0;
  int32_t layers = 0;
  kernels::KvFormat format = kernels::KvFormat::kBf16;
  int32_t index_dim = 0;   // > 0: each has a second plane, of an index key of such a size a token
  int64_t page_bytes = 0;  // bytes of a page of one layer; 0: page_size rows
};

// REQUIRES that the product of the three numbers is an int64_t.
GroupLayout MakeLayout(const UniformLayers& uniform);

// Layers of compressed entries; each entry of a layer stands for `ratios[layer]` tokens. A layer
// with ratio 0 does not have a plane. REQUIRES that ratios divide page_size.
GroupLayout MakeEntryLayout(const kernels::KvRowLayout& entry, kernels::KvFormat format,
                            int32_t page_size, std::span<const int32_t> ratios);

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_POOL_CACHE_LAYOUT_H_
