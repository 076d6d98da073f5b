// Bounds for 8-bit products in prefill, in addition to CheckOutput's limits. A wrong scale of
// queries, keys or values exceeds these bounds, although each single number is within its limit.
//
// - Outputs of a head follow the expected outputs: the slope of one over the other, over all rows
//   of a request, is 1 within 1 % and within the effect of independent errors of the measured size.
//   Rounding moves outputs to both sides, but a scale moves all of them alike.
// - A row that sees n keys whose logits spread has a log-sum-exp of ln n plus half the mean square
//   of the logits. Rounding moves each logit independently by 1/20 of itself in the root mean
//   square, so the mean over n keys moves by 1/sqrt(n) of that. A scale that is off by 12 % moves
//   the sum by a quarter of that half. For a row in which one key carries the weight, CheckOutput's
//   limit remains.
#ifndef MLA_TESTS_CONFORMANCE_PREFILL_PREFILL_CHECK_H_
#define MLA_TESTS_CONFORMANCE_PREFILL_PREFILL_CHECK_H_

#include <span>
#include <string>

#include "tests/conformance/cases/workload.h"

namespace mla::conformance {

// Outputs of all requests [row, head, column] and log-sum-exps [row, head], as in CaseOutput.
struct PrefillOutput {
  std::span<const float> o, lse;
};

// Returns "" if all is well or the case has no such products; otherwise the place and the bound.
std::string CheckPrefillProducts(const Workload& workload, const PrefillOutput& got,
                                 const PrefillOutput& want);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_PREFILL_PREFILL_CHECK_H_
