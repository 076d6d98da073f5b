// Says where KV rows lie. A page holds page_size tokens of one layer; a page group holds one page
// per layer of its model and is the unit of allocation, copy-on-write and scrubbing:
//
//   group:  [layer 0: planes][layer 1: planes] ... [pad to kPageGranuleBytes]
//
// The rows of a plane all have one format. Every layer has a plane for its KV rows. It may have
// others, each row of which stands for several tokens.
#ifndef MLA_SCHEDULER_KVCACHE_POOL_CACHE_LAYOUT_H_
#define MLA_SCHEDULER_KVCACHE_POOL_CACHE_LAYOUT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/formats/kv_format.h"
#include "kernels/types/attention_params.h"

namespace mla::kvcache {

struct KvPlane {
  int64_t offset = 0;       // counted from the beginning of the page group
  int64_t row_stride = 0;   // bytes between rows
  int32_t rows = 0;         // of a page
  int32_t token_ratio = 1;  // tokens that one row stands for
  kernels::KvFormat format = kernels::KvFormat::kBf16;
  // Returns the number of bytes that hold a page's first `tokens` tokens, if rows lead.
  int64_t bytes_of(int32_t tokens) const {
    return (int64_t{tokens} + token_ratio - 1) / token_ratio * row_stride;
  }
  friend bool operator==(const KvPlane&, const KvPlane&) = default;
};

struct GroupLayout {
  int32_t page_size = 0;  // tokens a page, >= 1
  // The planes of each layer; the first holds the KV rows.
  std::vector<std::vector<KvPlane>> layers;
  int64_t bytes = 0;  // of all planes
  // > 0: only this many of the last committed rows are kept, in whole pages.
  int32_t window = 0;

  const KvPlane& rows(int32_t layer) const { return layers[static_cast<size_t>(layer)].front(); }
  // REQUIRES that the layer has index keys.
  const KvPlane& index_keys(int32_t layer) const { return layers[static_cast<size_t>(layer)][1]; }
  // Returns the number of bytes that the pool allocates for a group. REQUIRES bytes <= INT64_MAX -
  // kPageGranuleBytes.
  int64_t group_bytes() const {
    const int64_t granule = kernels::kPageGranuleBytes;
    return (bytes + granule - 1) / granule * granule;
  }
  friend bool operator==(const GroupLayout&, const GroupLayout&) = default;
};

// Returns true if the first rows of every plane are its first bytes. Otherwise scales follow the
// rows of a page, and pages are copied whole.
bool RowsLead(const GroupLayout& layout);

// Layers that are all alike: each has one plane, with one row for each token.
struct UniformLayers {
  int64_t row_bytes = 0;  // from one row to the next
  int32_t page_size = 0;
  int32_t layers = 0;
  kernels::KvFormat format = kernels::KvFormat::kBf16;
  // > 0: each layer has a second plane, with an index key of this size for each token
  int32_t index_dim = 0;
  int64_t page_bytes = 0;  // bytes of a page of one layer; 0: page_size rows
};

// REQUIRES that the product of the three numbers fits an int64_t.
GroupLayout MakeLayout(const UniformLayers& uniform);

// Layers of compressed entries; each entry of a layer stands for `ratios[layer]` tokens. A layer
// with ratio 0 does not have a plane. REQUIRES that ratios divide page_size.
GroupLayout MakeEntryLayout(const kernels::KvRowLayout& entry, kernels::KvFormat format,
                            int32_t page_size, std::span<const int32_t> ratios);

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_POOL_CACHE_LAYOUT_H_
