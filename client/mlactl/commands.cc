#include "client/mlactl/commands.h"

#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/mlactl/attend_command.h"
#include "client/mlactl/bench_command.h"
#include "client/mlactl/cli/completion.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/fleet/announcer.h"
#include "client/mlactl/fleet/fleet_command.h"
#include "client/mlactl/hints/hint_command.h"
#include "client/mlactl/operator_commands.h"
#include "client/mlactl/page_commands.h"
#include "client/mlactl/query_commands.h"
#include "client/mlactl/replay/replay_command.h"
#include "client/mlactl/views/view_commands.h"

namespace mla::mlactl {
namespace {

void AddCompletion(Program* program) {
  const auto shell = std::make_shared<std::string>();
  Command command =
      program->Add({.name = "completion",
                    .group = "Shell",
                    .summary = "print a script that completes these words in bash, zsh or fish",
                    .examples = "source <(mlactl completion bash)\n"
                                "mlactl completion fish | source\n"});
  command.Word("SHELL", "bash, zsh or fish", shell.get());
  command.Run([program, shell](const CommonOptions&) -> int {
    const std::string script = CompletionScript(*shell, *program);
    if (script.empty()) {
      return FailUsage(absl::InvalidArgumentError(
          absl::StrCat("completion: got \"", *shell, "\", must be bash, zsh or fish")));
    }
    std::fputs(script.c_str(), stdout);
    return kOk;
  });
}

}  // namespace

void AddCommands(Program* program) {
  AddQueryCommands(program);
  AddTop(program);
  AddVersion(program);
  AddAttendCommand(program);
  AddBenchCommand(program);
  AddReplayCommand(program);
  AddOperatorCommands(program);
  AddFleetCommand(program);
  AddAnnounceCommand(program);
  AddPageCommands(program);
  AddHintCommand(program);
  AddSize(program);
  AddContexts(program);
  AddCompletion(program);
}

}  // namespace mla::mlactl
