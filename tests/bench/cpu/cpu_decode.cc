// Absorbed attention of decode steps on the CPU backend, compared with oneDNN's time for the two
// matrix products alone, in the same process, alternating, on the same number of threads.
//
//   cpu_decode_benchmark [--json=FILE] [--isa=LEVEL] [--threads=1,2] [--repeats=5] [--only=TEXT]
//                        [--kv=bf16,fp8_tensor,fp8_row,fp8_page] [--top-k=0] [--window=0]
//
// "Of peak" is the rate of a shape, relative to that of the level's products alone with operands in
// registers, on the same number of threads, measured once at the beginning.
//
// With several formats of rows each shape is timed on all of them in turns; "speedup" is the first
// format's time divided by each one's. "GB/s" counts the bytes read of rows in their format. With
// --top-k each shape is timed with index lists of this many entries, too, if its context has as
// many; "of dense" is the rate of rows, relative to attention to all rows. With --window the lists
// name entries, one for four positions, and each query row attends to this many rows, to its
// entries and to sinks, over rows of 448 + 64 values.
//
// Shapes: heads x query rows x context of one request, and batches of 16 (uniform; ragged with the
// same number of KV rows; for thread counts above 2 the uniform one shows how requests scale). The
// batch of 16 contexts of 65536 rows, which has 1.2 GB of them in bf16, exceeds any cache. It shows
// how much 8-bit rows save when all threads together reach the memory's bandwidth.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/cpu/cpu_bench.h"
#include "tests/bench/cpu/gemm_bound.h"

