#include "server/process/exit_guards.h"

#include <unistd.h>

#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

std::string WhatWasThrown() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    return absl::StrCat("the machine is short of threads or another resource: ", error.what());
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
  }
  return "the program had to end";
}

[[noreturn]] void EndStart() {
  Log(LogLevel::kError, "start_failed", {{"why", WhatWasThrown()}});
  _exit(kExitNotStarted);
}

}  // namespace

StartGuard::StartGuard() : before_(std::set_terminate(EndStart)) {}

StartGuard::~StartGuard() { std::set_terminate(before_); }

StopGuard::StopGuard(std::chrono::milliseconds bound) {
  const auto watch = [bound](const std::future<void>& over) {
    if (over.wait_for(bound) == std::future_status::ready) return;
    Log(LogLevel::kError, "stop_hangs",
        {{"after_ms", bound.count()}, {"why", "a launch does not end"}});
    _exit(kExitAborted);
  };
  try {
    thread_ = std::thread(watch, over_.get_future());
  } catch (const std::system_error& error) {
    Log(LogLevel::kWarning, "stop_unguarded", {{"why", error.what()}});
  }
}

StopGuard::~StopGuard() {
  over_.set_value();
  if (thread_.joinable()) thread_.join();
}

void EndStuck(const std::string& why) {
  Log(LogLevel::kError, "stuck", {{"why", why}});
  _exit(kExitAborted);
}

}  // namespace mla::server
