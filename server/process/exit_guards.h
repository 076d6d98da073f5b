// Ends the process when its normal shutdown cannot.
//
// Threading: only one StartGuard at a time; create and destroy a StopGuard on one thread.
#ifndef MLA_SERVER_PROCESS_EXIT_GUARDS_H_
#define MLA_SERVER_PROCESS_EXIT_GUARDS_H_

#include <chrono>
#include <exception>
#include <future>
#include <string>
#include <thread>

namespace mla::server {

inline constexpr int kExitDrained = 0, kExitBadConfig = 1, kExitNotStarted = 2, kExitAborted = 3,
                     kExitOutputLost = 4;

// While it lives, an exception that no code catches (the machine has no thread or memory left) ends
// the process with kExitNotStarted and a line in the log. The stack is not unwound, because running
// threads could not be ended.
class StartGuard final {
 public:
  StartGuard();
  ~StartGuard();
  StartGuard(const StartGuard&) = delete;
  StartGuard& operator=(const StartGuard&) = delete;

 private:
  const std::terminate_handler before_;
};

// Ends the process with kExitAborted and a log line unless it is destroyed within `bound`. A launch
// that never ends blocks the thread that shuts the engine down. If no thread can be started for it,
// it does nothing.
class StopGuard final {
 public:
  // Time that a shutdown may take after the drain's deadline. Service managers must wait longer.
  static constexpr std::chrono::milliseconds kGrace{5000};

  explicit StopGuard(std::chrono::milliseconds bound);
  ~StopGuard();
  StopGuard(const StopGuard&) = delete;
  StopGuard& operator=(const StopGuard&) = delete;

 private:
  std::promise<void> over_;
  std::thread thread_;
};

// Ends the process at once with kExitAborted and `why` in the log, because a thread that never
// returns holds what an orderly end needs.
[[noreturn]] void EndStuck(const std::string& why);

}  // namespace mla::server

#endif  // MLA_SERVER_PROCESS_EXIT_GUARDS_H_
