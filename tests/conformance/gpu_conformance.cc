// The conformance suite on this machine's GPU backend, as one portable program. It is linked
// statically except for libc, and for the GPU runtime, which it opens at run time.
//
//   gpu_conformance [--shapes N] [--seed S] [--first I] [--threads T] [--large N]
//                   [--prefill N] [--edges N] [--wide N] [--spread N]
//                   [--form absorbed|expanded] [--dims 128,128]
//                   [--expanded-workspace BYTES] [--heads 1,16,128] [--page-sizes 1,64]
//                   [--max-flop F] [--typical-flop F] [--progress 1] [--watchdog-ms MS]
//                   [--self-test 0] [--self-test-parts bf16,words] [--graphs auto|on|off]
//                   [--library LIB] [--units 1,4] [--shape SHAPE]...
//                   [--first-byte BYTES] [--kv bf16,fp8_tensor,fp8_row] [--attention
//                   dense|v32|v4|projected]
//                   [--compute bf16|fp8]
//                   [--image FILE]: device code to use instead of the built-in code
//
// --first is the first sampled shape and the first edge. --max-flop leaves out or shrinks larger
// shapes; --typical-flop is the size of nine in ten sampled shapes. --progress prints each shape
// before it runs, and each part of the self-test. --watchdog-ms is the longest time of a launch
// (ten minutes). --self-test 0 runs the shapes even on a device that gives wrong answers;
// --self-test-parts runs only these parts first. A --shape is a launch (directed_case.h), e.g.
// absorbed:128:1,4097,64; nothing else runs then except what later flags ask for. --first-byte
// places all pages after this many bytes of a larger pool, for addresses beyond 32 bits (with few
// --threads, each has a pool); a multiple of kPageGranuleBytes. On an emulated GPU, which computes
// about 10^8 products a second: --threads 1 --edges 200 --shapes 100 --large 0 --prefill 2
// --max-flop 1e8 --typical-flop 4e6 --progress 1.
//
// --dims: nope_dim and v_dim of all shapes. Without it they are 128,128, and 192,256 in some
// sampled shapes and shapes of the expanded form.
//
// --kv lists the formats of rows to draw from (default bf16; with --compute fp8, fp8_tensor and
// fp8_row). --compute fp8 multiplies rows of 8 bits in e4m3 and runs no other shapes. --attention
// v32: the sampled shapes have index lists; the only other launches are as many of the indexer, if
// the backend has one. --attention v4: runs only --shapes launches with windows, entries and sinks.
// --attention projected: runs only products of whole rows, with odd and with models' shapes.
//
// --wide is the number of cases of wide inputs. Known gap: absorbed queries are bf16 on GPUs, so
// queries that pass through Absorb may miss the rule of CheckWide; the misses are counted and
// printed. One in 32 misses, so 256 without a miss mean that the gap is closed and this expectation
// must be removed: status 1.
//
// Exit status 0 only if a GPU backend was found and every shape passed; 2 for invalid flags.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/reference/reference_backend.h"
#include "tests/conformance/cases/directed_case.h"
#include "tests/conformance/prefill/prefill_cases.h"
#include "tests/conformance/projected/projected_workload.h"
#include "tests/conformance/self_test_flags.h"
#include "tests/conformance/sparse/indexer_cases.h"
#include "tests/conformance/sparse/indexer_workload.h"
#include "tests/conformance/sparse/window_workload.h"
#include "tests/conformance/suite/scheduler_plan.h"
#include "tests/conformance/suite/suite.h"

