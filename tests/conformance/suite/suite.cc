#include "tests/conformance/suite/suite.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/conformance/pages/page_check.h"
#include "tests/conformance/prefill/prefill_check.h"
#include "tests/conformance/suite/bf16_form.h"

namespace mla::conformance {
namespace {

constexpr size_t kFailuresKept = 20;

// One thread's backends.
struct Bench {
  std::vector<std::unique_ptr<kernels::AttentionBackend>> backends;
  std::unique_ptr<CaseRunner> oracle;
  std::vector<std::unique_ptr<CaseRunner>> subjects;
};

absl::StatusOr<std::unique_ptr<CaseRunner>> MakeRunner(const SuiteOptions& options,
                                                       const BackendFactory& factory,
                                                       Bench& bench) {
  auto backend = factory();
  if (!backend.ok()) return backend.status();
  bench.backends.push_back(*std::move(backend));
  kernels::AttentionBackend& owned = *bench.backends.back();
  auto runner = CaseRunner::Create(owned, nullptr, options.runner);
  if (runner.ok()) (*runner)->set_plan(options.plan(owned));
  return runner;
}

absl::Status MakeBench(const SuiteOptions& options, Bench& bench) {
  auto oracle = MakeRunner(options, options.oracle, bench);
  if (!oracle.ok()) {
    return absl::InternalError(absl::StrCat("oracle: ", oracle.status().ToString()));
  }
  bench.oracle = *std::move(oracle);
  for (const Subject& subject : options.subjects) {
    auto runner = MakeRunner(options, subject.create, bench);
    if (!runner.ok()) {
      return absl::InternalError(absl::StrCat(subject.name, ": ", runner.status().ToString()));
    }
    bench.subjects.push_back(*std::move(runner));
    const std::string wrong =
        CheckPageTransfers(*bench.backends.back(), options.runner.kv_pool_bytes);
    if (!wrong.empty()) return absl::InternalError(absl::StrCat(subject.name, ": ", wrong));
  }
  return absl::OkStatus();
}

void Fail(SuiteReport& report, const std::string& message) {
  ++report.failure_count;
  if (report.failures.size() < kFailuresKept) report.failures.push_back(message);
}

void RunCase(const SuiteOptions& options, Bench& bench, size_t index, SuiteReport& report) {
  if (options.before_case) options.before_case(index, options.cases[index]);
  Workload workload = MakeWorkload(options.cases[index], options.base_granule);
  ++report.cases;
  auto want = RunOracle(*bench.oracle, workload);
  if (!want.ok()) return Fail(report, absl::StrCat("oracle: ", want.status().ToString()));
  if (!want->violation.empty()) Fail(report, absl::StrCat("oracle: ", want->violation));
  const bool wide = IsWide(workload.spec.inputs);
  const CaseOutput in_bf16 = wide ? AttendInBf16(workload) : CaseOutput();
  const bool check_alone = !wide && workload.requests.size() > 1 && options.invariance_every > 0 &&
                           index % static_cast<size_t>(options.invariance_every) == 0;
  for (size_t i = 0; i < bench.subjects.size(); ++i) {
    const Subject& subject = options.subjects[i];
    const auto fail = [&](const std::string& what) {
      if (what.empty()) return;
      Fail(report, absl::StrCat(subject.name, ": ", what, "\n    ", ToString(workload.spec)));
    };
    auto got = bench.subjects[i]->Run(workload);
    ++report.comparisons;
    if (!got.ok()) {
      fail(got.status().ToString());
      continue;
    }
    fail(got->violation);
    if (wide) {
      const std::string miss = CheckWide(workload, *got, *want, in_bf16);
      const bool absorbs = workload.spec.route == Route::kAbsorbProject;
      report.wide_checks += absorbs;
      if (absorbs && subject.rounded_queries) {
        report.known_misses += !miss.empty();
      } else {
        fail(miss);
      }
      continue;
    }
    fail(CheckOutput(workload, *got, *want, subject.rounded_weights, &report.worst_cosine));
    fail(CheckPrefillProducts(workload, {got->o, got->lse}, {want->o, want->lse}));
    if (!check_alone) continue;
    ++report.batch_checks;
    const auto request = static_cast<int32_t>(index % workload.requests.size());
    fail(CheckAlone(*bench.subjects[i], workload, *got, request, subject));
  }
}

void Merge(const SuiteReport& part, SuiteReport& whole) {
  whole.cases += part.cases;
  whole.comparisons += part.comparisons;
  whole.batch_checks += part.batch_checks;
  whole.worst_cosine = std::max(whole.worst_cosine, part.worst_cosine);
  whole.failure_count += part.failure_count;
  whole.wide_checks += part.wide_checks;
  whole.known_misses += part.known_misses;
  for (const std::string& failure : part.failures) {
    if (whole.failures.size() < kFailuresKept) whole.failures.push_back(failure);
  }
}

// Elements of the requests before `request` in a batch's concatenated [rows, heads, columns].
int64_t FirstRow(const CaseSpec& spec, int32_t request) {
  int64_t rows = 0;
  for (int32_t i = 0; i < request; ++i) {
    rows += static_cast<int64_t>(spec.requests[i].q_rows) * spec.requests[i].num_heads;
  }
  return rows;
}

constexpr int64_t kManyDims = 16;
constexpr double kCosineLimit = 1e-5;
constexpr double kBf16Rounding = 1.0 / 512;

// Errors of rounding to e4m3, see CheckOutput in the header: the most, and the mean square over
// mantissas, of a value. In a sum of 576 products each of 18 steps drops up to 2^-13.
constexpr double kE4m3Rounding = 1.0 / 16;
constexpr double kE4m3MeanSquare = 1.0 / 1536;
constexpr double kE4m3LogitRounding = 18.0 / 8192;
// Cosine differences from rounding probabilities: half the mean square error of a mantissa of 1,
// 1/768, if all may be near 1; less over all mantissas.
constexpr double kE4m3AnyCosine = 0.5 / 768, kE4m3SpreadCosine = 3e-4;
constexpr double kE4m3LseLimit = 4e-3;
// Each of a tile's 64 products of one sign drops up to 2^-13 of their sum.
constexpr double kE4m3DroppedCosine = 0.5 * (64.0 / 8192) * (64.0 / 8192);
constexpr double kDeviations = 6.0;  // within which one of many errors stays
// Next to the terms of kCancellation, 512 each, the other 30 products of a step of 32 are smaller
// than the 13 bits and are dropped whole. They are products of N(0,1)/10 and N(0,1)/10.
constexpr double kCancelledProducts = 30.0;
constexpr double kProductDeviation = 0.01;
// Matrix units may cut their fp32 sums: each step of 16 keys drops at most this part of the sum.
constexpr double kDroppedByAStep = 0x1p-23;
constexpr int32_t kKeysOfAStep = 16;

// Limits of outputs and of log-sum-exps.
struct Limits {
  Tolerance o, lse;
};

// Error of a log-sum-exp.
double DroppedBesideCancelled(const CaseSpec& spec) {
  if (spec.inputs != InputKind::kCancellation) return 0.0;
  return kDeviations * std::sqrt(kCancelledProducts) * kProductDeviation * spec.softmax_scale;
}

// Limits of the expanded form, in which keys and values are rounded too.
Limits E4m3PrefillLimits(const Workload& workload) {
  const CaseSpec& spec = workload.spec;
  // Pairs of values that cancel have five times the mean square of the outputs.
  const double times = spec.inputs == InputKind::kCancellation ? 5.0 : 1.0;
  // Logits that spread move by the rounding of both their factors.
  const double moved =
      spec.inputs == InputKind::kSpread ? std::sqrt(2 * kE4m3MeanSquare) * spec.logit_deviation : 0;
  return {{2 * kE4m3Rounding * workload.max_abs_value, 0.016,
           times * (kE4m3AnyCosine + 0.5 * kE4m3MeanSquare) + 0.5 * moved * moved},
          {5 * kE4m3LseLimit + DroppedBesideCancelled(workload.spec), 2 * kE4m3Rounding, 1.0}};
}

Limits E4m3Limits(const Workload& workload) {
  const CaseSpec& spec = workload.spec;
  if (spec.route == Route::kExpanded) return E4m3PrefillLimits(workload);
  // Movement of a logit by rounded queries.
  const double moved = spec.rounds_queries ? std::sqrt(kE4m3MeanSquare) * spec.logit_deviation : 0;
  const bool repeated = std::any_of(spec.requests.begin(), spec.requests.end(),
                                    [](const auto& r) { return r.repeats > 1; });
  const double of_weights = repeated                            ? kCosineLimit + kE4m3DroppedCosine
                            : spec.inputs == InputKind::kSpread ? kE4m3SpreadCosine
                                                                : kE4m3AnyCosine;
  const double most = kDeviations * moved;
  return {
      {(kE4m3Rounding + most) * workload.max_abs_value, 0.016, of_weights + 0.5 * moved * moved},
      {kE4m3LseLimit + most + DroppedBesideCancelled(spec), kE4m3LogitRounding, 1.0}};
}

// For rows that see a repeated sequence, whose values are of one sign: the sum of the dropped
// parts.
double CosineOfLongSums(const Workload& workload) {
  double dropped = 0.0;
  for (const RequestSpec& r : workload.spec.requests) {
    if (r.repeats == 1) continue;
    const double keys = double(r.cached_rows + r.q_rows) * r.repeats;
    dropped = std::max(dropped, keys / kKeysOfAStep * kDroppedByAStep);
  }
  return 0.5 * dropped * dropped;
}

// Movement of an output element when weights are rounded, see CheckOutput in the header; 0 if there
// are many dims.
double RoundingSize(const Workload& workload, int32_t request, bool rounded_weights) {
  if (!rounded_weights || workload.spec.o_dim() >= kManyDims) return 0.0;
  return kBf16Rounding * workload.requests[static_cast<size_t>(request)].mean_abs_value;
}

// The |g|^2 + |w|^2 at which this movement of every element just reaches the cosine limit.
double LeastNorms(const Workload& workload, int32_t request, bool rounded_weights) {
  const RequestSpec& r = workload.spec.requests[static_cast<size_t>(request)];
  const double size = RoundingSize(workload, request, rounded_weights);
  return size * size * r.q_rows * r.num_heads * workload.spec.o_dim() / kCosineLimit;
}

// Mean square of got - want where both are finite; NaN if special values differ.
double MeanSquareError(const std::vector<float>& got, const std::vector<float>& want) {
  double sum = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]))) continue;
    if (!std::isfinite(got[i]) || !std::isfinite(want[i])) return std::nan("");
    const double error = double{got[i]} - want[i];
    sum += error * error;
  }
  return got.empty() ? 0.0 : sum / static_cast<double>(got.size());
}

}  // namespace

