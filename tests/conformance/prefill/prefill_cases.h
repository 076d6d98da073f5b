// Cases of the expanded form whose logits spread, so that scales of queries and keys show.
#ifndef MLA_TESTS_CONFORMANCE_PREFILL_PREFILL_CASES_H_
#define MLA_TESTS_CONFORMANCE_PREFILL_PREFILL_CASES_H_

#include <cstdint>
#include <vector>

#include "tests/conformance/cases/case_spec.h"

namespace mla::conformance {

// Returns the first `count` of six cases with 8-bit products: prompts with and without a context,
// of one head and more, with rows of the sampler's 8-bit formats in turn. Empty if the sampler has
// no 8-bit format.
std::vector<CaseSpec> SpreadPrefillCases(const SamplerOptions& options, int32_t count);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_PREFILL_PREFILL_CASES_H_
