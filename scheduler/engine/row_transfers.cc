#include "scheduler/engine/row_transfers.h"

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "scheduler/kvcache/pool/group_pieces.h"

namespace mla::scheduler {
namespace {

// Client id of the forks that exports hold.
constexpr char kExportClient[] = "export";

absl::Status Differs(const char* field, const std::string& got, const std::string& limit) {
  return RefuseField(absl::StrCat("part.header.", field), got, limit, "import_differs",
                     absl::StatusCode::kFailedPrecondition);
}

// Entries, the rows of the window and the tail belong together: all of them move or none.
absl::Status CheckWhole(const Model& model, bool whole, const char* field) {
  if (whole || !model.spec->windowed()) return absl::OkStatus();
  return RefuseField(field, "some rows of a model whose attention has a window",
                     "all rows of a sequence, as a sequence of its own", "window_not_moved",
                     absl::StatusCode::kUnimplemented);
}

std::string DigestText(const std::string& digest) {
  return digest.empty() ? "none" : absl::BytesToHexString(digest);
}

}  // namespace

MovingPages RowTransfers::Moving(const Sequence& sequence, int64_t first_row, int64_t rows) const {
  const Model& model = *sequence.model;
  MovingPages pages;
  pages.id = sequence.id;
  pages.model_id = model.spec->id;
  pages.layout = model.contents->layout;
  pages.tags.geometry = model.spec->geometry;
  pages.tags.layers = model.spec->layers;
  pages.tags.page_size = model.spec->page_size;
  pages.tags.index_dim = model.spec->indexer.dim;
  pages.tags.kv_format = model.spec->kv_format;
  pages.tags.fp8 = fp8_;
  pages.tags.weights_digest = model.spec->weights_digest;
  pages.tags.kv_scales = model.contents->kv_scales;
  pages.tags.group_bytes = kvcache::PayloadBytes(
      kvcache::GroupPieces(model.contents->layout, model.contents->layout.page_size));
  pages.tags.first_row = first_row;
  pages.tags.rows = rows;
  pages.state.id = sequence.id;
  pages.state.epoch = sequence.epoch;
  pages.state.not_finite_from = sequence.not_finite_from;
  pages.state.chain = cache_->chain(sequence.slot);
  pages.state.declared = cache_->declared(sequence.slot);
  pages.state.contents = model.spec->ContentsText();
  if (!model.spec->windowed()) return pages;
  pages.window_layout = model.contents->window_layout;
  pages.tags.window = model.spec->window;
  pages.tags.ratios = model.spec->ratios;
  pages.tags.entry_format = model.spec->entry_format;
  pages.tags.tail_bytes = model.spec->tail_bytes;
  if (model.sinks_complete) pages.tags.sinks = model.sinks;
  pages.state.tail = sequence.tail.tail;
  if (sequence.tail.tail != nullptr) pages.tags.tail_position = sequence.tail.position;
  return pages;
}

absl::StatusOr<MovingPages> RowTransfers::BeginExport(const ExportArgs& args) {
  const TenantKey tenant = tenants_->Find(args.tenant);
  MLA_ASSIGN_OR_RETURN(Sequence* const sequence,
                       sequences_->FindIdle(tenant, args.id, args.expected_epoch));
  MLA_RETURN_IF_ERROR(CheckWhole(*sequence->model, args.first_row == 0, "first_row"));
  const int64_t committed = cache_->length(sequence->slot);
  const int64_t end = args.end_row.value_or(committed);
  MLA_RETURN_IF_ERROR(CheckRange("end_row", end, 0, committed));
  const int32_t page_size = sequence->model->spec->page_size;
  if (args.first_row < 0 || args.first_row > end || args.first_row % page_size != 0) {
    return RefuseField("first_row", absl::StrCat(args.first_row),
                       absl::StrCat("0..", end, ", and the first row of a page of ", page_size),
                       "out_of_range");
  }
  if (args.in_place) return Moving(*sequence, args.first_row, end - args.first_row);
  ForkArgs fork;
  fork.parent = args.id;
  fork.expected_epoch = args.expected_epoch;
  fork.length = end;
  fork.client_id = kExportClient;
  MLA_ASSIGN_OR_RETURN(Sequence* const held, sequences_->Fork(tenant, fork));
  held->exports = true;
  MovingPages pages = Moving(*held, args.first_row, end - args.first_row);
  pages.state.id = args.id;
  pages.state.epoch = args.expected_epoch;
  pages.state.client_id = sequence->client_id;
  // The fork's rows are declared only as far as the tenant's bound has room to count them twice.
  pages.state.chain = cache_->chain(sequence->slot);
  pages.state.declared = std::min(cache_->declared(sequence->slot), cache_->length(held->slot));
  return pages;
}

// Checks that rows with these tags mean the same in this model as in their own.
absl::Status RowTransfers::CheckTags(const Model& model, const PageTags& tags) const {
  const ModelSpec& spec = *model.spec;
  const kernels::Geometry& want = spec.geometry;
  const kernels::Geometry& have = tags.geometry;
  const auto text = [](const kernels::Geometry& g) {
    return absl::StrCat(g.num_heads, "/", g.kv_lora_rank, "/", g.rope_dim, "/", g.nope_dim, "/",
                        g.v_dim);
  };
  if (text(want) != text(have)) return Differs("model.geometry", text(have), text(want));
  const struct {
    const char* field;
    int64_t got, want;
  } numbers[] = {
      {"model.layers", tags.layers, spec.layers},
      {"model.page_size", tags.page_size, spec.page_size},
      {"model.index_dim", tags.index_dim, spec.indexer.dim},
      {"group_bytes", tags.group_bytes,
       kvcache::PayloadBytes(kvcache::GroupPieces(model.contents->layout, spec.page_size))},
  };
  if (tags.kv_format != spec.kv_format) {
    return Differs("model.kv_format", kernels::Name(tags.kv_format), kernels::Name(spec.kv_format));
  }
  for (const auto& number : numbers) {
    if (number.got == number.want) continue;
    return Differs(number.field, absl::StrCat(number.got), absl::StrCat(number.want));
  }
  if (tags.weights_digest != spec.weights_digest) {
    return Differs("model.weights_digest", DigestText(tags.weights_digest),
                   DigestText(spec.weights_digest));
  }
  if (tags.kv_scales != model.contents->kv_scales) {
    return Differs("kv_scales", "other scales", "the model's");
  }
  return CheckWindow(model, tags);
}

absl::Status RowTransfers::CheckWindow(const Model& model, const PageTags& tags) const {
  const ModelSpec& spec = *model.spec;
  if (tags.window != spec.window) {
    return Differs("model.window", absl::StrCat(tags.window), absl::StrCat(spec.window));
  }
  if (tags.ratios != spec.ratios) {
    return Differs("model.ratios", absl::StrJoin(tags.ratios, " "),
                   absl::StrJoin(spec.ratios, " "));
  }
  if (spec.windowed() && tags.entry_format != spec.entry_format) {
    return Differs("model.entry_format", kernels::Name(tags.entry_format),
                   kernels::Name(spec.entry_format));
  }
  if (tags.tail_bytes != spec.tail_bytes) {
    return Differs("model.tail_bytes", absl::StrCat(tags.tail_bytes),
                   absl::StrCat(spec.tail_bytes));
  }
  // Servers of older versions send no sinks.
  if (tags.sinks.has_value() && *tags.sinks != model.sinks) {
    return Differs("sinks", "other sinks", "the model's");
  }
  return CheckRange("part.header.tail_position", tags.tail_position, -1, tags.rows);
}

absl::StatusOr<Sequence*> RowTransfers::ImportTarget(const ImportArgs& args, Model* model) {
  const TenantKey tenant = tenants_->Find(args.tenant);
  if (args.id != 0) {
    absl::StatusOr<Sequence*> sequence = sequences_->FindIdle(tenant, args.id, args.expected_epoch);
    if (!sequence.ok() || (*sequence)->model == model) return sequence;
    return RefuseField("target.sequence_id",
                       absl::StrCat("a sequence of model ", (*sequence)->model->spec->id),
                       absl::StrCat("one of model ", model->spec->id), "wrong_model");
  }
  if (importing_.contains(args.restored_id)) {
    return RefuseField("sequence_ids", absl::StrCat(args.restored_id),
                       "sequences that no rows are on their way into", "sequence_open",
                       absl::StatusCode::kAlreadyExists);
  }
  OpenArgs open;
  open.model_id = args.model_id;
  open.client_id = args.client_id;
  open.lease_ms = args.lease_ms;
  open.restored_id = args.restored_id;
  return sequences_->Open(tenant, model, open, {});
}

absl::StatusOr<MovingPages> RowTransfers::BeginImport(const ImportArgs& args) {
  const TenantKey tenant = tenants_->Find(args.tenant);
  MLA_ASSIGN_OR_RETURN(Model* const model, models_->Use(tenant, args.model_id, "target.model_id"));
  MLA_RETURN_IF_ERROR(CheckWhole(*model, args.id == 0, "target.sequence_id"));
  MLA_RETURN_IF_ERROR(CheckTags(*model, args.tags));
  MLA_ASSIGN_OR_RETURN(Sequence* const target, ImportTarget(args, model));
  Sequence* const sequence = target;
  const int64_t length = cache_->length(sequence->slot);
  const int64_t room =
      std::min<int64_t>(limits_.max_sequence_rows, cache_->max_rows(sequence->slot)) - length;
  absl::Status status;
  if (args.tags.first_row != length || length % model->spec->page_size != 0) {
    status = RefuseField(
        {.field = "part.header.first_row",
         .got = absl::StrCat(args.tags.first_row),
         .limit = absl::StrCat(length, ", the rows that the sequence has, and whole pages of ",
                               model->spec->page_size),
         .reason = "position_mismatch",
         .last_good_position = length},
        absl::StatusCode::kFailedPrecondition);
  } else {
    status = CheckRange("part.header.rows", args.tags.rows, 1, room);
  }
  const auto rows = static_cast<int32_t>(args.tags.rows);
  MovingPages pages = Moving(*sequence, length, rows);
  pages.opened = args.id == 0;
  pages.tags.fp8 = args.tags.fp8;  // format in which the rows arrive
  if (status.ok() && model->spec->windowed()) {
    const int64_t skipped = FirstWindowRow(pages) / pages.window_layout.page_size;
    cache_->SkipPages(sequence->slot, static_cast<int32_t>(skipped));
    pages.tags.tail_position = args.tags.tail_position;
  }
  if (status.ok()) {
    status = opener_->ReservePages({{sequence, static_cast<int32_t>(length), rows, 0}}, *model,
                                   "part.header.rows");
  }
  if (!status.ok()) {
    if (args.id == 0) sequences_->Release(sequence);
    return status;
  }
  sequence->imports = true;
  importing_.insert(sequence->id);
  sequences_->Renew(sequence);
  return pages;
}

absl::Status RowTransfers::Start(PageMove* move) {
  const TenantKey tenant = tenants_->Find(move->tenant);
  MLA_ASSIGN_OR_RETURN(Sequence* const found,
                       sequences_->FindOrRefuse(tenant, move->id, "sequence_id"));
  Sequence& sequence = *found;
  const Model& model = *sequence.model;
  const kvcache::GroupLayout& layout =
      move->window ? model.contents->window_layout : model.contents->layout;
  const kvcache::SeqSlot slot = sequence.slot;
  const kvcache::PageList list =
      move->window ? kvcache::PageList::kWindow : kvcache::PageList::kMain;
  const bool has = cache_->Has(slot, list);
  const int64_t first = move->page * layout.page_size;
  const int64_t committed = has ? cache_->length(slot, list) : 0;
  const int64_t end = committed + (move->in && has ? cache_->reserved(slot, list) : 0);
  if (!has || move->rows < 1 || move->rows > layout.page_size ||
      first < (move->in ? committed : 0) || first + move->rows > end ||
      (move->in && !sequence.imports)) {
    return MakeError(absl::StatusCode::kAborted, "the rows to be moved are not there any more",
                     {.field = "sequence_id",
                      .got = absl::StrCat(move->id),
                      .limit = "a sequence that stays while its rows move",
                      .reason = "changed_meanwhile"});
  }
  const std::vector<kvcache::GroupPiece> pieces = kvcache::GroupPieces(layout, move->rows);
  const auto bytes = static_cast<int64_t>(move->bytes.size());
  if (!kvcache::IsPart(pieces, move->offset, bytes)) {
    return RefuseField("part.chunk.payload",
                       absl::StrCat(bytes, " bytes at ", move->offset, " of the group"),
                       "whole rows inside the group", "payload_size");
  }
  PageMove::EngineFields& note = move->engine;
  note.entry = cache_->group(slot, move->page, list);
  note.tenant = tenant;
  note.ticket = cache_->work().last();
  note.transfers.clear();
  kvcache::AddTransfers(pieces, move->offset, bytes, cache_->group_offset(note.entry),
                        move->bytes.data(), &note.transfers);
  mover_->Add(move);
  sequences_->Renew(&sequence);
  return absl::OkStatus();
}

absl::StatusOr<SequenceInfo> RowTransfers::EndImport(const std::string& tenant, SequenceId id,
                                                     int64_t not_finite_from,
                                                     const SequenceState* state,
                                                     SequenceTail tail) {
  importing_.erase(id);
  MLA_ASSIGN_OR_RETURN(Sequence* const found,
                       sequences_->FindOrRefuse(tenants_->Find(tenant), id, "sequence_id"));
  Sequence& sequence = *found;
  if (!sequence.imports) {
    return MakeError(absl::StatusCode::kAborted, "no rows are being imported into the sequence",
                     {.field = "sequence_id",
                      .got = absl::StrCat(id),
                      .limit = "a sequence with an import under way",
                      .reason = "changed_meanwhile"});
  }
  sequence.imports = false;
  const int32_t rows = cache_->reserved(sequence.slot);
  if (not_finite_from < cache_->length(sequence.slot) + rows) {
    sequence.not_finite_from = std::min(sequence.not_finite_from, not_finite_from);
    // Rows that are not finite are not shared with other sequences.
    cache_->Undeclare(sequence.slot, static_cast<int32_t>(sequence.not_finite_from));
  }
  cache_->Commit(sequence.slot, rows);
  sequence.SwapTail(tail.position, &tail.tail);
  if (state != nullptr) cache_->Note(sequence.slot, kvcache::EventKind::kRestored);
  if (state != nullptr && state->chain != nullptr) sequences_->Redeclare(&sequence, *state);
  sequences_->Renew(&sequence);
  return sequences_->Info(sequence);
}

void RowTransfers::AbortImport(const std::string& tenant, const MovingPages& pages) {
  importing_.erase(pages.id);
  Sequence* const sequence = sequences_->Find(tenants_->Find(tenant), pages.id);
  if (sequence == nullptr || !sequence->imports) return;
  sequence->imports = false;
  if (pages.opened) return sequences_->Release(sequence);
  cache_->Rollback(sequence->slot);
}

std::vector<SequenceInfo> RowTransfers::AllSequences() const {
  std::vector<SequenceInfo> infos;
  for (const std::unique_ptr<Sequence>& sequence : sequences_->slots()) {
    if (sequence == nullptr || sequence->exports) continue;
    const TenantRef tenant = tenants_->Get(sequence->tenant);
    infos.push_back(sequences_->Info(*sequence));
    if (tenant) infos.back().tenant = tenant->name();
  }
  std::sort(infos.begin(), infos.end(), [](const SequenceInfo& a, const SequenceInfo& b) {
    return std::tie(a.tenant, a.id) < std::tie(b.tenant, b.id);
  });
  return infos;
}

absl::Status RowTransfers::EndHandOver(const SequenceInfo& moved, const std::string& peer) {
  MLA_ASSIGN_OR_RETURN(Sequence* const sequence,
                       sequences_->FindIdle(tenants_->Find(moved.tenant), moved.id, moved.epoch));
  if (cache_->length(sequence->slot) != moved.length) {
    return MakeError(absl::StatusCode::kAborted, "the sequence got rows while it was handed over",
                     {.field = "sequence_id",
                      .got = absl::StrCat(moved.id),
                      .limit = "a sequence that stays while its rows move",
                      .reason = "changed_meanwhile"});
  }
  cache_->Note(sequence->slot, kvcache::EventKind::kPreempted);
  sequences_->ReleaseMoved(sequence, peer);
  return absl::OkStatus();
}

}  // namespace mla::scheduler
