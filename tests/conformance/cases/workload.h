// The data of a conformance case: queries, KV rows, weights, and where the rows lie in the pool.
//
// Everything around the data is hostile: pages are handed out in random order with gaps between
// page groups, the whole region is filled with NaN before the rows are appended, and the page-table
// entries after a sequence's last page point far outside the pool. So a kernel that reads one row
// too many is noticed.
#ifndef MLA_TESTS_CONFORMANCE_CASES_WORKLOAD_H_
#define MLA_TESTS_CONFORMANCE_CASES_WORKLOAD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/types/attention_params.h"
#include "tests/conformance/cases/case_spec.h"
#include "tests/conformance/cases/sparse_cases.h"

namespace mla::conformance {

// Value of an unused page-table entry.
inline constexpr uint32_t kWildEntry = 2147480000u;
// Page-table entries of a sequence after its last page, all kWildEntry.
inline constexpr int64_t kWildEntries = 8;

// W_UK and W_UV of all heads of a geometry. Equal geometries have equal weights, so a runner can
// keep them loaded between cases.
struct Weights {
  kernels::Geometry geometry;
  std::vector<kernels::Bf16> w_uk;  // [heads, nope_dim, kv_lora_rank]
  std::vector<kernels::Bf16> w_uv;  // [heads, kv_lora_rank, v_dim]
};

// Made on first use and kept for the life of the process; thread-safe.
const Weights& WeightsFor(const kernels::Geometry& geometry);

struct RequestData {
  std::vector<std::byte> q;          // [q_rows, num_heads, q_dim], spec.q_dtype, dense
  std::vector<std::byte> kv;         // [kv_rows, row_dim], spec.kv_source, dense
  std::vector<float> stored;         // the same rows after they were stored in the pool and read
  IndexLists lists;                  // for sparse cases
  std::vector<uint32_t> page_table;  // used entries, then kWildEntries wild ones
  int64_t row_stride = 0;            // bytes between rows of a page
  int64_t layer_offset = 0;          // bytes
  double mean_abs_value = 0.0;       // mean |V| over what the outputs average
};

struct Workload {
  CaseSpec spec;
  const Weights* weights = nullptr;  // null for Route::kAbsorbed
  std::vector<RequestData> requests;
  int64_t first_granule = 0;  // the pool region in use, in granules of kPageGranuleBytes
  int64_t granules = 0;
  double max_abs_value = 0.0;  // max |V| over what the outputs average (a lower bound of it)
};

// Recomputes `stored` after a change of `kv`.
void UpdateStored(const CaseSpec& spec, const RequestSpec& request, RequestData& data);

// `base_granule` is the lowest granule that pages may use: large values test 64-bit addressing.
Workload MakeWorkload(const CaseSpec& spec, int64_t base_granule = 0);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_CASES_WORKLOAD_H_
