#include "server/logging/library_logs.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <string>

#include "server/logging/log_limiter.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

LogLimiter limiter;

void Report(const char* library, const std::string& message) {
  limiter.Log(LogLevel::kWarning, "library", {{"library", library}, {"message", message}});
}

void FromGrpc(gpr_log_func_args* args) {
  const std::string message = args->message;
  if (message.rfind("assertion failed", 0) != 0) return Report("grpc", message);
  // The library is about to end the process, so write this line at once and no other one.
  Log(LogLevel::kError, "library", {{"library", "grpc"}, {"message", message}});
}

void FromProtobuf(google::protobuf::LogLevel, const char*, int, const std::string& message) {
  Report("protobuf", message);
}

}  // namespace

void CaptureLibraryLogs() {
  gpr_set_log_function(FromGrpc);
  google::protobuf::SetLogHandler(FromProtobuf);
}

}  // namespace mla::server
