#include "server/reload/live_settings.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"

namespace mla::server {
namespace {

OperatorPolicy OperatorsOf(const Config::Listen& listen) {
  OperatorPolicy policy;
  for (const absl::string_view name :
       absl::StrSplit(listen.operators, ',', absl::SkipWhitespace())) {
    policy.tenants.emplace(absl::StripAsciiWhitespace(name));
  }
  policy.local_without_tls = listen.plain_operators != "none";
  policy.remote_without_tls = listen.plain_operators == "any";
  return policy;
}

}  // namespace

void LiveSettings::Set(const Config& config) {
  OperatorPolicy operators = OperatorsOf(config.listen);
  const MutexLock lock(mutex_);
  operators_ = std::move(operators);
  leases_ = {config.limits.sequence_lease_ms, config.limits.model_lease_ms,
             config.limits.step_lease_ms};
  restart_after_ = std::chrono::milliseconds(config.restart_after_ms);
  drain_deadline_ = std::chrono::milliseconds(config.drain_deadline_ms);
}

absl::Status LiveSettings::CheckOperator(const Identity& who) const {
  const MutexLock lock(mutex_);
  return server::CheckOperator(who, operators_);
}

scheduler::DefaultLeases LiveSettings::leases() const {
  const MutexLock lock(mutex_);
  return leases_;
}

std::chrono::milliseconds LiveSettings::restart_after() const {
  const MutexLock lock(mutex_);
  return restart_after_;
}

std::chrono::milliseconds LiveSettings::drain_deadline() const {
  const MutexLock lock(mutex_);
  return drain_deadline_;
}

void LiveSettings::SetRefusal(const std::string& why) {
  const MutexLock lock(mutex_);
  refusal_ = why;
}

std::string LiveSettings::refusal() const {
  const MutexLock lock(mutex_);
  return refusal_;
}

}  // namespace mla::server
