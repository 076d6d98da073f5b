#include "server/pages/page_stream.h"

#include <algorithm>
#include <bit>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/request_validator.h"

namespace mla::server {
namespace {

using scheduler::Limits;
using scheduler::MovingPages;
using scheduler::PageTags;

absl::Status Order(const std::string& got, const std::string& want) {
  return RefuseField("part", got, want, "order");
}

absl::Status DigestDiffers(const char* field, const std::string& got, const std::string& want) {
  return MakeError(
      absl::StatusCode::kDataLoss, absl::StrCat(field, ": differs from the digest of what arrived"),
      {.field = field,
       .got = absl::BytesToHexString(got.substr(0, kMostDigestBytes)),
       .limit = absl::StrCat(absl::BytesToHexString(want), ", the digest of what arrived"),
       .reason = "digest_mismatch"});
}

std::string NameOf(const v1::PagesPart& part) {
  switch (part.part_case()) {
    case v1::PagesPart::kHeader:
      return "header";
    case v1::PagesPart::kGroup:
      return "group";
    case v1::PagesPart::kChunk:
      return "chunk";
    case v1::PagesPart::kGroupEnd:
      return "group_end";
    case v1::PagesPart::kTrailer:
      return "trailer";
    case v1::PagesPart::PART_NOT_SET:
      break;
  }
  return "nothing";
}

// Does what CheckRange does, for 64-bit fields.
absl::Status TakeNumber(uint64_t value, int64_t low, int64_t high, const char* field,
                        int64_t* result) {
  if (value > static_cast<uint64_t>(high) || static_cast<int64_t>(value) < low) {
    return RefuseField(field, absl::StrCat(value), absl::StrCat(low, "..", high), "out_of_range");
  }
  *result = static_cast<int64_t>(value);
  return absl::OkStatus();
}

uint32_t VersionOf(const PageTags& tags, DigestKind digests) {
  if (digests == DigestKind::kXxh3) return kPagesVersionWithXxh3;
  return tags.sinks.has_value() ? kPagesVersionWithSinks : kPagesVersion;
}

// Returns the digest of their bits, least significant byte first; empty without sinks.
std::string SinksDigest(const std::vector<float>& sinks) {
  if (sinks.empty()) return "";
  std::string bytes;
  bytes.reserve(sinks.size() * sizeof(float));
  for (const float sink : sinks) {
    const auto bits = std::bit_cast<uint32_t>(sink);
    for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(bits >> shift);
  }
  PageDigest digest(DigestKind::kSha256);
  digest.Add(bytes);
  return absl::BytesToHexString(digest.End());
}

// If the model is registered, their values are compared with the model's; else they are checked as
// in a registration.
absl::Status ParseSinks(const v1::PagesHeader& header, const scheduler::ModelSpec& model,
                        PageTags* tags) {
  const bool told = header.version() == kPagesVersionWithSinks ||
                    (header.version() == kPagesVersionWithXxh3 && model.windowed());
  if (told && !model.windowed()) {
    return RefuseField("part.header.version", absl::StrCat(header.version()),
                       absl::StrCat(kPagesVersion, " of a model without a window"), "inconsistent");
  }
  const int64_t count = header.sinks_size();
  const int64_t all = told ? int64_t{model.layers} * model.geometry.num_heads : 0;
  if (count != 0 && count != all) {
    return RefuseField("part.header.sinks", absl::StrCat(count, " sinks"),
                       absl::StrCat("0 or ", all), "wrong_count");
  }
  if (told) tags->sinks.emplace(header.sinks().begin(), header.sinks().end());
  return absl::OkStatus();
}

}  // namespace

std::string TagText(const PageTags& tags, DigestKind digests) {
  const kernels::Geometry& g = tags.geometry;
  std::string text = absl::StrCat(
      "mla-pages/", VersionOf(tags, digests), "\ngeometry ", g.num_heads, " ", g.kv_lora_rank, " ",
      g.rope_dim, " ", g.nope_dim, " ", g.v_dim, "\nlayers ", tags.layers, "\npage_size ",
      tags.page_size, "\nindex_dim ", tags.index_dim, "\nkv_format ",
      static_cast<int>(tags.kv_format), "\nfp8_kind ", static_cast<int>(tags.fp8), "\ngroup_bytes ",
      tags.group_bytes, "\nfirst_row ", tags.first_row, "\nrows ", tags.rows, "\nweights_digest ",
      absl::BytesToHexString(tags.weights_digest), "\nkv_scales");
  for (const float scale : tags.kv_scales) {
    absl::StrAppendFormat(&text, " %08x", std::bit_cast<uint32_t>(scale));
  }
  text += '\n';
  if (tags.window > 0) {
    absl::StrAppend(&text, "window ", tags.window, "\nratios ", absl::StrJoin(tags.ratios, " "),
                    "\nentry_format ", static_cast<int>(tags.entry_format), "\ntail_bytes ",
                    tags.tail_bytes, "\ntail_position ", tags.tail_position, "\n");
  }
  if (tags.sinks.has_value()) absl::StrAppend(&text, "sinks ", SinksDigest(*tags.sinks), "\n");
  return text;
}

int64_t GroupCount(const MovingPages& pages) {
  const PageTags& tags = pages.tags;
  const auto groups = [](int64_t rows, int64_t size) { return (rows + size - 1) / size; };
  int64_t count = groups(tags.rows, tags.page_size);
  if (tags.window > 0) {
    count += groups(tags.rows - FirstWindowRow(pages), pages.window_layout.page_size);
  }
  return count + (tags.tail_position >= 0 ? 1 : 0);
}

StreamGroup GroupAt(const MovingPages& pages, int64_t index) {
  const PageTags& tags = pages.tags;
  StreamGroup group;
  int64_t begin = tags.first_row, size = tags.page_size;
  const int64_t of_rows = (tags.rows + size - 1) / size;
  if (index >= of_rows) {
    if (index == GroupCount(pages) - 1 && tags.tail_position >= 0) {
      return {v1::PAGE_CONTENT_TAIL, tags.tail_position, 0};
    }
    group.content = v1::PAGE_CONTENT_WINDOW;
    begin = FirstWindowRow(pages);
    size = pages.window_layout.page_size;
    index -= of_rows;
  }
  group.first_row = begin + index * size;
  const int64_t left = tags.first_row + tags.rows - group.first_row;
  group.rows = static_cast<int32_t>(std::min(size, left));
  return group;
}

std::vector<kvcache::GroupPiece> PiecesOf(const MovingPages& pages, const StreamGroup& group) {
  switch (group.content) {
    case v1::PAGE_CONTENT_TAIL: {
      kvcache::GroupPiece all;
      all.bytes = pages.tags.tail_bytes;
      all.unit = 1;
      return {all};
    }
    case v1::PAGE_CONTENT_WINDOW:
      return kvcache::GroupPieces(pages.window_layout, group.rows);
    default:
      return kvcache::GroupPieces(pages.layout, group.rows);
  }
}

int64_t MostPayloadBytes(const MovingPages& pages) {
  const PageTags& tags = pages.tags;
  const int64_t of_rows = (tags.rows + tags.page_size - 1) / tags.page_size;
  int64_t bytes = of_rows * tags.group_bytes;
  if (tags.window > 0) {
    const kvcache::GroupLayout& layout = pages.window_layout;
    const int64_t pages_left =
        (tags.rows - FirstWindowRow(pages) + layout.page_size - 1) / layout.page_size;
    bytes += pages_left * kvcache::PayloadBytes(kvcache::GroupPieces(layout, layout.page_size));
  }
  return bytes + (tags.tail_position >= 0 ? tags.tail_bytes : 0);
}

int32_t PageSizeOf(const MovingPages& pages, const StreamGroup& group) {
  return group.content == v1::PAGE_CONTENT_WINDOW ? pages.window_layout.page_size
                                                  : pages.tags.page_size;
}

void FillHeader(const scheduler::ModelSpec& model, const PageTags& tags, v1::PagesHeader* header,
                DigestKind digests) {
  header->set_version(VersionOf(tags, digests));
  FillModel(model, header->mutable_model());
  header->mutable_kv_scales()->Assign(tags.kv_scales.begin(), tags.kv_scales.end());
  header->set_fp8_kind(static_cast<v1::Fp8Kind>(tags.fp8));
  header->set_group_bytes(static_cast<uint64_t>(tags.group_bytes));
  header->set_first_row(static_cast<uint64_t>(tags.first_row));
  header->set_rows(static_cast<uint64_t>(tags.rows));
  if (tags.sinks.has_value()) {
    header->mutable_sinks()->Assign(tags.sinks->begin(), tags.sinks->end());
  }
  if (tags.tail_position >= 0) {
    header->set_tail_position(static_cast<uint64_t>(tags.tail_position));
  }
}

absl::Status ParseHeader(const v1::PagesHeader& header, const Limits& limits, PageTags* tags) {
  if (header.version() < kPagesVersion || header.version() > kPagesVersionWithXxh3) {
    return RefuseField("part.header.version", absl::StrCat(header.version()),
                       absl::StrCat(kPagesVersion, "..", kPagesVersionWithXxh3), "unknown_version");
  }
  scheduler::ModelSpec model;
  if (absl::Status known = ParseModelSpec(header.model(), limits, &model); !known.ok()) {
    return AmendDetail(known, [](ErrorDetail& detail) {
      detail.field = absl::StrCat("part.header.", detail.field);
    });
  }
  if (header.fp8_kind() != v1::FP8_KIND_E4M3FN && header.fp8_kind() != v1::FP8_KIND_E4M3FNUZ) {
    return RefuseField("part.header.fp8_kind", absl::StrCat(static_cast<int>(header.fp8_kind())),
                       "FP8_KIND_E4M3FN or FP8_KIND_E4M3FNUZ", "unknown_value");
  }
  if (header.has_tail_position() && model.tail_bytes == 0) {
    return RefuseField("part.header.tail_position", absl::StrCat(header.tail_position()),
                       "none: the model was registered without tail_bytes", "inconsistent");
  }
  tags->geometry = model.geometry;
  tags->layers = model.layers;
  tags->page_size = model.page_size;
  tags->index_dim = model.indexer.dim;
  tags->kv_format = model.kv_format;
  tags->window = model.window;
  tags->ratios = model.ratios;
  tags->entry_format = model.entry_format;
  tags->tail_bytes = model.tail_bytes;
  tags->weights_digest = model.weights_digest;
  tags->fp8 = static_cast<kernels::Fp8Kind>(header.fp8_kind());
  if (header.kv_scales_size() > limits.max_layers) {
    return RefuseField("part.header.kv_scales", absl::StrCat(header.kv_scales_size()),
                       absl::StrCat("at most ", limits.max_layers), "out_of_range");
  }
  tags->kv_scales.assign(header.kv_scales().begin(), header.kv_scales().end());
  MLA_RETURN_IF_ERROR(ParseSinks(header, model, tags));
  const int64_t rows = limits.max_sequence_rows;
  absl::Status status = TakeNumber(header.group_bytes(), 1, scheduler::kMostKvCacheBytes,
                                   "part.header.group_bytes", &tags->group_bytes);
  if (status.ok()) {
    status = TakeNumber(header.first_row(), 0, rows, "part.header.first_row", &tags->first_row);
  }
  if (status.ok()) status = TakeNumber(header.rows(), 1, rows, "part.header.rows", &tags->rows);
  if (!status.ok() || !header.has_tail_position()) return status;
  return TakeNumber(header.tail_position(), 0, tags->rows, "part.header.tail_position",
                    &tags->tail_position);
}

absl::Status ParseExport(const v1::ExportRequest& message, const Limits& limits,
                         scheduler::ExportArgs* args) {
  args->id = message.sequence_id();
  args->expected_epoch = message.expected_epoch();
  absl::Status status =
      TakeNumber(message.first_row(), 0, limits.max_sequence_rows, "first_row", &args->first_row);
  if (!status.ok() || !message.has_end_row()) return status;
  int64_t end = 0;
  status = TakeNumber(message.end_row(), 0, limits.max_sequence_rows, "end_row", &end);
  args->end_row = end;
  return status;
}

absl::Status ParseTarget(const v1::ImportTarget& message, const Limits& limits,
                         scheduler::ImportArgs* args) {
  absl::Status status = CheckName(message.model_id(), "target.model_id", false, limits);
  if (status.ok()) status = CheckName(message.client_id(), "target.client_id", true, limits);
  if (status.ok()) {
    status = CheckRange("target.lease_ms", message.lease_ms(), 0, limits.max_lease_ms);
  }
  args->model_id = message.model_id();
  args->id = message.sequence_id();
  args->expected_epoch = message.expected_epoch();
  args->client_id = message.client_id();
  args->lease_ms = message.lease_ms();
  return status;
}

PageDigests::PageDigests(const PageTags& tags, DigestKind kind)
    : tags_(TagText(tags, kind)), group_(kind), all_(kind) {
  all_.Add(tags_);
}

void PageDigests::BeginGroup(const StreamGroup& group) {
  group_.Begin();
  const char* const kind = group.content == v1::PAGE_CONTENT_ROWS     ? "group "
                           : group.content == v1::PAGE_CONTENT_WINDOW ? "window "
                                                                      : "tail ";
  group_.Add(absl::StrCat(tags_, kind, group.first_row, " ", group.rows, "\n"));
}

void PageDigests::Add(absl::string_view payload) { group_.Add(payload); }

std::string PageDigests::EndGroup() {
  std::string digest = group_.End();
  all_.Add(digest);
  return digest;
}

std::string PageDigests::End() { return all_.End(); }

PageStreamReader::PageStreamReader(const scheduler::MovingPages& pages, int64_t chunk_bytes,
                                   DigestKind digests)
    : pages_(pages), chunk_bytes_(chunk_bytes), digests_(pages.tags, digests) {}

absl::Status PageStreamReader::Add(const v1::PagesPart& part, std::optional<PagePlace>* place) {
  place->reset();
  if (ended_) return Order(NameOf(part), "nothing after the trailer");
  if (open_) {
    const bool whole = offset_ == kvcache::PayloadBytes(pieces_);
    if (whole && part.has_group_end()) return EndGroup(part.group_end());
    if (!whole && part.has_chunk()) return AddChunk(part.chunk().payload(), place);
    return Order(NameOf(part), whole ? "group_end after all bytes of a group"
                                     : absl::StrCat("chunk, until the group has ",
                                                    kvcache::PayloadBytes(pieces_), " bytes"));
  }
  const bool more = groups_ < GroupCount(pages_);
  if (more && part.has_group()) return AddGroup(part.group());
  if (!more && part.has_trailer()) return AddTrailer(part.trailer());
  return Order(NameOf(part), more ? "group" : "trailer");
}

absl::Status PageStreamReader::AddGroup(const v1::PageGroup& group) {
  const auto text = [](v1::PageContent content, auto first, auto rows) {
    return absl::StrCat(v1::PageContent_Name(content), ", ", rows, " rows from ", first, " on");
  };
  const StreamGroup want = GroupAt(pages_, groups_);
  if (group.content() != want.content || group.rows() != static_cast<uint32_t>(want.rows) ||
      group.first_row() != static_cast<uint64_t>(want.first_row)) {
    return RefuseField("part.group", text(group.content(), group.first_row(), group.rows()),
                       text(want.content, want.first_row, want.rows), "order");
  }
  open_ = true;
  group_ = want;
  offset_ = 0;
  pieces_ = PiecesOf(pages_, want);
  digests_.BeginGroup(want);
  return absl::OkStatus();
}

absl::Status PageStreamReader::AddChunk(const std::string& payload,
                                        std::optional<PagePlace>* place) {
  const auto bytes = static_cast<int64_t>(payload.size());
  if (bytes > chunk_bytes_ || !kvcache::IsPart(pieces_, offset_, bytes)) {
    return RefuseField(
        "part.chunk.payload", absl::StrCat(bytes, " bytes"),
        absl::StrCat("whole rows, at most ", chunk_bytes_, " bytes and ",
                     kvcache::PayloadBytes(pieces_) - offset_, ", which the group misses"),
        "payload_size");
  }
  digests_.Add(payload);
  const bool tail = group_.content == v1::PAGE_CONTENT_TAIL;
  *place = {group_, tail ? 0 : group_.first_row / PageSizeOf(pages_, group_), offset_};
  offset_ += bytes;
  bytes_ += payload.size();
  return absl::OkStatus();
}

absl::Status PageStreamReader::EndGroup(const v1::PageGroupEnd& end) {
  const std::string digest = digests_.EndGroup();
  if (end.sha256() != digest) return DigestDiffers("part.group_end.sha256", end.sha256(), digest);
  open_ = false;
  ++groups_;
  return absl::OkStatus();
}

absl::Status PageStreamReader::AddTrailer(const v1::PagesTrailer& trailer) {
  if (trailer.groups() != static_cast<uint64_t>(groups_)) {
    return RefuseField("part.trailer.groups", absl::StrCat(trailer.groups()), absl::StrCat(groups_),
                       "order");
  }
  const std::string digest = digests_.End();
  if (trailer.sha256() != digest) {
    return DigestDiffers("part.trailer.sha256", trailer.sha256(), digest);
  }
  ended_ = true;
  return absl::OkStatus();
}

absl::Status PageStreamReader::Finish() const {
  return ended_ ? absl::OkStatus()
                : RefuseField("part", "the end of the stream", "a trailer as the last part",
                              "missing");
}

}  // namespace mla::server
