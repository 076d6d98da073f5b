// Checks that cases of spread logits show the error of rounding to e4m3, and that their limits tell
// it from faults. Attention is computed here as kernels with 8-bit products compute it, and in ways
// in which they must not.
#include <algorithm>
#include <bit>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/formats/fp8.h"
#include "tests/conformance/suite/suite.h"

namespace mla::conformance {
namespace {

constexpr int32_t kDim = 576, kValues = 512, kTile = 64;
constexpr auto kKind = kernels::Fp8Kind::kE4m3Fn;

enum class Kernel {
  kExact,
  kRounds,       // probabilities, and queries where the case says so
  kRoundsTwice,  // probabilities to two bits of mantissa
  kDropsBits,    // rounds, and sums all tiles with 13 bits
};

float Kept(float sum) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(sum) & ~((1u << 10) - 1));
}

float Rounded(float x) { return kernels::DecodeFp8(kernels::EncodeFp8(x, kKind), kKind); }

std::vector<float> QueryOf(const Workload& workload, size_t request, int64_t index, bool round) {
  std::vector<float> q(kDim);
  const auto* from =
      reinterpret_cast<const kernels::Bf16*>(workload.requests[request].q.data()) + index * kDim;
  float largest = 0.0f;
  for (int32_t i = 0; i < kDim; ++i) {
    q[i] = kernels::ToFloat(from[i]);
    largest = std::max(largest, std::abs(q[i]));
  }
  const float scale = std::exp2(std::floor(std::log2(448.0f / largest)));
  for (float& x : q) x = round ? Rounded(x * scale) / scale : x;
  return q;
}

// Adds the output and log-sum-exp of one query row and head.
void Attend(const Workload& workload, size_t request, int64_t index, Kernel kernel,
            CaseOutput& out) {
  const RequestSpec& r = workload.spec.requests[request];
  const float* const kv = workload.requests[request].stored.data();
  const std::vector<float> q = QueryOf(workload, request, index, kernel != Kernel::kExact);
  const int32_t visible = r.cached_rows + static_cast<int32_t>(index / r.num_heads) + 1;
  std::vector<double> logits(static_cast<size_t>(visible));
  for (int32_t key = 0; key < visible; ++key) {
    double sum = 0.0;
    for (int32_t i = 0; i < kDim; ++i) sum += double{q[i]} * kv[int64_t{key} * kDim + i];
    logits[key] = sum * workload.spec.softmax_scale;
  }
  const double top = *std::max_element(logits.begin(), logits.end());
  std::vector<double> o(kValues, 0.0);
  std::vector<float> kept(kValues, 0.0f);
  double sum = 0.0, of_codes = 0.0;
  for (int32_t first = 0; first < visible * r.repeats; first += kTile) {
    const int32_t begin = first % visible, end = std::min(begin + kTile, visible);
    const double of_tile = *std::max_element(&logits[begin], &logits[begin] + (end - begin));
    const double factor = std::exp(of_tile - top) / 256.0;
    for (int32_t key = begin; key < end; ++key) {
      float p = static_cast<float>(256.0 * std::exp(logits[key] - of_tile));
      sum += p * factor;
      if (kernel == Kernel::kRounds || kernel == Kernel::kDropsBits) p = Rounded(p);
      if (kernel == Kernel::kRoundsTwice) {
        p = std::bit_cast<float>((std::bit_cast<uint32_t>(p) + (1u << 20)) & ~((1u << 21) - 1));
      }
      of_codes += p * factor;
      for (int32_t i = 0; i < kValues; ++i) {
        const double term = p * factor * kv[int64_t{key} * kDim + i];
        if (kernel == Kernel::kDropsBits) {
          kept[i] = Kept(kept[i] + static_cast<float>(term));
        } else {
          o[i] += term;
        }
      }
    }
  }
  for (int32_t i = 0; i < kValues; ++i) {
    const double total = kernel == Kernel::kDropsBits ? kept[i] : o[i];
    out.o.push_back(static_cast<float>(total / of_codes));
  }
  out.lse.push_back(static_cast<float>(top + std::log(sum)));
}

CaseOutput AttendAll(const Workload& workload, Kernel kernel) {
  CaseOutput out;
  for (size_t request = 0; request < workload.requests.size(); ++request) {
    const RequestSpec& r = workload.spec.requests[request];
    for (int64_t i = 0; i < int64_t{r.q_rows} * r.num_heads; ++i) {
      Attend(workload, request, i, kernel, out);
    }
  }
  return out;
}

