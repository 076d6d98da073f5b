// The product's programs as an operator runs them: an mla-server process, and programs that run to
// their end.
#ifndef MLA_TESTS_INTEGRATION_PROCESSES_H_
#define MLA_TESTS_INTEGRATION_PROCESSES_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "tests/integration/test_server.h"

namespace mla::integration {

inline constexpr char kServer[] = "server/mla-server";
inline constexpr char kMlactl[] = "client/mlactl/mlactl";

struct Result {
  int code = -1;
  std::string output;
};

// Runs a shell command; the result has stdout and stderr together.
Result Shell(const std::string& command);

// A shell command that runs in the background; killed by the destructor.
class BackgroundCommand final {
 public:
  explicit BackgroundCommand(const std::string& command);
  ~BackgroundCommand();
  BackgroundCommand(const BackgroundCommand&) = delete;
  BackgroundCommand& operator=(const BackgroundCommand&) = delete;

  void Signal(int number) const;
  // Waits for its end. The code of a killed command is 128 plus the signal, as in a shell.
  Result Finish();

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

// An mla-server process with small limits on a unix socket of its own; killed by the destructor.
class ServerProcess final {
 public:
  // Returns when the server is healthy, or after ten seconds. `log` is the descriptor of its log,
  // which the caller keeps; -1: a file, which Log reads.
  explicit ServerProcess(const std::vector<std::string>& flags, int log = -1);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  std::string target() const { return "unix:" + folder_.File("mla.sock"); }
  // A command line that runs mlactl against the server.
  std::string Mlactl(const std::string& words) const;
  int Health() const { return Shell(Mlactl("health")).code; }
  // After SIGSTOP it returns once the server has stopped.
  void Signal(int number) const;
  // From now on the server may write no file beyond this many bytes. Returns false if the system
  // refuses.
  bool LimitFiles(uint64_t bytes) const;
  int Wait();  // waits for its end; returns the exit code
  std::string Log() const;
  std::string File(const std::string& name) const { return folder_.File(name); }

 private:
  TempFolder folder_;
  pid_t pid_ = -1;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_PROCESSES_H_
