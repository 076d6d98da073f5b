// Cases that a user describes by their shape.
#ifndef MLA_TESTS_CONFORMANCE_CASES_DIRECTED_CASE_H_
#define MLA_TESTS_CONFORMANCE_CASES_DIRECTED_CASE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tests/conformance/cases/case_spec.h"

namespace mla::conformance {

// One launch of full dims (512/64/128) from text:
//
//   ROUTE:HEADS:REQUEST[/REQUEST...][:UNITS]      e.g. absorbed:128:1,4097,64/5,0,64/0,9,64:4
//
// ROUTE is absorbed, expanded, project (absorb, attend, project) or v32 (absorbed, with index lists
// of a random kind). A REQUEST is query rows, rows in the cache before them and rows a page; a
// fourth field `full` removes the causal mask. UNITS is the number of units of the plan (default
// 4). Queries are bf16. The kind of inputs and the dtypes of cache rows and outputs are drawn from
// the sampler's seed and `index`.
//
// INVALID_ARGUMENT names the part, its value and valid values.
absl::StatusOr<CaseSpec> ParseCase(const SamplerOptions& options, uint64_t index,
                                   absl::string_view text);

// As ParseCase, for text of this tree. Text that does not parse ends the program with status 2 and
// the reason on stderr, so that no case is missing without a word.
CaseSpec ParseOrEnd(const SamplerOptions& options, uint64_t index, absl::string_view text);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_CASES_DIRECTED_CASE_H_
