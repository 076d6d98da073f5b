// The Cache service: rows of sequences out of the server and into it.
//
// Each stream holds one buffer of a chunk, its thread, and its place among the uploads of its
// tenant. Chunks go between pool and stream with the launches of the engine, so that steps of
// others go on.
//
// Threading: any thread; a stream holds its thread for its whole life.
#ifndef MLA_SERVER_CONTROL_CACHE_SERVICE_H_
#define MLA_SERVER_CONTROL_CACHE_SERVICE_H_

#include <cstdint>
#include <string>

#include "mla/v1/cache.grpc.pb.h"
#include "server/control/rpc_context.h"
#include "server/lifecycle/idle_calls.h"
#include "server/pages/page_stream.h"

namespace mla::server {

class CacheService final : public v1::Cache::Service {
 public:
  // Of the chunks that Export sends: any client takes messages of this size.
  static constexpr int64_t kExportChunkBytes = int64_t{1} << 20;

  // `chunk_bytes`: wire.weight_chunk_bytes. `idle` outlives the service.
  CacheService(const RpcContext& rpc, int64_t chunk_bytes, IdleCalls* idle)
      : rpc_(rpc), chunk_bytes_(chunk_bytes), idle_(idle) {}

  grpc::Status Export(grpc::ServerContext* context, const v1::ExportRequest* request,
                      grpc::ServerWriter<v1::PagesPart>* writer) override;
  grpc::Status Import(grpc::ServerContext* context, grpc::ServerReader<v1::ImportRequest>* reader,
                      v1::ImportReply* reply) override;

 private:
  using Reader = grpc::ServerReader<v1::ImportRequest>;
  using Writer = grpc::ServerWriter<v1::PagesPart>;

  // Runs `body` with a place among the tenant's uploads.
  template <typename Body>
  absl::Status AsUpload(const std::string& tenant, grpc::ServerContext* context, Body body);
  absl::Status SendPages(const std::string& tenant, const scheduler::MovingPages& pages,
                         grpc::ServerContext* context, Writer* writer);
  // The group with row tags.first_row + `row`, and its digest.
  absl::Status SendGroup(const std::string& tenant, const scheduler::MovingPages& pages,
                         int64_t row, PageDigests* digests, grpc::ServerContext* context,
                         Writer* writer);
  bool Send(grpc::ServerContext* context, Writer* writer, const v1::PagesPart& part);
  bool Read(grpc::ServerContext* context, Reader* reader, v1::ImportRequest* message);
  absl::Status ReadHead(grpc::ServerContext* context, Reader* reader, scheduler::ImportArgs* args);
  // `not_finite_from`: as Engine::EndImport takes it.
  absl::Status TakePages(const std::string& tenant, const scheduler::MovingPages& pages,
                         grpc::ServerContext* context, Reader* reader, int64_t* not_finite_from,
                         uint64_t* bytes);

  const RpcContext rpc_;
  const int64_t chunk_bytes_;
  IdleCalls* const idle_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_CACHE_SERVICE_H_
