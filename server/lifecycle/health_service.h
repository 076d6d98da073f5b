// Implements grpc.health.v1 over ServerState: SERVING only while the server is ready for new work.
// So a prober sees it neither before warm-up has ended nor after a drain has begun.
//
// Check and Watch are served by the stream poller's threads. They hold no thread of their own, and
// calls that keep the control threads busy do not delay them. One notifier thread writes to all
// watchers when the state changes. At most `max_watchers` calls are open at the same time, and at
// most half of them by one tenant; further calls are RESOURCE_EXHAUSTED. A call whose request does
// not arrive within kRequestTimeout is cancelled.
//
// Life: call Serve when the gRPC server has started; call Stop after its Shutdown and before the
// poller's Stop. Threading: Serve, Stop and the destructor from one thread.
#ifndef MLA_SERVER_LIFECYCLE_HEALTH_SERVICE_H_
#define MLA_SERVER_LIFECYCLE_HEALTH_SERVICE_H_

#include <grpcpp/impl/service_type.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "grpc/health/v1/health.pb.h"
#include "server/grpc/stream_call.h"
#include "server/lifecycle/server_state.h"

namespace mla::server {

struct HealthOptions {
  std::set<std::string> services;  // full names; "" is added
  int32_t max_watchers = 1024;
  size_t max_name_bytes = 128;  // of tenants
  std::string unix_tenant;      // server.unix_tenant
};

class HealthService final : public grpc::Service {
 public:
  static constexpr std::chrono::seconds kRequestTimeout{5};

  // `state` outlives the service.
  HealthService(const ServerState* state, HealthOptions options);
  ~HealthService() override;

  void Serve(CompletionPoller* poller);
  // Waits until no call is left, then ends the notifier.
  void Stop();

 private:
  class Call;
  enum class Method { kCheck, kWatch };  // also the methods' indices

  void Accept(Method method, std::unique_ptr<StreamCall> call);
  bool Admit(const std::string& tenant);
  void Forget(Call* call);                 // it is about to finish
  void OnGone(const std::string& tenant);  // it has finished
  // Tells watchers of each version of the state after `seen`.
  void Notify(uint64_t seen);
  // Empty: the service does not exist.
  std::optional<grpc::health::v1::HealthCheckResponse::ServingStatus> StatusOf(
      const std::string& service, const ServerState::Snapshot& now) const;

  const ServerState* const state_;
  HealthOptions options_;
  std::optional<StreamAcceptor> check_, watch_;
  Mutex mutex_;
  CondVar changed_;
  std::set<Call*> calls_ ABSL_GUARDED_BY(mutex_);                // not about to finish
  std::map<std::string, int32_t> open_ ABSL_GUARDED_BY(mutex_);  // calls by tenant
  int32_t open_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread notifier_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_LIFECYCLE_HEALTH_SERVICE_H_
