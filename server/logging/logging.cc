#include "server/logging/logging.h"

#include <pthread.h>
#include <signal.h>
#include <spdlog/async_logger.h>
#include <spdlog/details/thread_pool.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "server/logging/stderr_sink.h"

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
  // Invalid UTF-8 from a client is replaced, because logging must not fail.
  return nlohmann::json(value).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

bool IsPlain(const std::string& value) {
  if (value.empty()) return false;
  for (const char c : value) {
    if (c <= 0x20 || c >= 0x7f || c == '"' || c == '=' || c == '\\') return false;
  }
  return true;
}

// At most this number of lines waits for a reader of standard error; beyond it the oldest are
// dropped.
constexpr size_t kMostQueuedLines = 4096;
// An error line may delay its caller by this time, so that it is written before the process ends.
constexpr std::chrono::milliseconds kErrorFlush{200};

// The object is never destroyed, because lines may still be written while the process ends.
struct Output {
  // null: each line is written by the thread that logs it
  std::shared_ptr<spdlog::details::thread_pool> pool;
  std::shared_ptr<StderrSink> sink;
  std::shared_ptr<spdlog::logger> logger;
  std::atomic<uint64_t> logged{0};
  std::atomic<uint64_t> stuck_at{UINT64_MAX};  // lines written when a flush gave up

  uint64_t dropped() const { return pool == nullptr ? 0 : pool->overrun_counter(); }
};

// Returns a thread that writes to standard error, whose reader may stop reading: callers of Log
// must not wait for it. Files have no readers, and the last lines before a crash should be in the
// file. Returns null for files, and if no thread can be made.
std::shared_ptr<spdlog::details::thread_pool> MakePool() {
  struct stat about;
  if (fstat(STDERR_FILENO, &about) == 0 && S_ISREG(about.st_mode)) return nullptr;
  // Signals must go to the thread that waits for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  std::shared_ptr<spdlog::details::thread_pool> pool;
  try {
    pool = std::make_shared<spdlog::details::thread_pool>(kMostQueuedLines, 1);
  } catch (const std::exception&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return pool;
}

Output& TheOutput() {
  static Output* const output = [] {
    auto* new_output = new Output;
    new_output->pool = MakePool();
    new_output->sink = std::make_shared<StderrSink>(
        [new_output] { return new_output->dropped(); },
        [](uint64_t lines) {
          return FormatLine(json_lines, LogLevel::kWarning, "log_dropped", {{"lines", lines}});
        });
    if (new_output->pool == nullptr) {
      new_output->logger = std::make_shared<spdlog::logger>("mla", new_output->sink);
    } else {
      new_output->logger = std::make_shared<spdlog::async_logger>(
          "mla", new_output->sink, new_output->pool, spdlog::async_overflow_policy::overrun_oldest);
    }
    new_output->logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %v");
    return new_output;
  }();
  return *output;
}

spdlog::logger& Logger() { return *TheOutput().logger; }

}  // namespace

void ConfigureLogging(const std::string& format, const std::string& level) {
  json_lines = format == "json";
  Logger().set_pattern(json_lines ? "{\"time\":\"%Y-%m-%dT%H:%M:%S.%e%z\",%v"
                                  : "%Y-%m-%dT%H:%M:%S.%e%z %v");
  SetLogLevel(level);
}

void SetLogLevel(const std::string& level) {
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
  ++TheOutput().logged;
  Logger().log(ToSpdlog(level), "{}", FormatLine(json_lines, level, event, fields));
  // An error may be the last line before the process ends.
  if (level == LogLevel::kError) FlushLog(kErrorFlush);
}

void FlushLog(std::chrono::milliseconds limit) {
  Output& output = TheOutput();
  const uint64_t logged = output.logged;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (output.sink->written() + output.dropped() < logged) {
    const uint64_t written = output.sink->written();
    // One wait is enough to learn that the reader has stopped reading.
    if (written == output.stuck_at) return;
    if (std::chrono::steady_clock::now() >= deadline) {
      output.stuck_at = written;
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace mla::server
