// Head slices of tensor-parallel ranks: one fused record, compared with a launch for each slice. On
// the CPU backend through the engine, ABSORBED, one query row over a committed context, alternating
// in one process.
//
//   slices_benchmark [--json=FILE] [--isa=LEVEL] [--threads=1,2] [--repeats=5] [--only=TEXT]
//
// `us` is the fused time of all 128 heads; the `gemm_only_us` field of the JSON rows holds the time
// of the separate slices, so that `ratio` is the gain.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"
#include "scheduler/testing/engine_harness.h"
#include "tests/bench/cpu/cpu_bench.h"

namespace mla::bench {
namespace {

using scheduler::StreamId;
using scheduler::testing::EngineHarness;
using scheduler::testing::MakeRow;
using scheduler::testing::Row;
using scheduler::testing::TestRequest;

constexpr int kHeads = 128;
constexpr int kRowDim = 576;
constexpr int kLongest = 16384;

std::unique_ptr<EngineHarness> MakeHarness(const BenchFlags& flags, int32_t threads) {
  kernels::BackendOptions options;
  options.threads = threads;
  options.cpu_isa = flags.isa;
  options.deterministic = flags.deterministic;
  auto backend = kernels::CpuBackend::Create(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", std::string(backend.status().message()).c_str());
    std::exit(1);
  }
  scheduler::testing::HarnessOptions harness;
  scheduler::Limits& limits = harness.limits;
  limits = scheduler::testing::TinyLimits();
  limits.kv_cache_bytes = int64_t{64} << 20;
  limits.default_page_size = 64;
  limits.max_sequence_rows = limits.max_step_rows = kLongest + 1;
  limits.max_pages_per_sequence = kLongest / 64 + 1;
  limits.max_heads = kHeads;
  limits.max_row_dim = kRowDim;
  limits.max_participants = kHeads;
  limits.launch_rows = limits.prefill_rows = kLongest;
  limits.launch_packed_rows = 1024;
  harness.model = scheduler::testing::TinyModel();
  harness.model.geometry = {kHeads, 512, 64, 0, 0};
  harness.model.layers = 1;
  harness.model.softmax_scale = 0.04;
  harness.backend = *std::move(backend);
  return std::make_unique<EngineHarness>(std::move(harness));
}

// A step of one row over `context` committed rows, begun by `ranks` streams.
struct Step {
  Step(EngineHarness& h, scheduler::StepId id, int context, int ranks) : id(id) {
    for (int i = 0; i < ranks; ++i) streams.push_back(h.core().steps().OpenStream(h.tenant()));
    const auto seq = h.Open();
    h.Begin(streams[0], id, {{seq.id, 1, 0, context}});
    std::vector<Row> rows;
    for (int i = 0; i < context; ++i) rows.push_back(MakeRow(uint64_t(i), kRowDim));
    auto kv = h.AppendOnly(streams[0], id, 0, 0, rows);
    h.Run();
    h.End(streams[0], id);
    for (const StreamId stream : streams) h.Begin(stream, id, {{seq.id, 1, context, 1}}, ranks);
    kv = h.AppendOnly(streams[0], id, 0, 0, {MakeRow(7, kRowDim)});
    h.Run();
  }
  const scheduler::StepId id;
  std::vector<StreamId> streams;
};

double Time(EngineHarness& h, const Step& step, bool apart) {
  const int ranks = static_cast<int>(step.streams.size());
  std::vector<std::unique_ptr<TestRequest>> slices;
  for (int i = 0; i < ranks; ++i) {
    const int heads = kHeads / ranks;
    slices.push_back(h.Unsent(step.streams[i], step.id, 0, 0, 1, {}, i * heads, heads, 9));
  }
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& slice : slices) {
    h.Submit(slice.get());
    if (apart) h.AdvanceMicros(h.core().limits().slice_wait_us);
    if (apart) h.Run();
  }
  h.Run();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  for (const auto& slice : slices) {
    if (slice->answered() && slice->status.ok()) continue;
    std::fprintf(stderr, "a slice failed: %s\n", std::string(slice->status.message()).c_str());
    std::exit(1);
  }
  return took.count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

int Main(int argc, char** argv) {
  const BenchFlags flags = ParseFlags(argc, argv);
  for (const int32_t threads : flags.threads) {
    for (const int ranks : {2, 4, 8}) {
      for (const int context : {1024, 4096, 16384}) {
        const std::string shape = absl::StrCat(ranks, " ranks, context ", context);
        if (shape.find(flags.only) == std::string::npos) continue;
        auto h = MakeHarness(flags, threads);
        const Step step(*h, 1, context, ranks);
        std::vector<double> fused, apart;
        for (int i = 0; i <= flags.repeats; ++i) {
          const double together = Time(*h, step, false);
          const double one_by_one = Time(*h, step, true);
          if (i == 0) continue;  // warm-up
          fused.push_back(together);
          apart.push_back(one_by_one);
        }
        BenchRow row;
        row.bench = "slices";
        row.shape = shape;
        row.threads = threads;
        row.us = Median(fused);
        row.gflops = 2.0 * kHeads * (context + 1) * (kRowDim + 512) / row.us * 1e-3;
        row.gemm_only_us = Median(apart);
        row.kv_rows_per_s = (context + 1) / row.us * 1e6;
        Report(row);
      }
    }
  }
  WriteJson(flags.json);
  return 0;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
