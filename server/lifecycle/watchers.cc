#include "server/lifecycle/watchers.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::server {

Watchers::Place::Place(Watchers* watchers, std::string tenant)
    : watchers_(watchers), tenant_(std::move(tenant)) {
  const MutexLock lock(watchers_->mutex_);
  int32_t& watchers_of_tenant = watchers_->of_tenant_[tenant_];
  taken_ = watchers_->open_ < watchers_->limit_ && watchers_of_tenant < (watchers_->limit_ + 1) / 2;
  if (taken_) {
    ++watchers_of_tenant;
    ++watchers_->open_;
  } else if (watchers_of_tenant == 0) {
    watchers_->of_tenant_.erase(tenant_);
  }
}

Watchers::Place::~Place() {
  if (!taken_) return;
  const MutexLock lock(watchers_->mutex_);
  --watchers_->open_;
  const auto own = watchers_->of_tenant_.find(tenant_);
  if (--own->second == 0) watchers_->of_tenant_.erase(own);
}

absl::Status Watchers::Place::Check(const char* call) const {
  if (taken_) return absl::OkStatus();
  return RefuseField({.field = "call",
                      .got = absl::StrCat("one more ", call),
                      .limit = absl::StrCat("at most ", (watchers_->limit_ + 1) / 2,
                                            " of a tenant, ", watchers_->limit_, " in all"),
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
