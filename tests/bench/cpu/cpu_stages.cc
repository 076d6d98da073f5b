// The time of an absorbed decode on the CPU by stage. The stages of one tile are timed alone, with
// operands in the cache, and compared with a tile's share of a whole launch. The time of a launch
// beyond the sum of its stages is for operands outside the cache, packing of queries, outputs and
// control.
//
//   cpu_stages_benchmark [--json=FILE] [--isa=LEVEL] [--repeats=5] [--only=TEXT]
//
// "all in one call" is the call of a level that does all stages of a tile, which launches with more
// than 32 heads make. "in L1" repeats a product with every operand row and panel at one address,
// which shows the instructions' own rate. All times are for one thread and 128 KV rows, as a share
// of a tile's.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/dispatch.h"
#include "kernels/formats/dtype.h"
#include "tests/bench/cpu/cpu_bench.h"

namespace mla::bench {
namespace {

using kernels::Bf16;
using kernels::cpu::KernelSet;
using kernels::cpu::kPanel;
using kernels::cpu::kTileRows;

constexpr int32_t kKeyDim = 576, kValueDim = 512;
constexpr int32_t kContext = 4096;
constexpr int32_t kCalls = 50;  // calls of a stage per measurement

// Scratch memory aligned to cache lines, as the backend's.
struct alignas(64) Line {
  float at[16];
};
class Floats {
 public:
  explicit Floats(int64_t count, float value = 0.0f)
      : lines_(static_cast<size_t>(count + 15) / 16) {
    for (Line& line : lines_) std::fill_n(line.at, 16, value);
  }
  float* data() { return lines_[0].at; }

 private:
  std::vector<Line> lines_;
};

constexpr int64_t kLdo = kValueDim + kPanel;
constexpr int64_t kPanelBytes = kernels::cpu::kMostKvRows / 2 * 64 + 64;

// Operands of one tile, filled with 1/128 so that no stage meets special values.
struct Tile {
  Tile(const KernelSet& set, int32_t heads)
      : kernels(set),
        columns((heads + kPanel - 1) / kPanel * kPanel),
        rows(int64_t{set.kv_rows} * kKeyDim / 2),
        wide(int64_t{set.kv_rows} * kKeyDim, 0.0078125f),
        queries(kernels::cpu::PanelBytes(set.bf16_operands, set.k_align, kKeyDim) * columns /
                kPanel / 4),
        logits(set.kv_rows * (columns + kPanel)),
        p(int64_t{kTileRows} * kTileRows),
        values(kPanelBytes * (kValueDim / kPanel) / 4),
        o(columns * kLdo),
        state(4 * columns) {
    auto* row = reinterpret_cast<Bf16*>(rows.data());
    std::fill_n(row, set.kv_rows * kKeyDim, kernels::ToBf16(0.0078125f));
    for (int32_t r = 0; r < set.kv_rows; ++r) {
      row_pointers.push_back(row + r * kKeyDim);
      operands.push_back(set.bf16_operands ? static_cast<const void*>(row_pointers.back())
                                           : wide.data() + r * kKeyDim);
    }
    gemm.a_rows = operands.data();
    gemm.rows = set.kv_rows;
    gemm.k = kKeyDim;
    gemm.panel_bytes = kernels::cpu::PanelBytes(set.bf16_operands, set.k_align, kKeyDim);
    gemm.panels = columns / kPanel;
    gemm.b = queries.data();
    gemm.c = logits.data();
    gemm.ldc = columns + kPanel;
    softmax.s = logits.data();
    softmax.lds = gemm.ldc;
    softmax.rows = set.kv_rows;
    softmax.columns = columns;
    softmax.scale2 = 0.2f;
    softmax.m = state.data();
    softmax.l = state.data() + columns;
    softmax.norm = set.bf16_operands ? state.data() + 2 * columns : nullptr;
    softmax.alpha = state.data() + 3 * columns;
    softmax.p = p.data();
    accumulate.p = p.data();
    accumulate.rows = set.kv_rows;
    accumulate.columns = columns;
    accumulate.packed_rows = heads;
    accumulate.v = set.bf16_operands ? values.data() : wide.data();
    accumulate.ldv = set.bf16_operands ? kPanelBytes : kKeyDim;
    accumulate.panels = kValueDim / kPanel;
    accumulate.o = o.data();
    accumulate.ldo = kLdo;
    accumulate.alpha = softmax.alpha;
  }

