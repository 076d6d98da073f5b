// Bounds of products of 8 bits in prefill, in addition to CheckOutput's limits: a wrong scale of
// queries, keys or values does not keep them, though each single number is within its limit.
//
// - Outputs of a head follow the wanted ones: the slope of the one over the other, over all rows of
//   a request, is 1 within 1 % and what independent errors of the measured size make of it.
//   Rounding moves outputs to either side; a scale moves all of them alike.
// - A row that sees n keys whose logits spread has a log-sum-exp of ln n and half the mean square
//   of the logits. Rounding moves logits by 1/20 of themselves in the root mean square, each by
//   itself, so that the mean over n keys moves by 1/sqrt(n) of that; a scale that is off by 12 %
//   moves the sum by a quarter of that half. CheckOutput's limit stays for a row in which one key
//   carries the weight.
#ifndef MLA_TESTS_CONFORMANCE_PREFILL_PREFILL_CHECK_H_
#define MLA_TESTS_CONFORMANCE_PREFILL_PREFILL_CHECK_H_

#include <span>
#include <string>

#include "tests/conformance/cases/workload.h"

namespace mla::conformance {

// Outputs of all requests [row, head, column] and log-sum-exps [row, head], as CaseOutput has them.
struct PrefillOutput {
  std::span<const float> o, lse;
};

// Empty when all is well, or the case has no such products; else where, and which bound.
std::string CheckPrefillProducts(const Workload& workload, const PrefillOutput& got,
                                 const PrefillOutput& want);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_PREFILL_PREFILL_CHECK_H_
