#include "tests/integration/processes.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::integration {

Result Shell(const std::string& command) {
  Result result;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  std::array<char, 4096> buffer;
  for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    result.output.append(buffer.data(), n);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) result.code = WEXITSTATUS(status);
  return result;
}

BackgroundCommand::BackgroundCommand(const std::string& command) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) return;
  output_ = ends[0];
  const std::string line = "exec " + command;
  pid_ = fork();
  if (pid_ == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
    _exit(127);
  }
  close(ends[1]);
}

BackgroundCommand::~BackgroundCommand() {
  if (pid_ > 0) kill(pid_, SIGKILL);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
  if (output_ >= 0) close(output_);
}

void BackgroundCommand::Signal(int number) const { kill(pid_, number); }

Result BackgroundCommand::Finish() {
  Result result;
  std::array<char, 4096> buffer;
  for (ssize_t n; (n = read(output_, buffer.data(), buffer.size())) > 0;) {
    result.output.append(buffer.data(), static_cast<size_t>(n));
  }
  int status = 0;
  waitpid(std::exchange(pid_, -1), &status, 0);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

ServerProcess::ServerProcess(const std::vector<std::string>& flags, int log) {
  std::vector<std::string> arguments = {kServer,
                                        "--backend=reference",
                                        "--listen=",
                                        "--ops-listen=",
                                        "--kv-cache-bytes=8MiB",
                                        "--limits-weights-bytes=1MiB",
                                        "--wire-staging-bytes=64MiB",
                                        "--unix-path=" + folder_.File("mla.sock")};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  pid_ = fork();
  if (pid_ == 0) {
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const bool redirected = log >= 0 ? dup2(log, STDERR_FILENO) == STDERR_FILENO
                                     : freopen(folder_.File("log").c_str(), "w", stderr) != nullptr;
    if (!redirected) _exit(126);
    execv(kServer, argv.data());
    _exit(127);
  }
  for (int i = 0; i < 200 && Health() != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

ServerProcess::~ServerProcess() {
  if (pid_ > 0) kill(pid_, SIGKILL);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
}

std::string ServerProcess::Mlactl(const std::string& words) const {
  return absl::StrCat(kMlactl, " --target=", target(), " ", words);
}

void ServerProcess::Signal(int number) const {
  kill(pid_, number);
  if (number != SIGSTOP) return;
  // It answers calls until its threads have stopped.
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WEXITED | WNOWAIT);
}

bool ServerProcess::LimitFiles(uint64_t bytes) const {
  const rlimit limit = {bytes, bytes};
  return prlimit(pid_, RLIMIT_FSIZE, &limit, nullptr) == 0;
}

int ServerProcess::Wait() {
  int status = 0;
  waitpid(std::exchange(pid_, -1), &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string ServerProcess::Log() const {
  std::ifstream file(folder_.File("log"));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace mla::integration
