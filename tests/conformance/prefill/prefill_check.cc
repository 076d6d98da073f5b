#include "tests/conformance/prefill/prefill_check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"

namespace mla::conformance {
namespace {

constexpr double kDeviations = 6.0;  // within which one of many errors stays
// Mean square error of a value, or of a factor of a logit, that is rounded to e4m3.
constexpr double kMeanSquare = 1.0 / 1536;
constexpr double kSlope = 0.01;  // of sums that drop bits beyond 13
// Fewest independent errors in the outputs of a head: one a column, because columns differ.
constexpr double kColumns = 128.0;
constexpr double kLse = 0.02;

struct Moments {
  double both = 0.0, wanted = 0.0, errors = 0.0;
};

// Sums over one head of outputs [row, head, column].
Moments MomentsOf(const float* got, const float* want, const RequestSpec& request, int32_t columns,
                  int32_t head) {
  Moments m;
  for (int64_t row = 0; row < request.q_rows; ++row) {
    const int64_t first = (row * request.num_heads + head) * columns;
    for (int64_t i = first; i < first + columns; ++i) {
      if (!std::isfinite(got[i]) || !std::isfinite(want[i])) continue;
      m.both += double{got[i]} * want[i];
      m.wanted += double{want[i]} * want[i];
      m.errors += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    }
  }
  return m;
}

std::string CheckSlope(const Moments& m, const std::string& where) {
  if (m.wanted == 0.0) return "";
  const double bound = kSlope + kDeviations * std::sqrt(m.errors / m.wanted / kColumns);
  const double slope = m.both / m.wanted;
  // The error may be a scale, which would widen its own limit; so the limit is bounded by a half of
  // it.
  if (std::abs(slope - 1.0) <= std::min(bound, kSlope + kDeviations * 0.01)) return "";
  return absl::StrCat(where, ": outputs are ", slope, " of the wanted ones; ");
}

double LseLimit(double above_keys, double keys) {
  const double spread = 2.0 * above_keys;  // mean square of the logits
  const double moved = std::sqrt(4.0 * kMeanSquare * spread);
  const double alike = std::max(1.0, keys * std::exp(-spread));  // keys that carry the weight
  return kLse + 0.5 * moved * moved + kDeviations * moved / std::sqrt(alike);
}

bool Spreads(InputKind kind) {
  return kind == InputKind::kNormal || kind == InputKind::kSpread || kind == InputKind::kHostile;
}

}  // namespace

std::string CheckPrefillProducts(const Workload& workload, const PrefillOutput& got,
                                 const PrefillOutput& want) {
  const CaseSpec& spec = workload.spec;
  if (spec.route != Route::kExpanded || !spec.RoundsProbabilities()) return "";
  if (got.o.size() != want.o.size() || got.lse.size() != want.lse.size()) return "sizes differ";
  std::string message;
  int64_t first = 0;  // row of one head
  for (size_t i = 0; i < spec.requests.size() && message.empty(); ++i) {
    const RequestSpec& r = spec.requests[i];
    for (int32_t head = 0; head < r.num_heads && message.empty(); ++head) {
      const std::string where = absl::StrCat("request ", i, " head ", head);
      const int64_t offset = first * spec.o_dim();
      if (spec.inputs != InputKind::kCancellation) {  // outputs of the other kind are differences
                                                      // of values
        message = CheckSlope(
            MomentsOf(got.o.data() + offset, want.o.data() + offset, r, spec.o_dim(), head), where);
      }
      for (int32_t row = 0; row < r.q_rows && message.empty() && Spreads(spec.inputs); ++row) {
        const auto index = static_cast<size_t>(first + int64_t{row} * r.num_heads + head);
        const double keys = r.causal ? r.cached_rows + row + 1 : r.kv_rows();
        const double off = std::abs(double{got.lse[index]} - want.lse[index]);
        const double above = std::abs(double{want.lse[index]} - std::log(keys));
        if (!(off > LseLimit(above, keys))) continue;  // false if a value is not finite
        message = absl::StrCat(where, " row ", row, ": lse ", got.lse[index], ", want ",
                               want.lse[index], ", limit ", LseLimit(above, keys));
      }
    }
    first += int64_t{r.q_rows} * r.num_heads;
  }
  return message;
}

}  // namespace mla::conformance
