// Client: rows out of a server and into one.
#include <utility>

#include "client/cpp/client.h"
#include "client/cpp/client_impl.h"

namespace mla::client {

absl::Status Client::ExportPages(const v1::ExportRequest& request,
                                 const std::function<absl::Status(const v1::PagesPart&)>& take) {
  if (absl::Status status = impl_->Lost(); !status.ok()) return status;
  grpc::ClientContext context;
  impl_->Prepare(&context, Millis(impl_->options.request_timeout_ms * 10));
  const auto reader = impl_->cache->Export(&context, request);
  v1::PagesPart part;
  while (reader->Read(&part)) {
    absl::Status taken = take(part);
    if (taken.ok()) continue;
    context.TryCancel();
    reader->Finish();  // CANCELLED, as asked for
    return taken;
  }
  const grpc::Status status = reader->Finish();
  return status.ok() ? absl::OkStatus() : FromGrpc(status, context);
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
        const auto writer = impl_->cache->Import(context, out);
        bool open = writer->Write(message);
        while (open) {
          absl::StatusOr<std::optional<v1::PagesPart>> part = next();
          failed = part.status();
          if (!failed.ok()) context->TryCancel();
          if (!failed.ok() || !part->has_value()) break;
          *message.mutable_part() = **std::move(part);
          open = writer->Write(message);
        }
        writer->WritesDone();
        return writer->Finish();
      },
      Millis(impl_->options.request_timeout_ms * 10));
  if (!failed.ok()) return failed;
  if (!reply.ok()) return reply.status();
  return Sequence(this, reply->sequence());
}

}  // namespace mla::client
