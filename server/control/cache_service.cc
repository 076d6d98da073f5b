#include "server/control/cache_service.h"

#include <algorithm>
#include <span>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "kernels/formats/stored_rows.h"
#include "server/control/sequence_service.h"
#include "server/pages/page_stream.h"

namespace mla::server {
namespace {

using scheduler::MovingPages;

std::span<std::byte> BytesOf(std::string* text) {
  return std::as_writable_bytes(std::span(text->data(), text->size()));
}

absl::Status Broken() {
  return MakeError(absl::StatusCode::kCancelled, "the client has ended the call",
                   {.reason = "cancelled"});
}

// Makes NaN of what a row of the layer's first plane may not hold; the first row of the page in
// which something stands for NaN, or page_size.
int64_t Poison(const MovingPages& pages, const PagePlace& place, std::string* payload) {
  const scheduler::PageTags& tags = pages.tags;
  const kernels::KvRowLayout at =
      kernels::MakeKvRowLayout(tags.kv_format, tags.geometry.kv_lora_rank, tags.geometry.rope_dim);
  int64_t first = tags.page_size;
  for (const kvcache::GroupPiece& piece : kvcache::GroupPieces(pages.layout, place.rows)) {
    if (piece.plane != 0) continue;
    const auto size = static_cast<int64_t>(payload->size());
    const int64_t begin = std::max(place.offset, piece.payload_offset);
    const int64_t end = std::min(place.offset + size, piece.payload_offset + piece.bytes);
    if (begin >= end) continue;
    const kvcache::KvPlane& plane = pages.layout.rows(piece.layer);
    const bool whole = at.traits.scales == kernels::KvScales::kInPage;
    const int64_t row = whole ? 0 : (begin - piece.payload_offset) / piece.unit;
    const int64_t rows = whole ? place.rows : (end - begin) / piece.unit;
    const int64_t found =
        kernels::PoisonRows(at, tags.fp8, BytesOf(payload).data() + (begin - place.offset),
                            plane.row_stride, plane.rows, rows);
    if (found < rows) first = std::min(first, row + found);
  }
  return first;
}

}  // namespace

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
      return SendPages(who.tenant, *pages, context, writer);
    });
  });
}

bool CacheService::Send(grpc::ServerContext* context, Writer* writer, const v1::PagesPart& part) {
  idle_->Waits(context);
  const bool sent = writer->Write(part);
  idle_->Works(context);
  return sent;
}

absl::Status CacheService::SendPages(const std::string& tenant, const MovingPages& pages,
                                     grpc::ServerContext* context, Writer* writer) {
  const scheduler::PageTags& tags = pages.tags;
  const auto model = rpc_.engine->FindModel(tenant, pages.model_id);
  if (model == nullptr) return absl::AbortedError("the model has gone");
  PageDigests digests(tags);
  v1::PagesPart part;
  FillHeader(*model, tags, part.mutable_header());
  if (!Send(context, writer, part)) return Broken();
  uint64_t groups = 0;
  for (int64_t row = 0; row < tags.rows; row += tags.page_size, ++groups) {
    absl::Status status = SendGroup(tenant, pages, row, &digests, context, writer);
    if (!status.ok()) return status;
  }
  part.mutable_trailer()->set_groups(groups);
  part.mutable_trailer()->set_sha256(digests.End());
  return Send(context, writer, part) ? absl::OkStatus() : Broken();
}

absl::Status CacheService::SendGroup(const std::string& tenant, const MovingPages& pages,
                                     int64_t row, PageDigests* digests,
                                     grpc::ServerContext* context, Writer* writer) {
  const scheduler::PageTags& tags = pages.tags;
  const int64_t first_row = tags.first_row + row;
  scheduler::PageMove move;
  move.tenant = tenant;
  move.id = pages.id;
  move.page = first_row / tags.page_size;
  move.rows = static_cast<int32_t>(std::min<int64_t>(tags.page_size, tags.rows - row));
  v1::PagesPart part;
  part.mutable_group()->set_first_row(static_cast<uint64_t>(first_row));
  part.mutable_group()->set_rows(static_cast<uint32_t>(move.rows));
  if (!Send(context, writer, part)) return Broken();
  digests->BeginGroup(first_row, move.rows);
  const auto pieces = kvcache::GroupPieces(pages.layout, move.rows);
  const int64_t bytes = kvcache::PayloadBytes(pieces);
  std::string* const payload = part.mutable_chunk()->mutable_payload();
  while (move.offset < bytes) {
    const int64_t end = kvcache::PartEnd(pieces, move.offset, kExportChunkBytes);
    payload->resize(static_cast<size_t>(end - move.offset));
    move.bytes = BytesOf(payload);
    absl::Status moved = rpc_.engine->MovePart(&move);
    if (!moved.ok()) return moved;
    digests->Add(*payload);
    if (!Send(context, writer, part)) return Broken();
    move.offset = end;
  }
  part.mutable_group_end()->set_sha256(digests->EndGroup());
  return Send(context, writer, part) ? absl::OkStatus() : Broken();
}