namespace mla::conformance {
namespace {

struct Flags {
  int64_t shapes = 200;
  uint64_t first = 0;
  int32_t threads = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  int32_t large = 4;
  int32_t prefill = 8;
  int32_t edges = 40;
  int32_t wide = 40;
  int32_t spread = 16;
  bool progress = false;
  bool max_flop_given = false;
  bool sparse = false;    // DeepSeek V3.2
  bool windowed = false;  // DeepSeek V4
  bool projected = false;
  bool fp8 = false;
  std::string form;           // of the attention; empty: both
  std::vector<int32_t> dims;  // nope_dim and v_dim; empty: dims with kernels of their own
  int64_t expanded_workspace = 0;
  int64_t first_byte = 0;  // first byte of the pool that pages may use
  int64_t watchdog_ms = 600000;
  SelfTestFlags self_test;
  std::vector<std::string> directed;
  std::string image;  // contents of the file
  std::string library;
  SamplerOptions sampler;
};

constexpr kernels::Geometry kWide{1, 512, 64, 192, 256};
constexpr size_t kStreamEvery = 2;  // cases
constexpr int32_t kMostKeys = 1 << 20;
constexpr uint64_t kMostTries = 1000;  // shapes that are drawn for one that is run
constexpr int32_t kMost = std::numeric_limits<int32_t>::max();

bool Refuse(const std::string& name, const std::string& value, const std::string& want) {
  std::fprintf(stderr, "%s: got '%s', want %s\n", name.c_str(), value.c_str(), want.c_str());
  return false;
}

// Stores `value` if it is a number from `least` to `most`; otherwise prints a message and returns
// false.
template <typename T>
bool Integer(const std::string& name, const std::string& value, int64_t least, int64_t most,
             T* into) {
  int64_t number = 0;
  if (!absl::SimpleAtoi(value, &number) || number < least || number > most) {
    return Refuse(name, value, absl::StrCat(least, " to ", most));
  }
  *into = static_cast<T>(number);
  return true;
}

bool Integers(const std::string& name, const std::string& value, int32_t most,
              std::vector<int32_t>* into) {
  into->clear();
  for (const auto& part : absl::StrSplit(value, ',')) {
    into->emplace_back();
    if (!Integer(name, std::string(part), 1, most, &into->back())) return false;
  }
  return true;
}

bool Formats(const std::string& name, const std::string& value,
             std::vector<kernels::KvFormat>* into) {
  into->clear();
  for (const auto& part : absl::StrSplit(value, ',')) {
    const auto* const end = std::end(kernels::kKvFormats);
    const auto* const found = std::find_if(std::begin(kernels::kKvFormats), end,
                                           [&](kernels::KvFormat f) { return Name(f) == part; });
    if (found == end) return Refuse(name, value, "formats of rows");
    into->push_back(*found);
  }
  return true;
}

bool Flop(const std::string& name, const std::string& value, double* into) {
  return (absl::SimpleAtod(value, into) && *into > 0.0) || Refuse(name, value, "a number above 0");
}

bool File(const std::string& name, const std::string& value, std::string* into) {
  std::ifstream in(value, std::ios::binary);
  into->assign(std::istreambuf_iterator<char>(in), {});
  return !into->empty() || Refuse(name, value, "a file that can be read and is not empty");
}

// Parses the flags that select cases. Sets `known` to false for other flags.
bool ParseCases(const std::string& name, const std::string& value, Flags& flags, bool* known) {
  SamplerOptions& sampler = flags.sampler;
  if (name == "--shapes") return Integer(name, value, 0, kMost, &flags.shapes);
  if (name == "--first") return Integer(name, value, 0, kMost, &flags.first);
  if (name == "--large") return Integer(name, value, 0, kMost, &flags.large);
  if (name == "--prefill") return Integer(name, value, 0, kMost, &flags.prefill);
  if (name == "--edges") return Integer(name, value, 0, kMost, &flags.edges);
  if (name == "--wide") return Integer(name, value, 0, kMost, &flags.wide);
  if (name == "--spread") return Integer(name, value, 0, kMost, &flags.spread);
  if (name == "--heads") return Integers(name, value, 65535, &sampler.heads);
  if (name == "--page-sizes") return Integers(name, value, 1 << 20, &sampler.page_sizes);
  if (name == "--units") return Integers(name, value, 4096, &sampler.units);
  if (name == "--dims") {
    return Integers(name, value, 512, &flags.dims) &&
           (flags.dims.size() == 2 || Refuse(name, value, "nope_dim and v_dim"));
  }
  if (name == "--kv") return Formats(name, value, &sampler.kv_formats);
  if (name == "--typical-flop") return Flop(name, value, &sampler.typical_flop);
  if (name == "--seed") {
    return absl::SimpleAtoi(value, &sampler.seed) || Refuse(name, value, "0 to 2^64 - 1");
  }
  if (name == "--max-flop") {
    flags.max_flop_given = true;
    return Flop(name, value, &sampler.max_flop);
  }
  if (name == "--attention") {
    flags.sparse = value == "v32";
    flags.windowed = value == "v4";
    flags.projected = value == "projected";
    return flags.sparse || flags.windowed || flags.projected || value == "dense" ||
           Refuse(name, value, "dense, v32, v4 or projected");
  }
  if (name == "--compute") {
    flags.fp8 = value == "fp8";
    return flags.fp8 || value == "bf16" || Refuse(name, value, "bf16 or fp8");
  }
  if (name == "--form") {
    flags.form = value;
    return value == "absorbed" || value == "expanded" ||
           Refuse(name, value, "absorbed or expanded");
  }
  if (name == "--shape") {
    if (flags.directed.empty())
      flags.shapes = flags.large = flags.prefill = flags.edges = flags.wide = flags.spread = 0;
    flags.directed.push_back(value);
    return true;
  }
  *known = false;
  return false;
}

// Parses the remaining flags.
bool ParseDevice(const std::string& name, const std::string& value, Flags& flags) {
  constexpr int64_t kMostBytes = int64_t{1} << 40;
  if (name == "--threads") return Integer(name, value, 1, 4096, &flags.threads);
  if (name == "--watchdog-ms") return Integer(name, value, 1, kMost, &flags.watchdog_ms);
  if (const auto wanted = flags.self_test.Take(name, value)) {
    return wanted->empty() || Refuse(name, value, *wanted);
  }
  if (name == "--progress") return Integer(name, value, 0, 1, &flags.progress);
  if (name == "--expanded-workspace") {
    return Integer(name, value, 1, kMostBytes, &flags.expanded_workspace);
  }
  if (name == "--first-byte") {
    if (!Integer(name, value, 0, kMostBytes, &flags.first_byte)) return false;
    return flags.first_byte % kernels::kPageGranuleBytes == 0 ||
           Refuse(name, value, absl::StrCat("a multiple of ", kernels::kPageGranuleBytes));
  }
  if (name == "--image") return File(name, value, &flags.image);
  if (name == "--library") {
    flags.library = value;
    return true;
  }
  std::fprintf(stderr, "unknown flag %s\n", name.c_str());
  return false;
}

// Returns false, with a message, if a flag is unknown or its value is invalid.
bool Parse(int argc, char** argv, Flags& flags) {
  flags.sampler.kv_formats.clear();
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 >= argc) {
      std::fprintf(stderr, "%s wants a value\n", name.c_str());
      return false;
    }
    const std::string value = argv[i + 1];
    bool known = true;
    if (ParseCases(name, value, flags, &known)) continue;
    if (known || !ParseDevice(name, value, flags)) return false;
  }
  if (flags.sampler.kv_formats.empty()) {
    using kernels::KvFormat;
    flags.sampler.kv_formats = {KvFormat::kBf16};
    if (flags.fp8) flags.sampler.kv_formats = {KvFormat::kFp8Tensor, KvFormat::kFp8Row};
  }
  return true;
}

