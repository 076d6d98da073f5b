#include "server/operations/probes.h"

#include <chrono>

#include "absl/strings/str_cat.h"

namespace mla::server {

HttpReply Probes::Alive() const {
  const ServerState::Snapshot now = state_->Get();
  const std::chrono::milliseconds timeout = live_->restart_after();
  const bool hung = timeout.count() > 0 && !now.healthy &&
                    std::chrono::steady_clock::now() - now.unhealthy_since >= timeout;
  if (!now.lost && !hung) return {.body = "alive\n"};
  return {.status = 503, .body = absl::StrCat("restart this server: ", now.why_unhealthy, "\n")};
}

HttpReply Probes::Ready(const std::string& query) const {
  const ServerState::Snapshot now = state_->Get();
  HttpReply reply;
  // Once the certificate has expired, every new connection over TLS fails.
  const bool expired = tls_ != nullptr && tls_->CertificateExpired();
  reply.status = now.serving() && !expired ? 200 : 503;
  reply.body = reply.status == 200 ? "ready\n" : "not ready\n";
  if (query != "verbose") return reply;
  if (expired) absl::StrAppend(&reply.body, "tls.cert has expired\n");
  const std::string why = tls_ == nullptr ? "" : tls_->status().why;
  if (!why.empty()) absl::StrAppend(&reply.body, "TLS files not in use: ", why, "\n");
  const std::string refusal = live_->refusal();
  if (!refusal.empty()) absl::StrAppend(&reply.body, "configuration not in use: ", refusal, "\n");
  absl::StrAppend(&reply.body, "state ", PhaseName(now.phase), " ", now.percent, "%\nengine ",
                  now.healthy ? "healthy" : "unhealthy", "\n", now.message,
                  now.message.empty() ? "" : "\n");
  // During a drain the message names what the drain waits for, so the fault of the device is
  // reported too.
  if (now.why_unhealthy != now.message && !now.healthy) {
    absl::StrAppend(&reply.body, now.why_unhealthy, "\n");
  }
  absl::StrAppend(&reply.body, notes_);
  return reply;
}

}  // namespace mla::server
