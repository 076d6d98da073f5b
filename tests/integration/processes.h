// The binaries as an operator meets them: an mla-server process, and programs run to their end.
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

// Runs a command of the shell; stdout and stderr come together.
Result Shell(const std::string& command);

// A command of the shell that runs meanwhile; killed at the end.
class BackgroundCommand final {
 public:
  explicit BackgroundCommand(const std::string& command);
  ~BackgroundCommand();
  BackgroundCommand(const BackgroundCommand&) = delete;
  BackgroundCommand& operator=(const BackgroundCommand&) = delete;

  void Signal(int number) const;
  // Waits for its end; the code is 128 + the signal that killed it, as a shell says it.
  Result Finish();

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

// An mla-server process with small limits on a unix socket of its own; killed at the end.
class ServerProcess final {
 public:
  // Returns when it is healthy, or has had ten seconds. `log`: the descriptor that it writes its
  // log to, which stays the caller's; -1: a file, which Log reads.
  explicit ServerProcess(const std::vector<std::string>& flags, int log = -1);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  std::string target() const { return "unix:" + folder_.File("mla.sock"); }
  // A command line that runs mlactl on it.
  std::string Mlactl(const std::string& words) const;
  int Health() const { return Shell(Mlactl("health")).code; }
  void Signal(int number) const;
  // From now on it may write no file beyond so many bytes. False: the system refuses.
  bool LimitFiles(uint64_t bytes) const;
  int Wait();  // for its end; the exit code
  std::string Log() const;
  std::string File(const std::string& name) const { return folder_.File(name); }

 private:
  TempFolder folder_;
  pid_t pid_ = -1;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_PROCESSES_H_
