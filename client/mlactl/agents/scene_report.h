// Writes the results of `mlactl bench --scene` as text and JSON. agents/README.md documents
// them.
//
// Times and rows count finished turns only. Threading: any thread.
#ifndef MLA_CLIENT_MLACTL_AGENTS_SCENE_REPORT_H_
#define MLA_CLIENT_MLACTL_AGENTS_SCENE_REPORT_H_

#include <string>

#include "client/mlactl/agents/scene.h"
#include "client/mlactl/bench/bench_options.h"
#include "mla/v1/admin.pb.h"

namespace mla::mlactl {

// Returns lines for a terminal: rows found, where matches ended, times by the share that was found.
std::string SceneText(const BenchOptions& options, const SceneRun& run);
// Returns one object with the sums and a row a turn. `server` gives the names of version and
// backend.
std::string SceneJson(const BenchOptions& options, const v1::GetServerInfoReply& server,
                      const SceneRun& run);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_AGENTS_SCENE_REPORT_H_
