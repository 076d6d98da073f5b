// The part of Client that moves rows out of a server and into one, makes checkpoints, and asks
// about cached rows.
#include <utility>

#include "base/status_macros.h"
#include "client/cpp/client.h"
#include "client/cpp/client_impl.h"
#include "proto/wire/calls/stream_call.h"

namespace mla::client {
namespace {

constexpr char kExport[] = "/mla.v1.Cache/Export";
constexpr char kImport[] = "/mla.v1.Cache/Import";
constexpr char kWatchEvents[] = "/mla.v1.Cache/WatchEvents";

}  // namespace

absl::Status Client::ExportPages(const v1::ExportRequest& request,
                                 const std::function<absl::Status(const v1::PagesPart&)>& take) {
  MLA_RETURN_IF_ERROR(impl_->Lost());
  grpc::ClientContext context;
  impl_->Prepare(&context, Millis(impl_->options.request_timeout_ms * 10));
  wire::StreamCall call(impl_->channel, &context, kExport);
  call.Write(request);
  call.WritesDone();
  v1::PagesPart part;
  while (call.Read(&part)) {
    absl::Status taken = take(part);
    if (!taken.ok()) return taken;  // which cancels the call
  }
  return FromGrpc(call.Finish(), context);
}

absl::StatusOr<Sequence> Client::ImportPages(
    const v1::ImportTarget& target,
    const std::function<absl::StatusOr<std::optional<v1::PagesPart>>()>& next) {
  v1::ImportRequest message;
  *message.mutable_target() = target;
  if (target.client_id().empty()) message.mutable_target()->set_client_id(client_id());
  absl::Status failed;
  const auto reply = impl_->Unary<v1::ImportReply>(
      [&](grpc::ClientContext* context, v1::ImportReply* out) {
        wire::StreamCall call(impl_->channel, context, kImport);
        bool open = call.Write(message);
        while (open) {
          absl::StatusOr<std::optional<v1::PagesPart>> part = next();
          failed = part.status();
          if (!failed.ok()) context->TryCancel();
          if (!failed.ok() || !part->has_value()) break;
          *message.mutable_part() = **std::move(part);
          open = call.Write(message);
        }
        return call.FinishWith(out);
      },
      Millis(impl_->options.request_timeout_ms * 10));
  if (!failed.ok()) return failed;
  if (!reply.ok()) return reply.status();
  return Sequence(this, reply->sequence());
}

absl::Status Client::WatchEvents(std::optional<uint64_t> after,
                                 const std::function<bool(const v1::WatchEventsReply&)>& take,
                                 bool all_tenants) {
  MLA_RETURN_IF_ERROR(impl_->Lost());
  grpc::ClientContext context;
  // A watch has no natural end, so it has no deadline either.
  if (!impl_->options.tenant.empty()) context.AddMetadata("mla-tenant", impl_->options.tenant);
  v1::WatchEventsRequest request;
  if (after) request.set_after(*after);
  request.set_all_tenants(all_tenants);
  wire::StreamCall call(impl_->channel, &context, kWatchEvents);
  call.Write(request);
  call.WritesDone();
  v1::WatchEventsReply reply;
  while (call.Read(&reply)) {
    if (!take(reply)) return absl::OkStatus();  // which cancels the call
  }
  return FromGrpc(call.Finish(), context);
}

absl::StatusOr<v1::ExplainReply> Client::Explain(uint32_t most, bool all_tenants) {
  v1::ExplainRequest request;
  request.set_most(most);
  request.set_all_tenants(all_tenants);
  return impl_->Unary<v1::ExplainReply>(
      [&](auto* context, auto* reply) { return impl_->cache->Explain(context, request, reply); });
}

absl::StatusOr<v1::HintReply> Client::Hint(const v1::HintRequest& request) {
  return impl_->Unary<v1::HintReply>(
      [&](auto* context, auto* reply) { return impl_->cache->Hint(context, request, reply); });
}

absl::StatusOr<v1::CheckpointReply> Client::Checkpoint(const std::vector<uint64_t>& ids) {
  v1::CheckpointRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return impl_->Unary<v1::CheckpointReply>(
      [&](auto* context, auto* reply) { return impl_->cache->Checkpoint(context, request, reply); },
      Millis(impl_->options.request_timeout_ms * 10));
}

absl::StatusOr<std::vector<Sequence>> Client::Restore(const std::vector<uint64_t>& ids) {
  v1::RestoreRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  request.set_client_id(client_id());
  request.set_lease_ms(static_cast<uint32_t>(impl_->options.sequence_lease_ms));
  const auto reply = impl_->Unary<v1::RestoreReply>(
      [&](auto* context, auto* out) { return impl_->cache->Restore(context, request, out); },
      Millis(impl_->options.request_timeout_ms * 10));
  if (!reply.ok()) return reply.status();
  std::vector<Sequence> sequences;
  for (const v1::SequenceInfo& info : reply->sequences()) {
    sequences.push_back(Sequence(this, info));
  }
  return sequences;
}

absl::StatusOr<v1::ListCheckpointsReply> Client::ListCheckpoints() {
  return impl_->Unary<v1::ListCheckpointsReply>([&](auto* context, auto* reply) {
    return impl_->cache->ListCheckpoints(context, {}, reply);
  });
}

absl::StatusOr<v1::DropCheckpointsReply> Client::DropCheckpoints(const std::vector<uint64_t>& ids) {
  v1::DropCheckpointsRequest request;
  request.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  return impl_->Unary<v1::DropCheckpointsReply>([&](auto* context, auto* reply) {
    return impl_->cache->DropCheckpoints(context, request, reply);
  });
}

}  // namespace mla::client