namespace mla::bench {
namespace {

struct Shape {
  std::string name;
  int32_t heads;
  std::vector<BenchRequest> requests;
};

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (const int32_t heads : {128, 16}) {
    for (const int32_t q : {1, 4}) {
      for (const int32_t context : {1024, 4096, 16384, 65536}) {
        shapes.push_back({"heads=" + std::to_string(heads) + " q=" + std::to_string(q) +
                              " ctx=" + std::to_string(context),
                          heads,
                          {{q, context}}});
      }
    }
    Shape uniform{"heads=" + std::to_string(heads) + " q=1 batch=16 ctx=4096", heads, {}};
    Shape ragged{"heads=" + std::to_string(heads) + " q=1 batch=16 ragged", heads, {}};
    // 16 lengths between 300 and 8000 rows that sum to 16 x 4096.
    for (int32_t i = 0; i < 16; ++i) {
      uniform.requests.push_back({1, 4096});
      ragged.requests.push_back({1, 4096 + (i % 2 == 0 ? 1 : -1) * (i / 2 * 512 + 212)});
    }
    shapes.push_back(uniform);
    shapes.push_back(ragged);
  }
  shapes.push_back({"heads=16 q=1 batch=16 ctx=65536", 16,
                    std::vector<BenchRequest>(16, BenchRequest{1, 65536})});
  return shapes;
}

// Returns true if each row of the shape sees more positions than a list has.
bool HasLists(const Shape& shape, const BenchFlags& flags) {
  const int32_t wanted = flags.window > 0 ? flags.top_k * AttentionBench::kEntryRatio : flags.top_k;
  return std::all_of(shape.requests.begin(), shape.requests.end(),
                     [wanted](const BenchRequest& r) { return r.kv_rows - r.q_rows >= wanted; });
}

double GigabytesPerSecond(const BenchRow& row, int32_t latent_dim) {
  const kernels::KvRowLayout at = kernels::MakeKvRowLayout(row.kv, latent_dim, 64);
  return row.kv_rows_per_s * (at.row_bytes + at.page_scales_bytes) * 1e-9;
}

// Query rows that share one read of a KV row in attention to all rows.
double QueryRowsARead(const Shape& shape) { return shape.requests.front().q_rows; }

// The row for the shape with lists, which took `us`, compared with `dense`, attention to all rows.
BenchRow ListRow(const BenchRow& dense, const Shape& shape, int32_t q_rows, const BenchFlags& flags,
                 double us) {
  const double rows = static_cast<double>(q_rows) * (flags.top_k + flags.window);
  BenchRow lists;
  lists.bench = dense.bench;
  lists.shape = dense.shape + " top_k=" + std::to_string(flags.top_k);
  if (flags.window > 0) lists.shape += " window=" + std::to_string(flags.window);
  lists.kv = dense.kv;
  lists.threads = dense.threads;
  lists.us = us;
  lists.gflops = 2.0 * rows * shape.heads * (flags.window > 0 ? 512 + 512 : 576 + 512) / us * 1e-3;
  lists.kv_rows_per_s = rows / us * 1e6;
  lists.gb_per_s = GigabytesPerSecond(lists, flags.window > 0 ? 448 : 512);
  lists.of_dense = lists.kv_rows_per_s / (dense.kv_rows_per_s * QueryRowsARead(shape));
  return lists;
}

void RunShape(const BenchFlags& flags, const Shape& shape, const kernels::cpu::KernelSet& level) {
  std::vector<std::unique_ptr<GemmBound>> bounds;
  int64_t kv_rows = 0;
  int32_t q_rows = 0;
  SetGemmThreads(1);
  for (const BenchRequest& r : shape.requests) {
    kv_rows += (r.kv_rows + 63) / 64 * 64;
    q_rows += r.q_rows;
    bounds.push_back(std::make_unique<GemmBound>(r.q_rows * shape.heads, r.kv_rows, 576, 512,
                                                 level.bf16_operands));
  }
  double gemm_one = 0.0;
  for (const int32_t threads : flags.threads) {
    AttentionBench::Options options;
    options.geometry.num_heads = shape.heads;
    options.threads = threads;
    options.isa = flags.isa;
    options.spin_us = flags.spin_us;
    options.deterministic = flags.deterministic;
    options.max_kv_rows = kv_rows;
    options.max_q_rows = q_rows;
    std::vector<std::unique_ptr<AttentionBench>> benches;
    std::vector<std::function<void()>> bodies;
    for (const kernels::KvFormat kv : flags.kv) {
      options.kv_format = kv;
      benches.push_back(std::make_unique<AttentionBench>(options));
      benches.back()->Prepare(shape.requests);
      bodies.emplace_back([bench = benches.back().get()] { bench->Run(); });
    }
    const bool listed = flags.top_k > 0 && HasLists(shape, flags);
    if (flags.window > 0) options.geometry = {shape.heads, 448, 64, 0, 0};
    for (size_t i = 0; listed && i < flags.kv.size(); ++i) {
      options.kv_format = flags.kv[i];
      options.top_k = flags.top_k;
      options.window = flags.window;
      benches.push_back(std::make_unique<AttentionBench>(options));
      benches.back()->Prepare(shape.requests);
      bodies.emplace_back([bench = benches.back().get()] { bench->Run(); });
    }
    bodies.emplace_back([&] {
      for (const auto& bound : bounds) bound->Run();
    });
    SetGemmThreads(threads);
    const std::vector<double> us = Medians(flags.repeats, threads, bodies);
    if (gemm_one == 0.0) gemm_one = us.back();
    for (size_t i = 0; i < flags.kv.size(); ++i) {
      BenchRow row;
      row.bench = "cpu_decode";
      row.shape = shape.name;
      row.kv = flags.kv[i];
      row.threads = threads;
      row.us = us[i];
      row.gflops = AttentionFlop(shape.requests, shape.heads, 576, 512) / us[i] * 1e-3;
      const double peak = PeakOf(level.name, threads);
      if (peak > 0.0) row.of_peak = row.gflops / peak;
      row.gemm_only_us = us.back();
      row.onednn_scaling = gemm_one / us.back();
      row.kv_rows_per_s = static_cast<double>(kv_rows) / us[i] * 1e6;
      row.gb_per_s = GigabytesPerSecond(row, 512);
      if (flags.kv.size() > 1) row.speedup = us[0] / us[i];
      Report(row);
      if (!listed) continue;
      Report(ListRow(row, shape, q_rows, flags, us[flags.kv.size() + i]));
    }
  }
}

int Main(int argc, char** argv) {
  const BenchFlags flags = ParseFlags(argc, argv);
  const kernels::cpu::KernelSet& level = UseLevel(flags);
  SetGemmIsa(level.name);
  for (const Shape& shape : Shapes()) {
    if (shape.name.find(flags.only) == std::string::npos) continue;
    RunShape(flags, shape, level);
  }
  WriteJson(flags.json);
  return 0;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
