// The program mla-server; see `mla-server --help` and docs/configuration.md.
//
// Exit codes: 0 drained and stopped; 1 bad configuration; 2 could not start; 3 stopped with steps
// aborted at the drain deadline, or while a launch hung; 4 standard output was cut off.
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_join.h"
#include "base/version/version.h"
#include "proto/wire/grpc_tuning.h"
#include "relay/relay_channel.h"
#include "relay/relay_main.h"
#include "server/config/config.h"
#include "server/logging/library_logs.h"
#include "server/logging/logging.h"
#include "server/preflight.h"
#include "server/process/exit_guards.h"
#include "server/process/process_usage.h"
#include "server/process/service_manager.h"
#include "server/reload/config_reloader.h"
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
  if (command.version) {
    text = std::string("mla-server ") + mla::base::kVersion + "\nrevision " +
           mla::base::Revision() + "\n";
  }
  if (command.print_example) text = mla::server::ExampleYaml();
  if (command.print_reference) text = mla::server::ReferenceMarkdown();
  if (command.print_config) text = mla::server::PrintConfig(loaded);
  std::fputs(text.c_str(), stdout);
  return !text.empty();
}

// Returns the exit code of a process that has printed something: a configuration that a full disk
// has cut off must not look whole.
int Printed() {
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::ferror(stdout) == 0) return mla::server::kExitDrained;
  // If an earlier print has failed, errno may be that of any call since.
  const char* const why = flushed ? "cannot be written" : std::strerror(errno);
  std::fprintf(stderr, "standard output: %s\n", why);
  return mla::server::kExitOutputLost;
}

absl::StatusOr<std::unique_ptr<mla::server::Server>> Start(const mla::server::Config& config) {
  const mla::server::StartGuard guard;
  return mla::server::Server::Start({config, [] { kill(getpid(), SIGTERM); }});
}

// The last lines may wait this long for a reader of the log.
constexpr std::chrono::milliseconds kLastFlush{1000};

// Between two looks at the configuration file, and between two reports to the service manager.
constexpr timespec kLook{0, 500'000'000};

// The work of the main thread while the server serves: it reads the configuration again, and tells
// the service manager that the server goes on.
class Attendant final {
 public:
  Attendant(const mla::server::LoadedConfig& loaded, std::string contents,
            std::vector<std::string> arguments, mla::server::Server* server)
      : server_(server),
        reloader_(
            loaded.config, std::move(contents),
            {.load = [arguments = std::move(
                          arguments)] { return mla::server::LoadConfig(arguments, Environment()); },
             .contents = [file = loaded.file] { return mla::server::FileContents(file); },
             .apply = [this](const mla::server::Config& config) { Apply(config); }}) {}

  // Returns when the process is asked to end.
  void WaitForEnd(const sigset_t& signals) {
    for (;;) {
      const int number = sigtimedwait(&signals, nullptr, &kLook);
      if (number == SIGHUP) {
        Reload();
      } else if (number > 0) {
        mla::server::Log(mla::server::LogLevel::kInfo, "signal", {{"number", number}});
        return;
      } else {
        if (reloader_.Look()) Note();
        // A server whose engine is silent for good is not kept alive: the manager restarts it.
        if (server_->Alive()) mla::server::NotifyManager("WATCHDOG=1");
      }
    }
  }

  std::chrono::milliseconds drain_deadline() const {
    return std::chrono::milliseconds(reloader_.running().drain_deadline_ms);
  }

 private:
  void Apply(const mla::server::Config& config) {
    mla::server::SetLogLevel(config.log.level);
    server_->Apply(config);
  }

  void Reload() {
    mla::server::NotifyManager(mla::server::ReloadingText());
    server_->LookAtTls();
    reloader_.Reload().IgnoreError();
    Note();
  }

  void Note() {
    const mla::server::ReloadStats& status = reloader_.status();
    server_->NoteConfig(status);
    mla::server::NotifyManager(status.why.empty()
                                   ? "READY=1\nSTATUS=serving"
                                   : "READY=1\nSTATUS=serving; the configuration was refused");
  }

  mla::server::Server* const server_;
  mla::server::ConfigReloader reloader_;
};

}  // namespace

int main(int argc, char** argv) {
  namespace server = mla::server;
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (!arguments.empty() && arguments.front() == mla::relay::kRelayCommand) {
    return mla::relay::RunRelay();
  }
  const auto loaded = server::LoadConfig(arguments, Environment());
  const std::string contents = server::FileContents(loaded.file);
  for (const std::string& fault : loaded.faults) std::fprintf(stderr, "%s\n", fault.c_str());
  const bool printed = Print(loaded);
  if (!loaded.faults.empty()) return server::kExitBadConfig;
  if (loaded.command.check_config) {
    for (const std::string& line : server::DescribeGpus(loaded.config)) {
      std::printf("%s\n", line.c_str());
    }
    const std::vector<std::string> faults = server::Preflight(loaded.config);
    for (const std::string& fault : faults) std::fprintf(stderr, "%s\n", fault.c_str());
    return faults.empty() ? Printed() : server::kExitBadConfig;
  }
  if (printed) return Printed();
  mla::wire::KeepMessageMemory();
  mla::wire::SkipChecksOfLockOrder();
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
  // Writes beyond the file size limit must fail like writes to a full disk.
  signal(SIGXFSZ, SIG_IGN);

  auto started = Start(loaded.config);
  if (!started.ok()) {
    server::Log(server::LogLevel::kError, "start_failed", {{"why", started.status().ToString()}});
    return server::kExitNotStarted;
  }
  Attendant attendant(loaded, contents, arguments, started->get());
  server::NotifyManager("READY=1\nSTATUS=serving");
  attendant.WaitForEnd(signals);
  server::NotifyManager("STOPPING=1\nSTATUS=draining");
  const std::chrono::milliseconds deadline = attendant.drain_deadline();
  bool drained = false;
  {
    const server::StopGuard guard(deadline + server::StopGuard::kGrace);
    drained = (*started)->Shutdown(deadline).drained;
    started->reset();
  }
  server::FlushLog(kLastFlush);
  return drained ? server::kExitDrained : server::kExitAborted;
}
