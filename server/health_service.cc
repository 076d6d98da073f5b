#include "server/health_service.h"

#include <chrono>

#include "absl/cleanup/cleanup.h"

namespace mla::server {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// How often a watcher looks whether its client is still there.
constexpr auto kCancelPeriod = std::chrono::milliseconds(200);

HealthCheckResponse::ServingStatus StatusOf(const ServerState::Snapshot& snapshot) {
  return snapshot.serving() ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

}  // namespace

HealthService::HealthService(const ServerState* state, std::set<std::string> services,
                             int32_t max_watchers)
    : state_(state), services_(std::move(services)), max_watchers_(max_watchers) {
  services_.insert("");
}

grpc::Status HealthService::Check(grpc::ServerContext*, const HealthCheckRequest* request,
                                  HealthCheckResponse* reply) {
  if (services_.count(request->service()) == 0) {
    return grpc::Status(grpc::StatusCode::NOT_FOUND, "no such service");
  }
  reply->set_status(StatusOf(state_->Get()));
  return grpc::Status::OK;
}

grpc::Status HealthService::Watch(grpc::ServerContext* context, const HealthCheckRequest* request,
                                  grpc::ServerWriter<HealthCheckResponse>* writer) {
  const absl::Cleanup leave = [this] { watchers_.fetch_sub(1); };
  if (watchers_.fetch_add(1) >= max_watchers_) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "too many watchers");
  }
  const bool known = services_.count(request->service()) != 0;
  HealthCheckResponse reply;
  int sent = -1;
  ServerState::Snapshot now = state_->Get();
  while (!context->IsCancelled()) {
    reply.set_status(known ? StatusOf(now) : HealthCheckResponse::SERVICE_UNKNOWN);
    if (reply.status() != sent && !writer->Write(reply)) break;
    sent = reply.status();
    if (now.phase == Phase::kStopped) break;
    now = state_->WaitForChange(now.version, kCancelPeriod);
  }
  return grpc::Status::OK;
}

}  // namespace mla::server
