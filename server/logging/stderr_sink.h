// Where log lines go: the standard error of the process.
//
// Threading: one thread writes at a time, which the logger sees to; the counts from any thread.
#ifndef MLA_SERVER_LOGGING_STDERR_SINK_H_
#define MLA_SERVER_LOGGING_STDERR_SINK_H_

#include <spdlog/sinks/base_sink.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace mla::server {

class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  // `dropped`: lines that were left out for want of room, so far; `notice`: the text of the line
  // that says how many.
  StderrSink(std::function<uint64_t()> dropped, std::function<std::string(uint64_t)> notice);
  // Lines that were written, or could not be.
  uint64_t written() const { return written_; }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override;
  void flush_() override {}

 private:
  void Write(const spdlog::details::log_msg& message);

  const std::function<uint64_t()> dropped_;
  const std::function<std::string(uint64_t)> notice_;
  uint64_t noticed_ = 0;
  std::atomic<uint64_t> written_{0};
};

}  // namespace mla::server

#endif  // MLA_SERVER_LOGGING_STDERR_SINK_H_
