#include "server/control/sequence_service.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/request_validator.h"

namespace mla::server {

void Fill(const scheduler::SequenceInfo& from, v1::SequenceInfo* message) {
  message->set_sequence_id(from.id);
  message->set_epoch(from.epoch);
  message->set_length(static_cast<uint64_t>(from.length));
  message->set_lease_left_ms(
      static_cast<uint32_t>(std::clamp<int64_t>(from.lease_left_ms, 0, UINT32_MAX)));
  message->set_in_step(from.in_step);
  message->set_open_step(from.in_step ? from.open_step : 0);
  message->set_model_id(from.model_id);
  message->set_client_id(from.client_id);
  message->set_page_groups(static_cast<uint64_t>(from.page_groups));
  message->set_declared(static_cast<uint64_t>(from.declared));
  if (from.tail_position) message->set_tail_position(static_cast<uint64_t>(*from.tail_position));
  message->set_tenant(from.tenant);
  message->set_age_ms(static_cast<uint64_t>(from.age_ms));
  message->set_kv_bytes(static_cast<uint64_t>(from.kv_bytes));
}

namespace {

constexpr size_t kTailPartBytes = 56 << 10;  // of one reply; fits any wire.message_bytes

void FillMatch(const scheduler::SequenceInfo& from, v1::PrefixMatch* match) {
  static_assert(static_cast<int>(kvcache::MatchEnd::kDeferred) == v1::MATCH_END_DEFERRED);
  match->set_rows(static_cast<uint64_t>(from.matched.rows));
  match->set_end(static_cast<v1::MatchEnd>(from.matched.end));
}

// A call waits for slower tiers for at most this part of its client's deadline. The rest is for the
// answer: without an answer a sequence would be open that its client does not know.
constexpr int64_t kWaitsPercent = 90;

int64_t MostWaitMs(const grpc::ServerContext& context) {
  const auto now = std::chrono::system_clock::now();
  if (context.deadline() - now > std::chrono::hours(24)) return std::numeric_limits<int64_t>::max();
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(context.deadline() - now).count();
  return std::max<int64_t>(0, left) * kWaitsPercent / 100;
}

}  // namespace

grpc::Status SequenceService::Open(grpc::ServerContext* context, const v1::OpenRequest* request,
                                   v1::OpenReply* reply) {
  return rpc_.Serve(context, "Sequences.Open", [&](const Identity& who) {
    scheduler::OpenArgs args;
    args.tenant = who.tenant;
    MLA_RETURN_IF_ERROR(ParseOpen(*request, rpc_.engine->limits(), &args));
    args.most_wait_ms = MostWaitMs(*context);
    args.prefix.hashed = PrefixTurns::End;
    MLA_ASSIGN_OR_RETURN(const auto opened, rpc_.engine->OpenSequence(args));
    Fill(opened, reply->mutable_sequence());
    if (!args.prefix.empty()) FillMatch(opened, reply->mutable_match());
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status SequenceService::Match(grpc::ServerContext* context, const v1::MatchRequest* request,
                                    v1::MatchReply* reply) {
  return rpc_.Serve(context, "Sequences.Match", [&](const Identity& who) {
    scheduler::MatchArgs args;
    args.tenant = who.tenant;
    MLA_RETURN_IF_ERROR(ParseMatch(*request, rpc_.engine->limits(), &args));
    args.most_wait_ms = MostWaitMs(*context);
    args.prefix.hashed = PrefixTurns::End;
    MLA_ASSIGN_OR_RETURN(const auto matched, rpc_.engine->MatchSequence(args));
    Fill(matched, reply->mutable_sequence());
    FillMatch(matched, reply->mutable_match());
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status SequenceService::Probe(grpc::ServerContext* context, const v1::ProbeRequest* request,
                                    v1::ProbeReply* reply) {
  return rpc_.Serve(context, "Sequences.Probe", [&](const Identity& who) {
    scheduler::PrefixArgs prefix;
    MLA_RETURN_IF_ERROR(ParseProbe(*request, rpc_.engine->limits(), &prefix));
    prefix.hashed = PrefixTurns::End;
    MLA_ASSIGN_OR_RETURN(const auto probed,
                         rpc_.engine->Probe(who.tenant, request->model_id(), prefix));
    const auto count = [](int64_t number) {
      return static_cast<uint64_t>(std::max<int64_t>(number, 0));
    };
    reply->set_boot_id(rpc_.boot_id);
    reply->set_rows_asked(count(probed.rows_asked));
    reply->set_rows_in_pool(count(probed.rows_in_pool));
    reply->set_rows_in_host(count(probed.rows_in_host));
    reply->set_rows_in_file(count(probed.rows_in_file));
    reply->set_kv_bytes_free(count(probed.kv_bytes_free));
    reply->set_kv_bytes_cached(count(probed.kv_bytes_cached));
    reply->set_kv_bytes_total(count(probed.kv_bytes_total));
    reply->set_sequences(static_cast<uint32_t>(count(probed.sequences)));
    reply->set_queued_requests(static_cast<uint32_t>(count(probed.queued_requests)));
    reply->set_wait_us(count(probed.wait_ns / 1000));
    reply->set_draining(probed.draining);
    return absl::OkStatus();
  });
}

grpc::Status SequenceService::Get(grpc::ServerContext* context, const v1::GetRequest* request,
                                  v1::GetReply* reply) {
  return rpc_.Serve(
      context, "Sequences.Get",
      [&](const Identity& who) {
        scheduler::SequenceSelection selection;
        scheduler::SequencePage page;
        selection.tenant = who.tenant;
        MLA_RETURN_IF_ERROR(ParseGet(*request, rpc_.engine->limits(), &selection, &page));
        if (page.all_tenants) MLA_RETURN_IF_ERROR(rpc_.live->CheckOperator(who));
        const scheduler::SequenceList list = rpc_.engine->GetSequences(selection, page);
        const auto most_name = static_cast<size_t>(rpc_.engine->limits().max_name_bytes);
        for (const auto& sequence : list.sequences) {
          // The server's own tenants, as of the warm-up, have names that no client can have.
          if (page.all_tenants && !IsTenantName(sequence.tenant, most_name)) continue;
          Fill(sequence, reply->add_sequences());
        }
        reply->set_more(list.more);
        reply->mutable_not_found()->Add(list.not_found.begin(), list.not_found.end());
        for (const auto& [id, peer] : list.moved) {
          v1::MovedSequence* const moved = reply->add_moved();
          moved->set_sequence_id(id);
          moved->set_peer(peer);
        }
        reply->set_boot_id(rpc_.boot_id);
        return absl::OkStatus();
      },
      CallClass::kReserved);
}

grpc::Status SequenceService::Fork(grpc::ServerContext* context, const v1::ForkRequest* request,
                                   v1::ForkReply* reply) {
  return rpc_.Serve(context, "Sequences.Fork", [&](const Identity& who) {
    scheduler::ForkArgs args;
    args.tenant = who.tenant;
    MLA_RETURN_IF_ERROR(ParseFork(*request, rpc_.engine->limits(), &args));
    MLA_ASSIGN_OR_RETURN(const auto forked, rpc_.engine->ForkSequence(args));
    Fill(forked, reply->mutable_sequence());
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status SequenceService::Truncate(grpc::ServerContext* context,
                                       const v1::TruncateRequest* request,
                                       v1::TruncateReply* reply) {
  return rpc_.Serve(context, "Sequences.Truncate", [&](const Identity& who) {
    int64_t length = 0;
    MLA_RETURN_IF_ERROR(ParseTruncate(*request, &length));
    MLA_ASSIGN_OR_RETURN(const auto truncated,
                         rpc_.engine->TruncateSequence(who.tenant, request->sequence_id(), length,
                                                       request->expected_epoch()));
    reply->set_epoch(truncated.epoch);
    reply->set_length(static_cast<uint64_t>(truncated.length));
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status SequenceService::ReadTail(grpc::ServerContext* context,
                                       const v1::ReadTailRequest* request,
                                       v1::ReadTailReply* reply) {
  return rpc_.Serve(context, "Sequences.ReadTail", [&](const Identity& who) {
    MLA_ASSIGN_OR_RETURN(const auto read, rpc_.engine->ReadTail(who.tenant, request->sequence_id(),
                                                                request->expected_epoch()));
    const auto size = static_cast<int64_t>(read.tail->size);
    MLA_RETURN_IF_ERROR(CheckRange("offset", request->offset(), 0, size - 1));
    const size_t offset = request->offset();
    reply->set_position(static_cast<uint64_t>(read.position));
    reply->set_tail(read.tail->data.get() + offset,
                    std::min(read.tail->size - offset, kTailPartBytes));
    reply->set_tail_bytes(read.tail->size);
    reply->set_serial(read.serial);
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status SequenceService::Release(grpc::ServerContext* context,
                                      const v1::ReleaseRequest* request, v1::ReleaseReply* reply) {
  return rpc_.Serve(
      context, "Sequences.Release",
      [&](const Identity& who) {
        std::vector<scheduler::SequenceId> ids, not_found;
        MLA_RETURN_IF_ERROR(ParseRelease(*request, rpc_.engine->limits(), &ids));
        const int32_t released = rpc_.engine->ReleaseSequences(who.tenant, ids, &not_found);
        reply->set_released(static_cast<uint32_t>(released));
        reply->mutable_not_found()->Add(not_found.begin(), not_found.end());
        reply->set_boot_id(rpc_.boot_id);
        return absl::OkStatus();
      },
      CallClass::kReserved);
}

grpc::Status SequenceService::RenewLease(grpc::ServerContext* context,
                                         const v1::RenewLeaseRequest* request,
                                         v1::RenewLeaseReply* reply) {
  return rpc_.Serve(
      context, "Sequences.RenewLease",
      [&](const Identity& who) {
        scheduler::SequenceSelection selection;
        selection.tenant = who.tenant;
        int64_t lease_ms = 0;
        std::vector<scheduler::SequenceId> not_found;
        MLA_RETURN_IF_ERROR(ParseRenew(*request, rpc_.engine->limits(), &selection, &lease_ms));
        reply->set_renewed(
            static_cast<uint32_t>(rpc_.engine->RenewLeases(selection, lease_ms, &not_found)));
        reply->mutable_not_found()->Add(not_found.begin(), not_found.end());
        reply->set_boot_id(rpc_.boot_id);
        return absl::OkStatus();
      },
      CallClass::kReserved);
}

}  // namespace mla::server
