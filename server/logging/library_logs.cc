#include "server/logging/library_logs.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <string>

#include "server/logging/log_limiter.h"

namespace mla::server {
namespace {

LogLimiter limiter;

void Report(const char* library, const std::string& message) {
  limiter.Log(LogLevel::kWarning, "library", {{"library", library}, {"message", message}});
}

void FromGrpc(gpr_log_func_args* args) { Report("grpc", args->message); }

void FromProtobuf(google::protobuf::LogLevel, const char*, int, const std::string& message) {
  Report("protobuf", message);
}

}  // namespace

void CaptureLibraryLogs() {
  gpr_set_log_function(FromGrpc);
  google::protobuf::SetLogHandler(FromProtobuf);
}

}  // namespace mla::server
