// Log lines. A line describes one event by a fixed `event` word and fields.
//
// As text ("07:12:01.123 info  listening address=127.0.0.1:50551") or as JSON objects with the keys
// time, level, event and the fields. Fields never hold tensor bytes or weights. Their values are
// escaped, so that one event cannot look like two.
//
// Lines go to standard error. Unless that is a file, a separate thread writes them, so that a
// reader that has stopped reading delays no caller. When thousands of lines wait, the oldest are
// dropped, and the event log_dropped gives their number.
//
// Threading: any thread; lines never mix.
#ifndef MLA_SERVER_LOGGING_LOGGING_H_
#define MLA_SERVER_LOGGING_LOGGING_H_

#include <chrono>
#include <cmath>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mla::server {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// A value of a log line: a text, a number or a boolean. JSON output keeps the difference.
class LogValue {
 public:
  LogValue(std::string text) : value_(std::move(text)) {}  // NOLINT: implicit
  LogValue(const char* text) : value_(text) {}             // NOLINT: implicit
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  LogValue(T number) : value_(std::to_string(number)), plain_(true) {  // NOLINT: implicit
    if constexpr (std::is_same_v<T, bool>) value_ = number ? "true" : "false";
    if constexpr (std::is_floating_point_v<T>) plain_ = std::isfinite(number);
  }

  const std::string& text() const { return value_; }
  bool plain() const { return plain_; }  // not a text

 private:
  std::string value_;
  bool plain_ = false;
};

using LogFields = std::vector<std::pair<std::string, LogValue>>;

// Call it before the first line. `format` is "text" or "json"; `level` is a value of the config key
// log.level.
void ConfigureLogging(const std::string& format, const std::string& level);

// Sets the level from the next line on. `level` is as for ConfigureLogging.
void SetLogLevel(const std::string& level);

void Log(LogLevel level, const char* event, const LogFields& fields = {});

// Returns when all lines so far are written, or after `limit`, because their reader may have
// stopped. Call it before the process ends. After an error Log itself flushes for a moment.
void FlushLog(std::chrono::milliseconds limit);

// Returns the line that Log would write, without a time stamp. For tests.
std::string FormatLine(bool json, LogLevel level, const std::string& event,
                       const LogFields& fields);

}  // namespace mla::server

#endif  // MLA_SERVER_LOGGING_LOGGING_H_
