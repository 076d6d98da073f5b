// grpc.health.v1 over ServerState: SERVING only while the server is ready for new work, so a prober
// never sees it before warm-up has ended nor after a drain has begun.
//
// Threading: any thread. A Watch holds its thread; at most `max_watchers` at a time, further ones
// are RESOURCE_EXHAUSTED.
#ifndef MLA_SERVER_HEALTH_SERVICE_H_
#define MLA_SERVER_HEALTH_SERVICE_H_

#include <atomic>
#include <set>
#include <string>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/server_state.h"

namespace mla::server {

class HealthService final : public grpc::health::v1::Health::Service {
 public:
  // `services`: full names; "" is added.
  HealthService(const ServerState* state, std::set<std::string> services, int32_t max_watchers);

  grpc::Status Check(grpc::ServerContext* context,
                     const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* reply) override;
  grpc::Status Watch(grpc::ServerContext* context,
                     const grpc::health::v1::HealthCheckRequest* request,
                     grpc::ServerWriter<grpc::health::v1::HealthCheckResponse>* writer) override;

 private:
  const ServerState* const state_;
  std::set<std::string> services_;
  const int32_t max_watchers_;
  std::atomic<int32_t> watchers_{0};
};

}  // namespace mla::server

#endif  // MLA_SERVER_HEALTH_SERVICE_H_
