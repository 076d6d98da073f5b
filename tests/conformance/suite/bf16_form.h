// The expanded form computed in bf16, as common implementations of dense attention do. Keys and
// values are up-projected and rounded to bf16, logits and sums are wide, and probabilities are
// rounded to bf16. Users know its errors, so wide inputs are judged by them.
#ifndef MLA_TESTS_CONFORMANCE_SUITE_BF16_FORM_H_
#define MLA_TESTS_CONFORMANCE_SUITE_BF16_FORM_H_

#include "tests/conformance/cases/workload.h"
#include "tests/conformance/suite/case_runner.h"

namespace mla::conformance {

// REQUIRES: a route with weights, bf16 queries. Outputs are rounded to the case's dtype.
CaseOutput AttendInBf16(const Workload& workload);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SUITE_BF16_FORM_H_
