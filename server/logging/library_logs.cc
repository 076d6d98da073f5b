#include "server/logging/library_logs.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <string>

#include "server/logging/logging.h"

namespace mla::server {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::min();

std::atomic<int64_t> last_second{kNever};
std::atomic<int64_t> suppressed{0};

void Report(const char* library, const std::string& message) {
  const int64_t second = std::chrono::duration_cast<std::chrono::seconds>(
                             std::chrono::steady_clock::now().time_since_epoch())
                             .count();
  int64_t last = last_second.load(std::memory_order_relaxed);
  if (last == second || !last_second.compare_exchange_strong(last, second)) {
    suppressed.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  LogFields fields = {{"library", library}, {"message", message}};
  if (const int64_t left_out = suppressed.exchange(0); left_out > 0) {
    fields.emplace_back("suppressed", left_out);
  }
  Log(LogLevel::kWarning, "library", fields);
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
