#include "tests/conformance/prefill/prefill_cases.h"

#include <algorithm>

namespace mla::conformance {

std::vector<CaseSpec> SpreadPrefillCases(const SamplerOptions& options, int32_t count) {
  constexpr int32_t kShapes[6][3] = {
      // heads, q rows, cached rows
      {1, 130, 200}, {2, 129, 127}, {1, 257, 0}, {3, 140, 600}, {1, 130, 1500}, {2, 300, 300}};
  constexpr float kDeviations[] = {1.0f, 1.5f, 1.25f};
  // With bf16 keys such logits move by more than the bounds of other cases allow.
  std::vector<kernels::KvFormat> formats = options.kv_formats;
  std::erase(formats, kernels::KvFormat::kBf16);
  std::vector<CaseSpec> cases;
  if (formats.empty()) return cases;
  for (int32_t i = 0; i < std::min(count, 6); ++i) {
    CaseSpec spec = SampleCase(options, 9000000 + static_cast<uint64_t>(i));
    spec.geometry = options.full;
    spec.geometry.num_heads = kShapes[i][0];
    spec.route = Route::kExpanded;
    spec.inputs = InputKind::kSpread;
    spec.q_dtype = kernels::DType::kBf16;
    spec.softmax_scale = 0.135234f;
    spec.logit_deviation = kDeviations[i % 3];
    spec.kv_format = formats[static_cast<size_t>(i) % formats.size()];
    for (float& scale : spec.kv_scales) scale = 0.0011f;  // rows fill the range
    RequestSpec r;
    r.num_heads = kShapes[i][0];
    r.q_rows = kShapes[i][1];
    r.cached_rows = kShapes[i][2];
    r.page_size = i % 2 == 0 ? 64 : 16;
    r.layer = i % 2;
    spec.requests = {r};
    if (ComputeInFp8(spec)) cases.push_back(spec);
  }
  return cases;
}

}  // namespace mla::conformance
