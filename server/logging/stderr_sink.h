// Writes log lines to the standard error of the process.
//
// Threading: any thread; set the pattern before the first line.
#ifndef MLA_SERVER_LOGGING_STDERR_SINK_H_
#define MLA_SERVER_LOGGING_STDERR_SINK_H_

#include <spdlog/details/null_mutex.h>
#include <spdlog/sinks/base_sink.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::server {

class StderrSink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  // `dropped`: returns the number of lines dropped so far for lack of room; the text of the line
  // that says how many.
  StderrSink(std::function<uint64_t()> dropped, std::function<std::string(uint64_t)> notice);
  // Returns the number of lines that were written or could not be.
  uint64_t written() const { return written_; }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override;
  void flush_() override {}

 private:
  void Write(const spdlog::details::log_msg& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(lines_mutex_);

  const std::function<uint64_t()> dropped_;
  const std::function<std::string(uint64_t)> notice_;
  Mutex lines_mutex_;
  uint64_t noticed_ ABSL_GUARDED_BY(lines_mutex_) = 0;
  std::atomic<uint64_t> written_{0};
};

}  // namespace mla::server

#endif  // MLA_SERVER_LOGGING_STDERR_SINK_H_
