// What `mlactl bench` measures: a model, and one run for each combination of the listed loads.
#ifndef MLA_CLIENT_MLACTL_BENCH_BENCH_OPTIONS_H_
#define MLA_CLIENT_MLACTL_BENCH_BENCH_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/mlactl/cli/command_line.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/load/load_loop.h"
#include "mla/v1/attention.pb.h"
#include "mla/v1/model.pb.h"

namespace mla::mlactl {

inline constexpr size_t kMaxBenchRuns = 100;

// One run.
struct BenchPoint {
  std::string transport = "auto";  // auto, inline, shm, ring-futex or ring-spin
  v1::Profile profile = v1::PROFILE_EXPANDED;
  uint32_t batch = 1;       // sequences of a step
  uint32_t rows = 1;        // new rows of each sequence in a step
  uint32_t context = 1024;  // rows of each sequence before the first step
  uint32_t concurrency = 1;
  double rate_per_s = 0;  // steps; 0: closed loop

  // E.g. "ring-spin EXPANDED batch 32 rows 1 context 4096, 4 workers".
  std::string Name() const;
};

struct BenchOptions {
  std::string target;
  client::ClientOptions client;  // of every connection; transport and sizes are each run's
  v1::ModelSpec model;           // its model_id is chosen by the run
  std::vector<BenchPoint> points;
  LoadOptions load;             // concurrency and rate are each point's
  bool shared_context = false;  // sequences are forks of one, instead of filled each
  bool grow = false;            // steps commit their rows; otherwise the context stays as it is
  bool want_lse = false;
  bool touch = false;  // every input byte is written and every output byte read, as a model does
  v1::DType o_dtype = v1::DTYPE_BF16;
  uint32_t spin_us = kDefaultSpinMicros;  // of ring-spin, each side
  std::string plot_file;                  // empty: none
  bool quiet = false;                     // no progress
};

// The options of the command, for the table of commands.
std::vector<Option> BenchOptionTable();

// INVALID_ARGUMENT with all faults, one a line.
absl::StatusOr<BenchOptions> ReadBenchOptions(const Arguments& arguments);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_BENCH_BENCH_OPTIONS_H_
