// Index lists of sparse cases.
#ifndef MLA_TESTS_CONFORMANCE_CASES_SPARSE_CASES_H_
#define MLA_TESTS_CONFORMANCE_CASES_SPARSE_CASES_H_

#include <cstdint>
#include <vector>

#include "tests/conformance/cases/case_spec.h"
#include "tests/conformance/cases/random.h"

namespace mla::conformance {

// Lists of all query rows of a request, in the form of SegmentRecord.
struct IndexLists {
  std::vector<int32_t> entries;
  std::vector<int32_t> begin;  // [q_rows + 1]; begin[0] is not always 0
  int32_t longest = 0;         // entries of a row
};

IndexLists MakeLists(Random& random, const RequestSpec& request);

// Marks the KV rows of the request that some query row attends to.
std::vector<bool> RowsListed(const RequestSpec& request, const IndexLists& lists);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_CASES_SPARSE_CASES_H_
