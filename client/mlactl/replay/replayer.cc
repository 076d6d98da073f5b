#include "client/mlactl/replay/replayer.h"

#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/mlactl/cli/output.h"

namespace mla::mlactl {

struct Replayer::Model {
  Model(const v1::ModelSpec& model, std::string name)
      : spec(model), projection(model), server_id(std::move(name)) {}
  const v1::ModelSpec& spec;
  ValueProjection projection;
  const std::string server_id;
};

struct Replayer::OpenSequence {
  client::Sequence remote;
  Model* model;
  ValueBounds bounds;
};

struct Replayer::OpenStep {
  std::unique_ptr<client::Step> remote;
  Model* model;
  struct Row {
    std::shared_ptr<OpenSequence> sequence;
    uint64_t position;
  };
  std::vector<Row> rows;
  std::vector<std::shared_ptr<OpenSequence>> sequences;

  // Drops rows that were not committed.
  void Settle() {
    for (const auto& sequence : sequences) sequence->bounds.Truncate(sequence->remote.length());
  }
};

Replayer::Replayer(client::Client* client, RecordingReader* reader, RecordingWriter* writer,
                   const ReplayOptions& options)
    : client_(client),
      reader_(reader),
      writer_(writer),
      options_(options),
      comparison_(options.rule) {}

Replayer::~Replayer() {
  steps_.clear();
  session_.reset();
  sequences_.clear();
  for (const auto& [name, model] : models_) {
    client_->UnregisterModel(model->server_id).IgnoreError();
  }
}

std::vector<std::string> Replayer::model_ids() const {
  std::vector<std::string> ids;
  ids.reserve(models_.size());
  for (const auto& [name, model] : models_) ids.push_back(model->server_id);
  return ids;
}

absl::Status Replayer::RegisterModels() {
  for (const v1::ModelSpec& model : reader_->models()) {
    v1::ModelSpec spec = model;
    spec.set_model_id(NewModelId("replay"));
    const auto registered = client_->RegisterModel(spec);
    if (!registered.ok()) return WithContext(model.model_id(), registered.status());
    models_[model.model_id()] = std::make_unique<Model>(model, spec.model_id());
  }
  return absl::OkStatus();
}

absl::Status Replayer::Run(const std::function<bool()>& progress) {
  MLA_ASSIGN_OR_RETURN(session_, client_->OpenSession());
  MLA_RETURN_IF_ERROR(RegisterModels());
  Record record;
  do {
    MLA_RETURN_IF_ERROR(reader_->Next(&record));
    absl::Status status;
    // An upload ends at the first record of another kind, which is replayed after it.
    if (record.kind == RecordKind::kWeights) {
      status = Upload(&record, progress);
      if (absl::IsCancelled(status)) return status;
    }
    if (status.ok()) status = Replay(record);
    if (!status.ok()) return WithContext(absl::StrCat("record ", reader_->records()), status);
    if (status = Write(record); !status.ok()) return status;
    if (!progress()) return absl::CancelledError("interrupted");
  } while (record.kind != RecordKind::kDone);
  return absl::OkStatus();
}

absl::Status Replayer::Replay(const Record& record) {
  switch (record.kind) {
    case RecordKind::kOpen:
    case RecordKind::kFork:
      return Create(record);
    case RecordKind::kTruncate: {
      OpenSequence& sequence = *sequences_.at(record.sequence);
      const absl::Status status = sequence.remote.Truncate(record.length);
      if (status.ok()) sequence.bounds.Truncate(record.length);
      return status;
    }
    case RecordKind::kRelease: {
      const absl::Status status = sequences_.at(record.sequence)->remote.Release();
      sequences_.erase(record.sequence);
      return status;
    }
    case RecordKind::kBegin:
      return Begin(record);
    case RecordKind::kAttend:
      return Attend(record);
    case RecordKind::kEnd:
      return End(record);
    case RecordKind::kAbort: {
      const auto step = steps_.extract(record.step);
      const absl::Status status = step.mapped()->remote->Abort();
      step.mapped()->Settle();
      return status;
    }
    case RecordKind::kWeights:
    case RecordKind::kDone:
      break;
  }
  return absl::OkStatus();
}

absl::Status Replayer::Upload(Record* record, const std::function<bool()>& progress) {
  while (record->kind == RecordKind::kWeights) {
    Model& model = *models_.at(record->model_id);
    const std::string model_id = record->model_id;
    absl::Status read;
    const auto next = [&]() -> std::optional<client::WeightsChunk> {
      const bool same = record->kind == RecordKind::kWeights && record->model_id == model_id;
      if (!read.ok() || !same) return std::nullopt;
      model.projection.Add(record->layer, record->head_begin, record->head_count, record->payload);
      client::WeightsChunk chunk{record->layer, record->head_begin, record->head_count,
                                 std::string(reinterpret_cast<const char*>(record->payload.data()),
                                             record->payload.size())};
      read = Write(*record);
      if (read.ok()) read = reader_->Next(record);
      if (read.ok() && !progress()) read = absl::CancelledError("interrupted");
      return chunk;
    };
    const auto reply = client_->UploadWeights(model.server_id, next);
    if (!read.ok()) return read;
    if (!reply.ok()) return reply.status();
  }
  return absl::OkStatus();
}

absl::Status Replayer::Create(const Record& record) {
  Model& model = *models_.at(record.model_id);
  ValueBounds bounds(model.spec.layers());
  absl::StatusOr<client::Sequence> remote = absl::InternalError("unset");
  if (record.kind == RecordKind::kFork) {
    OpenSequence& parent = *sequences_.at(record.parent);
    remote = parent.remote.Fork(record.length);
    bounds = parent.bounds;
    bounds.Truncate(record.length);
  } else {
    remote = client_->OpenSequence(model.server_id);
  }
  if (!remote.ok()) return remote.status();
  sequences_[record.sequence] =
      std::make_shared<OpenSequence>(OpenSequence{*std::move(remote), &model, std::move(bounds)});
  return absl::OkStatus();
}

absl::Status Replayer::Begin(const Record& record) {
  auto step = std::make_unique<OpenStep>();
  step->model = models_.at(record.model_id).get();
  std::vector<client::StepRows> rows;
  for (const RecordedRows& one : record.rows) {
    const std::shared_ptr<OpenSequence>& sequence = sequences_.at(one.sequence);
    if (sequence->remote.length() != one.start_position) {
      return absl::DataLossError(absl::StrCat("start_position: got ", one.start_position,
                                              ", the sequence has ", sequence->remote.length(),
                                              " rows"));
    }
    rows.push_back({&sequence->remote, one.rows});
    step->sequences.push_back(sequence);
    for (uint32_t i = 0; i < one.rows; ++i) {
      step->rows.push_back({sequence, one.start_position + i});
    }
  }
  client::BeginOptions options;
  options.lease_ms = StepLeaseMs(*client_);
  MLA_ASSIGN_OR_RETURN(step->remote, session_->Begin(step->model->server_id, rows, options));
  steps_[record.step] = std::move(step);
  return absl::OkStatus();
}

absl::Status Replayer::Attend(const Record& record) {
  using Clock = std::chrono::steady_clock;
  OpenStep& step = *steps_.at(record.step);
  AddKv(record, &step);
  for (uint32_t row = 0; row < record.row_count; ++row) {
    const OpenStep::Row& at = step.rows[record.row_begin + row];
    if (!at.sequence->bounds.Has(record.layer, at.position)) {
      return absl::DataLossError(absl::StrCat("row ", row, " has no kv row yet"));
    }
  }
  const bool as_f32 = options_.o_dtype == v1::DTYPE_F32;
  output_.resize(record.o.size() * (as_f32 ? 4 : 2));
  lse_.resize(record.lse.size());
  client::AttendCall call;
  call.layer = record.layer;
  call.row_begin = record.row_begin;
  call.row_count = record.row_count;
  call.head_offset = record.head_offset;
  call.num_heads = record.num_heads;
  call.profile = record.profile;
  call.q_dtype = record.dtype;
  call.o_dtype = options_.o_dtype;
  if (!record.kv.empty()) call.kv = record.kv.data();
  if (!record.q.empty()) call.q = record.q.data();
  call.o = output_.data();
  if (!lse_.empty()) call.lse = lse_.data();
  const Clock::time_point sent = Clock::now();
  MLA_RETURN_IF_ERROR(step.remote->Attend(call).status());
  counts_.attend_times.Record(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - sent).count());
  ++counts_.attends;
  counts_.rows += record.row_count;
  o_ = ToFloats(output_, options_.o_dtype);
  Compare(record, step);
  return absl::OkStatus();
}

