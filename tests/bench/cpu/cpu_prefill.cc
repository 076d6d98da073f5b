// Expanded (192/128) causal attention of prefills and long extends on the CPU backend.
//
//   cpu_prefill_benchmark [--json=FILE] [--isa=LEVEL] [--threads=1,2] [--repeats=5] [--only=TEXT]
//
// GFLOP/s counts attention alone (640 per head and visible pair). "with up-projection" is the whole
// launch. "attention" subtracts the up-projection's own time, measured as the same launch with the
// fewest query rows that still up-project every KV row of every tile. The GEMM-only time is
// oneDNN's for the two products of one head, in blocks of 512 query rows against the KV rows that
// some of them see, times the heads.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/items/run_layout.h"
#include "tests/bench/cpu/cpu_bench.h"
#include "tests/bench/cpu/gemm_bound.h"

namespace mla::bench {
namespace {

struct Shape {
  std::string name;
  int32_t heads, q_rows, kv_rows;
};

const Shape kShapes[] = {
    {"heads=128 q=1024 kv=1024", 128, 1024, 1024}, {"heads=128 q=2048 kv=2048", 128, 2048, 2048},
    {"heads=128 q=4096 kv=4096", 128, 4096, 4096}, {"heads=128 q=512 kv=4096", 128, 512, 4096},
    {"heads=16 q=4096 kv=4096", 16, 4096, 4096},   {"heads=16 q=512 kv=4096", 16, 512, 4096},
};

// One query row for every tile of the real launch, which sees the rows that the tile sees: all of
// the up-projections and very little else.
std::vector<BenchRequest> UpProjectionOnly(const Shape& shape) {
  std::vector<BenchRequest> requests;
  const int32_t step = kernels::cpu::kExpandedTileRows;
  for (int32_t begin = 0; begin < shape.q_rows; begin += step) {
    const int32_t end = std::min(shape.q_rows, begin + step);
    requests.push_back({1, shape.kv_rows - shape.q_rows + end});
  }
  return requests;
}

constexpr int32_t kBoundRows = 512;

std::vector<std::unique_ptr<GemmBound>> BoundsOfOneHead(const Shape& shape, bool bf16) {
  std::vector<std::unique_ptr<GemmBound>> bounds;
  SetGemmThreads(1);
  for (int32_t begin = 0; begin < shape.q_rows; begin += kBoundRows) {
    const int32_t rows = std::min(kBoundRows, shape.q_rows - begin);
    const int32_t seen = shape.kv_rows - shape.q_rows + begin + rows;
    bounds.push_back(std::make_unique<GemmBound>(rows, seen, 192, 128, bf16));
  }
  return bounds;
}

void RunShape(const BenchFlags& flags, const Shape& shape, bool bf16) {
  const auto bounds = BoundsOfOneHead(shape, bf16);
  double gemm_one = 0.0;
  for (const int32_t threads : flags.threads) {
    AttentionBench::Options options;
    options.geometry.num_heads = shape.heads;
    options.form = kernels::AttentionForm::kExpanded;
    options.threads = threads;
    options.isa = flags.isa;
    options.spin_us = flags.spin_us;
    options.deterministic = flags.deterministic;
    options.max_kv_rows = 4 * static_cast<int64_t>(shape.kv_rows);
    options.max_q_rows = shape.q_rows;
    AttentionBench whole(options), up(options);
    const std::vector<BenchRequest> requests = {{shape.q_rows, shape.kv_rows}};
    whole.Prepare(requests);
    up.Prepare(UpProjectionOnly(shape));
    SetGemmThreads(threads);
    const std::vector<double> us = Medians(flags.repeats, threads,
                                           {[&] { whole.Run(); }, [&] { up.Run(); },
                                            [&] {
                                              for (const auto& bound : bounds) bound->Run();
                                            }});
    const double gemm_us = us[2] * shape.heads;
    if (gemm_one == 0.0) gemm_one = gemm_us;
    const double flop = AttentionFlop(requests, shape.heads, 192, 128);
    BenchRow row;
    row.bench = "cpu_prefill";
    row.threads = threads;
    row.gemm_only_us = gemm_us;
    row.onednn_scaling = gemm_one / gemm_us;
    row.shape = shape.name + " with up-projection";
    row.us = us[0];
    row.gflops = flop / us[0] * 1e-3;
    row.kv_rows_per_s = shape.kv_rows / us[0] * 1e6;
    Report(row);
    row.shape = shape.name + " attention";
    row.us = us[0] - us[1];
    row.gflops = flop / row.us * 1e-3;
    row.kv_rows_per_s = shape.kv_rows / row.us * 1e6;
    Report(row);
  }
}

int Main(int argc, char** argv) {
  const BenchFlags flags = ParseFlags(argc, argv);
  const kernels::cpu::KernelSet& level = UseLevel(flags);
  SetGemmIsa(level.name);
  for (const Shape& shape : kShapes) {
    if (shape.name.find(flags.only) != std::string::npos) {
      RunShape(flags, shape, level.bf16_operands);
    }
  }
  WriteJson(flags.json);
  return 0;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
