#include "client/mlactl/replay/recording.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/mlactl/replay/record_fields.h"

namespace mla::mlactl {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors and lengths are little endian");

constexpr uint64_t kMostHeaderBytes = 1u << 20;
constexpr uint64_t kMostNumber = (uint64_t{1} << 53) - 1;
// Together they keep every product of dimensions within 64 bits.
constexpr uint32_t kMostDim = 1u << 16;
constexpr uint32_t kMostRows = 1u << 24;

constexpr struct {
  const char* name;
  RecordKind kind;
} kKinds[] = {
    {"weights", RecordKind::kWeights}, {"open", RecordKind::kOpen},
    {"fork", RecordKind::kFork},       {"truncate", RecordKind::kTruncate},
    {"release", RecordKind::kRelease}, {"begin", RecordKind::kBegin},
    {"attend", RecordKind::kAttend},   {"end", RecordKind::kEnd},
    {"abort", RecordKind::kAbort},     {"done", RecordKind::kDone},
};

absl::Status NotOpen(const char* key) {
  return absl::DataLossError(absl::StrCat(key, ": not open"));
}

absl::Status UnknownModel() { return absl::DataLossError("model_id: not in the header line"); }

uint32_t Small(RecordFields* fields, const char* key, uint32_t least, uint32_t most) {
  return static_cast<uint32_t>(fields->Number(key, least, most));
}

void Exactly(RecordFields* fields, const char* key, uint64_t expected) {
  fields->Number(key, expected, expected);
}

absl::Status Truncated() { return absl::DataLossError("the recording ends inside a record"); }

// Reads one of the header line's models.
v1::ModelSpec ReadModel(RecordFields* fields) {
  v1::ModelSpec model;
  model.set_model_id(fields->Text("model_id"));
  v1::Geometry* const geometry = model.mutable_geometry();
  geometry->set_num_heads(static_cast<uint32_t>(fields->Number("num_heads", 1, kMostDim)));
  geometry->set_kv_lora_rank(static_cast<uint32_t>(fields->Number("kv_lora_rank", 1, kMostDim)));
  geometry->set_rope_dim(static_cast<uint32_t>(fields->Number("rope_dim", 0, kMostDim)));
  geometry->set_nope_dim(static_cast<uint32_t>(fields->Number("nope_dim", 0, kMostDim)));
  geometry->set_v_dim(static_cast<uint32_t>(fields->Number("v_dim", 0, kMostDim)));
  model.set_layers(static_cast<uint32_t>(fields->Number("layers", 1, kMostDim)));
  model.set_page_size(static_cast<uint32_t>(fields->Number("page_size", 0, kMostDim)));
  model.set_softmax_scale(fields->Real("softmax_scale"));
  model.set_kv_dtype(v1::DTYPE_BF16);
  model.set_rope_owner(v1::ROPE_OWNER_WORKER);
  return model;
}

}  // namespace

// -------------------------------------------------------------------------------------- Reader

absl::StatusOr<std::unique_ptr<RecordingReader>> RecordingReader::Open(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  std::unique_ptr<RecordingReader> reader(new RecordingReader(file));
  if (std::fseek(file, 0, SEEK_END) != 0) return absl::DataLossError(path + ": not a plain file");
  reader->file_bytes_ = static_cast<uint64_t>(std::ftell(file));
  std::rewind(file);
  if (absl::Status status = reader->ReadHeaderLine(); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
  }
  return reader;
}

double RecordingReader::fraction_read() const {
  return static_cast<double>(read_) / static_cast<double>(file_bytes_);
}

const v1::ModelSpec* RecordingReader::Model(const std::string& id) const {
  for (const v1::ModelSpec& model : models_) {
    if (model.model_id() == id) return &model;
  }
  return nullptr;
}

absl::Status RecordingReader::ReadBytes(void* to, uint64_t bytes) {
  if (bytes > file_bytes_ - read_) return Truncated();
  if (std::fread(to, 1, bytes, file_.get()) != bytes) return Truncated();
  read_ += bytes;
  return absl::OkStatus();
}

