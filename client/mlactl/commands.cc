#include "client/mlactl/commands.h"

#include <cstdio>
#include <string>
#include <vector>

#include "client/mlactl/admin_commands.h"
#include "client/mlactl/attend_command.h"
#include "client/mlactl/bench/bench_command.h"
#include "client/mlactl/bench/bench_options.h"
#include "client/mlactl/cli/interrupt.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/replay/replay_command.h"

namespace mla::mlactl {
namespace {

constexpr std::string_view kQuotaNotes =
    "Changes are not persisted: a restarted server has those of its configuration. A bound below "
    "what\n"
    "is in use takes nothing away; the tenant gets no more until it has given enough back.\n";

constexpr std::string_view kAttendNotes =
    "A prompt in the EXPANDED profile and one more row in ABSORBED, on a model of its own. Exit "
    "code 5\n"
    "when the outputs are not what they should be. A first check of a new server; replay is the\n"
    "thorough one.\n";

constexpr std::string_view kBenchNotes =
    "Simulated model workers send decode steps: BeginStep, one Attend for each layer, each sent "
    "when\n"
    "the one before is answered, EndStep. LIST options take values separated by commas; every\n"
    "combination is a run. A model of random weights and a new name is registered for it and "
    "removed\n"
    "again; Ctrl-C ends the run early, prints what there is and removes it as well.\n"
    "\n"
    "In a closed loop each worker starts a step when its last one is done. With --rate steps "
    "arrive\n"
    "whether or not the server keeps up, and latency runs from the intended arrival, so that a "
    "stall\n"
    "is charged to every step that it delays; concurrency is then the most steps under way.\n"
    "\n"
    "network is what the client saw beyond the server's own queue, plan, kernel and write.\n";

constexpr std::string_view kBenchExamples =
    "mlactl bench\n"
    "mlactl --target=unix:/run/mla/mla.sock bench --transport=all --json=wire.json "
    "--plot=wire.svg\n"
    "mlactl bench --preset=deepseek-v3 --batch=1,32,128 --context=4096 --shared-context\n"
    "mlactl bench --rate=500,1000,2000 --concurrency=64 --duration=30\n"
    "mlactl bench --rows=512 --context=0 --steps=20       # prefill\n";

constexpr std::string_view kReplayNotes =
    "FILE holds requests and the outputs that they should give, as ./dev demo --record writes it. "
    "It\n"
    "is sent to the server under model names of its own. Exit code 5 when outputs are outside the\n"
    "rule; the worst figures are printed either way.\n"
    "\n"
    "With --save the answers of this server take the place of the expected ones in a new "
    "recording,\n"
    "so that another backend can be compared with it. Ctrl-C prints what there is by then.\n";

constexpr std::string_view kReplayExamples =
    "mlactl replay demo.rec\n"
    "mlactl --target=unix:/run/cpu.sock replay demo.rec --save=cpu.rec\n"
    "mlactl --target=unix:/run/gpu.sock replay cpu.rec --transport=inline --json=gpu.json\n";

int Complete(const Arguments& arguments) {
  const std::string script = CompletionScript(arguments.words()[0], Commands());
  if (script.empty()) {
    return FailUsage(absl::InvalidArgumentError("completion: got \"" + arguments.words()[0] +
                                                "\", must be bash, zsh or fish"));
  }
  std::fputs(script.c_str(), stdout);
  return kOk;
}

// Draining and its undoing, quotas, eviction.
std::vector<Command> OperatorCommands() {
  return {
      {"drain",
       "",
       0,
       "refuse new work and wait for open steps",
       {{"deadline-ms", "N", "abort what is still open after this time (default 0: the server's)"},
        {"exit", "", "stop the process when drained"}},
       "",
       "mlactl drain --deadline-ms=60000 --exit\n",
       Drain},
      {"cancel-drain",
       "",
       0,
       "take new work again, or end a drain that is under way",
       {},
       "",
       "mlactl cancel-drain\n",
       CancelDrain},
      {"quotas",
       "",
       0,
       "what each tenant uses and may use",
       {},
       "",
       "mlactl quotas --json\n",
       Quotas},
      {"quota",
       "TENANT",
       1,
       "what one tenant uses and may use",
       {},
       "",
       "mlactl quota research\n",
       Quota},
      {"set-quota",
       "TENANT",
       1,
       "bounds of one tenant, until the server ends",
       {{"bounds", "LIST", "RESOURCE=NUMBER, separated by commas; sizes take KiB, MiB, GiB"},
        {"weight", "N", "its share in what the scheduler divides, 1 to 1000"},
        {"reset", "", "first undo all earlier set-quota of this tenant"}},
       kQuotaNotes,
       "mlactl set-quota research --bounds=kv_bytes=4GiB,sequences=64\n"
       "mlactl set-quota research --reset\n",
       SetQuota},
      {"evict-sequences",
       "TENANT",
       1,
       "release sequences of any tenant",
       {{"ids", "LIST", "these, as sequences shows them"},
        {"client", "ID", "those of one client"},
        {"all", "", "all of the tenant"}},
       "",
       "mlactl evict-sequences research --client=worker-7\n",
       EvictSequences},
      {"evict-model",
       "TENANT MODEL",
       2,
       "release a model's sequences and unregister it",
       {},
       "",
       "mlactl evict-model research deepseek-v3\n",
       EvictModel},
  };
}

Command CompletionCommand() {
  return {"completion",
          "SHELL",
          1,
          "a script that completes these words in bash, zsh or fish",
          {},
          "",
          "source <(mlactl completion bash)\nmlactl completion fish | source\n",
          Complete};
}

std::vector<Command> MakeCommands() {
  std::vector<Command> commands = {
      {"info",
       "",
       0,
       "what the server is: backends, limits, profiles",
       {},
       "",
       "mlactl info\nmlactl --target=unix:/run/mla/mla.sock info --json\n",
       Info},
      {"status",
       "",
       0,
       "what it does now: counters and gauges",
       {},
       "",
       "mlactl status\nmlactl status --json | jq .kv_bytes_used\n",
       Status},
      {"watch",
       "",
       0,
       "its state whenever that changes, until Ctrl-C",
       {{"interval-ms", "N", "a line at least this often (default 1000)"},
        {"count", "N", "end after N lines"}},
       "",
       "mlactl watch\nmlactl watch --count=1 --json\n",
       Watch},
      {"models", "", 0, "registered models of the tenant", {}, "", "mlactl models\n", Models},
      {"sequences",
       "",
       0,
       "open sequences of the tenant",
       {},
       "",
       "mlactl sequences --tenant=research\n",
       Sequences},
      {"health",
       "",
       0,
       "exit 0 when it takes new work, 4 when not",
       {},
       "",
       "mlactl health && echo ready\n",
       Health},
      {"attend", "", 0, "a few rows of attention, checked against this program's own",
       AttendOptionTable(), kAttendNotes, "mlactl attend\nmlactl attend --transport=shm --json\n",
       Attend},
      {"bench", "", 0, "load on the server, measured", BenchOptionTable(), kBenchNotes,
       kBenchExamples, Bench},
      {"replay", "FILE", 1, "a recording sent to the server, its outputs compared",
       ReplayOptionTable(), kReplayNotes, kReplayExamples, Replay},
  };
  const std::vector<Command> more = OperatorCommands();
  commands.insert(commands.end(), more.begin(), more.end());
  commands.push_back(CompletionCommand());
  return commands;
}

}  // namespace

std::span<const Command> Commands() {
  static const auto* const kCommands = new std::vector<Command>(MakeCommands());
  return *kCommands;
}

int RunMlactl(std::span<const char* const> words) {
  const auto arguments = ParseArguments(words, Commands());
  if (!arguments.ok()) return FailUsage(arguments.status());
  if (arguments->Has("help")) {
    std::fputs(HelpText(arguments->command(), Commands()).c_str(), stdout);
    return kOk;
  }
  if (const auto options = ClientOptionsOf(*arguments); !options.ok()) {
    return FailUsage(options.status());
  }
  ExitOnInterrupts();
  return arguments->command()->run(*arguments);
}

}  // namespace mla::mlactl
