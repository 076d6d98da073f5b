#include "server/pages/page_transfer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/formats/convert_rows.h"
#include "kernels/formats/stored_rows.h"
#include "server/pages/page_stream.h"

namespace mla::server {
namespace {

using scheduler::Engine;
using scheduler::MovingPages;

std::span<std::byte> BytesOf(std::string* text) {
  return std::as_writable_bytes(std::span(text->data(), text->size()));
}

// The rows of one plane of a layer, or all of a page if scales follow its rows.
struct PlaneRows {
  int32_t plane = 0;
  int32_t token_ratio = 1;
  kernels::KvRowLayout at;
  std::byte* bytes = nullptr;
  int64_t row_stride = 0;
  int32_t page_rows = 0;
  int64_t first = 0;  // first of the page's rows
  int64_t count = 0;
};

// Returns the planes' rows that the payload consists of.
std::vector<PlaneRows> RowsOf(const MovingPages& pages, const PagePlace& place,
                              std::string* payload) {
  const scheduler::PageTags& tags = pages.tags;
  const bool window = place.group.content == v1::PAGE_CONTENT_WINDOW;
  const kvcache::GroupLayout& layout = window ? pages.window_layout : pages.layout;
  std::vector<PlaneRows> planes;
  for (const kvcache::GroupPiece& piece : PiecesOf(pages, place.group)) {
    const auto size = static_cast<int64_t>(payload->size());
    const int64_t begin = std::max(place.offset, piece.payload_offset);
    const int64_t end = std::min(place.offset + size, piece.payload_offset + piece.bytes);
    if (begin >= end) continue;
    const kvcache::KvPlane& plane =
        layout.layers[static_cast<size_t>(piece.layer)][static_cast<size_t>(piece.plane)];
    const bool keys = plane.format == kernels::KvFormat::kIndexKey;
    PlaneRows rows;
    rows.plane = piece.plane;
    rows.token_ratio = plane.token_ratio;
    rows.at =
        kernels::MakeKvRowLayout(plane.format, keys ? tags.index_dim : tags.geometry.kv_lora_rank,
                                 keys ? 0 : tags.geometry.rope_dim);
    rows.bytes = BytesOf(payload).data() + (begin - place.offset);
    rows.row_stride = plane.row_stride;
    rows.page_rows = plane.rows;
    const bool whole = rows.at.traits.scales == kernels::KvScales::kInPage;
    rows.first = whole ? 0 : (begin - piece.payload_offset) / piece.unit;
    rows.count = whole ? place.group.rows / plane.token_ratio : (end - begin) / piece.unit;
    planes.push_back(rows);
  }
  return planes;
}

// Replaces encodings that rows of a layer's first plane may not have by NaN. Returns the position
// of the first row with such a NaN, from which on rows may not be finite, or kAllFinite. An entry
// counts as the row that completes it.
int64_t Poison(const MovingPages& pages, const PagePlace& place,
               const std::vector<PlaneRows>& planes) {
  int64_t first = Engine::kAllFinite;
  for (const PlaneRows& rows : planes) {
    if (rows.plane != 0) continue;
    const int64_t bad_row = kernels::PoisonRows(rows.at, pages.tags.fp8, rows.bytes,
                                                rows.row_stride, rows.page_rows, rows.count);
    if (bad_row == rows.count) continue;
    const int64_t behind = (rows.first + bad_row + 1) * rows.token_ratio;
    first = std::min(first, place.group.first_row + behind - 1);
  }
  return first;
}

// Converts to the kind of 8-bit floats in the pool. Scales of layers are the scales for kE4m3Fn on
// every server.
void Convert(kernels::Fp8Kind from, kernels::Fp8Kind target, const std::vector<PlaneRows>& planes) {
  if (from == target) return;
  for (const PlaneRows& rows : planes) {
    kernels::ConvertRows(rows.at, target, rows.bytes, rows.row_stride, rows.page_rows, rows.count);
  }
}

// Sends the groups of one export.
class GroupSender {
 public:
  GroupSender(Engine* engine, const std::string& tenant, const MovingPages& pages,
              const SendOptions& options, PageDigests* digests, const PartSink& sink)
      : engine_(engine), pages_(pages), options_(options), digests_(digests), sink_(sink) {
    move_.tenant = tenant;
    move_.id = pages.id;
  }

  absl::Status Send(const StreamGroup& group) {
    v1::PagesPart part;
    part.mutable_group()->set_first_row(static_cast<uint64_t>(group.first_row));
    part.mutable_group()->set_rows(static_cast<uint32_t>(group.rows));
    part.mutable_group()->set_content(group.content);
    MLA_RETURN_IF_ERROR(sink_(part));
    digests_->BeginGroup(group);
    const auto pieces = PiecesOf(pages_, group);
    const int64_t bytes = kvcache::PayloadBytes(pieces);
    for (int64_t offset = 0; offset < bytes;) {
      const int64_t end = kvcache::PartEnd(pieces, offset, options_.chunk_bytes);
      MLA_RETURN_IF_ERROR(Chunk(group, offset, end - offset));
      offset = end;
    }
    part.mutable_group_end()->set_sha256(digests_->EndGroup());
    return sink_(part);
  }