std::string CheckWide(const Workload& workload, const CaseOutput& got, const CaseOutput& want,
                      const CaseOutput& in_bf16) {
  constexpr double kTimes = 1.5;
  constexpr double kOfFp32 = 1e-6;  // error of sums in fp32, relative to the largest value
  double most_lse = 1.0;
  for (const float lse : want.lse) {
    if (std::isfinite(lse)) most_lse = std::max(most_lse, std::abs(double{lse}));
  }
  std::string message;
  const auto judge = [&message](const char* what, double error, double of_bf16, double floor) {
    if (error <= kTimes * of_bf16 + floor) return;  // false for NaN
    absl::StrAppend(&message, what, ": error ", error, ", of the expanded form in bf16 ", of_bf16,
                    ", which is ", error / of_bf16, " times; ");
  };
  judge("output", std::sqrt(MeanSquareError(got.o, want.o)),
        std::sqrt(MeanSquareError(in_bf16.o, want.o)), kOfFp32 * workload.max_abs_value);
  judge("lse", std::sqrt(MeanSquareError(got.lse, want.lse)),
        std::sqrt(MeanSquareError(in_bf16.lse, want.lse)), kOfFp32 * most_lse);
  if (got.o.size() != want.o.size()) message = "sizes differ";
  return message;
}

