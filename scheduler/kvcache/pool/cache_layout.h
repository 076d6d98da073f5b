// Where a KV row lies. A page holds page_size rows of one layer; a page group holds one page per
// layer of its model and is the unit of allocation, copy-on-write and scrubbing:
//
//   group:  [layer 0: row 0 .. row page_size-1][layer 1: ...] ... [pad to kPageGranuleBytes]
#ifndef MLA_SCHEDULER_KVCACHE_POOL_CACHE_LAYOUT_H_
#define MLA_SCHEDULER_KVCACHE_POOL_CACHE_LAYOUT_H_

#include <cstdint>

#include "kernels/attention_params.h"

namespace mla::kvcache {

struct GroupLayout {
  int64_t row_bytes = 0;  // stride between rows of a page
  int32_t page_size = 0;  // rows a page, >= 1
  int32_t layers = 0;

  int64_t layer_bytes() const { return row_bytes * page_size; }
  int64_t layer_offset(int32_t layer) const { return layer_bytes() * layer; }
  int64_t group_bytes() const {
    const int64_t raw = layer_bytes() * layers;
    const int64_t granule = kernels::kPageGranuleBytes;
    return (raw + granule - 1) / granule * granule;
  }
  friend bool operator==(const GroupLayout&, const GroupLayout&) = default;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_POOL_CACHE_LAYOUT_H_
