#include "server/logging/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <nlohmann/json.hpp>

namespace mla::server {
namespace {

bool json_lines = false;

const char* LevelName(LogLevel level) {
  static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
  return kNames[static_cast<int>(level)];
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  static constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                          spdlog::level::warn, spdlog::level::err};
  return kLevels[static_cast<int>(level)];
}

std::string Quote(const std::string& value) {
  // Invalid UTF-8 from a client is replaced instead of refused: logging must not fail.
  return nlohmann::json(value).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

bool IsPlain(const std::string& value) {
  if (value.empty()) return false;
  for (const char c : value) {
    if (c <= 0x20 || c >= 0x7f || c == '"' || c == '=' || c == '\\') return false;
  }
  return true;
}

spdlog::logger& Logger() {
  // Never destroyed: lines may still be written while the process ends.
  static spdlog::logger* logger = [] {
    auto* made = new spdlog::logger("mla", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %v");
    made->flush_on(spdlog::level::debug);
    return made;
  }();
  return *logger;
}

}  // namespace

void ConfigureLogging(const std::string& format, const std::string& level) {
  json_lines = format == "json";
  Logger().set_pattern(json_lines ? "{\"time\":\"%Y-%m-%dT%H:%M:%S.%e%z\",%v"
                                  : "%Y-%m-%dT%H:%M:%S.%e%z %v");
  Logger().set_level(spdlog::level::from_str(level == "warning" ? "warn" : level));
}

std::string FormatLine(bool json, LogLevel level, const std::string& event,
                       const LogFields& fields) {
  std::string line;
  if (json) {
    line = "\"level\":" + Quote(LevelName(level)) + ",\"event\":" + Quote(event);
    for (const auto& [name, value] : fields) {
      line += "," + Quote(name) + ":" + (value.plain() ? value.text() : Quote(value.text()));
    }
    return line + "}";
  }
  line = std::string(LevelName(level)) + " " + event;
  for (const auto& [name, value] : fields) {
    line += " " + name + "=" + (IsPlain(value.text()) ? value.text() : Quote(value.text()));
  }
  return line;
}

void Log(LogLevel level, const char* event, const LogFields& fields) {
  if (!Logger().should_log(ToSpdlog(level))) return;
  Logger().log(ToSpdlog(level), "{}", FormatLine(json_lines, level, event, fields));
}

}  // namespace mla::server