std::vector<CaseSpec> SampleCases(const SamplerOptions& options, uint64_t first, int64_t count) {
  std::vector<CaseSpec> cases;
  for (int64_t i = 0; i < count; ++i) {
    cases.push_back(SampleCase(options, first + static_cast<uint64_t>(i)));
  }
  return cases;
}

absl::StatusOr<CaseOutput> RunOracle(CaseRunner& oracle, Workload& workload) {
  const Route route = workload.spec.route;
  const kernels::DType products = workload.spec.products;
  if (route == Route::kAbsorbProject) workload.spec.route = Route::kExpanded;
  workload.spec.products = kernels::DType::kBf16;  // the bf16 form rounds nothing to 8 bits
  const kernels::DType outputs = workload.spec.o_dtype;
  if (IsWide(workload.spec.inputs)) workload.spec.o_dtype = kernels::DType::kF32;
  std::vector<int32_t> repeats;
  for (RequestSpec& r : workload.spec.requests) repeats.push_back(std::exchange(r.repeats, 1));
  auto output = oracle.Run(workload);
  size_t index = 0;
  for (size_t i = 0; i < repeats.size(); ++i) {
    RequestSpec& r = workload.spec.requests[i];
    r.repeats = repeats[i];
    const auto more = static_cast<float>(std::log(double(r.repeats)));
    for (int32_t n = r.q_rows * r.num_heads; n > 0 && output.ok(); --n)
      output->lse[index++] += more;
  }
  workload.spec.route = route;
  workload.spec.products = products;
  workload.spec.o_dtype = outputs;
  return output;
}

