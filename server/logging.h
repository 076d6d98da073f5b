// Log lines: one event, one line, a stable `event` word, and fields.
//
// As text ("07:12:01.123 info  listening address=127.0.0.1:50551") or as JSON objects with the keys
// time, level, event and the fields. Fields never hold tensor bytes or weights; their values are
// escaped, so that one event cannot look like two.
//
// Threading: any thread; lines are written whole.
#ifndef MLA_SERVER_LOGGING_H_
#define MLA_SERVER_LOGGING_H_

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace mla::server {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

using LogFields = std::vector<std::pair<std::string, std::string>>;

// Before the first line. `format` is "text" or "json"; `level` a name of config key log.level.
void ConfigureLogging(const std::string& format, const std::string& level);

void Log(LogLevel level, const char* event, const LogFields& fields = {});

// The line that Log would write, without a time stamp. For tests.
std::string FormatLine(bool json, LogLevel level, const std::string& event,
                       const LogFields& fields);

}  // namespace mla::server

#endif  // MLA_SERVER_LOGGING_H_
