#include "scheduler/kvcache/pool/cache_layout.h"

#include <algorithm>

namespace mla::kvcache {

bool RowsLead(const GroupLayout& layout) {
  const auto leads = [](const KvPlane& plane) {
    return kernels::TraitsOf(plane.format).scales != kernels::KvScales::kInPage;
  };
  return std::all_of(layout.layers.begin(), layout.layers.end(), [&](const auto& planes) {
    return std::all_of(planes.begin(), planes.end(), leads);
  });
}

GroupLayout MakeLayout(const UniformLayers& uniform) {
  GroupLayout layout;
  layout.page_size = uniform.page_size;
  const int64_t page_bytes =
      uniform.page_bytes > 0 ? uniform.page_bytes : uniform.row_bytes * uniform.page_size;
  int64_t index_bytes = 0;
  kernels::KvRowLayout key;
  if (uniform.index_dim > 0) {
    key = kernels::MakeKvRowLayout(kernels::KvFormat::kIndexKey, uniform.index_dim, 0);
    index_bytes = kernels::KvPageBytes(key, key.row_bytes, uniform.page_size);
  }
  const int64_t layer_bytes = page_bytes + index_bytes;
  for (int32_t layer = 0; layer < uniform.layers; ++layer) {
    std::vector<KvPlane>& planes = layout.layers.emplace_back();
    const int64_t begin = layer_bytes * layer;
    planes.push_back(
        {begin, uniform.row_bytes, uniform.page_size, /*token_ratio=*/1, uniform.format});
    if (index_bytes == 0) continue;
    planes.push_back({begin + page_bytes, key.row_bytes, uniform.page_size, /*token_ratio=*/1,
                      kernels::KvFormat::kIndexKey});
  }
  layout.bytes = layer_bytes * uniform.layers;
  return layout;
}

GroupLayout MakeEntryLayout(const kernels::KvRowLayout& entry, kernels::KvFormat format,
                            int32_t page_size, std::span<const int32_t> ratios) {
  GroupLayout layout;
  layout.page_size = page_size;
  for (const int32_t ratio : ratios) {
    std::vector<KvPlane>& planes = layout.layers.emplace_back();
    if (ratio == 0) continue;
    const int32_t rows = page_size / ratio;
    planes.push_back({layout.bytes, entry.row_bytes, rows, ratio, format});
    constexpr int64_t kAlignment = 16;  // alignment of the next layer
    const int64_t bytes = kernels::KvPageBytes(entry, entry.row_bytes, rows);
    layout.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  return layout;
}

}  // namespace mla::kvcache
