// The conformance suite on device code that was compiled for the host (kernels/hip/host_images):
// the kernels themselves, driven through the whole host path by the fake runtime.
//
//   host_conformance --arch gfx950|gfx942|sm_90 [--image FILE] [--long 1] [--seed S]
//                    [--cases all|FIRST,COUNT] [--first-failure 1] [--progress 1]
//                    [--kv FORMAT] [--attention dense|v32|v4|projected|indexer] [--compute
//                    bf16|fp8]
//
// --image is a library of device code to use instead of the built one. --long has each directed
// case in each format and draws more cases, as MLA_TEST_LONG does. --kv keeps only cases with rows
// of this format; --attention keeps only cases without (dense) or with (v32) index lists; with
// `projected` only products of whole rows run, which come first otherwise; with `indexer` only
// launches of an indexer, and with `v4` only those of windows, which sparse_kernels_test also has.
// --compute fp8 takes only 8-bit rows
// and multiplies them in e4m3. --cases runs COUNT cases from number FIRST on. --first-failure ends
// after the first group with a failed case.
//
// Exit status 0: every case passed; 1: some failed; 2: no verdict, for example if the oracle itself
// has no result, or if no case launched a kernel that directed cases are for.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/testing/long_runs.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/reference/reference_backend.h"
#include "tests/conformance/cases/directed_case.h"
#include "tests/conformance/cases/host_cases.h"
#include "tests/conformance/prefill/prefill_cases.h"
#include "tests/conformance/projected/projected_workload.h"
#include "tests/conformance/sparse/indexer_cases.h"
#include "tests/conformance/sparse/window_workload.h"
#include "tests/conformance/suite/plan_builder.h"
#include "tests/conformance/suite/scheduler_plan.h"
#include "tests/conformance/suite/suite.h"
#include "tests/fake_hip/runtime/fake_control.h"

