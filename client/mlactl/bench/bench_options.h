// Settings of `mlactl bench`: a model, and one run for each combination of the listed loads.
#ifndef MLA_CLIENT_MLACTL_BENCH_BENCH_OPTIONS_H_
#define MLA_CLIENT_MLACTL_BENCH_BENCH_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/mlactl/cli/program.h"
#include "client/mlactl/cli/transport.h"
#include "client/mlactl/load/load_loop.h"
#include "client/mlactl/load/trace.h"
#include "mla/v1/attention.pb.h"
#include "mla/v1/model.pb.h"

namespace mla::mlactl {

inline constexpr size_t kMaxBenchRuns = 100;

// One run.
struct BenchPoint {
  std::string transport = "auto";  // auto, inline, shm, ring-futex, ring-spin or ucx
  v1::Profile profile = v1::PROFILE_EXPANDED;
  uint32_t batch = 1;       // sequences of a step
  uint32_t rows = 1;        // new rows of each sequence in each step
  uint32_t context = 1024;  // rows of each sequence before the first step
  uint32_t concurrency = 1;
  double rate_per_s = 0;  // steps; 0: closed loop

  // Returns e.g. "ring-spin EXPANDED batch 32 rows 1 context 4096, 4 workers".
  std::string Name() const;
};

// A scene is run instead of decode steps: conversations of agents (client/mlactl/agents).
struct SceneOptions {
  std::string name;                   // agents or agent-turn; empty: there is no scene
  AgentsShape shape;                  // without the context, which the point has
  double share = 0.96;                // for agent-turn: share of the rows that the cache has
  uint32_t repeats = 3;               // agent-turn
  uint32_t prefill_rows = 512;        // per step that computes rows of an input
  double speed = 0;                   // relative to the trace's time; 0: no waiting
  std::string trace_file, save_file;  // empty: no plot
};

struct BenchOptions {
  std::string target;
  client::ClientOptions client;  // for every connection, without transport and sizes: see points
  v1::ModelSpec model;           // without model_id, which the run sets
  std::vector<BenchPoint> points;
  SceneOptions scene;           // a scene requires exactly one point
  LoadOptions load;             // without concurrency and rate, which are in `points`
  bool shared_context = false;  // sequences are forks of one sequence, instead of each being filled
  // true: steps commit their rows; false: the context keeps its length
  bool grow = false;
  bool want_lse = false;
  // Every input byte is written and every output byte read, as a real model would do.
  bool touch = false;
  v1::DType q_dtype = v1::DTYPE_BF16, kv_row_dtype = v1::DTYPE_BF16;
  v1::DType o_dtype = v1::DTYPE_BF16;
  uint32_t spin_us = kDefaultSpinMicros;  // for ring-spin and ucx, on each side
  std::string plot_file;                  // empty: no plot
  bool quiet = false;                     // no progress
  // > 0: of each point, the highest rate is looked for at which p99 of a step is within this time
  double within_p99_ms = 0;
};

// The command line: values that go into BenchOptions unchanged, names that must still be resolved,
// and lists, each combination of which is a run.
struct BenchArguments {
  BenchOptions options;  // without target, client, model and points
  std::string preset = "small", query_precision = "default", arrivals = "poisson";
  std::string kv_format = "bf16", attention = "dense", fp8_compute = "auto";
  std::string projected_dtype;       // for projected; empty: bf16
  uint32_t q_lora = 0, hidden = 0;   // for projected; 0: the preset's
  uint32_t top_k = 0;                // for v32 and v4; 0: their defaults
  uint32_t window = 128, ratio = 4;  // for v4
  std::string query_dtype = "bf16", row_dtype = "bf16", output_dtype = "bf16";
  uint32_t heads = 0, layers = 0;  // 0: the preset's; for lora 448 with v4, else 512
  uint32_t lora = 0, rope = 64, nope = 128, v = 128, page_size = 0;
  std::vector<std::string> transports = {"auto"}, profiles = {"expanded"};
  std::vector<uint64_t> batches = {1}, rows = {1}, contexts = {1024}, workers = {1};
  std::vector<double> rates = {0};
};

// Defines the options. `arguments` must outlive the program's run.
void AddBenchOptions(Command* command, BenchArguments* arguments);

// Returns the options of the runs; INVALID_ARGUMENT if the lists combine to more than
// kMaxBenchRuns, or if a combination does not exist. For v4: the expanded profile, and KV rows of 8
// bits. For the projected profile: other profiles with outputs, queries of 8 bits, the log-sum-exp,
// and sparse attention. For a scene: more than one run, index lists, rows without outputs, and
// several workers in agent-turn.
absl::StatusOr<BenchOptions> MakeBenchOptions(const CommonOptions& common,
                                              const BenchArguments& arguments);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_BENCH_BENCH_OPTIONS_H_
