// Tests the bounds for 8-bit products in prefill: a scale that is 12 % off is found, and rounding
// is accepted.
#include "tests/conformance/prefill/prefill_check.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/formats/fp8.h"
#include "kernels/reference/reference_backend.h"
#include "tests/conformance/prefill/prefill_cases.h"
#include "tests/conformance/suite/plan_builder.h"
#include "tests/conformance/suite/suite.h"

namespace mla::conformance {
namespace {

constexpr float kOff = 1.12f;

class PrefillCheckTest : public ::testing::Test {
 protected:
  PrefillCheckTest() {
    SamplerOptions sampler;
    sampler.kv_formats = {kernels::KvFormat::kFp8Row};
    for (CaseSpec& spec : SpreadPrefillCases(sampler, 3)) {
      EXPECT_TRUE(ComputeInFp8(spec));
      cases_.push_back(MakeWorkload(spec));
    }
    auto runner = CaseRunner::Create(backend_, [this](const auto& shapes, const auto& traits) {
      return plan_.Build(shapes, traits);
    });
    EXPECT_TRUE(runner.ok()) << runner.status();
    runner_ = *std::move(runner);
  }
  CaseOutput Answer(Workload& workload) {
    auto output = RunOracle(*runner_, workload);
    EXPECT_TRUE(output.ok()) << output.status();
    return *std::move(output);
  }
  static std::string Check(const Workload& workload, const CaseOutput& got,
                           const CaseOutput& want) {
    return CheckPrefillProducts(workload, {got.o, got.lse}, {want.o, want.lse});
  }
  // The verdict of CheckOutput's limits.
  static std::string Before(const Workload& workload, const CaseOutput& got,
                            const CaseOutput& want) {
    double worst = 0.0;
    return CheckOutput(workload, got, want, false, &worst);
  }

  std::vector<Workload> cases_;
  kernels::ReferenceBackend backend_;
  EvenPlanBuilder plan_;
  std::unique_ptr<CaseRunner> runner_;
};

TEST_F(PrefillCheckTest, TheAnswerItselfIsWithinThem) {
  for (Workload& workload : cases_) {
    const CaseOutput want = Answer(workload);
    EXPECT_EQ(Check(workload, want, want), "");
  }
}

TEST_F(PrefillCheckTest, AScaleOfKeysOrQueriesThatIsOffIsFound) {
  for (Workload& workload : cases_) {
    const CaseOutput want = Answer(workload);
    for (const float off : {kOff, 1.0f / kOff}) {
      workload.spec.softmax_scale *= off;
      const CaseOutput got = Answer(workload);
      workload.spec.softmax_scale /= off;
      EXPECT_NE(Check(workload, got, want), "") << ToString(workload.spec);
    }
  }
}

// One head alone is enough to find it.
TEST_F(PrefillCheckTest, AScaleOfValuesThatIsOffIsFound) {
  for (Workload& workload : cases_) {
    const CaseOutput want = Answer(workload);
    const RequestSpec& r = workload.spec.requests[0];
    const auto columns = static_cast<size_t>(workload.spec.o_dim());
    CaseOutput got = want;
    for (size_t row = 0; row < static_cast<size_t>(r.q_rows); ++row) {
      for (size_t i = 0; i < columns; ++i) {
        got.o[row * static_cast<size_t>(r.num_heads) * columns + i] *= kOff;
      }
    }
    EXPECT_NE(Check(workload, got, want).find("request 0 head 0: outputs are 1.12"),
              std::string::npos);
  }
}

// Each output moves by its rounding error, to either side.
TEST_F(PrefillCheckTest, RoundingIsWithinThem) {
  for (Workload& workload : cases_) {
    const CaseOutput want = Answer(workload);
    CaseOutput got = want;
    for (float& x : got.o) {
      x = 0.1f * kernels::DecodeFp8(kernels::EncodeFp8(10.0f * x, kernels::Fp8Kind::kE4m3Fn),
                                    kernels::Fp8Kind::kE4m3Fn);
    }
    EXPECT_EQ(Check(workload, got, want), "");
    EXPECT_EQ(Before(workload, got, want), "");
  }
}

}  // namespace
}  // namespace mla::conformance