namespace mla::conformance {
namespace {

constexpr char kLibrary[] = "tests/fake_hip/libfake_hip.so";
// Workspaces of the expanded form: one that holds all heads of most cases, and one that holds less
// than many contexts.
constexpr int64_t kWorkspaces[] = {int64_t{64} << 20, 200000};

#ifdef MLA_SANITIZED
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

struct Flags {
  std::string arch;
  std::string image;      // contents of the file
  std::string kv;         // name of a format; empty: all
  std::string attention;  // dense, v32, projected or indexer; empty: all but indexer
  bool fp8 = false;       // 8-bit rows with products of kFp8E4m3, and no other cases
  bool many = false;
  bool first_failure = false;
  bool progress = false;
  uint64_t seed = 1;
  size_t first = 0, count = ~size_t{0};
};

bool Read(const std::string& path, std::string* into) {
  std::ifstream in(path, std::ios::binary);
  into->assign(std::istreambuf_iterator<char>(in), {});
  return !into->empty();
}

bool ReadRange(const std::string& value, Flags& flags) {
  const std::vector<std::string> parts = absl::StrSplit(value, ',');
  return value == "all" || (parts.size() == 2 && absl::SimpleAtoi(parts[0], &flags.first) &&
                            absl::SimpleAtoi(parts[1], &flags.count));
}

bool Parse(int argc, char** argv, Flags& flags) {
  flags.many = IsLongRun();
  const char* const seed = std::getenv("MLA_TEST_SEED");
  if (seed != nullptr && *seed != '\0' && !absl::SimpleAtoi(seed, &flags.seed)) return false;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    const bool on = value == "1";
    if (name == "--arch") {
      flags.arch = value;
    } else if (name == "--image") {
      if (!Read(value, &flags.image)) return false;
    } else if (name == "--kv") {
      flags.kv = value;
    } else if (name == "--attention") {
      const std::set<std::string> known = {"dense", "v32", "v4", "projected", "indexer"};
      if (!known.contains(value)) return false;
      flags.attention = value;
    } else if (name == "--compute") {
      if (value != "bf16" && value != "fp8") return false;
      flags.fp8 = value == "fp8";
    } else if (name == "--long") {
      flags.many = on;
    } else if (name == "--first-failure") {
      flags.first_failure = on;
    } else if (name == "--progress") {
      flags.progress = on;
    } else if (name == "--seed") {
      if (!absl::SimpleAtoi(value, &flags.seed)) return false;
    } else if (name != "--cases" || !ReadRange(value, flags)) {
      return false;
    }
  }
  return argc % 2 == 1 &&
         (flags.arch == "gfx950" || flags.arch == "gfx942" || flags.arch == "sm_90");
}

kernels::hip::HipBackendOptions DeviceOptions(const Flags& flags) {
  kernels::hip::HipBackendOptions options;
  options.vendor =
      flags.arch == "sm_90" ? kernels::hip::Vendor::kNvidia : kernels::hip::Vendor::kAmd;
  options.libraries = {kLibrary};
  options.watchdog_ms = 600000;
  options.self_test = false;
  return options;
}

// One of this many cases also runs with 8-bit products, if the backend supports them for it.
constexpr size_t kProductsEvery = 3;

constexpr kernels::Geometry kWide{1, 512, 64, 192, 256};
constexpr size_t kGroup = std::size(kDirected);  // cases that share a backend

// Cases with 8-bit products whose weights spread, so that rounding them shows, and cases whose last
// keys or groups count.
void AddSpreadCases(SamplerOptions sampler, int32_t count, std::vector<CaseSpec>& wanted) {
  sampler.kv_formats = {kernels::KvFormat::kFp8Tensor, kernels::KvFormat::kFp8Row};
  for (CaseSpec& spec : SpreadCases(sampler, 0, count, 4096)) {
    if (ComputeInFp8(spec)) wanted.push_back(std::move(spec));
  }
  for (CaseSpec& spec : SinkCases(sampler)) {
    if (!kSlow && ComputeInFp8(spec)) wanted.push_back(std::move(spec));
  }
  for (CaseSpec& spec : LateCases(sampler)) wanted.push_back(std::move(spec));
  for (CaseSpec& spec : SpreadPrefillCases(sampler, count / 4)) {
    if (ComputeInFp8(spec)) wanted.push_back(std::move(spec));
  }
}

// Returns true if the run has directed case `index` in the format of this number. A run of many
// cases has each case in each format. Other runs have it in one; neighbouring cases, and the
// repetitions of a case, are in different formats.
bool Chosen(const Flags& flags, size_t index, size_t repetition, size_t format, size_t formats) {
  return flags.many || (index + repetition + format) % formats == 0;
}

void AddScaleCases(SamplerOptions sampler, std::vector<CaseSpec>& wanted) {
  sampler.kv_formats = {kernels::KvFormat::kFp8Row};
  for (size_t i = 0; i < std::size(kDirectedScales); ++i) {
    CaseSpec spec = ParseOrEnd(sampler, 9100000 + i, kDirectedScales[i]);
    spec.other_scales = true;
    wanted.push_back(spec);
    if (ComputeInFp8(spec)) wanted.push_back(std::move(spec));
  }
}

// Launches whose blocks merge parts, with both products. A shape is in one format as in
// DirectedCases, or in the wanted one.
std::vector<CaseSpec> SplitCases(const Flags& flags, SamplerOptions sampler) {
  std::vector<CaseSpec> wanted;
  if (kSlow || kernels::hip::FindArchTraits(flags.arch)->split.empty()) return wanted;
  constexpr kernels::KvFormat kFormats[] = {kernels::KvFormat::kBf16, kernels::KvFormat::kFp8Row,
                                            kernels::KvFormat::kFp8Tensor};
  for (size_t f = 0; f < std::size(kFormats); ++f) {
    sampler.kv_formats = {kFormats[f]};
    for (size_t i = 0; i < std::size(kDirectedSplits); ++i) {
      if (flags.kv.empty() && !Chosen(flags, i, 0, f, std::size(kFormats))) continue;
      CaseSpec spec = ParseOrEnd(sampler, 9000000 + i, kDirectedSplits[i]);
      if (!flags.fp8) wanted.push_back(spec);
      if (ComputeInFp8(spec)) wanted.push_back(std::move(spec));
    }
  }
  return wanted;
}

// Says how many of the cases a run has.
struct Extent {
  size_t lists;  // times that the directed lists are repeated
  int32_t edges;
  int64_t samples;
  int32_t prefill, sparse, spread;
};

Extent ExtentOf(const Flags& flags) {
  if (kSlow) return {2, 20, 10, 0, 6, 4};
  if (flags.many) return {6, 600, 400, 4, 400, 40};
  // Fifteen: the last sample has values that are not finite in the expanded form.
  return {3, 48, 15, 1, 10, 8};
}

// Directed cases with rows of the sampler's only format, number `format` of `formats`.
std::vector<CaseSpec> DirectedCases(const Flags& flags, SamplerOptions sampler, size_t format,
                                    size_t formats) {
  std::vector<CaseSpec> selected;
  const auto add = [&](uint64_t number, size_t index, size_t repetition, const char* text) {
    if (!Chosen(flags, index, repetition, format, formats)) return;
    selected.push_back(ParseOrEnd(sampler, number, text));
  };
  for (size_t i = 0; i < 2 * kGroup; ++i) {
    const char* text = kDirected[i % kGroup];
    if (i >= kGroup && text == kManyParts) text = kManyPartsAgain;
    add(5000000 + i, i % kGroup, i / kGroup, text);
  }
  const size_t lists = std::size(kDirectedLists);
  for (size_t i = 0; i < ExtentOf(flags).lists * lists; ++i) {
    add(7000000 + i * 7, i % lists, i / lists, kDirectedLists[i % lists]);
  }
  for (size_t i = 0; i < std::size(kDirectedTwice); ++i) {
    const size_t before = selected.size();
    add(7500000 + i, i, 0, kDirectedTwice[i]);
    if (selected.size() == before) continue;
    for (RequestSpec& request : selected.back().requests) request.lists = ListKind::kTwice;
  }
  sampler.full = kWide;
  for (size_t i = 0; i < std::size(kDirectedWide); ++i) add(6000000 + i, i, 0, kDirectedWide[i]);
  return selected;
}

std::vector<CaseSpec> Cases(const Flags& flags, const kernels::hip::HipBackend& backend) {
  SamplerOptions sampler;
  sampler.seed = flags.seed;
  sampler.geometries = {kWide, {1, 512, 64, 128, 128}};
  sampler.typical_flop = 2e6;
  sampler.max_flop = 1e7;
  std::vector<CaseSpec> selected;
  const auto& formats = backend.Info().kv_formats;
  for (size_t f = 0; f < formats.size(); ++f) {
    SamplerOptions of_format = sampler;
    of_format.kv_formats = {formats[f]};
    for (CaseSpec& spec : DirectedCases(flags, of_format, f, formats.size())) {
      selected.push_back(std::move(spec));
    }
  }
  sampler.kv_formats = {kernels::KvFormat::kBf16};
  for (size_t i = 0; backend.Info().stream_bytes > 0 && i < 2 * std::size(kDirectedStreams); ++i) {
    CaseSpec spec =
        ParseOrEnd(sampler, 8000000 + i, kDirectedStreams[i % std::size(kDirectedStreams)]);
    const bool own_rows = i < std::size(kDirectedStreams);
    if (Stream(spec, own_rows)) selected.push_back(std::move(spec));
  }
  sampler.kv_formats = backend.Info().kv_formats;
  const Extent extent = ExtentOf(flags);
  for (const auto& more :
       {EdgeCases(sampler, 0, extent.edges), SampleCases(sampler, 0, extent.samples),
        PrefillCases(sampler, extent.prefill), SparseCases(sampler, 0, extent.sparse)}) {
    selected.insert(selected.end(), more.begin(), more.end());
  }
  AddSpreadCases(sampler, extent.spread, selected);
  AddScaleCases(sampler, selected);
  std::vector<CaseSpec> cases;
  const auto add = [&](CaseSpec& spec) {
    if (flags.fp8 && !ComputeInFp8(spec)) return false;
    spec.latent_q_dtype = backend.Info().absorbed_q_dtype(spec.q_dtype, false);
    if (!backend.CanRun(spec.Desc()).ok()) {
      spec.q_dtype = spec.latent_q_dtype = kernels::DType::kBf16;
    }
    const bool chosen = (flags.kv.empty() || flags.kv == kernels::Name(spec.kv_format)) &&
                        (flags.attention.empty() || (flags.attention == "v32") == spec.sparse);
    if (!chosen || !backend.CanRun(spec.Desc()).ok()) return false;
    cases.push_back(spec);
    return true;
  };
  for (CaseSpec& spec : selected) {
    if (!add(spec)) continue;
    const bool in_fp8 = spec.products == kernels::DType::kFp8E4m3;
    if (in_fp8 || cases.size() % kProductsEvery != 0) continue;
    if (ComputeInFp8(spec) && backend.CanRun(spec.Desc()).ok()) cases.push_back(std::move(spec));
  }
  for (CaseSpec& spec : SplitCases(flags, sampler)) add(spec);
  if (flags.first >= cases.size()) return {};
  const auto first = cases.begin() + static_cast<ptrdiff_t>(flags.first);
  return {first, first + static_cast<ptrdiff_t>(std::min(flags.count, cases.size() - flags.first))};
}

SuiteOptions Suite(const Flags& flags, const kernels::hip::HipBackendOptions& device) {
  SuiteOptions suite;
  suite.subjects = {{"host " + flags.arch,
                     [device]() -> absl::StatusOr<std::unique_ptr<kernels::AttentionBackend>> {
                       auto backend = kernels::hip::HipBackend::Create(device);
                       if (!backend.ok()) return backend.status();
                       return std::unique_ptr<kernels::AttentionBackend>(*std::move(backend));
                     },
                     /*bit_equal_batches=*/false, /*rounded_weights=*/false,
                     /*rounded_queries=*/true}};
  suite.oracle = []() -> absl::StatusOr<std::unique_ptr<kernels::AttentionBackend>> {
    return std::make_unique<kernels::ReferenceBackend>();
  };
  suite.plan = SchedulerPlanBuilder;
  suite.threads = 1;  // the fake device has one
  suite.runner.kv_pool_bytes = int64_t{64} << 20;
  suite.runner.staging_bytes = int64_t{64} << 20;
  suite.runner.slot_workspace_bytes = int64_t{24} << 20;
  suite.runner.partial_rows = 40000;
  suite.runner.weights_bytes = int64_t{256} << 20;
  if (flags.progress) {
    suite.before_case = [](size_t, const CaseSpec& spec) {
      std::printf("%s\n", ToString(spec).c_str());
      std::fflush(stdout);
    };
  }
  return suite;
}

int64_t stream_launches = 0;
std::set<std::string> replacing;  // launched kernels of ArchTraits::split and boxes
void CountLaunches(const char* kernel) {
  stream_launches += std::string_view(kernel).starts_with("mla_stream");
  const std::string_view name = kernel;
  if (name.starts_with("mla_split") || name.ends_with("_boxes")) replacing.insert(kernel);
}

// Kernels that merge parts themselves, and kernels whose rows come in boxes, that a run with all
// directed cases launches.
std::set<std::string> ExpectedKernels(const Flags& flags) {
  std::set<std::string> expected;
  const bool all = !kSlow && flags.first == 0 && flags.count == ~size_t{0};
  const kernels::hip::ArchTraits& arch = *kernels::hip::FindArchTraits(flags.arch);
  for (const auto kernels : {arch.split, arch.boxes}) {
    for (const kernels::hip::FormatVariant& v : kernels) {
      const bool chosen = (flags.kv.empty() || flags.kv == kernels::Name(v.format)) &&
                          !(flags.fp8 && v.format == kernels::KvFormat::kBf16);
      if (all && chosen && flags.attention != "v32") expected.insert(v.kernel);
    }
  }
  return expected;
}

struct Totals {
  bool oracle_failed = false;
  int64_t cases = 0, comparisons = 0, failures = 0;
  double worst_cosine = 0.0;
};

void RunGroup(SuiteOptions& suite, std::vector<CaseSpec> cases, Totals& totals) {
  suite.cases = std::move(cases);
  const SuiteReport report = RunSuite(suite);
  for (const std::string& failure : report.failures) {
    std::printf("FAIL %s\n", failure.c_str());
    totals.oracle_failed |= failure.starts_with("oracle");
  }
  totals.cases += report.cases;
  totals.comparisons += report.comparisons;
  totals.failures += report.failure_count;
  totals.worst_cosine = std::max(totals.worst_cosine, report.worst_cosine);
}

// Prints what was run and returns the exit status.
int Report(const Flags& flags, const std::vector<CaseSpec>& cases, const Totals& totals) {
  std::printf(
      "%s on the host: %lld cases, %lld comparisons, %lld failures, worst cosine difference "
      "%.2e\n",
      flags.arch.c_str(), static_cast<long long>(totals.cases),
      static_cast<long long>(totals.comparisons), static_cast<long long>(totals.failures),
      totals.worst_cosine);
  const auto streamed =
      std::count_if(cases.begin(), cases.end(), [](const CaseSpec& spec) { return spec.streamed; });
  std::printf("%lld streamed cases, %lld streamed launches\n", static_cast<long long>(streamed),
              static_cast<long long>(stream_launches));
  const std::set<std::string> expected = ExpectedKernels(flags);
  std::printf("kernels for parts and boxes: launched %s, expected %s\n",
              absl::StrJoin(replacing, " ").c_str(), absl::StrJoin(expected, " ").c_str());
  // Kernels that fail before the first case, in moves of pages, have failed.
  if (totals.oracle_failed || totals.comparisons + totals.failures == 0) return 2;
  if (totals.failures > 0) return 1;
  const bool launched =
      std::includes(replacing.begin(), replacing.end(), expected.begin(), expected.end());
  return launched && stream_launches >= streamed ? 0 : 2;
}

absl::StatusOr<int64_t> RunWindows(const Flags& flags, kernels::hip::HipBackend& backend) {
  if (absl::Status s = backend.Configure(WindowLimits()); !s.ok()) return s;
  EvenPlanBuilder even;
  const PlanBuilder plan = [&even](std::span<const PlanShape> shapes,
                                   const kernels::PlanTraits& traits) {
    return even.Build(shapes, traits);
  };
  std::vector<WindowCase> cases = DirectedWindowCases();
  for (WindowCase& c : WideWindowCases(18, flags.seed)) cases.push_back(std::move(c));
  const std::vector<std::string> failures = RunWindows(backend, {&plan, 1}, cases, flags.progress);
  for (const std::string& failure : failures) std::printf("FAIL %s\n", failure.c_str());
  std::printf("windows: %lld launches, %lld failures\n", 0ll + std::ssize(cases),
              0ll + std::ssize(failures));
  return std::ssize(failures);
}

// Returns the number of failed products of rows, or of launches of an indexer or of windows; -1
// without a verdict.
int64_t RunOthers(const Flags& flags, const kernels::hip::HipBackendOptions& device) {
  const bool indexer = flags.attention == "indexer", windows = flags.attention == "v4";
  const bool wanted = flags.attention == "projected" || (flags.attention.empty() && !flags.fp8);
  if (!indexer && !windows && (!wanted || !flags.kv.empty() || flags.first > 0)) return 0;
  auto backend = kernels::hip::HipBackend::Create(device);
  if (!backend.ok()) return -1;
  std::vector<ProjectedCase> cases = ProjectedCases();
  const std::vector<ProjectedCase> of_codes = ProjectedCodeCases();
  cases.insert(cases.end(), of_codes.begin(), of_codes.end());
  const auto failures = indexer   ? RunDirectedIndexers(**backend)
                        : windows ? RunWindows(flags, **backend)
                                  : RunProjected(**backend, cases);
  if (failures.ok()) return *failures;
  std::fprintf(stderr, "%s\n", failures.status().ToString().c_str());
  return -1;
}

int Main(int argc, char** argv) {
  Flags flags;
  if (!Parse(argc, argv, flags)) {
    std::fprintf(stderr, "see the top of tests/conformance/host_conformance.cc\n");
    return 2;
  }
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  using GetControl = fake_hip::Control* (*)();
  fake_hip::Control& control = *reinterpret_cast<GetControl>(dlsym(library, "fake_hip_control"))();
  control.arch = flags.arch.c_str();
  control.on_launch = CountLaunches;
  kernels::hip::HipBackendOptions device = DeviceOptions(flags);
  const std::string text = "fake image for " + flags.arch + '\0';
  const std::string& image = flags.image.empty() ? text : flags.image;
  device.images = {{flags.arch, std::as_bytes(std::span<const char>(image))}};
  auto backend = kernels::hip::HipBackend::Create(device);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    return 2;
  }
  const std::set<std::string> others = {"projected", "indexer", "v4"};
  if (const int64_t failed = RunOthers(flags, device);
      failed != 0 || others.contains(flags.attention)) {
    return failed == 0 ? 0 : failed > 0 ? 1 : 2;
  }
  const std::vector<CaseSpec> cases = Cases(flags, **backend);
  SuiteOptions suite = Suite(flags, device);
  Totals totals;
  for (size_t i = 0; i < cases.size(); i += kGroup) {
    device.expanded_workspace_bytes = kWorkspaces[i / kGroup % 2];
    suite.subjects = Suite(flags, device).subjects;
    const size_t end = std::min(cases.size(), i + kGroup);
    RunGroup(
        suite,
        {cases.begin() + static_cast<ptrdiff_t>(i), cases.begin() + static_cast<ptrdiff_t>(end)},
        totals);
    if (flags.first_failure && totals.failures > 0) break;
  }
  return Report(flags, cases, totals);
}

}  // namespace
}  // namespace mla::conformance

int main(int argc, char** argv) { return mla::conformance::Main(argc, argv); }
