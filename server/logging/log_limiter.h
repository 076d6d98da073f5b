// Writes at most one line a second for an event that others can cause as often as they like.
//
// Threading: any thread.
#ifndef MLA_SERVER_LOGGING_LOG_LIMITER_H_
#define MLA_SERVER_LOGGING_LOG_LIMITER_H_

#include <atomic>
#include <cstdint>
#include <limits>

#include "base/clock.h"
#include "server/logging/logging.h"

namespace mla::server {

class LogLimiter final {
 public:
  // Writes the line unless one was written in this second. The next line that is written has the
  // number of those left out in its field `suppressed`.
  void Log(LogLevel level, const char* event, LogFields fields) {
    const int64_t second = SteadyNanos() / 1'000'000'000;
    int64_t last = last_second_.load(std::memory_order_relaxed);
    if (last == second || !last_second_.compare_exchange_strong(last, second)) {
      suppressed_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    if (const int64_t left_out = suppressed_.exchange(0); left_out > 0) {
      fields.emplace_back("suppressed", left_out);
    }
    server::Log(level, event, fields);
  }

 private:
  std::atomic<int64_t> last_second_{std::numeric_limits<int64_t>::min()};
  std::atomic<int64_t> suppressed_{0};
};

}  // namespace mla::server

#endif  // MLA_SERVER_LOGGING_LOG_LIMITER_H_