  const KernelSet& kernels;
  int32_t columns;
  Floats rows, wide, queries, logits, p, values, o, state;
  std::vector<const uint16_t*> row_pointers;
  std::vector<const void*> operands;
  kernels::cpu::GemmArgs gemm{};
  kernels::cpu::SoftmaxArgs softmax{};
  kernels::cpu::AccumulateArgs accumulate{};
};

struct Stage {
  std::string name;
  double flop = 0.0;  // FLOP, if the stage is a product
  std::function<void()> body;
};

std::vector<Stage> Stages(Tile& tile, int32_t heads) {
  const KernelSet& kernels = tile.kernels;
  const double pairs = 2.0 * kernels.kv_rows * heads;
  std::vector<Stage> stages;
  if (kernels.bf16_operands) {
    stages.push_back({"interleave V", 0.0, [&] {
                        kernels.pack_values(tile.row_pointers.data(), kernels.kv_rows, kValueDim,
                                            reinterpret_cast<uint16_t*>(tile.values.data()),
                                            tile.accumulate.ldv);
                      }});
  } else {
    stages.push_back({"widen rows", 0.0, [&] {
                        kernels.widen(tile.row_pointers.data(), kernels.kv_rows, kKeyDim,
                                      tile.wide.data(), kKeyDim);
                      }});
  }
  stages.push_back({"K Q^T", pairs * kKeyDim, [&] { kernels.gemm(tile.gemm); }});
  stages.push_back({"softmax", 0.0, [&] { kernels.softmax(tile.softmax); }});
  stages.push_back({"P V", pairs * kValueDim, [&] { kernels.accumulate(tile.accumulate); }});
  if (kernels.attend != nullptr) {
    stages.push_back({"all in one call", pairs * (kKeyDim + kValueDim), [&] {
                        kernels::cpu::GemmArgs gemm = tile.gemm;
                        gemm.value_panels = reinterpret_cast<uint16_t*>(tile.values.data());
                        gemm.value_panel_bytes = tile.accumulate.ldv;
                        gemm.value_dim = kValueDim;
                        kernels.attend({gemm, tile.softmax, tile.accumulate});
                      }});
  }
  stages.push_back({"K Q^T in L1", pairs * kKeyDim, [&] {
                      const std::vector<const void*> same(static_cast<size_t>(kernels.kv_rows),
                                                          tile.operands[0]);
                      kernels::cpu::GemmArgs near = tile.gemm;
                      near.a_rows = same.data();
                      near.panel_bytes = 0;
                      kernels.gemm(near);
                    }});
  return stages;
}

// Microseconds for 128 KV rows in a whole launch.
double WholeTile(const BenchFlags& flags, int32_t heads) {
  AttentionBench::Options options;
  options.geometry.num_heads = heads;
  options.isa = flags.isa;
  options.max_kv_rows = kContext;
  options.max_q_rows = 1;
  AttentionBench bench(options);
  bench.Prepare({{1, kContext}});
  return Medians(4 * flags.repeats, 1, {[&] { bench.Run(); }})[0] * kTileRows / kContext;
}

void RunHeads(const BenchFlags& flags, const KernelSet& kernels, int32_t heads) {
  const auto report = [&](const std::string& name, double us, double flop) {
    BenchRow row;
    row.bench = "cpu_stages";
    row.shape = "heads=" + std::to_string(heads) + " " + name;
    row.us = us;
    row.gflops = flop / us * 1e-3;
    Report(row);
  };
  Tile tile(kernels, heads);
  std::vector<std::function<void()>> bodies;
  const std::vector<Stage> stages = Stages(tile, heads);
  for (const Stage& stage : stages) {
    bodies.push_back([&stage] {
      for (int32_t call = 0; call < kCalls; ++call) stage.body();
    });
  }
  if (kernels.enter_thread != nullptr) kernels.enter_thread();
  const std::vector<double> us = Medians(flags.repeats, 1, bodies);
  if (kernels.leave_thread != nullptr) kernels.leave_thread();
  const double share = static_cast<double>(kTileRows) / kernels.kv_rows / kCalls;
  for (size_t i = 0; i < stages.size(); ++i) {
    report(stages[i].name, us[i] * share, stages[i].flop * share * kCalls);
  }
  report("tile of a launch", WholeTile(flags, heads), 2.0 * kTileRows * heads * (576 + 512));
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
  for (const int32_t heads : {128, 16}) {
    if (("heads=" + std::to_string(heads)).find(flags.only) == std::string::npos) continue;
    RunHeads(flags, **level, heads);
  }
  WriteJson(flags.json);
  return 0;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
