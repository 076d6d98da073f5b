#include "tests/conformance/cases/compare.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace mla::conformance {
namespace {

std::string At(int64_t index, int64_t columns) {
  return absl::StrCat("[row ", index / columns, ", column ", index % columns, "]");
}

}  // namespace

Comparison Compare(std::span<const float> got, std::span<const float> want, int64_t columns,
                   const Tolerance& tolerance) {
  Comparison result;
  if (got.size() != want.size() || columns <= 0) {
    return {false, 0, 0, absl::StrCat("sizes differ: got ", got.size(), ", want ", want.size())};
  }
  double errors = 0.0, norms = 0.0, worst_excess = 0.0;
  int64_t worst = -1, misses = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = got[i], w = want[i];
    if (!std::isfinite(g) || !std::isfinite(w)) {
      if ((std::isnan(g) && std::isnan(w)) || g == w) continue;
      return {false, INFINITY, 1.0,
              absl::StrCat("special values differ at ", At(static_cast<int64_t>(i), columns),
                           ": got ", g, ", want ", w)};
    }
    const double error = std::abs(g - w);
    errors += error * error;
    norms += g * g + w * w;
    result.worst_abs = std::max(result.worst_abs, error);
    const double excess = error - std::max(tolerance.abs, tolerance.rel * std::abs(w));
    if (excess <= 0.0) continue;
    ++misses;
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = static_cast<int64_t>(i);
    }
  }
  norms = std::max(norms, tolerance.least_norms);
  result.cosine_diff = norms > 0.0 ? errors / norms : 0.0;
  if (misses > 0) {
    result.equal = false;
    absl::StrAppend(&result.message, misses, " of ", got.size(), " elements outside abs ",
                    tolerance.abs, " / rel ", tolerance.rel, ", worst at ", At(worst, columns),
                    ": got ", got[worst], ", want ", want[worst]);
  }
  if (!(result.cosine_diff < tolerance.cosine) && tolerance.cosine < 1.0) {
    result.equal = false;
    absl::StrAppend(&result.message, result.message.empty() ? "" : "; ", "cosine difference ",
                    result.cosine_diff, ", limit ", tolerance.cosine);
  }
  return result;
}

}  // namespace mla::conformance