absl::Status RecordingReader::ReadHeaderLine() {
  for (int next = std::fgetc(file_.get()); next != '\n'; next = std::fgetc(file_.get())) {
    if (next == EOF || header_line_.size() == kMostHeaderBytes) {
      return absl::DataLossError("no recording: it has no header line");
    }
    header_line_.push_back(static_cast<char>(next));
  }
  read_ = header_line_.size() + 1;
  RecordFields fields(header_line_);
  const std::string format = fields.Text("format");
  const uint64_t version = fields.Number("version", 1, kMostNumber);
  if (!fields.status().ok()) return fields.status();
  if (format != "mla-recording" || version != 1) {
    return absl::DataLossError(absl::StrCat("got format ", format, " version ", version,
                                            ", want mla-recording version 1"));
  }
  for (RecordFields& one : fields.Objects("models")) {
    models_.push_back(ReadModel(&one));
    if (!one.status().ok()) return one.status();
  }
  if (models_.empty() && fields.status().ok()) return absl::DataLossError("models: it has none");
  return fields.status();
}

absl::Status RecordingReader::ReadPayload(Record* record) {
  uint64_t bytes = 0;
  MLA_RETURN_IF_ERROR(ReadBytes(&bytes, sizeof(bytes)));
  if (bytes > file_bytes_ - read_) return Truncated();
  record->payload.resize(bytes);
  return ReadBytes(record->payload.data(), bytes);
}

absl::Status RecordingReader::Next(Record* record) {
  if (done_) return absl::FailedPreconditionError("the recording has ended");
  if (read_ == file_bytes_) {
    return absl::DataLossError("the recording is truncated: it has no record \"done\"");
  }
  std::vector<std::byte> payload = std::move(record->payload);  // reuses its memory
  *record = Record();
  record->payload = std::move(payload);
  uint32_t header_bytes = 0;
  MLA_RETURN_IF_ERROR(ReadBytes(&header_bytes, sizeof(header_bytes)));
  if (header_bytes > kMostHeaderBytes) return absl::DataLossError("a record's header is too long");
  record->header.resize(header_bytes);
  absl::Status status = ReadBytes(record->header.data(), header_bytes);
  if (status.ok()) status = ReadPayload(record);
  if (!status.ok()) return status;
  ++records_;
  status = Parse(record);
  if (!status.ok()) {
    return absl::DataLossError(absl::StrCat("record ", records_, ": ", status.message()));
  }
  done_ = record->kind == RecordKind::kDone;
  return done_ && read_ != file_bytes_
             ? absl::DataLossError("something follows the record \"done\"")
             : absl::OkStatus();
}

absl::Status RecordingReader::Parse(Record* record) {
  RecordFields fields(record->header);
  const std::string kind = fields.Text("kind");
  bool known = false;
  for (const auto& [name, value] : kKinds) {
    if (kind != name) continue;
    record->kind = value;
    known = true;
  }
  if (!known) fields.Fault("kind", kind, "one that version 1 has");
  if (!fields.status().ok()) return fields.status();
  switch (record->kind) {
    case RecordKind::kWeights:
      return ParseWeights(&fields, record);
    case RecordKind::kOpen:
    case RecordKind::kFork:
    case RecordKind::kTruncate:
    case RecordKind::kRelease:
      return ParseSequence(&fields, record);
    case RecordKind::kBegin:
      return ParseBegin(&fields, record);
    case RecordKind::kAttend:
      return ParseAttend(&fields, record);
    case RecordKind::kEnd:
      for (const uint64_t rows : fields.Numbers("committed_rows", UINT32_MAX)) {
        record->committed_rows.push_back(static_cast<uint32_t>(rows));
      }
      record->lengths = fields.Numbers("lengths", kMostNumber);
      [[fallthrough]];
    case RecordKind::kAbort:
      record->step = fields.Number("step", 0, kMostNumber);
      if (fields.status().ok() && steps_.erase(record->step) == 0) return NotOpen("step");
      return fields.status();
    case RecordKind::kDone:
      return absl::OkStatus();
  }
  return absl::InternalError("unreachable");
}