struct Gpu {
  kernels::hip::HipBackendOptions options;
  std::unique_ptr<kernels::hip::HipBackend> backend;
};

// Returns the first vendor whose backend can be made; prints why the others cannot.
absl::StatusOr<Gpu> FindGpu(const Flags& flags) {
  absl::Status last;
  for (const kernels::hip::Vendor vendor :
       {kernels::hip::Vendor::kAmd, kernels::hip::Vendor::kNvidia}) {
    kernels::hip::HipBackendOptions options;
    options.vendor = vendor;
    options.watchdog_ms = flags.watchdog_ms;
    flags.self_test.Apply(flags.progress, &options);
    if (flags.expanded_workspace > 0) options.expanded_workspace_bytes = flags.expanded_workspace;
    if (!flags.library.empty()) options.libraries = {flags.library};
    if (!flags.image.empty()) {
      const auto bytes = std::as_bytes(std::span<const char>(flags.image));
      for (const char* arch : {"gfx950", "gfx942", "sm_90"})
        options.images.push_back({arch, bytes});
    }
    auto backend = kernels::hip::HipBackend::Create(options);
    if (backend.ok()) {
      std::printf("backend %s on %s, %d units\n", (*backend)->Info().name.c_str(),
                  (*backend)->Info().device.c_str(), (*backend)->Info().units);
      SelfTestFlags::Keep(**backend, &options);
      return Gpu{options, *std::move(backend)};
    }
    last = backend.status();
    std::printf("%s: %s\n", vendor == kernels::hip::Vendor::kAmd ? "hip" : "cuda",
                std::string(last.message()).c_str());
  }
  return last;
}

