#include "server/control/cache_service.h"

#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "server/control/sequence_service.h"
#include "server/grpc/request_validator.h"
#include "server/hand_over/take_over.h"
#include "server/logging/logging.h"
#include "server/pages/page_stream.h"
#include "server/pages/page_transfer.h"

namespace mla::server {
namespace {

using scheduler::MovingPages;

absl::Status Broken() {
  return MakeError(absl::StatusCode::kCancelled, "the client has ended the call",
                   {.reason = "cancelled"});
}

void Fill(const CheckpointInfo& from, v1::CheckpointInfo* to) {
  to->set_sequence_id(from.id);
  to->set_epoch(from.epoch);
  to->set_length(static_cast<uint64_t>(from.rows));
  to->set_bytes(static_cast<uint64_t>(from.bytes));
  to->set_model_id(from.model_id);
  to->set_saved_unix_ms(static_cast<uint64_t>(from.saved_unix_ms));
}

}  // namespace

CacheService::CacheService(const RpcContext& rpc, int64_t chunk_bytes, IdleCalls* idle,
                           CheckpointStore* checkpoints, Watchers* watchers)
    : rpc_(rpc),
      chunk_bytes_(chunk_bytes),
      idle_(idle),
      checkpoints_(checkpoints),
      watchers_(watchers) {
  MarkMethodStreamed(MethodIndex("mla.v1.Cache.Import"),
                     ServeUploadBytes<&CacheService::ServeImport, v1::ImportReply>(this));
}

template <typename Body>
absl::Status CacheService::AsUpload(const std::string& tenant, grpc::ServerContext* context,
                                    Body body) {
  scheduler::TenantTable& tenants = *rpc_.engine->tenants();
  const absl::StatusOr<scheduler::TenantRef> row = tenants.Enter(tenant);
  if (!row.ok()) return row.status();
  absl::Status status = tenants.Take(**row, scheduler::Resource::kUploads, 1, "call");
  if (!status.ok()) {
    rpc_.metrics->CountRejected(DetailOf(status).reason);
    return status;
  }
  status = body();
  tenants.Return(**row, scheduler::Resource::kUploads, 1);
  return idle_->End(context, status);
}

grpc::Status CacheService::Export(grpc::ServerContext* context, const v1::ExportRequest* request,
                                  Writer* writer) {
  return rpc_.Serve(context, "Cache.Export", [&](const Identity& who) {
    scheduler::ExportArgs args;
    args.tenant = who.tenant;
    absl::Status status = ParseExport(*request, rpc_.engine->limits(), &args);
    if (!status.ok()) return status;
    return AsUpload(who.tenant, context, [&] {
      const absl::StatusOr<MovingPages> pages = rpc_.engine->BeginExport(args);
      if (!pages.ok()) return pages.status();
      const absl::Cleanup release = [&] {
        std::vector<scheduler::SequenceId> absent;
        rpc_.engine->ReleaseSequences(who.tenant, std::vector{pages->id}, &absent);
      };
      return SendPages(rpc_.engine, who.tenant, *pages, [&](const v1::PagesPart& part) {
        idle_->Waits(context);
        const bool sent = writer->Write(part);
        idle_->Works(context);
        return sent ? absl::OkStatus() : Broken();
      });
    });
  });
}

grpc::Status CacheService::ServeImport(grpc::ServerContext* context, UploadBytes* in,
                                       v1::ImportReply* reply) {
  return rpc_.Serve(context, "Cache.Import", [&](const Identity& who) {
    return AsUpload(who.tenant, context, [&] {
      scheduler::ImportArgs args;
      UploadReader reader(context, in, idle_);
      uint64_t attempt = 0;
      DigestKind digests = DigestKind::kSha256;
      absl::Status status = ReadHead(who, &reader, &args, &attempt, &digests);
      if (!status.ok()) return status;
      v1::ImportRequest message;
      const auto next = [&]() -> absl::StatusOr<v1::PagesPart*> {
        const absl::StatusOr<bool> read = reader.Read(&message);
        if (!read.ok()) return read.status();
        if (!*read) {
          if (context->IsCancelled()) return Broken();
          return nullptr;
        }
        if (message.has_part()) return message.mutable_part();
        return RefuseField("message", "target", "parts after the header", "order");
      };
      uint64_t bytes = 0;
      const auto ended = RunImport(rpc_.engine, *rpc_.abandoned, args, attempt, chunk_bytes_, next,
                                   &bytes, digests);
      if (!ended.ok()) return ended.status();
      if (args.tenant != who.tenant || args.restored_id != 0) {
        Log(LogLevel::kInfo, "taken_over",
            {{"operator", who.tenant}, {"tenant", args.tenant}, {"sequence", ended->id}});
        HandOverCounters& counters = rpc_.metrics->hand_overs();
        ++counters.taken_over;
        counters.taken_bytes += bytes;
      }
      Fill(*ended, reply->mutable_sequence());
      reply->set_bytes(bytes);
      reply->set_boot_id(rpc_.boot_id);
      return absl::OkStatus();
    });
  });
}

absl::Status CacheService::SetOwner(const Identity& who, const v1::ImportTarget& target,
                                    scheduler::ImportArgs* args) const {
  args->tenant = who.tenant;
  if (target.tenant().empty() && target.new_sequence_id() == 0 && target.attempt() == 0) {
    return absl::OkStatus();
  }
  const auto most = static_cast<size_t>(rpc_.engine->limits().max_name_bytes);
  if (!IsTenantName(target.tenant(), most)) {
    return RefuseField("target.tenant", absl::StrCat(target.tenant().size(), " bytes"),
                       absl::StrCat("1..", most, " printable ASCII characters"), "name_characters");
  }
  if (target.sequence_id() != 0) {
    return RefuseField("target.sequence_id", absl::StrCat(target.sequence_id()),
                       "0 together with target.tenant", "conflict");
  }
  if (absl::Status allowed = rpc_.live->CheckOperator(who); !allowed.ok()) return allowed;
  // Refuses to send rows of a tenant unencrypted to another machine or from an anonymous caller.
  if (!who.authenticated || who.local) {
    return RefuseField("target.tenant", "a caller without TLS", "an operator over TLS",
                       "not_an_operator", absl::StatusCode::kPermissionDenied);
  }
  args->tenant = target.tenant();
  args->restored_id = target.new_sequence_id();
  return absl::OkStatus();
}

absl::Status CacheService::RegisterFor(const scheduler::ImportArgs& args,
                                       const v1::PagesHeader& header) {
  if (rpc_.engine->FindModel(args.tenant, args.model_id) != nullptr) return absl::OkStatus();
  scheduler::ModelSpec spec;
  absl::Status status = ParseModelSpec(header.model(), rpc_.engine->limits(), &spec);
  // Without its sinks the digest of the model's results is not known.
  if (!status.ok() || (spec.windowed() && !args.tags.sinks.has_value())) return status;
  spec.id = args.model_id;
  std::vector<float> sinks = args.tags.sinks.value_or(std::vector<float>());
  if (sinks.empty() && spec.needs_sinks) {  // the client said that no head has a sink
    sinks.assign(static_cast<size_t>(spec.layers) * spec.geometry.num_heads, scheduler::kNoSink);
  }
  return rpc_.engine->RegisterModel(args.tenant, spec, 0, args.tags.kv_scales, sinks).status();
}

absl::Status CacheService::ReadHead(const Identity& who, UploadReader* in,
                                    scheduler::ImportArgs* args, uint64_t* attempt,
                                    DigestKind* digests) {
  v1::ImportRequest message;
  absl::StatusOr<bool> read = in->Read(&message);
  if (!read.ok()) return read.status();
  if (!*read || !message.has_target()) {
    return RefuseField("target", "nothing", "the first message of the call", "missing");
  }
  absl::Status status = ParseTarget(message.target(), rpc_.engine->limits(), args);
  if (status.ok()) status = SetOwner(who, message.target(), args);
  if (!status.ok()) return status;
  const bool registers = !message.target().tenant().empty();
  *attempt = message.target().attempt();
  read = in->Read(&message);
  if (!read.ok()) return read.status();
  if (!*read || !message.part().has_header()) {
    return RefuseField("part.header", "nothing", "the first part", "missing");
  }
  status = ParseHeader(message.part().header(), rpc_.engine->limits(), &args->tags);
  *digests = DigestsOf(message.part().header().version());
  if (!status.ok() || !registers) return status;
  return RegisterFor(*args, message.part().header());
}

absl::Status CacheService::CheckCheckpoints(int ids) const {
  if (checkpoints_ == nullptr) {
    return MakeError(absl::StatusCode::kUnimplemented,
                     "this server keeps no checkpoints: checkpoint.path is empty",
                     {.reason = "no_checkpoints"});
  }
  return CheckRange("sequence_ids", ids, 0, rpc_.engine->limits().max_sequences);
}

grpc::Status CacheService::Checkpoint(grpc::ServerContext* context,
                                      const v1::CheckpointRequest* request,
                                      v1::CheckpointReply* reply) {
  return rpc_.Serve(context, "Cache.Checkpoint", [&](const Identity& who) {
    absl::Status status = CheckCheckpoints(request->sequence_ids_size());
    if (!status.ok()) return status;
    return AsUpload(who.tenant, context, [&]() -> absl::Status {
      scheduler::SequenceSelection named;
      named.tenant = who.tenant;
      for (const uint64_t id : request->sequence_ids()) {
        if (context->IsCancelled()) return Broken();
        named.ids = {id};
        const scheduler::SequenceList found = rpc_.engine->GetSequences(named);
        // A sequence that does not exist is refused with the same words as Export.
        const uint64_t epoch = found.sequences.empty() ? 0 : found.sequences[0].epoch;
        const auto saved = checkpoints_->Save(rpc_.engine, who.tenant, id, epoch);
        if (!saved.ok()) return saved.status();
        Fill(*saved, reply->add_checkpoints());
      }
      reply->set_boot_id(rpc_.boot_id);
      return absl::OkStatus();
    });
  });
}

grpc::Status CacheService::Restore(grpc::ServerContext* context, const v1::RestoreRequest* request,
                                   v1::RestoreReply* reply) {
  return rpc_.Serve(context, "Cache.Restore", [&](const Identity& who) {
    const scheduler::Limits& limits = rpc_.engine->limits();
    absl::Status status = CheckCheckpoints(request->sequence_ids_size());
    if (status.ok()) status = CheckName(request->client_id(), "client_id", true, limits);
    if (status.ok()) status = CheckRange("lease_ms", request->lease_ms(), 0, limits.max_lease_ms);
    if (!status.ok()) return status;
    return AsUpload(who.tenant, context, [&]() -> absl::Status {
      for (const uint64_t id : request->sequence_ids()) {
        if (context->IsCancelled()) return Broken();
        const auto restored = checkpoints_->Restore(rpc_.engine, who.tenant, id,
                                                    request->client_id(), request->lease_ms());
        if (!restored.ok()) return restored.status();
        Fill(*restored, reply->add_sequences());
      }
      reply->set_boot_id(rpc_.boot_id);
      return absl::OkStatus();
    });
  });
}

grpc::Status CacheService::ListCheckpoints(grpc::ServerContext* context,
                                           const v1::ListCheckpointsRequest*,
                                           v1::ListCheckpointsReply* reply) {
  return rpc_.Serve(context, "Cache.ListCheckpoints", [&](const Identity& who) {
    absl::Status status = CheckCheckpoints(0);
    if (!status.ok()) return status;
    // It reads a header from each file.
    return AsUpload(who.tenant, context, [&]() -> absl::Status {
      for (const CheckpointInfo& info : checkpoints_->List(who.tenant)) {
        Fill(info, reply->add_checkpoints());
      }
      reply->set_boot_id(rpc_.boot_id);
      return absl::OkStatus();
    });
  });
}

grpc::Status CacheService::DropCheckpoints(grpc::ServerContext* context,
                                           const v1::DropCheckpointsRequest* request,
                                           v1::DropCheckpointsReply* reply) {
  return rpc_.Serve(context, "Cache.DropCheckpoints", [&](const Identity& who) {
    absl::Status status = CheckCheckpoints(request->sequence_ids_size());
    if (!status.ok()) return status;
    for (const uint64_t id : request->sequence_ids()) {
      if (checkpoints_->Drop(who.tenant, id)) {
        reply->set_dropped(reply->dropped() + 1);
      } else {
        reply->add_not_found(id);
      }
    }
    reply->set_boot_id(rpc_.boot_id);
    return status;
  });
}

}  // namespace mla::server
