// Cost of the wire for a model worker in Python, by path, between two processes.
//
//   python_wire_benchmark [--json FILE] [--seconds S]      from the root of the repository
//
// Starts the server of wire_benchmark, whose kernel computes nothing, and runs python_wire.py
// against it; that file describes the measurements.
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/wire/wire_server.h"

namespace mla::bench {
namespace {

constexpr char kPython[] = "/usr/bin/python3";
constexpr char kScript[] = "tests/bench/wire/python_wire.py";

// Returns the exit status of the script. It gets the server's target, then this program's
// arguments.
int RunScript(const std::string& folder, int argc, char** argv) {
  const std::string target = "--target=unix:" + folder + "/s";
  std::vector<const char*> arguments = {kPython, kScript, target.c_str()};
  arguments.insert(arguments.end(), argv + 1, argv + argc);
  arguments.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execv(kPython, const_cast<char* const*>(arguments.data()));
    std::perror(kPython);
    std::_Exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int Main(int argc, char** argv) {
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const shared = new (page) Shared;
  char name[] = "/tmp/mla-wire-XXXXXX";
  const std::string folder = mkdtemp(name);
  // Forks before either side has a thread.
  const pid_t server = fork();
  if (server == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Serve(folder, shared);
    std::_Exit(0);
  }
  while (shared->ready.load() == 0 && waitpid(server, nullptr, WNOHANG) == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const int result = RunScript(folder, argc, argv);
  shared->stop = 1;
  int status = 0;
  waitpid(server, &status, 0);
  unlink((folder + "/s").c_str());
  rmdir(folder.c_str());
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? result : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