// `count` sampled cases that the backend can run, and the directed cases. Tensors between the
// projections have the dtypes that the backend asks for.
std::vector<CaseSpec> SupportedCases(const Flags& flags, const SamplerOptions& sampler,
                                     const kernels::hip::HipBackend& backend) {
  const auto is_selected = [&](CaseSpec& spec) {
    spec.latent_q_dtype = backend.Info().absorbed_q_dtype(spec.q_dtype, false);
    if (flags.fp8 && !ComputeInFp8(spec)) return false;
    const kernels::AttentionDesc desc = spec.Desc();
    return backend.CanRun(desc).ok() &&
           (flags.form.empty() || flags.form == kernels::Name(desc.form));
  };
  std::vector<CaseSpec> cases;
  if (flags.sparse) {
    for (CaseSpec& spec : SparseCases(sampler, flags.first, flags.shapes)) {
      if (flags.max_flop_given && spec.Flop() > sampler.max_flop) continue;
      if (!is_selected(spec)) spec.q_dtype = kernels::DType::kBf16;
      if (is_selected(spec)) cases.push_back(std::move(spec));
    }
    return cases;
  }
  // Bounded, because flags can ask for shapes that the backend never runs.
  const uint64_t end = flags.first + static_cast<uint64_t>(flags.shapes) * kMostTries;
  for (uint64_t i = flags.first; i < end && static_cast<int64_t>(cases.size()) < flags.shapes;
       ++i) {
    CaseSpec spec = SampleCase(sampler, i);
    if (is_selected(spec)) cases.push_back(std::move(spec));
  }
  const auto first = static_cast<int32_t>(flags.first);
  for (std::vector<CaseSpec> directed :
       {EdgeCases(sampler, first, flags.edges), LargeCases(sampler, flags.large),
        PrefillCases(sampler, flags.prefill), SpreadPrefillCases(sampler, flags.prefill),
        WideCases(sampler, first, flags.wide, kernels::DType::kBf16),
        SpreadCases(sampler, first, flags.spread, kMostKeys),
        flags.spread > 0 ? SinkCases(sampler) : std::vector<CaseSpec>()}) {
    for (CaseSpec& spec : directed) {
      if (flags.max_flop_given && spec.Flop() > sampler.max_flop) continue;
      // These cases test shapes, so if fp32 queries are refused, bf16 queries are used.
      if (!is_selected(spec)) spec.q_dtype = kernels::DType::kBf16;
      if (is_selected(spec)) cases.push_back(spec);
    }
  }
  const size_t whole = backend.Info().stream_bytes > 0 ? cases.size() : 0;
  for (size_t i = 0; i < whole; i += kStreamEvery) {
    CaseSpec spec = cases[i];
    if (Stream(spec, i / kStreamEvery % 2 == 0)) cases.push_back(std::move(spec));
  }
  if (!flags.dims.empty()) return cases;
  // Only the expanded form has kernels of its own for other dims.
  SamplerOptions wide = sampler;
  wide.full = kWide;
  for (std::vector<CaseSpec> directed :
       {EdgeCases(wide, first, flags.edges), PrefillCases(wide, flags.prefill)}) {
    for (CaseSpec& spec : directed) {
      const bool small = !flags.max_flop_given || spec.Flop() <= sampler.max_flop;
      if (spec.route == Route::kExpanded && small && is_selected(spec)) cases.push_back(spec);
    }
  }
  return cases;
}

