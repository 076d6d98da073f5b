// `mlactl bench --scene` runs a trace of agents' conversations on a server.
//
// Workers take conversations whose next turn is due. A conversation has one turn at a time, and
// between its turns only the server's prefix cache keeps rows.
#ifndef MLA_CLIENT_MLACTL_AGENTS_SCENE_H_
#define MLA_CLIENT_MLACTL_AGENTS_SCENE_H_

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/mlactl/agents/tier_events.h"
#include "client/mlactl/agents/turn_worker.h"
#include "client/mlactl/bench/bench_options.h"
#include "client/mlactl/cli/progress.h"
#include "client/mlactl/load/trace.h"
#include "mla/v1/admin.pb.h"

namespace mla::mlactl {

struct SceneRun {
  Trace trace;
  // In the trace's order; a turn that is not done was cut off by the end of the run.
  std::vector<TurnResult> turns;
  double seconds = 0;
  v1::GetStatsReply before, after;  // of the server, for all its clients
  std::string transport;            // in use
  // The times at which rows came back to the pool, in Unix milliseconds, each with the name of the
  // tier from which they came (TierEvents::restored).
  std::vector<std::pair<int64_t, std::string>> restored;
  TierEvents::Rows tiers;      // rows stored in each tier, and moved from it or back
  bool tiers_complete = true;  // false: some tier events were lost
  bool interrupted = false;
};

// Returns the trace that the options name or describe; INVALID_ARGUMENT describes the fault.
absl::StatusOr<Trace> SceneTrace(const BenchOptions& options);

// REQUIRES: options.points has one entry. The model is registered, with weights if it needs them.
absl::StatusOr<SceneRun> RunScene(const BenchOptions& options, Trace trace, client::Client* client,
                                  const std::string& model_id, Progress* progress,
                                  const std::atomic<bool>& interrupted);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_AGENTS_SCENE_H_