 private:
  absl::Status Chunk(const StreamGroup& group, int64_t offset, int64_t bytes) {
    std::string* const payload = chunk_.mutable_chunk()->mutable_payload();
    payload->resize(static_cast<size_t>(bytes));
    if (group.content == v1::PAGE_CONTENT_TAIL) {
      std::memcpy(payload->data(), pages_.state.tail->data.get() + offset, payload->size());
    } else {
      move_.window = group.content == v1::PAGE_CONTENT_WINDOW;
      move_.page = group.first_row / PageSizeOf(pages_, group);
      move_.rows = group.rows;
      move_.offset = offset;
      move_.bytes = BytesOf(payload);
      MLA_RETURN_IF_ERROR(engine_->MovePart(&move_));
    }
    digests_->Add(*payload);
    return sink_(chunk_);
  }

  Engine* const engine_;
  const MovingPages& pages_;
  const SendOptions& options_;
  PageDigests* const digests_;
  const PartSink& sink_;
  scheduler::PageMove move_;
  v1::PagesPart chunk_;  // for all chunks, because their memory is worth keeping
};

// The contents of parts other than rows for the pool.
struct Brought {
  int64_t not_finite_from = Engine::kAllFinite;
  std::shared_ptr<scheduler::Tail> tail;
};

absl::Status TakeTailPart(Engine* engine, const std::string& tenant, const MovingPages& pages,
                          int64_t offset, const std::string& payload, Brought* brought) {
  if (brought->tail == nullptr) {
    MLA_ASSIGN_OR_RETURN(const scheduler::TenantRef row, engine->tenants()->Enter(tenant));
    MLA_ASSIGN_OR_RETURN(auto tail,
                         engine->MakeTail(row, pages.tags.tail_bytes, "part.chunk.payload"));
    brought->tail = std::move(tail);
  }
  std::memcpy(brought->tail->data.get() + offset, payload.data(), payload.size());
  return absl::OkStatus();
}

absl::Status Take(Engine* engine, const std::string& tenant, const MovingPages& pages,
                  PageStreamReader* parts, const PartSource& source, Brought* brought) {
  std::optional<PagePlace> place;
  scheduler::PageMove move;
  move.tenant = tenant;
  move.id = pages.id;
  move.in = true;
  while (true) {
    MLA_ASSIGN_OR_RETURN(v1::PagesPart* const part, source());
    if (part == nullptr) return parts->Finish();
    MLA_RETURN_IF_ERROR(parts->Add(*part, &place));
    if (!place) continue;
    std::string* const payload = part->mutable_chunk()->mutable_payload();
    if (place->group.content == v1::PAGE_CONTENT_TAIL) {
      MLA_RETURN_IF_ERROR(TakeTailPart(engine, tenant, pages, place->offset, *payload, brought));
      continue;
    }
    // Rows are found after the digests were computed, because digests cover the bytes as sent.
    const std::vector<PlaneRows> planes = RowsOf(pages, *place, payload);
    brought->not_finite_from = std::min(brought->not_finite_from, Poison(pages, *place, planes));
    Convert(pages.tags.fp8, engine->backend_info().fp8, planes);
    move.window = place->group.content == v1::PAGE_CONTENT_WINDOW;
    move.page = place->page;
    move.rows = place->group.rows;
    move.offset = place->offset;
    move.bytes = BytesOf(payload);
    MLA_RETURN_IF_ERROR(engine->MovePart(&move));
  }
}

}  // namespace

absl::Status SendPages(Engine* engine, const std::string& tenant, const MovingPages& pages,
                       const PartSink& sink, const SendOptions& options) {
  const scheduler::PageTags& tags = pages.tags;
  const auto model = engine->FindModel(tenant, pages.model_id);
  if (model == nullptr) return absl::AbortedError("the model has gone");
  PageDigests digests(tags, options.digests);
  v1::PagesPart part;
  FillHeader(*model, tags, part.mutable_header(), options.digests);
  MLA_RETURN_IF_ERROR(sink(part));
  GroupSender sender(engine, tenant, pages, options, &digests, sink);
  const int64_t groups = GroupCount(pages);
  for (int64_t index = 0; index < groups; ++index) {
    MLA_RETURN_IF_ERROR(sender.Send(GroupAt(pages, index)));
  }
  part.mutable_trailer()->set_groups(static_cast<uint64_t>(groups));
  part.mutable_trailer()->set_sha256(digests.End());
  return sink(part);
}

absl::StatusOr<scheduler::SequenceInfo> TakePages(Engine* engine, const std::string& tenant,
                                                  const MovingPages& pages, int64_t chunk_bytes,
                                                  const PartSource& source,
                                                  const scheduler::SequenceState* state,
                                                  uint64_t* bytes, DigestKind digests) {
  PageStreamReader parts(pages, chunk_bytes, digests);
  Brought brought;
  if (state != nullptr) brought.not_finite_from = state->not_finite_from;
  const absl::Status status = Take(engine, tenant, pages, &parts, source, &brought);
  *bytes = parts.bytes();
  if (status.ok()) {
    return engine->EndImport(tenant, pages.id, brought.not_finite_from, state,
                             {pages.tags.tail_position, brought.tail});
  }
  engine->AbortImport(tenant, pages);
  return status;
}

}  // namespace mla::server
