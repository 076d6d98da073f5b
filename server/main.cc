// The program mla-server; see `mla-server --help` and docs/configuration.md.
//
// Exit codes: 0 drained and stopped; 1 bad configuration; 2 could not start; 3 stopped with steps
// aborted at the drain deadline, or while a launch hung.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_join.h"
#include "proto/wire/grpc_tuning.h"
#include "server/config/config.h"
#include "server/logging/library_logs.h"
#include "server/logging/logging.h"
#include "server/preflight.h"
#include "server/process/exit_guards.h"
#include "server/process/process_usage.h"
#include "server/process/version.h"
#include "server/server.h"

extern char** environ;

namespace {

std::map<std::string, std::string> Environment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return variables;
}

// Prints what the command line asks for; returns false if it asks to serve.
bool Print(const mla::server::LoadedConfig& loaded) {
  const mla::server::CommandLine& command = loaded.command;
  std::string text;
  if (command.help) text = mla::server::HelpText();
  if (command.version) text = std::string("mla-server ") + mla::server::kVersion + "\n";
  if (command.print_example) text = mla::server::ExampleYaml();
  if (command.print_reference) text = mla::server::ReferenceMarkdown();
  if (command.print_config) text = mla::server::PrintConfig(loaded);
  std::fputs(text.c_str(), stdout);
  return !text.empty();
}

absl::StatusOr<std::unique_ptr<mla::server::Server>> Start(const mla::server::Config& config) {
  const mla::server::StartGuard guard;
  return mla::server::Server::Start({config, [] { kill(getpid(), SIGTERM); }});
}

// How long the last lines may wait for a reader of the log.
constexpr std::chrono::milliseconds kLastFlush{1000};

// Returns when the process is asked to end. A hang-up asks others to read their configuration
// again. This server does not: only the files of tls.* and quotas change while it runs. It rereads
// the files without a signal, and operators set quotas.
void WaitForEnd(const sigset_t& signals) {
  for (;;) {
    int number = 0;
    sigwait(&signals, &number);
    if (number != SIGHUP) {
      mla::server::Log(mla::server::LogLevel::kInfo, "signal", {{"number", number}});
      return;
    }
    mla::server::Log(mla::server::LogLevel::kWarning, "nothing_reloaded",
                     {{"number", number},
                      {"why",
                       "the configuration is read at the start alone; files of tls.* are "
                       "read again when they change"}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  namespace server = mla::server;
  const auto loaded =
      server::LoadConfig(std::vector<std::string>(argv + 1, argv + argc), Environment());
  for (const std::string& fault : loaded.faults) std::fprintf(stderr, "%s\n", fault.c_str());
  const bool printed = Print(loaded);
  if (!loaded.faults.empty()) return server::kExitBadConfig;
  if (loaded.command.check_config) {
    const std::vector<std::string> faults = server::Preflight(loaded.config);
    for (const std::string& fault : faults) std::fprintf(stderr, "%s\n", fault.c_str());
    return faults.empty() ? server::kExitDrained : server::kExitBadConfig;
  }
  if (printed) return 0;
  mla::wire::KeepMessageMemory();
  server::RaiseDescriptorLimit();
  server::ConfigureLogging(loaded.config.log.format, loaded.config.log.level);
  server::CaptureLibraryLogs();

  if (!loaded.service_links.empty()) {
    server::Log(server::LogLevel::kWarning, "environment_ignored",
                {{"names", absl::StrJoin(loaded.service_links, ",")},
                 {"why", "links to services of Kubernetes (enableServiceLinks)"}});
  }

  // All threads inherit this mask, so signals wait for sigwait below.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  // Writes beyond the file size limit shall fail like writes to a full disk.
  signal(SIGXFSZ, SIG_IGN);

  auto started = Start(loaded.config);
  if (!started.ok()) {
    server::Log(server::LogLevel::kError, "start_failed", {{"why", started.status().ToString()}});
    return server::kExitNotStarted;
  }
  WaitForEnd(signals);
  const auto deadline = std::chrono::milliseconds(loaded.config.drain_deadline_ms);
  bool drained = false;
  {
    const server::StopGuard guard(deadline + server::StopGuard::kGrace);
    drained = (*started)->Shutdown(deadline).drained;
    started->reset();
  }
  server::FlushLog(kLastFlush);
  return drained ? server::kExitDrained : server::kExitAborted;
}