grpc::Status CacheService::Import(grpc::ServerContext* context, Reader* reader,
                                  v1::ImportReply* reply) {
  return rpc_.Serve(context, "Cache.Import", [&](const Identity& who) {
    return AsUpload(who.tenant, context, [&] {
      scheduler::ImportArgs args;
      args.tenant = who.tenant;
      absl::Status status = ReadHead(context, reader, &args);
      if (!status.ok()) return status;
      const absl::StatusOr<MovingPages> pages = rpc_.engine->BeginImport(args);
      if (!pages.ok()) return pages.status();
      int64_t not_finite_from = scheduler::Engine::kAllFinite;
      uint64_t bytes = 0;
      status = TakePages(who.tenant, *pages, context, reader, &not_finite_from, &bytes);
      if (!status.ok()) {
        rpc_.engine->AbortImport(who.tenant, *pages);
        return status;
      }
      const auto ended = rpc_.engine->EndImport(who.tenant, pages->id, not_finite_from);
      if (!ended.ok()) return ended.status();
      Fill(*ended, reply->mutable_sequence());
      reply->set_bytes(bytes);
      reply->set_boot_id(rpc_.boot_id);
      return absl::OkStatus();
    });
  });
}

bool CacheService::Read(grpc::ServerContext* context, Reader* reader, v1::ImportRequest* message) {
  idle_->Waits(context);
  const bool read = reader->Read(message);
  idle_->Works(context);
  return read;
}

absl::Status CacheService::ReadHead(grpc::ServerContext* context, Reader* reader,
                                    scheduler::ImportArgs* args) {
  v1::ImportRequest message;
  if (!Read(context, reader, &message) || !message.has_target()) {
    return RefuseField("target", "nothing", "the first message of the call", "missing");
  }
  absl::Status status = ParseTarget(message.target(), rpc_.engine->limits(), args);
  if (!status.ok()) return status;
  if (!Read(context, reader, &message) || !message.part().has_header()) {
    return RefuseField("part.header", "nothing", "the first part", "missing");
  }
  return ParseHeader(message.part().header(), rpc_.engine->limits(), &args->tags);
}

absl::Status CacheService::TakePages(const std::string& tenant, const MovingPages& pages,
                                     grpc::ServerContext* context, Reader* reader,
                                     int64_t* not_finite_from, uint64_t* bytes) {
  PageStreamReader parts(pages, chunk_bytes_);
  v1::ImportRequest message;
  std::optional<PagePlace> place;
  scheduler::PageMove move;
  move.tenant = tenant;
  move.id = pages.id;
  move.in = true;
  while (Read(context, reader, &message)) {
    if (!message.has_part()) {
      return RefuseField("message", "target", "parts behind the header", "order");
    }
    absl::Status status = parts.Add(message.part(), &place);
    if (!status.ok()) return status;
    if (!place) continue;
    std::string* const payload = message.mutable_part()->mutable_chunk()->mutable_payload();
    if (const int64_t row = Poison(pages, *place, payload); row < pages.tags.page_size) {
      *not_finite_from = std::min(*not_finite_from, place->page * pages.tags.page_size + row);
    }
    move.page = place->page;
    move.rows = place->rows;
    move.offset = place->offset;
    move.bytes = BytesOf(payload);
    status = rpc_.engine->MovePart(&move);
    if (!status.ok()) return status;
  }
  *bytes = parts.bytes();
  return context->IsCancelled() ? Broken() : parts.Finish();
}

}  // namespace mla::server
