// Implements the Admin service: information about the server, its activity, quotas of tenants, and
// shutdown.
//
// Every caller may read. Drain is for operators (CheckOperator in identity.h).
//
// Threading: any thread. WatchStatus and Drain keep theirs for their whole time; the number of
// watchers is bounded.
#ifndef MLA_SERVER_CONTROL_ADMIN_SERVICE_H_
#define MLA_SERVER_CONTROL_ADMIN_SERVICE_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend_registry.h"
#include "mla/v1/admin.grpc.pb.h"
#include "server/config/config.h"
#include "server/control/rpc_context.h"
#include "server/hand_over/hand_over.h"
#include "server/lifecycle/drain.h"
#include "server/lifecycle/watchers.h"

namespace mla::server {

struct AdminOptions {
  Drain* drain = nullptr;
  // Prepares a hand-over to the servers at these addresses; empty if this server does not have TLS.
  std::function<absl::StatusOr<std::unique_ptr<HandOver>>(const std::vector<std::string>&)>
      connect_peers;
  Watchers* watchers = nullptr;
  std::function<void()> exit;  // asks the process to stop
  std::vector<kernels::BackendCandidate> candidates;
  Config config;
  bool shared_memory = false;  // the listener is open
  bool ucx = false;            // rings over UCX can be opened
  bool checkpoints = false;    // whether a folder for checkpoints is configured
  // Returns figures for GetStats and WatchStatus without waiting for a launch. If it is empty,
  // Engine::Stats is called.
  std::function<scheduler::EngineStats()> stats;
};

class AdminService final : public v1::Admin::Service {
 public:
  AdminService(const RpcContext& rpc, AdminOptions options);

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoReply* reply) override;
  grpc::Status GetStats(grpc::ServerContext* context, const v1::GetStatsRequest* request,
                        v1::GetStatsReply* reply) override;
  grpc::Status WatchStatus(grpc::ServerContext* context, const v1::WatchStatusRequest* request,
                           grpc::ServerWriter<v1::StatusUpdate>* writer) override;
  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainReply* reply) override;
  grpc::Status CancelDrain(grpc::ServerContext* context, const v1::CancelDrainRequest* request,
                           v1::CancelDrainReply* reply) override;
  grpc::Status GetQuota(grpc::ServerContext* context, const v1::GetQuotaRequest* request,
                        v1::GetQuotaReply* reply) override;
  grpc::Status SetQuota(grpc::ServerContext* context, const v1::SetQuotaRequest* request,
                        v1::SetQuotaReply* reply) override;
  grpc::Status EvictSequences(grpc::ServerContext* context,
                              const v1::EvictSequencesRequest* request,
                              v1::EvictSequencesReply* reply) override;
  grpc::Status EvictModel(grpc::ServerContext* context, const v1::EvictModelRequest* request,
                          v1::EvictModelReply* reply) override;

 private:
  scheduler::EngineStats Stats() const;
  absl::StatusOr<std::unique_ptr<HandOver>> ConnectPeers(const v1::DrainRequest& request) const;
  absl::Status CheckTenant(const std::string& tenant) const;
  void FillLimits(v1::Limits* limits) const;
  void FillBackends(v1::GetServerInfoReply* reply) const;
  void FillUpdate(const ServerState::Snapshot& snapshot, v1::StatusUpdate* update) const;

  const RpcContext rpc_;
  const AdminOptions options_;
  const std::chrono::steady_clock::time_point started_;
};

// Fills the reply of GetStats; the status page shows it too.
void FillStats(const StatSources& stats, v1::GetStatsReply* reply);

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_ADMIN_SERVICE_H_
