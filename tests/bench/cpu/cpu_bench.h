// Code shared by the CPU benchmarks: a configured backend with a filled pool, launches to time,
// medians, and the JSON rows.
#ifndef MLA_TESTS_BENCH_CPU_CPU_BENCH_H_
#define MLA_TESTS_BENCH_CPU_CPU_BENCH_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention_backend.h"
#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/types/attention_params.h"
#include "scheduler/planning/planner.h"

namespace mla::bench {

// Command line of every CPU benchmark:
//   [--json=FILE] [--isa=LEVEL] [--threads=1,2] [--repeats=5] [--only=TEXT] [--spin-us=200]
//   [--deterministic] [--kv=bf16,fp8_tensor,fp8_row,fp8_page] [--top-k=0] [--window=0]
struct BenchFlags {
  std::string json;
  std::string isa;  // forced dispatch level; empty: the best
  std::vector<int32_t> threads = {1, 2};
  int32_t repeats = 5;
  std::string only;       // shapes whose name contains this
  int32_t spin_us = 200;  // idle workers poll this long
  bool deterministic = false;
  std::vector<kernels::KvFormat> kv = {kernels::KvFormat::kBf16};  // formats of rows
  // For benchmarks that support them: entries of index lists, and rows of the window; 0: none.
  int32_t top_k = 0;
  int32_t window = 0;
};
// Prints usage and exits on an unknown flag.
BenchFlags ParseFlags(int argc, char** argv);

struct BenchRow {
  std::string bench, shape;
  int32_t threads = 1;
  double us = 0.0, gflops = 0.0;
  double gemm_only_us = 0.0;    // 0: no bound was measured
  double onednn_scaling = 0.0;  // the bound's speed, relative to one thread; 0: not measured
  double kv_rows_per_s = 0.0;
  double gb_per_s = 0.0;  // 10^9 bytes a second, of rows as they are stored; 0: not measured
  kernels::KvFormat kv = kernels::KvFormat::kBf16;
  double speedup = 0.0;   // over bf16 rows in the same run; 0: not measured
  double of_peak = 0.0;   // gflops, relative to PeakOf; 0: not measured
  double of_dense = 0.0;  // KV rows a second, relative to attention to all rows; 0: not measured
};
// Prints a row as text and keeps it; WriteJson writes all rows.
void Report(const BenchRow& row);
void WriteJson(const std::string& path);

// Medians of `repeats` alternating runs of several bodies, in microseconds, after one warm-up each.
// On several threads each timed run follows a pause and an untimed run. In the pause the threads of
// the previous body stop polling (an OpenMP runtime's threads poll for milliseconds). So every body
// is measured as if it ran repeatedly.
std::vector<double> Medians(int32_t repeats, int32_t threads,
                            const std::vector<std::function<void()>>& bodies);

// GFLOP/s of a dispatch level's best multiply-add instruction with its operands in registers,
// measured on `threads` threads at a time: bf16 tile products or dot products if the level has
// them, otherwise fp32 FMA; 0 for the portable level. On several threads this shows how the machine
// itself can scale. REQUIRES: the machine runs the level, and SelectLevel returned it before.
double MeasurePeak(const std::string& level, int32_t threads);
// As MeasurePeak, but measures each level and number of threads only once. One thread calls it.
double PeakOf(const std::string& level, int32_t threads);

// The dispatch level that flags.isa names; prints its peak for each number of threads. Exits with a
// message if the machine cannot run it.
const kernels::cpu::KernelSet& UseLevel(const BenchFlags& flags);

struct BenchRequest {
  int32_t q_rows = 1;
  int32_t kv_rows = 0;  // visible to the last query row
};

// A CPU backend with one layer of KV rows, N(0,1)/10, and launches over them.
class AttentionBench {
 public:
  struct Options {
    kernels::Geometry geometry = {128, 512, 64, 128, 128};
    kernels::AttentionForm form = kernels::AttentionForm::kAbsorbed;
    kernels::KvFormat kv_format = kernels::KvFormat::kBf16;
    int32_t page_size = 64;
    int32_t threads = 1;
    std::string isa;
    bool deterministic = false;
    int32_t spin_us = 200;
    // Each query row attends to a list of this many random positions that it sees, in ascending
    // order; 0: to all. REQUIRES: no more than kv_rows - q_rows of any request.
    int32_t top_k = 0;
    // > 0: each query row attends to this many last rows and, by its list, to `top_k` entries, one
    // for kEntryRatio positions, with a sink a head. Entries lie at the place of the first rows.
    // REQUIRES: top_k > 0; a geometry without nope_dim and v_dim.
    int32_t window = 0;
    int64_t max_kv_rows = 0;  // all requests of a launch together
    int32_t max_q_rows = 0;
  };
  static constexpr int32_t kEntryRatio = 4;
  // Exits with a message on failure: a benchmark has no caller to report to.
  explicit AttentionBench(const Options& options);
  ~AttentionBench();

  // Plans and prepares a launch; Run executes it (Submit to Wait).
  void Prepare(const std::vector<BenchRequest>& requests);
  void Run();
  // Appends `rows` rows of `dtype` to each of `sequences` sequences, as one launch.
  void Append(int32_t sequences, int32_t rows, kernels::DType dtype);
  kernels::AttentionBackend& backend() { return *backend_; }

 private:
  void MakeLists(const std::vector<BenchRequest>& requests);
  // Values of an output row of the absorbed form.
  int64_t AbsorbedDim() const;
  kernels::AppendRecord AppendOf(int32_t first_position, int32_t rows) const;

  Options options_;
  kernels::KvRowLayout row_;
  std::unique_ptr<kernels::AttentionBackend> backend_;
  std::unique_ptr<scheduler::MetadataBuffers> buffers_;
  scheduler::Planner planner_;
  std::vector<uint32_t> tables_;
  std::vector<kernels::SegmentRecord> records_;
  std::vector<kernels::WindowRecord> windows_;
  std::vector<float> sinks_;
  std::vector<int32_t> lists_, list_begins_;
  std::vector<kernels::AppendRecord> appends_;
  kernels::Launch launch_;
  std::vector<kernels::Bf16> q_, o_;
  std::vector<float> kv_;
};

// Attention FLOP of a launch: products only, masked pairs not counted.
double AttentionFlop(const std::vector<BenchRequest>& requests, int32_t heads, int32_t key_dim,
                     int32_t value_dim);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_CPU_CPU_BENCH_H_