// The cases that --shape names.
absl::StatusOr<std::vector<CaseSpec>> DirectedCases(const Flags& flags,
                                                    const SamplerOptions& sampler,
                                                    const kernels::hip::HipBackend& backend) {
  std::vector<CaseSpec> cases;
  for (const std::string& text : flags.directed) {
    auto spec = ParseCase(sampler, 4000000 + cases.size(), text);
    if (!spec.ok()) return spec.status();
    if (flags.fp8) ComputeInFp8(*spec);
    if (absl::Status s = backend.CanRun(spec->Desc()); !s.ok()) return s;
    cases.push_back(*std::move(spec));
  }
  return cases;
}

absl::StatusOr<SuiteOptions> Suite(const Flags& flags, const Gpu& gpu) {
  SuiteOptions options;
  SamplerOptions sampler = flags.sampler;
  sampler.geometries = {kWide, {1, 512, 64, 128, 128}};  // the second is drawn more often
  if (!flags.dims.empty()) {
    sampler.full = {1, 512, 64, flags.dims[0], flags.dims[1]};
    sampler.geometries = {sampler.full};
  }
  auto directed = DirectedCases(flags, sampler, *gpu.backend);
  if (!directed.ok()) return directed.status();
  options.cases = SupportedCases(flags, sampler, *gpu.backend);
  options.cases.insert(options.cases.begin(), directed->begin(), directed->end());
  options.subjects = {
      {"gpu",
       [gpu_options = gpu.options]() -> absl::StatusOr<std::unique_ptr<kernels::AttentionBackend>> {
         auto backend = kernels::hip::HipBackend::Create(gpu_options);
         if (!backend.ok()) return backend.status();
         return std::unique_ptr<kernels::AttentionBackend>(*std::move(backend));
       },
       /*bit_equal_batches=*/false, /*rounded_weights=*/false, /*rounded_queries=*/true}};
  options.oracle = []() -> absl::StatusOr<std::unique_ptr<kernels::AttentionBackend>> {
    return std::make_unique<kernels::ReferenceBackend>();
  };
  options.plan = SchedulerPlanBuilder;
  if (flags.progress) {
    options.before_case = [count = options.cases.size()](size_t index, const CaseSpec& spec) {
      std::printf("%zu/%zu %s\n", index + 1, count, ToString(spec).c_str());
      std::fflush(stdout);
    };
  }
  options.threads = flags.threads;
  options.base_granule = flags.first_byte / kernels::kPageGranuleBytes;
  options.runner.kv_pool_bytes += flags.first_byte;
  options.runner.staging_bytes = int64_t{96} << 20;
  options.runner.slot_workspace_bytes = int64_t{96} << 20;
  return options;
}

int64_t Failed(const std::string& of, const absl::Status& status) {
  if (status.ok()) return 0;
  std::printf("FAIL %s: %s\n", of.c_str(), std::string(status.message()).c_str());
  std::fflush(stdout);
  return 1;
}

// Runs launches of the indexer; returns the number of failures.
absl::StatusOr<int64_t> RunIndexer(const Flags& flags, const Gpu& gpu) {
  auto backend = kernels::hip::HipBackend::Create(gpu.options);
  if (!backend.ok()) return backend.status();
  kernels::ReferenceBackend reference;
  absl::Status s = (*backend)->Configure(IndexerLimits());
  if (s.ok()) s = reference.Configure(IndexerLimits());
  if (!s.ok()) return s;
  const int32_t dim = (*backend)->Info().index_dim;
  int64_t failures = 0;
  std::vector<IndexerCase> cases = IndexerCases(static_cast<int32_t>(flags.shapes), {dim});
  for (const IndexerCase& c : LongIndexerCases()) cases.push_back(c);
  for (const IndexerCase& c : DirectedIndexerCases()) cases.push_back(c);
  cases.push_back(ManyRowsIndexerCase());
  for (const IndexerCase& c : cases) {
    failures += Failed(ToString(c), CheckIndexer(reference, **backend, c));
  }
  for (const IndexerPair& pair : IndexerPairs()) {
    failures +=
        Failed("with others, " + ToString(pair.first), CheckIndexer(reference, **backend, pair));
  }
  std::printf("indexer: %lld launches, %lld failures\n",
              static_cast<long long>(cases.size() + IndexerPairs().size()),
              static_cast<long long>(failures));
  return failures;
}

