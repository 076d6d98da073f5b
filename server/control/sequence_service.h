// Implements the Sequences service. Each RPC is parsed, makes one engine call, and replies.
//
// Threading: any thread. A call waits for the engine's role, at most for a running launch. Open and
// Match also wait for rows from slower tiers, for at most 90 % of their client's deadline.
#ifndef MLA_SERVER_CONTROL_SEQUENCE_SERVICE_H_
#define MLA_SERVER_CONTROL_SEQUENCE_SERVICE_H_

#include "mla/v1/sequence.grpc.pb.h"
#include "server/control/rpc_context.h"

namespace mla::server {

void Fill(const scheduler::SequenceInfo& from, v1::SequenceInfo* message);

class SequenceService final : public v1::Sequences::Service {
 public:
  explicit SequenceService(const RpcContext& rpc) : rpc_(rpc) {}

  grpc::Status Open(grpc::ServerContext* context, const v1::OpenRequest* request,
                    v1::OpenReply* reply) override;
  grpc::Status Match(grpc::ServerContext* context, const v1::MatchRequest* request,
                     v1::MatchReply* reply) override;
  grpc::Status Probe(grpc::ServerContext* context, const v1::ProbeRequest* request,
                     v1::ProbeReply* reply) override;
  grpc::Status Get(grpc::ServerContext* context, const v1::GetRequest* request,
                   v1::GetReply* reply) override;
  grpc::Status Fork(grpc::ServerContext* context, const v1::ForkRequest* request,
                    v1::ForkReply* reply) override;
  grpc::Status Truncate(grpc::ServerContext* context, const v1::TruncateRequest* request,
                        v1::TruncateReply* reply) override;
  grpc::Status ReadTail(grpc::ServerContext* context, const v1::ReadTailRequest* request,
                        v1::ReadTailReply* reply) override;
  grpc::Status Release(grpc::ServerContext* context, const v1::ReleaseRequest* request,
                       v1::ReleaseReply* reply) override;
  grpc::Status RenewLease(grpc::ServerContext* context, const v1::RenewLeaseRequest* request,
                          v1::RenewLeaseReply* reply) override;

 private:
  const RpcContext rpc_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_SEQUENCE_SERVICE_H_
