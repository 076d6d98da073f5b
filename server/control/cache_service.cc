#include "server/control/cache_service.h"

#include <chrono>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
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

void Fill(const CheckpointInfo& from, v1::CheckpointInfo* message) {
  message->set_sequence_id(from.id);
  message->set_epoch(from.epoch);
  message->set_length(static_cast<uint64_t>(from.rows));
  message->set_bytes(static_cast<uint64_t>(from.bytes));
  message->set_model_id(from.model_id);
  message->set_saved_unix_ms(static_cast<uint64_t>(from.saved_unix_ms));
}

// Returns the number of sinks of a model whose heads all have one.
size_t SinksOf(const scheduler::ModelSpec& spec) {
  return static_cast<size_t>(spec.layers) * static_cast<size_t>(spec.geometry.num_heads);
}

// Returns the sinks that come with rows, for a model there. Rows without any come from a model that
// was told that no head has a sink.
std::vector<float> SinksFor(const scheduler::ModelSpec& spec, const scheduler::PageTags& tags) {
  std::vector<float> sinks = tags.sinks.value_or(std::vector<float>());
  if (sinks.empty() && spec.needs_sinks) sinks.assign(SinksOf(spec), scheduler::kNoSink);
  return sinks;
}

constexpr size_t kBatch = 256;     // events of one reply
constexpr uint32_t kMisses = 100;  // if the client gives no number
// A watcher looks for new events at this interval. Having the engine wake watchers would cost the
// engine more time than this wait costs them.
constexpr auto kPause = std::chrono::milliseconds(50);

static_assert(static_cast<int>(kvcache::EventKind::kStored) == v1::CACHE_EVENT_KIND_STORED);
static_assert(static_cast<int>(kvcache::EventKind::kPreempted) == v1::CACHE_EVENT_KIND_PREEMPTED);
static_assert(static_cast<int>(kvcache::Tier::kFile) == v1::CACHE_TIER_FILE);

std::string BytesOf(const kvcache::PrefixKey& key) {
  return std::string(reinterpret_cast<const char*>(&key), sizeof(key));
}

void Fill(const kvcache::Event& from, bool named, v1::CacheEvent* message) {
  message->set_number(from.number);
  message->set_kind(static_cast<v1::CacheEventKind>(from.kind));
  message->set_tier(static_cast<v1::CacheTier>(from.tier));
  message->set_model_id(*from.model);
  message->set_sequence_id(from.sequence);
  message->set_first_row(static_cast<uint64_t>(from.first_row));
  message->set_rows(static_cast<uint64_t>(from.rows));
  if (from.key) message->set_key(BytesOf(*from.key));
  if (from.parent) message->set_parent(BytesOf(*from.parent));
  message->set_unix_ms(static_cast<uint64_t>(from.unix_ms));
  if (named) message->set_tenant(*from.tenant_name);
}

void Fill(const kvcache::Miss& from, bool named, v1::CacheMiss* message) {
  message->set_model_id(*from.model);
  message->set_sequence_id(from.sequence);
  message->set_first_row(static_cast<uint64_t>(from.first_row));
  message->set_rows_asked(static_cast<uint64_t>(from.rows_asked));
  message->set_rows_found(static_cast<uint64_t>(from.rows_found));
  message->set_end(static_cast<v1::MatchEnd>(from.end));
  message->set_unix_ms(static_cast<uint64_t>(from.unix_ms));
  if (named) message->set_tenant(*from.tenant_name);
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
  MLA_ASSIGN_OR_RETURN(const scheduler::TenantRef row, tenants.Enter(tenant));
  absl::Status status = tenants.Take(*row, scheduler::Resource::kUploads, 1, "call");
  if (!status.ok()) {
    rpc_.metrics->CountRejected(DetailOf(status).reason);
    return status;
  }
  status = body();
  tenants.Return(*row, scheduler::Resource::kUploads, 1);
  return idle_->End(context, status);
}

