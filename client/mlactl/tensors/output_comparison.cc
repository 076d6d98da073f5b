#include "client/mlactl/tensors/output_comparison.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace mla::mlactl {
namespace {

bool IsSpecial(double value) { return !std::isfinite(value); }

bool SameSpecial(double got, double want) {
  return (std::isnan(got) && std::isnan(want)) || got == want;
}

}  // namespace

void OutputComparison::Outside(uint64_t* count, const std::string& what, const std::string& where) {
  if (agrees()) first_outside_ = absl::StrCat(where, ": ", what);
  ++*count;
}

void OutputComparison::Keep(WorstError* worst, double value, const std::string& where) {
  if (!worst->where.empty() && value <= worst->value) return;
  worst->value = value;
  worst->where = where;
}

void OutputComparison::AddRow(std::span<const float> got, std::span<const float> want, double max_v,
                              const std::string& where) {
  double dot = 0, norms = 0, worst_abs = 0, worst_of_allowed = 0;
  ++rows_;
  elements_ += want.size();
  if (got.size() != want.size()) {
    return Outside(&outside_elements_,
                   absl::StrCat("got ", got.size(), " elements, want ", want.size()), where);
  }
  for (size_t i = 0; i < want.size(); ++i) {
    const double g = got[i], w = want[i];
    if (IsSpecial(g) || IsSpecial(w)) {
      if (!SameSpecial(g, w))
        Outside(&outside_elements_, absl::StrCat("got ", g, ", want ", w), where);
      continue;
    }
    const double error = std::abs(g - w);
    const double allowed = std::max(rule_.abs_of_v * max_v, rule_.rel * std::abs(w));
    // No error is allowed where everything is zero; the part is then infinite.
    const double part = error == 0 ? 0 : error / allowed;
    if (part > 1)
      Outside(&outside_elements_, absl::StrCat("element ", i, ": got ", g, ", want ", w), where);
    worst_of_allowed = std::max(worst_of_allowed, part);
    worst_abs = std::max(worst_abs, error);
    dot += g * w;
    norms += g * g + w * w;
  }
  const double cosine = norms > 0 ? 1 - 2 * dot / norms : 0;
  if (!(cosine < rule_.cosine))
    Outside(&outside_cosines_, absl::StrCat("cosine difference ", cosine), where);
  Keep(&of_allowed_, worst_of_allowed, where);
  Keep(&abs_, worst_abs, where);
  Keep(&abs_of_v_, max_v > 0 ? worst_abs / max_v : 0, where);
  Keep(&cosine_, cosine, where);
}

void OutputComparison::AddLse(float got, float want, const std::string& where) {
  if (IsSpecial(got) || IsSpecial(want)) {
    if (!SameSpecial(got, want))
      Outside(&outside_lse_, absl::StrCat("lse: got ", got, ", want ", want), where);
    return;
  }
  const double error = std::abs(static_cast<double>(got) - want);
  if (error > rule_.lse)
    Outside(&outside_lse_, absl::StrCat("lse: got ", got, ", want ", want), where);
  Keep(&lse_, error, where);
}

}  // namespace mla::mlactl
