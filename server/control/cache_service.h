// The Cache service: moves rows of sequences out of the server and into it, and tells about cached
// rows.
//
// Each stream holds one chunk of memory, its thread, and one of its tenant's upload places.
// Launches of the engine carry the chunks between pool and stream, so steps of other clients go on
// at the same time.
//
// Threading: any thread; a stream holds its thread until it ends.
#ifndef MLA_SERVER_CONTROL_CACHE_SERVICE_H_
#define MLA_SERVER_CONTROL_CACHE_SERVICE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "mla/v1/cache.grpc.pb.h"
#include "server/control/rpc_context.h"
#include "server/lifecycle/idle_calls.h"
#include "server/lifecycle/upload_reader.h"
#include "server/lifecycle/watchers.h"
#include "server/pages/checkpoint_store.h"
#include "server/pages/page_digest.h"

namespace mla::server {

class CacheService final : public v1::Cache::Service {
 public:
  // `chunk_bytes` is wire.weight_chunk_bytes. `checkpoints` is null if none are configured. All
  // pointers must outlive the service.
  CacheService(const RpcContext& rpc, int64_t chunk_bytes, IdleCalls* idle,
               CheckpointStore* checkpoints, Watchers* watchers);

  grpc::Status Export(grpc::ServerContext* context, const v1::ExportRequest* request,
                      grpc::ServerWriter<v1::PagesPart>* writer) override;
  grpc::Status WatchEvents(grpc::ServerContext* context, const v1::WatchEventsRequest* request,
                           grpc::ServerWriter<v1::WatchEventsReply>* writer) override;
  grpc::Status Hint(grpc::ServerContext* context, const v1::HintRequest* request,
                    v1::HintReply* reply) override;
  grpc::Status Explain(grpc::ServerContext* context, const v1::ExplainRequest* request,
                       v1::ExplainReply* reply) override;
  grpc::Status Checkpoint(grpc::ServerContext* context, const v1::CheckpointRequest* request,
                          v1::CheckpointReply* reply) override;
  grpc::Status Restore(grpc::ServerContext* context, const v1::RestoreRequest* request,
                       v1::RestoreReply* reply) override;
  grpc::Status ListCheckpoints(grpc::ServerContext* context,
                               const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsReply* reply) override;
  grpc::Status DropCheckpoints(grpc::ServerContext* context,
                               const v1::DropCheckpointsRequest* request,
                               v1::DropCheckpointsReply* reply) override;

 private:
  using Writer = grpc::ServerWriter<v1::PagesPart>;

  // Import.
  grpc::Status ServeImport(grpc::ServerContext* context, UploadBytes* in, v1::ImportReply* reply);
  // Runs `body` while holding one of the tenant's upload places.
  template <typename Body>
  absl::Status AsUpload(const std::string& tenant, grpc::ServerContext* context, Body body);
  // Returns the tenant whose events a caller may see: its own, or with `all` every tenant
  // (nullopt). PERMISSION_DENIED if a caller that is not an operator sets `all`.
  absl::StatusOr<std::optional<scheduler::TenantKey>> TenantToShow(const Identity& who,
                                                                   bool all) const;
  // Returns UNIMPLEMENTED without checkpoints, and an error if `ids` is more than the sequences
  // that may be open.
  absl::Status CheckCheckpoints(int ids) const;
  absl::Status ReadHead(const Identity& who, UploadReader* in, scheduler::ImportArgs* args,
                        uint64_t* attempt, DigestKind* digests);
  // Sets owner and id of the new sequence, which a draining server passes in `target`.
  absl::Status SetOwner(const Identity& who, const v1::ImportTarget& target,
                        scheduler::ImportArgs* args) const;
  // Registers the model of a sequence that comes from another server if the tenant does not have
  // it.
  absl::Status RegisterFor(const scheduler::ImportArgs& args, const v1::PagesHeader& header);
  // Gives a model that waits for its sinks those that the rows of another server come with.
  absl::Status BringSinks(const scheduler::ImportArgs& args);

  const RpcContext rpc_;
  const int64_t chunk_bytes_;
  IdleCalls* const idle_;
  CheckpointStore* const checkpoints_;
  Watchers* const watchers_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_CACHE_SERVICE_H_