absl::Status RecordingReader::ParseWeights(RecordFields* fields, Record* record) const {
  record->model_id = fields->Text("model_id");
  const v1::ModelSpec* const model = Model(record->model_id);
  if (!fields->status().ok()) return fields->status();
  if (model == nullptr) return UnknownModel();
  const v1::Geometry& g = model->geometry();
  record->layer = Small(fields, "layer", 0, model->layers() - 1);
  record->head_begin = Small(fields, "head_begin", 0, g.num_heads() - 1);
  record->head_count = Small(fields, "head_count", 1, g.num_heads() - record->head_begin);
  const uint64_t expected =
      uint64_t{record->head_count} * g.kv_lora_rank() * (uint64_t{g.nope_dim()} + g.v_dim()) * 2;
  if (record->payload.size() != expected) {
    fields->Fault("payload", absl::StrCat(record->payload.size(), " bytes"),
                  absl::StrCat(expected, " bytes"));
  }
  return fields->status();
}

absl::Status RecordingReader::ParseSequence(RecordFields* fields, Record* record) {
  record->sequence = fields->Number("sequence", 0, kMostNumber);
  const bool is_new = record->kind == RecordKind::kOpen || record->kind == RecordKind::kFork;
  if (record->kind == RecordKind::kFork) record->parent = fields->Number("parent", 0, kMostNumber);
  if (record->kind == RecordKind::kOpen) record->model_id = fields->Text("model_id");
  if (record->kind == RecordKind::kFork || record->kind == RecordKind::kTruncate) {
    record->length = fields->Number("length", 0, kMostNumber);
  }
  if (!fields->status().ok()) return fields->status();
  if (sequences_.contains(record->sequence) == is_new) {
    return is_new ? absl::DataLossError("sequence: open already") : NotOpen("sequence");
  }
  if (record->kind == RecordKind::kOpen && Model(record->model_id) == nullptr) {
    return UnknownModel();
  }
  if (record->kind == RecordKind::kFork) {
    const auto parent = sequences_.find(record->parent);
    if (parent == sequences_.end()) return NotOpen("parent");
    record->model_id = parent->second;
  }
  if (is_new) sequences_[record->sequence] = record->model_id;
  if (record->kind == RecordKind::kRelease) sequences_.erase(record->sequence);
  return absl::OkStatus();
}

absl::Status RecordingReader::ParseBegin(RecordFields* fields, Record* record) {
  record->step = fields->Number("step", 0, kMostNumber);
  uint64_t total = 0;
  for (RecordFields& one : fields->Objects("sequences")) {
    RecordedRows rows;
    rows.sequence = one.Number("sequence", 0, kMostNumber);
    rows.start_position = one.Number("start_position", 0, kMostNumber);
    rows.rows = Small(&one, "rows", 1, kMostRows);
    if (!one.status().ok()) return one.status();
    const auto open = sequences_.find(rows.sequence);
    if (open == sequences_.end()) return NotOpen("sequences");
    if (!record->rows.empty() && open->second != record->model_id) {
      return absl::DataLossError("sequences: of different models");
    }
    record->model_id = open->second;
    record->rows.push_back(rows);
    total += rows.rows;
  }
  if (!fields->status().ok()) return fields->status();
  if (record->rows.empty() || total > kMostRows) {
    fields->Fault("sequences", absl::StrCat(total, " rows"),
                  absl::StrCat("1..", kMostRows, " rows"));
    return fields->status();
  }
  if (steps_.contains(record->step)) return absl::DataLossError("step: open already");
  steps_[record->step] = {record->model_id, static_cast<uint32_t>(total)};
  return absl::OkStatus();
}

