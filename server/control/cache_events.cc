// CacheService: events of cached rows, why matches missed, and hints.
#include <chrono>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "server/control/cache_service.h"
#include "server/grpc/request_validator.h"

namespace mla::server {
namespace {

constexpr size_t kBatch = 256;     // events of one reply
constexpr uint32_t kMisses = 100;  // if the client gives no number
// How often a watcher looks for new events. Having the engine wake watchers would cost the engine
// more time than this wait costs them.
constexpr auto kPause = std::chrono::milliseconds(50);

static_assert(static_cast<int>(kvcache::EventKind::kStored) == v1::CACHE_EVENT_KIND_STORED);
static_assert(static_cast<int>(kvcache::EventKind::kPreempted) == v1::CACHE_EVENT_KIND_PREEMPTED);
static_assert(static_cast<int>(kvcache::Tier::kFile) == v1::CACHE_TIER_FILE);

std::string BytesOf(const kvcache::PrefixKey& key) {
  return std::string(reinterpret_cast<const char*>(&key), sizeof(key));
}

void Fill(const kvcache::Event& from, bool named, v1::CacheEvent* to) {
  to->set_number(from.number);
  to->set_kind(static_cast<v1::CacheEventKind>(from.kind));
  to->set_tier(static_cast<v1::CacheTier>(from.tier));
  to->set_model_id(*from.model);
  to->set_sequence_id(from.sequence);
  to->set_first_row(static_cast<uint64_t>(from.first_row));
  to->set_rows(static_cast<uint64_t>(from.rows));
  if (from.key) to->set_key(BytesOf(*from.key));
  if (from.parent) to->set_parent(BytesOf(*from.parent));
  to->set_unix_ms(static_cast<uint64_t>(from.unix_ms));
  if (named) to->set_tenant(*from.tenant_name);
}

void Fill(const kvcache::Miss& from, bool named, v1::CacheMiss* to) {
  to->set_model_id(*from.model);
  to->set_sequence_id(from.sequence);
  to->set_first_row(static_cast<uint64_t>(from.first_row));
  to->set_rows_asked(static_cast<uint64_t>(from.rows_asked));
  to->set_rows_found(static_cast<uint64_t>(from.rows_found));
  to->set_end(static_cast<v1::MatchEnd>(from.end));
  to->set_unix_ms(static_cast<uint64_t>(from.unix_ms));
  if (named) to->set_tenant(*from.tenant_name);
}

}  // namespace

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
    absl::Status status = ParseHint(*request, rpc_.engine->limits(), &args);
    if (!status.ok()) return status;
    args.prefix.hashed = PrefixTurns::End;
    MLA_ASSIGN_OR_RETURN(const scheduler::HintAnswer answer, rpc_.engine->Hint(args));
    reply->set_outcome(static_cast<v1::HintOutcome>(answer.outcome));
    reply->set_rows(static_cast<uint64_t>(answer.rows));
    reply->set_rows_done(static_cast<uint64_t>(answer.rows_done));
    reply->set_rows_deferred(static_cast<uint64_t>(answer.rows_deferred));
    reply->set_reason(answer.reason);
    reply->set_boot_id(rpc_.boot_id);
    return status;
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