std::vector<Workload> Workloads() {
  SamplerOptions options;
  options.kv_formats = {kernels::KvFormat::kFp8Tensor, kernels::KvFormat::kFp8Row};
  std::vector<Workload> workloads;
  for (CaseSpec& spec : SpreadCases(options, 1, 6, 1 << 14)) {
    if (ComputeInFp8(spec)) workloads.push_back(MakeWorkload(spec));
  }
  return workloads;
}

double CosineDifference(const CaseOutput& got, const CaseOutput& want) {
  return Compare(got.o, want.o, kValues, {1e9, 0.0, 1.0}).cosine_diff;
}

TEST(SpreadTest, RoundingShowsAndPasses) {
  for (const Workload& workload : Workloads()) {
    SCOPED_TRACE(ToString(workload.spec));
    const CaseOutput want = AttendAll(workload, Kernel::kExact);
    const CaseOutput got = AttendAll(workload, Kernel::kRounds);
    double worst = 0.0;
    EXPECT_EQ(CheckOutput(workload, got, want, false, &worst), "");
    // Repeated sequences test the sum, so their rounding error may be small.
    const bool repeated = workload.spec.requests[0].repeats > 1;
    EXPECT_GT(worst, repeated ? 0.0 : 1e-5);
  }
}

TEST(SpreadTest, QueriesThatAreKeptLeaveLogSumExpsAlone) {
  for (const Workload& workload : Workloads()) {
    SCOPED_TRACE(ToString(workload.spec));
    const CaseOutput want = AttendAll(workload, Kernel::kExact);
    const CaseOutput got = AttendAll(workload, Kernel::kRounds);
    double largest = 0.0;
    for (size_t i = 0; i < want.lse.size(); ++i) {
      largest = std::max(largest, std::abs(double{got.lse[i]} - want.lse[i]));
    }
    if (workload.spec.rounds_queries) {
      EXPECT_GT(largest, 4e-3);
    } else {
      EXPECT_LT(largest, 1e-5);
    }
  }
}

TEST(SpreadTest, LogitsDeviateAsTheCaseSays) {
  for (const Workload& workload : Workloads()) {
    SCOPED_TRACE(ToString(workload.spec));
    const std::vector<float> q = QueryOf(workload, 0, 0, false);
    const std::vector<float>& kv = workload.requests[0].stored;
    double sum = 0.0, squares = 0.0;
    const auto keys = static_cast<double>(kv.size() / kDim);
    for (size_t at = 0; at < kv.size(); at += kDim) {
      double logit = 0.0;
      for (size_t i = 0; i < kDim; ++i) logit += double{q[i]} * kv[at + i];
      logit *= workload.spec.softmax_scale;
      sum += logit;
      squares += logit * logit;
    }
    const double deviation = std::sqrt(squares / keys - sum * sum / keys / keys);
    EXPECT_NEAR(deviation / workload.spec.logit_deviation, 1.0, 0.25);
  }
}

TEST(SpreadTest, CoarserRoundingIsFound) {
  for (const Workload& workload : Workloads()) {
    if (workload.spec.logit_deviation > 1.0f || workload.spec.requests[0].repeats > 1) continue;
    SCOPED_TRACE(ToString(workload.spec));
    const CaseOutput want = AttendAll(workload, Kernel::kExact);
    double worst = 0.0;
    EXPECT_NE(CheckOutput(workload, AttendAll(workload, Kernel::kRoundsTwice), want, false, &worst),
              "");
  }
}

TEST(SpreadTest, SumsThatDropBitsAreFound) {
  int faults = 0;
  for (const Workload& workload : Workloads()) {
    if (workload.spec.requests[0].repeats == 1) continue;
    SCOPED_TRACE(ToString(workload.spec));
    const CaseOutput want = AttendAll(workload, Kernel::kExact);
    const CaseOutput got = AttendAll(workload, Kernel::kDropsBits);
    double worst = 0.0;
    EXPECT_NE(CheckOutput(workload, got, want, false, &worst), "");
    EXPECT_GT(CosineDifference(got, want), 1e-4);
    ++faults;
  }
  EXPECT_GT(faults, 0);
}

}  // namespace
}  // namespace mla::conformance
