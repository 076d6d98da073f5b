#include "server/reload/config_reloader.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

constexpr size_t kMostFileBytes = size_t{1} << 20;  // yaml_file.h refuses larger ones
// Clients renew at a third of the lease that they found when they connected.
constexpr int64_t kLeastPartOfLease = 2;

}  // namespace

std::string FileContents(const std::string& path) {
  if (path.empty()) return "";
  std::ifstream file(path, std::ios::binary);
  if (!file) return "\ncannot be read";
  std::string text(kMostFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

ConfigReloader::ConfigReloader(Config running, std::string contents, ReloadHooks hooks)
    : hooks_(std::move(hooks)),
      running_(std::move(running)),
      longest_lease_ms_(running_.limits.sequence_lease_ms),
      used_(std::move(contents)),
      looked_at_(used_) {}

absl::Status ConfigReloader::Check(const LoadedConfig& read, const ConfigChanges& changes) const {
  if (!read.faults.empty()) {
    return absl::InvalidArgumentError(absl::StrJoin(read.faults, "; "));
  }
  if (!changes.fixed.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(absl::StrJoin(changes.fixed, ", "), ": only a restart changes this"));
  }
  const int64_t lease = read.config.limits.sequence_lease_ms;
  if (lease < longest_lease_ms_ / kLeastPartOfLease) {
    return absl::FailedPreconditionError(absl::StrCat(
        "limits.sequence_lease_ms: got ", lease, ", must be at least ",
        longest_lease_ms_ / kLeastPartOfLease, ": connected clients renew by the lease of ",
        longest_lease_ms_, " ms, and only a restart goes lower"));
  }
  return absl::OkStatus();
}

absl::Status ConfigReloader::Reload() {
  used_ = looked_at_ = hooks_.contents();
  const LoadedConfig read = hooks_.load();
  const ConfigChanges changes = ChangesOf(running_, read.config);
  if (absl::Status status = Check(read, changes); !status.ok()) {
    ++status_.refused;
    status_.why = std::string(status.message());
    Log(LogLevel::kError, "config_reload_refused",
        {{"why", status_.why}, {"in_use", "the last good configuration"}});
    return status;
  }
  status_.why.clear();
  if (changes.live.empty()) {
    Log(LogLevel::kInfo, "config_unchanged");
    return absl::OkStatus();
  }
  hooks_.apply(read.config);
  running_ = read.config;
  longest_lease_ms_ = std::max(longest_lease_ms_, running_.limits.sequence_lease_ms);
  ++status_.reloads;
  Log(LogLevel::kInfo, "config_reloaded", {{"keys", absl::StrJoin(changes.live, ",")}});
  return absl::OkStatus();
}

bool ConfigReloader::Look() {
  const std::string now = hooks_.contents();
  const bool settled = std::exchange(looked_at_, now) == now;
  if (!settled || now == used_) return false;
  Reload().IgnoreError();
  return true;
}

}  // namespace mla::server
