// Shows the progress of a long command on standard error: one line, redrawn, on a terminal; plain
// lines elsewhere. Threading: any thread.
#ifndef MLA_CLIENT_MLACTL_CLI_PROGRESS_H_
#define MLA_CLIENT_MLACTL_CLI_PROGRESS_H_

#include <chrono>
#include <cstdio>
#include <string>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::mlactl {

class Progress final {
 public:
  // `quiet` shows nothing at all.
  Progress(std::FILE* stream, bool quiet);
  ~Progress();

  // `fraction` 0..1 of `phase` is done; below 0: unknown. May be called often: it draws at most
  // ten times a second on a terminal, and elsewhere when the phase changes and every five seconds.
  void Show(const std::string& phase, double fraction, const std::string& detail = "");
  // Ends the redrawn line, so that other output starts on a line of its own.
  void Clear();

 private:
  using Clock = std::chrono::steady_clock;
  std::string Line(const std::string& phase, double fraction, const std::string& detail) const;

  std::FILE* const stream_;
  const bool quiet_, terminal_;
  Mutex mutex_;
  std::string phase_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point last_ ABSL_GUARDED_BY(mutex_){};
  bool drawn_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_PROGRESS_H_