absl::Status RecordingReader::ParseAttend(RecordFields* fields, Record* record) const {
  record->step = fields->Number("step", 0, kMostNumber);
  if (!fields->status().ok()) return fields->status();
  const auto step = steps_.find(record->step);
  if (step == steps_.end()) return NotOpen("step");
  const v1::ModelSpec& model = *Model(step->second.model_id);
  const v1::Geometry& g = model.geometry();
  record->layer = Small(fields, "layer", 0, model.layers() - 1);
  record->row_begin = Small(fields, "row_begin", 0, step->second.rows - 1);
  record->row_count = Small(fields, "row_count", 1, step->second.rows - record->row_begin);
  record->head_offset = Small(fields, "head_offset", 0, g.num_heads() - 1);
  record->num_heads = Small(fields, "num_heads", 1, g.num_heads() - record->head_offset);
  const std::string profile = fields->Text("profile"), dtype = fields->Text("dtype");
  if (!v1::Profile_Parse("PROFILE_" + profile, &record->profile) ||
      record->profile == v1::PROFILE_UNSPECIFIED) {
    fields->Fault("profile", profile, "EXPANDED, ABSORBED or APPEND_ONLY");
  }
  if (dtype != "bf16" && dtype != "f32") fields->Fault("dtype", dtype, "bf16 or f32");
  record->dtype = dtype == "f32" ? v1::DTYPE_F32 : v1::DTYPE_BF16;
  const bool has_kv = fields->Flag("has_kv");
  if (!fields->status().ok()) return fields->status();

  const uint64_t element = record->dtype == v1::DTYPE_F32 ? 4 : 2;
  const uint64_t rows = record->row_count, cells = rows * record->num_heads;
  const uint64_t latent = g.kv_lora_rank(), rope = g.rope_dim();
  const bool absorbed = record->profile == v1::PROFILE_ABSORBED;
  const bool computes = record->profile != v1::PROFILE_APPEND_ONLY;
  const uint64_t kv = has_kv ? rows * (latent + rope) * element : 0;
  const uint64_t q =
      computes ? cells * ((absorbed ? latent : uint64_t{g.nope_dim()}) + rope) * element : 0;
  const uint64_t o = computes ? cells * (absorbed ? latent : uint64_t{g.v_dim()}) * 4 : 0;
  Exactly(fields, "kv_bytes", kv);
  Exactly(fields, "q_bytes", q);
  Exactly(fields, "o_bytes", o);
  const uint64_t lse = fields->Number("lse_bytes", 0, kMostNumber);
  if (lse != 0 && (!computes || lse != cells * 4)) {
    fields->Fault("lse_bytes", absl::StrCat(lse), absl::StrCat("0 or ", computes ? cells * 4 : 0));
  }
  const uint64_t all = kv + q + o + lse;
  if (record->payload.size() != all) {
    fields->Fault("payload", absl::StrCat(record->payload.size(), " bytes"),
                  absl::StrCat(all, " bytes"));
  }
  if (!fields->status().ok()) return fields->status();
  const std::span<const std::byte> payload = record->payload;
  record->kv = payload.first(kv);
  record->q = payload.subspan(kv, q);
  // After bf16 inputs the outputs may not be aligned for floats.
  record->expected.resize((o + lse) / 4);
  if (o + lse > 0) std::memcpy(record->expected.data(), payload.data() + kv + q, o + lse);
  record->o = std::span(record->expected).first(o / 4);
  record->lse = std::span(record->expected).subspan(o / 4);
  return absl::OkStatus();
}

// -------------------------------------------------------------------------------------- Writer

absl::StatusOr<std::unique_ptr<RecordingWriter>> RecordingWriter::Create(
    const std::string& path, std::string_view header_line) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  std::unique_ptr<RecordingWriter> writer(new RecordingWriter(file, path));
  const bool written =
      writer->WriteBytes(header_line.data(), header_line.size()) && writer->WriteBytes("\n", 1);
  if (!written) return writer->Fault();
  return writer;
}

RecordingWriter::~RecordingWriter() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  std::error_code none;
  if (std::filesystem::is_regular_file(path_, none)) std::filesystem::remove(path_, none);
}

absl::Status RecordingWriter::Fault() const {
  return absl::InvalidArgumentError(absl::StrCat(path_, ": ", std::strerror(errno)));
}

bool RecordingWriter::WriteBytes(const void* from, uint64_t bytes) {
  return bytes == 0 || std::fwrite(from, 1, bytes, file_) == bytes;
}

absl::Status RecordingWriter::Write(std::string_view header,
                                    std::span<const std::span<const std::byte>> parts) {
  const auto header_bytes = static_cast<uint32_t>(header.size());
  uint64_t payload_bytes = 0;
  for (const auto& part : parts) payload_bytes += part.size();
  bool written = WriteBytes(&header_bytes, sizeof(header_bytes)) &&
                 WriteBytes(header.data(), header.size()) &&
                 WriteBytes(&payload_bytes, sizeof(payload_bytes));
  for (const auto& part : parts) written = written && WriteBytes(part.data(), part.size());
  return written ? absl::OkStatus() : Fault();
}

absl::Status RecordingWriter::Close() {
  if (file_ == nullptr) return absl::OkStatus();
  return std::fclose(std::exchange(file_, nullptr)) == 0 ? absl::OkStatus() : Fault();
}

}  // namespace mla::mlactl