void Replayer::AddKv(const Record& record, OpenStep* step) {
  if (record.kv.empty()) return;
  const v1::Geometry& geometry = step->model->spec.geometry();
  const size_t lora = geometry.kv_lora_rank(), width = lora + geometry.rope_dim();
  const std::vector<float> kv = ToFloats(record.kv, record.dtype);
  for (uint32_t row = 0; row < record.row_count; ++row) {
    const OpenStep::Row& at = step->rows[record.row_begin + row];
    at.sequence->bounds.AddRow(record.layer, at.position, std::span(kv).subspan(row * width, lora),
                               &step->model->projection);
  }
}

void Replayer::Compare(const Record& record, const OpenStep& step) {
  const size_t cells = size_t{record.row_count} * record.num_heads;
  if (cells == 0 || record.o.empty()) return;
  const size_t width = record.o.size() / cells;
  for (size_t cell = 0; cell < cells; ++cell) {
    const size_t row = cell / record.num_heads;
    const OpenStep::Row& place = step.rows[record.row_begin + row];
    const std::string where = absl::StrCat("record ", reader_->records(), ", layer ", record.layer,
                                           ", row ", row, " (position ", place.position, "), head ",
                                           record.head_offset + cell % record.num_heads);
    comparison_.AddRow(
        std::span(o_).subspan(cell * width, width), record.o.subspan(cell * width, width),
        place.sequence->bounds.Largest(record.layer, place.position, record.profile), where);
    if (!record.lse.empty()) comparison_.AddLse(lse_[cell], record.lse[cell], where);
  }
}

absl::Status Replayer::End(const Record& record) {
  const auto step = steps_.extract(record.step);
  client::Step& remote = *step.mapped()->remote;
  MLA_ASSIGN_OR_RETURN(const auto lengths, record.committed_rows.empty()
                                               ? remote.End()
                                               : remote.End(record.committed_rows));
  step.mapped()->Settle();
  ++counts_.steps;
  if (lengths != record.lengths) {
    return absl::DataLossError("the sequences' lengths after the step are not the recorded ones");
  }
  return absl::OkStatus();
}

absl::Status Replayer::Write(const Record& record) {
  if (writer_ == nullptr) return absl::OkStatus();
  if (record.kind != RecordKind::kAttend) {
    const std::span<const std::byte> parts[] = {record.payload};
    return writer_->Write(record.header, parts);
  }
  const std::span<const std::byte> parts[] = {record.kv, record.q, std::as_bytes(std::span(o_)),
                                              std::as_bytes(std::span(lse_))};
  return writer_->Write(record.header, parts);
}

}  // namespace mla::mlactl