absl::StatusOr<int64_t> RunWindows(const Flags& flags, const Gpu& gpu) {
  kernels::hip::HipBackend& backend = *gpu.backend;  // another one would test itself again
  if (absl::Status s = backend.Configure(WindowLimits()); !s.ok()) return s;
  EvenPlanBuilder even;
  const PlanBuilder plans[] = {
      SchedulerPlanBuilder(backend),
      [&even](std::span<const PlanShape> shapes, const kernels::PlanTraits& traits) {
        return even.Build(shapes, traits);
      }};
  std::vector<WindowCase> cases =
      WideWindowCases(static_cast<int32_t>(flags.shapes), flags.sampler.seed);
  for (WindowCase& c : DirectedWindowCases()) cases.push_back(std::move(c));
  const std::vector<std::string> failures = RunWindows(backend, plans, cases, flags.progress);
  for (const std::string& failure : failures) std::printf("FAIL %s\n", failure.c_str());
  std::printf("windows: %lld launches, %lld failures\n", 2ll * std::ssize(cases),
              0ll + std::ssize(failures));
  return std::ssize(failures);
}

// Runs the launches that have oracles of their own; returns the number of failures.
absl::StatusOr<int64_t> RunSparse(const Flags& flags, const Gpu& gpu) {
  if (flags.windowed) return RunWindows(flags, gpu);
  if (flags.projected) return RunProjected(*gpu.backend, ProjectedModelCases());
  if (flags.sparse && gpu.backend->Info().selects) return RunIndexer(flags, gpu);
  return 0;
}

int Main(int argc, char** argv) {
  Flags flags;
  if (!Parse(argc, argv, flags)) return 2;
  auto gpu = FindGpu(flags);
  if (!gpu.ok()) return 1;
  const absl::StatusOr<int64_t> sparse = RunSparse(flags, *gpu);
  if (!sparse.ok()) {
    std::printf("FAIL %s\n", sparse.status().ToString().c_str());
    return 1;
  }
  if (flags.windowed || flags.projected) return *sparse == 0 ? 0 : 1;
  const auto options = Suite(flags, *gpu);
  if (!options.ok()) {
    std::fprintf(stderr, "%s\n", std::string(options.status().message()).c_str());
    return 2;
  }
  const SuiteReport report = RunSuite(*options);
  for (const std::string& failure : report.failures) std::printf("FAIL %s\n", failure.c_str());
  std::printf(
      "seed %llu: %lld shapes, %lld comparisons, %lld batch checks, %lld failures, worst cosine "
      "difference %.2e\n",
      static_cast<unsigned long long>(flags.sampler.seed), static_cast<long long>(report.cases),
      static_cast<long long>(report.comparisons), static_cast<long long>(report.batch_checks),
      static_cast<long long>(report.failure_count), report.worst_cosine);
  std::printf("known gap: %lld of %lld cases of wide inputs miss the rule with bf16 queries\n",
              static_cast<long long>(report.known_misses),
              static_cast<long long>(report.wide_checks));
  const bool closed = report.wide_checks >= 256 && report.known_misses == 0;
  if (closed) std::printf("FAIL the gap is closed: judge wide inputs like all others\n");
  return *sparse == 0 && report.failure_count == 0 && report.comparisons > 0 && !closed ? 0 : 1;
}

}  // namespace
}  // namespace mla::conformance

int main(int argc, char** argv) { return mla::conformance::Main(argc, argv); }
