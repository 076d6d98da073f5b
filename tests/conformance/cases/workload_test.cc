#include "tests/conformance/cases/workload.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/cases/directed_case.h"
#include "tests/conformance/cases/sparse_cases.h"

namespace mla::conformance {
namespace {

// Limits scale with max |V|, so a case without any would accept no rounding at all.
TEST(WorkloadTest, FindsValuesWhereNoListNamesTheFirstRows) {
  int32_t later = 0;  // workloads whose lists name later rows only
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    auto spec = ParseCase({}, seed, "project:128:1,11,3");
    ASSERT_TRUE(spec.ok()) << spec.status();
    spec->inputs = InputKind::kNormal;
    spec->sparse = true;
    spec->requests[0].lists = static_cast<ListKind>(seed % kListKinds);
    const Workload workload = MakeWorkload(*spec);
    const std::vector<bool> listed = RowsListed(spec->requests[0], workload.requests[0].lists);
    const auto first = std::find(listed.begin(), listed.end(), true);
    if (first == listed.end()) continue;
    later += first - listed.begin() >= 2 ? 1 : 0;
    EXPECT_GT(workload.max_abs_value, 0.0) << "seed " << seed;
    EXPECT_GT(workload.requests[0].mean_abs_value, 0.0) << "seed " << seed;
  }
  EXPECT_GT(later, 0);
}

}  // namespace
}  // namespace mla::conformance
