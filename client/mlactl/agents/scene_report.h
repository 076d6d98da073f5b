// The results of a scene as text, JSON and SVG. README.md documents the JSON.
#ifndef MLA_CLIENT_MLACTL_AGENTS_SCENE_REPORT_H_
#define MLA_CLIENT_MLACTL_AGENTS_SCENE_REPORT_H_

#include <string>

#include "client/mlactl/agents/scene.h"
#include "client/mlactl/bench/bench_options.h"
#include "mla/v1/admin.pb.h"

namespace mla::mlactl {

std::string SceneText(const BenchOptions& options, const SceneRun& run);
std::string SceneJson(const BenchOptions& options, const v1::GetServerInfoReply& server,
                      const SceneRun& run);
std::string SceneSvg(const BenchOptions& options, const SceneRun& run);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_AGENTS_SCENE_REPORT_H_
