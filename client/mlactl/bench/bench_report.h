// Writes the results of `mlactl bench` as text and JSON. README.md documents the JSON.
#ifndef MLA_CLIENT_MLACTL_BENCH_BENCH_REPORT_H_
#define MLA_CLIENT_MLACTL_BENCH_BENCH_REPORT_H_

#include <string>
#include <vector>

#include "client/mlactl/bench/bench_options.h"
#include "client/mlactl/load/load_loop.h"
#include "mla/v1/admin.pb.h"

namespace mla::mlactl {

struct BenchRun {
  BenchPoint point;
  std::string transport;  // the transport used: "inline", "shm", "ring" or "ucx"
  LoadResult result;
  // The payload bytes that the server copied for each attend. It is computed from the server's
  // counters, which include other clients.
  double copied_bytes_per_attend = 0;
};

// The result of a search for the highest rate.
struct BenchRate {
  BenchPoint point;       // without a rate
  double rate_per_s = 0;  // steps; 0: the bound held at no rate that was tried
};

// Returns a text about server, model and load, which is printed before the first run.
std::string BenchHeaderText(const BenchOptions& options, const v1::GetServerInfoReply& server);
std::string BenchRunText(const BenchRun& run);
// Returns one line a run.
std::string BenchSummaryText(const std::vector<BenchRun>& runs);

std::string BenchRateText(const BenchOptions& options, const BenchRate& rate);

// `rates` is empty unless rates were looked for.
std::string BenchJson(const BenchOptions& options, const v1::GetServerInfoReply& server,
                      const std::vector<BenchRun>& runs, const std::vector<BenchRate>& rates);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_BENCH_BENCH_REPORT_H_
