#include "scheduler/kvcache/pool/cache_layout.h"

#include <algorithm>

namespace mla::kvcache {
namespace {

// Whether the layer's plane continues the run, which it may be the second member of.
bool Continues(const PlaneRun& run, const KvPlane& plane) {
  KvPlane alike = plane;
  alike.offset = run.plane.offset;
  const int64_t last = run.plane.offset + (run.pages - 1) * run.stride;
  return alike == run.plane && plane.offset > last &&
         (run.pages == 1 || plane.offset - last == run.stride);
}

}  // namespace

std::vector<PlaneRun> PlaneRuns(const GroupLayout& layout) {
  std::vector<PlaneRun> runs;
  size_t planes = 0;
  for (const auto& layer : layout.layers) {
    planes = std::max(planes, layer.size());
    for (const KvPlane& plane : layer) {
      if (kernels::TraitsOf(plane.format).scales == kernels::KvScales::kInPage) return {};
    }
  }
  for (size_t p = 0; p < planes; ++p) {
    bool open = false;  // the last run may go on
    for (const auto& layer : layout.layers) {
      if (p >= layer.size()) {
        open = false;
        continue;
      }
      if (open && Continues(runs.back(), layer[p])) {
        PlaneRun& run = runs.back();
        if (run.pages == 1) run.stride = layer[p].offset - run.plane.offset;
        ++run.pages;
      } else {
        runs.push_back({layer[p]});
      }
      open = true;
    }
  }
  return runs;
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
    constexpr int64_t kAlignment = 16;  // of the next layer's
    const int64_t bytes = kernels::KvPageBytes(entry, entry.row_bytes, rows);
    layout.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  return layout;
}

}  // namespace mla::kvcache
