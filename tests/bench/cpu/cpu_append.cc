// Appends on the CPU backend, alternating with memcpy of the same bytes.
//
//   cpu_append_benchmark [--json=FILE] [--isa=LEVEL] [--threads=1,2] [--repeats=5] [--only=TEXT]
//
// The `gemm_only_us` field of the JSON rows holds memcpy's time here, as the bound of a copy.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/bench/cpu/cpu_bench.h"

namespace mla::bench {
namespace {

struct Shape {
  std::string name;
  int32_t sequences, rows;
  kernels::DType dtype;
};

const Shape kShapes[] = {
    {"64 sequences x 1 row, bf16", 64, 1, kernels::DType::kBf16},
    {"1 sequence x 4096 rows, bf16", 1, 4096, kernels::DType::kBf16},
    {"1 sequence x 4096 rows, fp32", 1, 4096, kernels::DType::kF32},
    {"16 sequences x 512 rows, bf16", 16, 512, kernels::DType::kBf16},
};

int Main(int argc, char** argv) {
  const BenchFlags flags = ParseFlags(argc, argv);
  for (const Shape& shape : kShapes) {
    if (shape.name.find(flags.only) == std::string::npos) continue;
    for (const int32_t threads : flags.threads) {
      AttentionBench::Options options;
      options.threads = threads;
      options.isa = flags.isa;
      options.spin_us = flags.spin_us;
      options.max_kv_rows = static_cast<int64_t>(shape.sequences) * shape.rows;
      options.max_q_rows = 1;
      AttentionBench bench(options);
      const size_t bytes = static_cast<size_t>(options.max_kv_rows) * 576 * 2;
      std::vector<char> from(bytes, 1), to(bytes);
      const std::vector<double> us =
          Medians(10 * flags.repeats, threads,
                  {[&] { bench.Append(shape.sequences, shape.rows, shape.dtype); },
                   [&] { std::memcpy(to.data(), from.data(), bytes); }});
      BenchRow row;
      row.bench = "cpu_append";
      row.shape = shape.name;
      row.threads = threads;
      row.us = us[0];
      row.kv_rows_per_s = static_cast<double>(options.max_kv_rows) / us[0] * 1e6;
      row.gemm_only_us = us[1];
      Report(row);
    }
  }
  WriteJson(flags.json);
  return 0;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
