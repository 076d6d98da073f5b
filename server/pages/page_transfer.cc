#include "server/pages/page_transfer.h"

#include <algorithm>
#include <optional>
#include <span>

#include "base/error.h"
#include "kernels/formats/stored_rows.h"
#include "server/pages/page_stream.h"

namespace mla::server {
namespace {

using scheduler::Engine;
using scheduler::MovingPages;

std::span<std::byte> BytesOf(std::string* text) {
  return std::as_writable_bytes(std::span(text->data(), text->size()));
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

// The group with row tags.first_row + `row`, and its digest.
absl::Status SendGroup(Engine* engine, const std::string& tenant, const MovingPages& pages,
                       int64_t row, PageDigests* digests, const PartSink& sink) {
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
  absl::Status status = sink(part);
  digests->BeginGroup(first_row, move.rows);
  const auto pieces = kvcache::GroupPieces(pages.layout, move.rows);
  const int64_t bytes = kvcache::PayloadBytes(pieces);
  std::string* const payload = part.mutable_chunk()->mutable_payload();
  while (status.ok() && move.offset < bytes) {
    const int64_t end = kvcache::PartEnd(pieces, move.offset, kSentChunkBytes);
    payload->resize(static_cast<size_t>(end - move.offset));
    move.bytes = BytesOf(payload);
    status = engine->MovePart(&move);
    if (!status.ok()) return status;
    digests->Add(*payload);
    status = sink(part);
    move.offset = end;
  }
  if (!status.ok()) return status;
  part.mutable_group_end()->set_sha256(digests->EndGroup());
  return sink(part);
}

absl::Status Take(Engine* engine, const std::string& tenant, const MovingPages& pages,
                  PageStreamReader* parts, const PartSource& source, int64_t* not_finite_from) {
  std::optional<PagePlace> place;
  scheduler::PageMove move;
  move.tenant = tenant;
  move.id = pages.id;
  move.in = true;
  while (true) {
    const absl::StatusOr<v1::PagesPart*> part = source();
    if (!part.ok()) return part.status();
    if (*part == nullptr) return parts->Finish();
    absl::Status status = parts->Add(**part, &place);
    if (!status.ok()) return status;
    if (!place) continue;
    std::string* const payload = (*part)->mutable_chunk()->mutable_payload();
    if (const int64_t row = Poison(pages, *place, payload); row < pages.tags.page_size) {
      *not_finite_from = std::min(*not_finite_from, place->page * pages.tags.page_size + row);
    }
    move.page = place->page;
    move.rows = place->rows;
    move.offset = place->offset;
    move.bytes = BytesOf(payload);
    status = engine->MovePart(&move);
    if (!status.ok()) return status;
  }
}

}  // namespace

absl::Status SendPages(Engine* engine, const std::string& tenant, const MovingPages& pages,
                       const PartSink& sink) {
  const scheduler::PageTags& tags = pages.tags;
  const auto model = engine->FindModel(tenant, pages.model_id);
  if (model == nullptr) return absl::AbortedError("the model has gone");
  PageDigests digests(tags);
  v1::PagesPart part;
  FillHeader(*model, tags, part.mutable_header());
  absl::Status status = sink(part);
  uint64_t groups = 0;
  for (int64_t row = 0; status.ok() && row < tags.rows; row += tags.page_size, ++groups) {
    status = SendGroup(engine, tenant, pages, row, &digests, sink);
  }
  if (!status.ok()) return status;
  part.mutable_trailer()->set_groups(groups);
  part.mutable_trailer()->set_sha256(digests.End());
  return sink(part);
}

absl::StatusOr<scheduler::SequenceInfo> TakePages(Engine* engine, const std::string& tenant,
                                                  const MovingPages& pages, int64_t chunk_bytes,
                                                  const PartSource& source,
                                                  const scheduler::SequenceState* state,
                                                  uint64_t* bytes) {
  PageStreamReader parts(pages, chunk_bytes);
  int64_t not_finite_from = state == nullptr ? Engine::kAllFinite : state->not_finite_from;
  const absl::Status status = Take(engine, tenant, pages, &parts, source, &not_finite_from);
  *bytes = parts.bytes();
  if (status.ok()) return engine->EndImport(tenant, pages.id, not_finite_from, state);
  engine->AbortImport(tenant, pages);
  return status;
}

}  // namespace mla::server
