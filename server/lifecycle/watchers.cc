#include "server/lifecycle/watchers.h"

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::server {

absl::Status Watchers::Place::Check(const char* call) {
  if (before_ < watchers_->most_) return absl::OkStatus();
  return RefuseField({.field = "call",
                      .got = absl::StrCat("one more ", call),
                      .limit = absl::StrCat("at most ", watchers_->most_),
                      .reason = "too_many_watchers",
                      .retry_after_ms = 1000},
                     absl::StatusCode::kResourceExhausted);
}

bool Watchers::OverAfter(const grpc::ServerContext& call, std::chrono::milliseconds pause) const {
  if (call.IsCancelled()) return true;
  ServerState::Snapshot now = state_->Get();
  const auto end = std::chrono::steady_clock::now() + pause;
  while (now.phase != Phase::kStopped && std::chrono::steady_clock::now() < end) {
    now = state_->WaitForChange(now.version, std::chrono::ceil<std::chrono::milliseconds>(
                                                 end - std::chrono::steady_clock::now()));
  }
  return now.phase == Phase::kStopped || call.IsCancelled();
}

}  // namespace mla::server
