#include "scheduler/kvcache/pool/cache_layout.h"

namespace mla::kvcache {

GroupLayout MakeLayout(const UniformLayers& uniform) {
  GroupLayout layout;
  layout.page_size = uniform.page_size;
  const int64_t page_bytes = uniform.row_bytes * uniform.page_size;
  for (int32_t layer = 0; layer < uniform.layers; ++layer) {
    layout.layers.push_back({{page_bytes * layer, uniform.row_bytes, uniform.page_size,
                              /*token_ratio=*/1, uniform.format}});
  }
  layout.bytes = page_bytes * uniform.layers;
  return layout;
}

}  // namespace mla::kvcache