std::string CheckOutput(const Workload& workload, const CaseOutput& got, const CaseOutput& want,
                        bool rounded_weights, double* worst_cosine) {
  Limits limits{{2e-3 * workload.max_abs_value, 0.016, kCosineLimit + CosineOfLongSums(workload)},
                {1e-3, 0.0, 1.0}};
  if (workload.spec.RoundsProbabilities()) limits = E4m3Limits(workload);
  for (int32_t i = 0; i < static_cast<int32_t>(workload.requests.size()); ++i) {
    limits.o.least_norms += LeastNorms(workload, i, rounded_weights);
  }
  const Comparison o = Compare(got.o, want.o, workload.spec.o_dim(), limits.o);
  const Comparison lse = Compare(got.lse, want.lse, 1, limits.lse);
  *worst_cosine = std::max(*worst_cosine, o.cosine_diff);
  std::string message;
  if (!o.equal) absl::StrAppend(&message, "output: ", o.message, "; ");
  if (!lse.equal) absl::StrAppend(&message, "lse: ", lse.message);
  return message;
}

std::string CheckAlone(CaseRunner& runner, const Workload& workload, const CaseOutput& batch,
                       int32_t request, const Subject& subject) {
  RunOptions options;
  options.only_request = request;
  options.check_stored_rows = false;
  auto alone = runner.Run(workload, options);
  if (!alone.ok()) return absl::StrCat("alone: ", alone.status().ToString());
  const int64_t columns = workload.spec.o_dim();
  const float* part = batch.o.data() + FirstRow(workload.spec, request) * columns;
  const size_t count = alone->o.size();
  if (count == 0) return "";
  if (subject.bit_equal_batches) {
    if (std::memcmp(part, alone->o.data(), count * sizeof(float)) == 0) return "";
    return absl::StrCat("request ", request, " differs by bits between batch and alone");
  }
  const bool e4m3 = workload.spec.RoundsProbabilities();  // other parts round differently
  Comparison all =
      Compare({part, count}, alone->o, columns,
              {std::numeric_limits<double>::max(), 0.0, e4m3 ? 4 * kE4m3AnyCosine : kCosineLimit,
               LeastNorms(workload, request, subject.rounded_weights)});
  if (!all.equal) return absl::StrCat("request ", request, " alone: ", all.message);
  const double rounding = e4m3 ? 2.0 * kE4m3Rounding * workload.max_abs_value
                               : 2.0 * RoundingSize(workload, request, subject.rounded_weights);
  for (size_t row = 0; row < count; row += static_cast<size_t>(columns)) {
    double maximum = 0.0;
    for (int64_t i = 0; i < columns; ++i) {
      const double value = std::abs(alone->o[row + static_cast<size_t>(i)]);
      if (std::isfinite(value)) maximum = std::max(maximum, value);
    }
    const Comparison one = Compare({part + row, static_cast<size_t>(columns)},
                                   {alone->o.data() + row, static_cast<size_t>(columns)}, columns,
                                   {maximum / 128 + rounding, 0.0, 1.0});
    if (!one.equal) return absl::StrCat("request ", request, " alone: ", one.message);
  }
  return "";
}

SuiteReport RunSuite(const SuiteOptions& options) {
  SuiteReport report;
  std::mutex mutex;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    SuiteReport part;
    Bench bench;
    if (absl::Status made = MakeBench(options, bench); !made.ok()) {
      Fail(part, std::string(made.message()));
    } else {
      for (size_t i = next++; i < options.cases.size(); i = next++) {
        RunCase(options, bench, i, part);
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    Merge(part, report);
  };
  std::vector<std::thread> threads;
  for (int32_t i = 1; i < options.threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return report;
}

}  // namespace mla::conformance
