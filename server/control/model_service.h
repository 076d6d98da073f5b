// The Models service: registration, and the streamed upload of weights for the EXPANDED profile.
//
// An upload is header, chunks, trailer. Chunks go to the engine as they come. They count only after
// the trailer's digest has been found equal; whatever ends the call earlier discards them. One
// transfer of a model at a time (incoming_weights.h).
//
// An upload that sends nothing for wire.upload_idle_ms is cancelled: its client sees CANCELLED.
//
// Threading: any thread; an upload holds its thread until it ends.
#ifndef MLA_SERVER_CONTROL_MODEL_SERVICE_H_
#define MLA_SERVER_CONTROL_MODEL_SERVICE_H_

#include <cstdint>

#include "mla/v1/model.grpc.pb.h"
#include "server/control/incoming_weights.h"
#include "server/control/rpc_context.h"
#include "server/lifecycle/idle_calls.h"
#include "server/lifecycle/upload_reader.h"

namespace mla::server {

class ModelService final : public v1::Models::Service {
 public:
  // `weight_chunk_bytes` is wire.weight_chunk_bytes. `idle` must outlive the service.
  ModelService(const RpcContext& rpc, int64_t weight_chunk_bytes, IdleCalls* idle);

  grpc::Status Register(grpc::ServerContext* context, const v1::RegisterRequest* request,
                        v1::RegisterReply* reply) override;
  grpc::Status UploadScales(grpc::ServerContext* context, const v1::UploadScalesRequest* request,
                            v1::UploadScalesReply* reply) override;
  grpc::Status UploadSinks(grpc::ServerContext* context, const v1::UploadSinksRequest* request,
                           v1::UploadSinksReply* reply) override;
  grpc::Status List(grpc::ServerContext* context, const v1::ListModelsRequest* request,
                    v1::ListModelsReply* reply) override;
  grpc::Status Unregister(grpc::ServerContext* context, const v1::UnregisterRequest* request,
                          v1::UnregisterReply* reply) override;

 private:
  // UploadWeights.
  grpc::Status ServeWeights(grpc::ServerContext* context, UploadBytes* in,
                            v1::UploadWeightsReply* reply);
  // Serves one upload, which takes one of the tenant's upload places and is cancelled if it is
  // idle.
  absl::Status ServeUpload(const Identity& who, grpc::ServerContext* context, UploadBytes* in,
                           v1::UploadWeightsReply* reply);
  // Reads the header, then takes the chunks for the caller or, from another server, for the tenant
  // that the header names.
  absl::Status Upload(const Identity& who, UploadReader* in, v1::UploadWeightsReply* reply);

  const RpcContext rpc_;
  IdleCalls* const idle_;
  IncomingWeights incoming_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_MODEL_SERVICE_H_
