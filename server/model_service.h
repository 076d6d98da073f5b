// The Models service: registration, and the streamed upload of the EXPANDED profile's weights.
//
// An upload is header, chunks, trailer. Chunks go to the engine as they come but count only after
// the trailer's SHA-256 has been found equal; whatever ends the call earlier discards them. One
// upload a model at a time.
//
// Threading: any thread; an upload holds its thread for its whole life.
#ifndef MLA_SERVER_MODEL_SERVICE_H_
#define MLA_SERVER_MODEL_SERVICE_H_

#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "mla/v1/model.grpc.pb.h"
#include "server/rpc_context.h"

namespace mla::server {

class ModelService final : public v1::Models::Service {
 public:
  // `weight_chunk_bytes`: wire.weight_chunk_bytes.
  ModelService(const RpcContext& rpc, int64_t weight_chunk_bytes)
      : rpc_(rpc), weight_chunk_bytes_(weight_chunk_bytes) {}

  grpc::Status Register(grpc::ServerContext* context, const v1::RegisterRequest* request,
                        v1::RegisterReply* reply) override;
  grpc::Status UploadWeights(grpc::ServerContext* context,
                             grpc::ServerReader<v1::UploadWeightsRequest>* reader,
                             v1::UploadWeightsReply* reply) override;
  grpc::Status List(grpc::ServerContext* context, const v1::ListModelsRequest* request,
                    v1::ListModelsReply* reply) override;
  grpc::Status Unregister(grpc::ServerContext* context, const v1::UnregisterRequest* request,
                          v1::UnregisterReply* reply) override;

 private:
  absl::Status Upload(const std::string& tenant, grpc::ServerReader<v1::UploadWeightsRequest>* in,
                      v1::UploadWeightsReply* reply, scheduler::Fault* fault);

  const RpcContext rpc_;
  const int64_t weight_chunk_bytes_;
  std::mutex mutex_;
  std::set<std::pair<std::string, std::string>> uploading_;  // (tenant, model)
};

}  // namespace mla::server

#endif  // MLA_SERVER_MODEL_SERVICE_H_
