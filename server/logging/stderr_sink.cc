#include "server/logging/stderr_sink.h"

#include <poll.h>
#include <spdlog/details/log_msg.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace mla::server {
namespace {

// Waits until the descriptor takes more. Another process that shares it may have made it
// non-blocking.
bool WaitForRoom() {
  pollfd wanted = {STDERR_FILENO, POLLOUT, 0};
  return poll(&wanted, 1, -1) == 1 && (wanted.revents & POLLOUT) != 0;
}

}  // namespace

StderrSink::StderrSink(std::function<uint64_t()> dropped,
                       std::function<std::string(uint64_t)> notice)
    : dropped_(std::move(dropped)), notice_(std::move(notice)) {}

void StderrSink::sink_it_(const spdlog::details::log_msg& message) {
  const MutexLock lock(lines_mutex_);
  if (const uint64_t dropped = dropped_(); dropped != noticed_) {
    const std::string text = notice_(dropped - std::exchange(noticed_, dropped));
    Write({message.time, {}, message.logger_name, spdlog::level::warn, text});
  }
  Write(message);
  ++written_;
}

void StderrSink::Write(const spdlog::details::log_msg& message) {
  spdlog::memory_buf_t line;
  formatter_->format(message, line);
  for (size_t done = 0; done < line.size();) {
    const ssize_t some = write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (some >= 0) {
      done += static_cast<size_t>(some);
    } else if (errno != EINTR && !(errno == EAGAIN && WaitForRoom())) {
      return;  // the reader has gone or the disk is full; the server goes on without logs
    }
  }
}

}  // namespace mla::server
