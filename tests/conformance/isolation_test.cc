// NaN, infinities and denormals must affect only the outputs that may see them, on every dispatch
// level, real and emulated. The test searches at random over their places.
//
// Each case runs three times: clean on the backend, contaminated on the backend, and contaminated
// on the oracle. Rows that have no contaminated query and see no contaminated KV row must equal the
// clean run. The other rows must have NaN and infinities where the oracle has them.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/emulation/emulated_levels.h"
#include "kernels/reference/reference_backend.h"
#include "tests/conformance/cases/random.h"
#include "tests/conformance/suite/case_runner.h"
#include "tests/conformance/suite/scheduler_plan.h"
#include "tests/conformance/suite/suite.h"

namespace mla::conformance {
namespace {

using kernels::Bf16;
using kernels::DType;
using kernels::cpu::KernelSet;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

#ifdef MLA_SANITIZED
constexpr uint64_t kCases = 20;
#else
constexpr uint64_t kCases = 300;
#endif
constexpr uint64_t kEmulatedCases = 40;

struct Place {
  size_t request;
  int64_t row;   // query row or KV row
  int64_t head;  // for a query
};

struct Contamination {
  std::vector<Place> queries, keys;
};

void Write(std::vector<std::byte>& bytes, DType dtype, int64_t at, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(bytes.data() + at * 4, &value, 4);
  } else {
    const Bf16 narrow = kernels::ToBf16(value);
    std::memcpy(bytes.data() + at * 2, &narrow, 2);
  }
}

// In the expanded form, infinities in the latent part give +inf - inf in an order of summation that
// no backend guarantees, so they are put into the rotated part.
float DrawSpecial(Random& random, bool infinities) {
  const float kinds[] = {kNan, 1e-40f, -3e-39f, 1e-44f, kInf, -kInf};
  return kinds[random.Below(infinities ? 6 : 4)];
}

Contamination Contaminate(Random& random, Workload& workload) {
  Contamination places;
  const CaseSpec& spec = workload.spec;
  const kernels::Geometry& g = spec.geometry;
  for (size_t i = 0; i < workload.requests.size(); ++i) {
    const RequestSpec& r = spec.requests[i];
    RequestData& data = workload.requests[i];
    if (r.q_rows == 0) continue;
    for (int64_t n = random.Below(3); n > 0; --n) {
      const Place place{i, random.Below(r.q_rows), random.Below(r.num_heads)};
      const int64_t first = (place.row * r.num_heads + place.head) * spec.q_dim();
      Write(data.q, spec.q_dtype, first + random.Below(spec.q_dim()),
            DrawSpecial(random, spec.route == Route::kAbsorbed));
      places.queries.push_back(place);
    }
    for (int64_t n = random.Below(4); n > 0; --n) {
      // Late rows are masked for some query rows, so they are drawn often; any other row may be
      // drawn, too.
      const int64_t span = random.OneIn(2) ? std::min(r.kv_rows(), r.q_rows + 2) : r.kv_rows();
      const Place place{i, r.kv_rows() - 1 - random.Below(span), 0};
      const bool anywhere = spec.route == Route::kAbsorbed;
      const int64_t element = random.Below(g.kv_row_dim());
      const float value = DrawSpecial(random, anywhere || element >= g.kv_lora_rank);
      Write(data.kv, spec.kv_source, place.row * g.kv_row_dim() + element, value);
      places.keys.push_back(place);
    }
    UpdateStored(spec, r, data);
  }
  return places;
}

bool Touched(const CaseSpec& spec, const Contamination& places, size_t request, int64_t row,
             int64_t head) {
  const RequestSpec& r = spec.requests[request];
  for (const Place& q : places.queries) {
    if (q.request == request && q.row == row && q.head == head) return true;
  }
  const int64_t seen = r.causal ? r.kv_rows() - r.q_rows + row + 1 : r.kv_rows();
  for (const Place& key : places.keys) {
    if (key.request == request && key.row < seen) return true;
  }
  return false;
}

// Returns "" if untouched rows equal the clean run, and touched rows have special values where the
// oracle has them.
std::string Check(const Workload& workload, const Contamination& places, const CaseOutput& clean,
                  const CaseOutput& got, const CaseOutput& want) {
  const CaseSpec& spec = workload.spec;
  const int64_t columns = spec.o_dim();
  size_t index = 0;
  for (size_t i = 0; i < spec.requests.size(); ++i) {
    for (int64_t row = 0; row < spec.requests[i].q_rows; ++row) {
      for (int64_t head = 0; head < spec.requests[i].num_heads; ++head, ++index) {
        const bool touched = Touched(spec, places, i, row, head);
        const std::vector<float>& expected = touched ? want.o : clean.o;
        for (int64_t d = 0; d < columns; ++d) {
          const size_t element = index * static_cast<size_t>(columns) + static_cast<size_t>(d);
          const float a = got.o[element], b = expected[element];
          const bool same_kind =
              std::isfinite(b) ? std::isfinite(a)
                               : (std::isnan(a) == std::isnan(b) && (std::isnan(b) || a == b));
          const double limit = 4e-3 * workload.max_abs_value + 0.016 * std::abs(b);
          if (same_kind && (!std::isfinite(b) || std::abs(a - b) <= limit)) continue;
          return absl::StrCat(touched ? "touched" : "untouched", " row ", row, " head ", head,
                              " of request ", i, " element ", d, ": got ", a, ", want ", b);
        }
        const float a = got.lse[index], b = touched ? want.lse[index] : clean.lse[index];
        const bool same = std::isfinite(b)
                              ? std::abs(a - b) <= 2e-3
                              : std::isnan(a) == std::isnan(b) && (std::isnan(b) || a == b);
        if (!same) {
          return absl::StrCat("lse of row ", row, " head ", head, " of request ", i, ": got ", a,
                              ", want ", b);
        }
      }
    }
  }
  return "";
}

SamplerOptions SmallCases() {
  SamplerOptions sampler;
  sampler.heads = {1, 3, 16, 24};
  sampler.kv_formats.assign(std::begin(kernels::kKvFormats), std::end(kernels::kKvFormats));
  sampler.typical_flop = 1e6;
  sampler.max_flop = 8e6;
  return sampler;
}

class IsolationTest : public testing::TestWithParam<std::pair<const KernelSet*, uint64_t>> {};

TEST_P(IsolationTest, SpecialValuesStayWhereTheyAreSeen) {
  const auto [kernels, count] = GetParam();
  kernels::BackendOptions options;
  options.threads = 2;
  options.pin_threads = false;
  auto backend = kernels::CpuBackend::CreateWith(*kernels, options);
  ASSERT_TRUE(backend.ok()) << backend.status();
  kernels::ReferenceBackend reference;
  RunnerOptions sizes;
  sizes.partial_rows = int64_t{1} << 20;
  auto subject = CaseRunner::Create(**backend, nullptr, sizes);
  auto oracle = CaseRunner::Create(reference, nullptr, sizes);
  ASSERT_TRUE(subject.ok() && oracle.ok());
  (*subject)->set_plan(SchedulerPlanBuilder(**backend));
  (*oracle)->set_plan(SchedulerPlanBuilder(reference));
  int64_t touched_cases = 0;
  for (uint64_t index = 0; index < count; ++index) {
    CaseSpec spec = SampleCase(SmallCases(), 4000000 + index);
    spec.inputs = InputKind::kNormal;
    Workload workload = MakeWorkload(spec);
    const auto clean = (*subject)->Run(workload);
    Random random(index * 77 + 5);
    const Contamination places = Contaminate(random, workload);
    touched_cases += places.queries.empty() && places.keys.empty() ? 0 : 1;
    const auto got = (*subject)->Run(workload);
    const auto want = RunOracle(**oracle, workload);
    ASSERT_TRUE(clean.ok() && got.ok() && want.ok());
    EXPECT_EQ(got->violation, "");
    EXPECT_EQ(Check(workload, places, *clean, *got, *want), "") << ToString(spec);
  }
  EXPECT_GT(touched_cases, static_cast<int64_t>(count) / 2);
}

std::vector<std::pair<const KernelSet*, uint64_t>> Levels() {
  std::vector<std::pair<const KernelSet*, uint64_t>> levels;
  for (const KernelSet* level : kernels::cpu::UsableLevels()) levels.push_back({level, kCases});
  levels.push_back({&kernels::cpu::kEmulatedAmxKernels, kEmulatedCases});
  levels.push_back({&kernels::cpu::kEmulatedAvx512Bf16Kernels, kEmulatedCases});
  return levels;
}

INSTANTIATE_TEST_SUITE_P(Levels, IsolationTest, testing::ValuesIn(Levels()), [](const auto& info) {
  return absl::StrCat(info.param.first->name, info.param.second == kCases ? "" : "_emulated");
});

}  // namespace
}  // namespace mla::conformance
