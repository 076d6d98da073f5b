// Expanded (192/128) causal attention of prefills and long extends on the CPU backend.
//
//   cpu_prefill_benchmark [--json=FILE] [--isa=LEVEL] [--threads=1,2] [--repeats=5] [--only=TEXT]
//
// GFLOP/s counts attention alone (640 per head and visible pair). "with up-projection" is the whole
// launch; "attention" takes away the up-projection's own time, which is measured as the same launch
// with as few query rows as still up-project every KV row of every tile.
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/run_layout.h"
#include "tests/bench/cpu_bench.h"

namespace mla::bench {
namespace {

struct Shape {
  std::string name;
  int32_t heads, q_rows, kv_rows;
};

const Shape kShapes[] = {
    {"heads=128 q=1024 kv=1024", 128, 1024, 1024}, {"heads=128 q=2048 kv=2048", 128, 2048, 2048},
    {"heads=128 q=4096 kv=4096", 128, 4096, 4096}, {"heads=128 q=512 kv=4096", 128, 512, 4096},
    {"heads=16 q=4096 kv=4096", 16, 4096, 4096},
};

// One query row for every tile of the real launch, seeing the rows that the tile sees: all of the
// up-projections and next to nothing else.
std::vector<BenchRequest> UpProjectionOnly(const Shape& shape) {
  std::vector<BenchRequest> requests;
  const int32_t step = kernels::cpu::kExpandedTileRows;
  for (int32_t begin = 0; begin < shape.q_rows; begin += step) {
    const int32_t end = std::min(shape.q_rows, begin + step);
    requests.push_back({1, shape.kv_rows - shape.q_rows + end});
  }
  return requests;
}

void RunShape(const BenchFlags& flags, const Shape& shape) {
  for (const int32_t threads : flags.threads) {
    AttentionBench::Options options;
    options.geometry.num_heads = shape.heads;
    options.form = kernels::AttentionForm::kExpanded;
    options.threads = threads;
    options.isa = flags.isa;
    options.deterministic = flags.deterministic;
    options.max_kv_rows = 4 * static_cast<int64_t>(shape.kv_rows);
    options.max_q_rows = shape.q_rows;
    AttentionBench whole(options), up(options);
    const std::vector<BenchRequest> requests = {{shape.q_rows, shape.kv_rows}};
    whole.Prepare(requests);
    up.Prepare(UpProjectionOnly(shape));
    const std::vector<double> us =
        Medians(flags.repeats, {[&] { whole.Run(); }, [&] { up.Run(); }});
    const double flop = AttentionFlop(requests, shape.heads, 192, 128);
    BenchRow row;
    row.bench = "cpu_prefill";
    row.threads = threads;
    row.shape = shape.name + " with up-projection";
    row.us = us[0];
    row.gflops = flop / us[0] * 1e-3;
    Report(row);
    row.shape = shape.name + " attention";
    row.us = us[0] - us[1];
    row.gflops = flop / row.us * 1e-3;
    Report(row);
  }
}

int Main(int argc, char** argv) {
  const BenchFlags flags = ParseFlags(argc, argv);
  const auto level = kernels::cpu::SelectLevel(flags.isa, /*exact=*/true);
  if (!level.ok()) {
    std::fprintf(stderr, "%s\n", level.status().ToString().c_str());
    return 1;
  }
  std::printf("level %s, measured peak of one thread %.0f GFLOP/s\n", (*level)->name,
              MeasurePeak((*level)->name, 1));
  for (const Shape& shape : kShapes) {
    if (shape.name.find(flags.only) != std::string::npos) RunShape(flags, shape);
  }
  WriteJson(flags.json);
  return 0;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