grpc::Status CacheService::Export(grpc::ServerContext* context, const v1::ExportRequest* request,
                                  Writer* writer) {
  return rpc_.Serve(context, "Cache.Export", [&](const Identity& who) {
    scheduler::ExportArgs args;
    args.tenant = who.tenant;
    MLA_RETURN_IF_ERROR(ParseExport(*request, rpc_.engine->limits(), &args));
    return AsUpload(who.tenant, context, [&] {
      MLA_ASSIGN_OR_RETURN(const MovingPages pages, rpc_.engine->BeginExport(args));
      const absl::Cleanup release = [&] {
        std::vector<scheduler::SequenceId> absent;
        rpc_.engine->ReleaseSequences(who.tenant, std::vector{pages.id}, &absent);
      };
      return SendPages(rpc_.engine, who.tenant, pages, [&](const v1::PagesPart& part) {
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
      MLA_RETURN_IF_ERROR(ReadHead(who, &reader, &args, &attempt, &digests));
      v1::ImportRequest message;
      v1::PagesPart chunk;
      UploadPayload rows = {.path = kImportRowsPath,
                            .payload = chunk.mutable_chunk()->mutable_payload()};
      const auto next = [&]() -> absl::StatusOr<v1::PagesPart*> {
        MLA_ASSIGN_OR_RETURN(const bool read, reader.Read(&message, &rows));
        if (!read) {
          if (context->IsCancelled()) return Broken();
          return nullptr;
        }
        if (rows.found) return &chunk;
        if (message.has_part()) return message.mutable_part();
        return RefuseField("message", "target", "parts after the header", "order");
      };
      uint64_t bytes = 0;
      MLA_ASSIGN_OR_RETURN(const auto ended, RunImport(rpc_.engine, *rpc_.abandoned, args, attempt,
                                                       chunk_bytes_, next, &bytes, digests));
      if (args.tenant != who.tenant || args.restored_id != 0) {
        Log(LogLevel::kInfo, "taken_over",
            {{"operator", who.tenant}, {"tenant", args.tenant}, {"sequence", ended.id}});
        HandOverCounters& counters = rpc_.metrics->hand_overs();
        ++counters.taken_over;
        counters.taken_bytes += bytes;
      }
      Fill(ended, reply->mutable_sequence());
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
  if (target.sequence_id() != 0) {
    return RefuseField("target.sequence_id", absl::StrCat(target.sequence_id()),
                       "0 together with target.tenant", "conflict");
  }
  MLA_RETURN_IF_ERROR(rpc_.CheckActsFor(who, target.tenant(), "target.tenant"));
  args->tenant = target.tenant();
  args->restored_id = target.new_sequence_id();
  return absl::OkStatus();
}

absl::Status CacheService::RegisterFor(const scheduler::ImportArgs& args,
                                       const v1::PagesHeader& header) {
  if (rpc_.engine->FindModel(args.tenant, args.model_id) != nullptr) return BringSinks(args);
  scheduler::ModelSpec spec;
  absl::Status status = ParseModelSpec(header.model(), rpc_.engine->limits(), &spec);
  // Without its sinks the digest of the model's results is not known.
  if (!status.ok() || (spec.windowed() && !args.tags.sinks.has_value())) return status;
  spec.id = args.model_id;
  return rpc_.engine
      ->RegisterModel(args.tenant, spec, 0, args.tags.kv_scales, SinksFor(spec, args.tags))
      .status();
}

absl::Status CacheService::BringSinks(const scheduler::ImportArgs& args) {
  if (!args.tags.sinks.has_value()) return absl::OkStatus();
  const auto spec = rpc_.engine->FindModel(args.tenant, args.model_id);
  if (spec == nullptr) return absl::OkStatus();
  // Sinks of another number are of another model, which the import refuses.
  const std::vector<float> sinks = SinksFor(*spec, args.tags);
  return sinks.size() != SinksOf(*spec)
             ? absl::OkStatus()
             : server::BringSinks(rpc_.engine, args.tenant, args.model_id, sinks);
}

absl::Status CacheService::ReadHead(const Identity& who, UploadReader* in,
                                    scheduler::ImportArgs* args, uint64_t* attempt,
                                    DigestKind* digests) {
  v1::ImportRequest message;
  MLA_ASSIGN_OR_RETURN(bool read, in->Read(&message));
  if (!read || !message.has_target()) {
    return RefuseField("target", "nothing", "the first message of the call", "missing");
  }
  MLA_RETURN_IF_ERROR(ParseTarget(message.target(), rpc_.engine->limits(), args));
  MLA_RETURN_IF_ERROR(SetOwner(who, message.target(), args));
  const bool registers = !message.target().tenant().empty();
  *attempt = message.target().attempt();
  MLA_ASSIGN_OR_RETURN(read, in->Read(&message));
  if (!read || !message.part().has_header()) {
    return RefuseField("part.header", "nothing", "the first part", "missing");
  }
  const absl::Status status =
      ParseHeader(message.part().header(), rpc_.engine->limits(), &args->tags);
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
    MLA_RETURN_IF_ERROR(CheckCheckpoints(request->sequence_ids_size()));
    return AsUpload(who.tenant, context, [&]() -> absl::Status {
      scheduler::SequenceSelection named;
      named.tenant = who.tenant;
      for (const uint64_t id : request->sequence_ids()) {
        if (context->IsCancelled()) return Broken();
        named.ids = {id};
        const scheduler::SequenceList found = rpc_.engine->GetSequences(named);
        // A sequence that does not exist is refused with the same words as Export.
        const uint64_t epoch = found.sequences.empty() ? 0 : found.sequences[0].epoch;
        MLA_ASSIGN_OR_RETURN(const auto saved,
                             checkpoints_->Save(rpc_.engine, who.tenant, id, epoch));
        Fill(saved, reply->add_checkpoints());
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
    MLA_RETURN_IF_ERROR(CheckCheckpoints(request->sequence_ids_size()));
    MLA_RETURN_IF_ERROR(CheckName(request->client_id(), "client_id", true, limits));
    MLA_RETURN_IF_ERROR(CheckRange("lease_ms", request->lease_ms(), 0, limits.max_lease_ms));
    return AsUpload(who.tenant, context, [&]() -> absl::Status {
      for (const uint64_t id : request->sequence_ids()) {
        if (context->IsCancelled()) return Broken();
        MLA_ASSIGN_OR_RETURN(const auto restored,
                             checkpoints_->Restore(rpc_.engine, who.tenant, id,
                                                   request->client_id(), request->lease_ms()));
        Fill(restored, reply->add_sequences());
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
    MLA_RETURN_IF_ERROR(CheckCheckpoints(0));
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
    MLA_RETURN_IF_ERROR(CheckCheckpoints(request->sequence_ids_size()));
    for (const uint64_t id : request->sequence_ids()) {
      if (checkpoints_->Drop(who.tenant, id)) {
        reply->set_dropped(reply->dropped() + 1);
      } else {
        reply->add_not_found(id);
      }
    }
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

// ----------------------------------------------------------------------------------- Events, hints

absl::StatusOr<std::optional<scheduler::TenantKey>> CacheService::TenantToShow(const Identity& who,
                                                                               bool all) const {
  // The call keeps the tenant's row alive, so the key stays valid.
  if (!all) return rpc_.engine->tenants()->Find(who.tenant);
  MLA_RETURN_IF_ERROR(rpc_.live->CheckOperator(who));
  return std::nullopt;
}

grpc::Status CacheService::WatchEvents(grpc::ServerContext* context,
                                       const v1::WatchEventsRequest* request,
                                       grpc::ServerWriter<v1::WatchEventsReply>* writer) {
  return rpc_.Serve(context, "Cache.WatchEvents", [&](const Identity& who) {
    const Watchers::Place place(watchers_, who.tenant);
    MLA_RETURN_IF_ERROR(place.Check("WatchEvents"));
    const bool all_tenants = request->all_tenants();
    MLA_ASSIGN_OR_RETURN(const auto tenant, TenantToShow(who, all_tenants));
    if (all_tenants) {
      MLA_RETURN_IF_ERROR(CheckRange("after", request->after(), 0, 0));
    }
    const kvcache::EventLog& log = *rpc_.engine->events();
    kvcache::EventLog::Cursor cursor = !request->has_after() ? log.End()
                                       : all_tenants         ? log.Begin()
                                                             : log.After(*tenant, request->after());
    for (bool first = true;; first = false) {
      v1::WatchEventsReply reply;
      for (const kvcache::Event& event : log.Read(tenant, kBatch, &cursor)) {
        Fill(event, all_tenants, reply.add_events());
      }
      reply.set_boot_id(rpc_.boot_id);
      const bool sent = first || reply.events_size() > 0;
      if (sent && !writer->Write(reply)) break;
      // A full reply means that more events are waiting.
      if (reply.events_size() == kBatch) continue;
      if (watchers_->OverAfter(*context, kPause)) break;
    }
    return absl::OkStatus();
  });
}

grpc::Status CacheService::Hint(grpc::ServerContext* context, const v1::HintRequest* request,
                                v1::HintReply* reply) {
  static_assert(static_cast<int>(scheduler::HintKind::kDemote) == v1::HINT_KIND_DEMOTE);
  static_assert(static_cast<int>(scheduler::HintOutcome::kRefused) == v1::HINT_OUTCOME_REFUSED);
  return rpc_.Serve(context, "Cache.Hint", [&](const Identity& who) {
    scheduler::HintArgs args;
    args.tenant = who.tenant;
    MLA_RETURN_IF_ERROR(ParseHint(*request, rpc_.engine->limits(), &args));
    args.prefix.hashed = PrefixTurns::End;
    MLA_ASSIGN_OR_RETURN(const scheduler::HintAnswer answer, rpc_.engine->Hint(args));
    reply->set_outcome(static_cast<v1::HintOutcome>(answer.outcome));
    reply->set_rows(static_cast<uint64_t>(answer.rows));
    reply->set_rows_done(static_cast<uint64_t>(answer.rows_done));
    reply->set_rows_deferred(static_cast<uint64_t>(answer.rows_deferred));
    reply->set_reason(answer.reason);
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status CacheService::Explain(grpc::ServerContext* context, const v1::ExplainRequest* request,
                                   v1::ExplainReply* reply) {
  return rpc_.Serve(context, "Cache.Explain", [&](const Identity& who) {
    MLA_RETURN_IF_ERROR(CheckRange("most", request->most(), 0, kvcache::EventLog::kKept));
    const size_t most = request->most() == 0 ? kMisses : request->most();
    MLA_ASSIGN_OR_RETURN(const auto tenant, TenantToShow(who, request->all_tenants()));
    for (const kvcache::Miss& miss : rpc_.engine->events()->Misses(tenant, most)) {
      Fill(miss, request->all_tenants(), reply->add_misses());
    }
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

}  // namespace mla::server
