#include "client/mlactl/bench/bench_worker.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/mlactl/bench/projected_chunks.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/cli/transport.h"
#include "client/mlactl/tensors/random_tensors.h"
#include "client/mlactl/tensors/value_bounds.h"

namespace mla::mlactl {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint64_t kUploadBytes = 4u << 20;  // per chunk, or one head if that is more
constexpr uint32_t kFillRows = 1024;         // per step that fills the context
constexpr double kDeviation = 0.1;

uint64_t AlignUp(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Bytes of each tensor of one attend.
struct TensorBytes {
  uint64_t kv = 0, q = 0, lists = 0, o = 0, lse = 0;
  uint64_t lists_at() const { return AlignUp(kv) + AlignUp(q); }
  uint64_t in() const {
    if (lists > 0) return lists_at() + lists;
    return q == 0 ? kv : AlignUp(kv) + q;
  }
  uint64_t out() const { return lse == 0 ? o : AlignUp(o) + lse; }
};

// Returns the number of entries that `rows` rows after the first `first` rows complete; 0 for
// models without entries.
uint64_t EntriesOf(const v1::ModelSpec& model, uint64_t first, uint64_t rows) {
  const uint64_t ratio = model.ratios().empty() ? 0 : model.ratios(0);  // all layers have one
  return ratio == 0 ? 0 : (first + rows) / ratio - first / ratio;
}

// Returns true if requests have lists; for v4 only if there are more entries than a list holds.
bool HasLists(const BenchOptions& options, const BenchPoint& point) {
  const v1::ModelSpec& model = options.model;
  if (model.attention() != v1::ATTENTION_KIND_SPARSE_V4) {
    return model.attention() == v1::ATTENTION_KIND_SPARSE_V32;
  }
  return EntriesOf(model, 0, point.context) > model.top_k();
}

TensorBytes BytesOf(const BenchOptions& options, const BenchPoint& point) {
  const v1::Geometry& geometry = options.model.geometry();
  const uint64_t rows = uint64_t{point.batch} * point.rows;
  const uint64_t rows_heads = rows * geometry.num_heads();
  const uint64_t latent = geometry.kv_lora_rank(), rope = geometry.rope_dim();
  const uint64_t o_element = options.o_dtype == v1::DTYPE_F32 ? 4 : 2;
  TensorBytes bytes;
  const bool fp8_rows = options.kv_row_dtype == v1::DTYPE_F8_E4M3;
  bytes.kv = fp8_rows ? client::Fp8RowBytes(options.model, rows) : rows * (latent + rope) * 2;
  // In a growing context the number of entries differs from step to step, by at most one.
  const uint64_t entries = EntriesOf(options.model, options.grow ? 0 : point.context, point.rows) +
                           (options.grow && options.model.window() > 0 ? 1 : 0);
  bytes.kv += point.batch * entries * (latent + rope) * 2;
  if (point.profile == v1::PROFILE_APPEND_ONLY) return bytes;
  if (point.profile == v1::PROFILE_PROJECTED) {
    bytes.q = rows * options.model.q_lora_rank() * 2;
    bytes.o = rows * options.model.hidden_size() * o_element;
    return bytes;
  }
  const bool absorbed = point.profile == v1::PROFILE_ABSORBED;
  bytes.q = options.q_dtype == v1::DTYPE_F8_E4M3
                ? client::Fp8QueryBytes(options.model, point.profile, rows_heads)
                : rows_heads * ((absorbed ? latent : geometry.nope_dim()) + rope) * 2;
  const uint64_t values = options.model.window() > 0 ? latent + rope : latent;
  bytes.o = rows_heads * (absorbed ? values : geometry.v_dim()) * o_element;
  if (options.want_lse) bytes.lse = rows_heads * sizeof(float);
  if (HasLists(options, point)) {
    bytes.lists = rows * options.model.top_k() * sizeof(int32_t);
  }
  return bytes;
}

bool Has(const BenchOptions& options, v1::Profile profile) {
  return std::any_of(options.points.begin(), options.points.end(),
                     [profile](const BenchPoint& point) { return point.profile == profile; });
}

// Returns cosines and then sines of random angles for each row, [rows, rope].
std::vector<float> RandomRotations(uint64_t seed, uint64_t rows, uint32_t rope) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> angle(0, 6.28f);
  std::vector<float> rotations(rows * rope);
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint32_t pair = 0; pair < rope / 2; ++pair) {
      const float one = angle(random);
      rotations[row * rope + pair] = std::cos(one);
      rotations[row * rope + rope / 2 + pair] = std::sin(one);
    }
  }
  return rotations;
}

// Fills in, for each row of a step, different positions of the context, or entries, in random
// order, and then padding with -1.
void FillLists(const BenchOptions& options, const BenchPoint& point, uint64_t seed, int32_t* list) {
  std::mt19937_64 random(seed);
  const uint32_t top_k = options.model.top_k();
  const bool windowed = options.model.window() > 0;
  std::vector<int32_t> positions(windowed ? EntriesOf(options.model, 0, point.context)
                                          : std::max(point.context, 1u));
  std::iota(positions.begin(), positions.end(), 0);
  for (uint32_t row = 0; row < point.batch * point.rows; ++row, list += top_k) {
    const auto count = std::min<size_t>(top_k, positions.size());
    for (size_t i = 0; i < count; ++i) {
      std::swap(positions[i], positions[i + random() % (positions.size() - i)]);
    }
    std::fill(std::copy_n(positions.begin(), count, list), list + top_k, -1);
  }
}

}  // namespace

// --------------------------------------------------------------------------------------- Model

absl::StatusOr<std::unique_ptr<BenchModel>> BenchModel::Create(
    client::Client* client, const BenchOptions& options, const std::string& id,
    const std::function<bool(double)>& progress) {
  v1::ModelSpec spec = options.model;
  spec.set_model_id(id);
  // They are chosen so that the range of e4m3 holds five standard deviations.
  std::vector<float> scales;
  if (spec.kv_format() == v1::KV_FORMAT_FP8_TENSOR) {
    scales.assign(spec.layers(), static_cast<float>(5 * kDeviation / 448));
  }
  std::vector<float> sinks;
  if (spec.window() > 0) sinks.assign(spec.layers() * spec.geometry().num_heads(), 0.5f);
  const auto registered = client->RegisterModel(spec, 0, scales, sinks);
  if (!registered.ok()) return registered.status();
  std::unique_ptr<BenchModel> model(new BenchModel(client, spec.model_id()));
  const bool projected = Has(options, v1::PROFILE_PROJECTED);
  if (projected && registered->model().projected_dtype() != spec.projected_dtype()) {
    return absl::FailedPreconditionError(
        absl::StrCat("--projected-dtype: the server holds W_UQ and W_O as ",
                     v1::DType_Name(registered->model().projected_dtype())));
  }
  const double part = projected ? 0.5 : 1;  // of each upload
  absl::Status status;
  if (projected || Has(options, v1::PROFILE_EXPANDED)) {
    status = model->Upload(options, [&](double done) { return progress(part * done); });
  }
  if (projected && status.ok()) {
    status =
        model->UploadProjected(options, [&](double done) { return progress(part * (1 + done)); });
  }
  if (!status.ok()) return status;
  return model;
}

BenchModel::~BenchModel() { Remove().IgnoreError(); }

absl::Status BenchModel::Remove() {
  if (client_ == nullptr) return absl::OkStatus();
  return std::exchange(client_, nullptr)->UnregisterModel(id_);
}

uint64_t BenchModel::MostChunkBytes() const {
  const uint64_t limit = client_->info().limits().weight_chunk_bytes();
  return limit == 0 ? kUploadBytes : std::min(kUploadBytes, limit);
}

absl::Status BenchModel::Upload(const BenchOptions& options,
                                const std::function<bool(double)>& progress) {
  const v1::Geometry& geometry = options.model.geometry();
  const uint64_t head_elements =
      uint64_t{geometry.kv_lora_rank()} * (geometry.nope_dim() + geometry.v_dim());
  const auto heads_a_chunk = static_cast<uint32_t>(
      std::clamp<uint64_t>(MostChunkBytes() / (head_elements * 2), 1, geometry.num_heads()));
  std::vector<uint16_t> values(head_elements * heads_a_chunk);
  FillRandomBf16(options.load.seed, 1.0 / std::sqrt(geometry.kv_lora_rank()), values);
  uint32_t layer = 0, head = 0;
  bool going = true;
  const auto next = [&]() -> std::optional<client::WeightsChunk> {
    going = progress((layer + static_cast<double>(head) / geometry.num_heads()) /
                     options.model.layers());
    if (!going || layer == options.model.layers()) return std::nullopt;
    client::WeightsChunk chunk;
    chunk.layer = layer;
    chunk.head_begin = head;
    chunk.head_count = std::min(heads_a_chunk, geometry.num_heads() - head);
    chunk.bytes.assign(reinterpret_cast<const char*>(values.data()),
                       chunk.head_count * head_elements * 2);
    head += chunk.head_count;
    if (head == geometry.num_heads()) {
      head = 0;
      ++layer;
    }
    return chunk;
  };
  const auto reply = client_->UploadWeights(id_, next);
  if (!going) return absl::CancelledError("interrupted");
  return reply.status();
}

absl::Status BenchModel::UploadProjected(const BenchOptions& options,
                                         const std::function<bool(double)>& progress) {
  ProjectedChunks chunks(options.model, MostChunkBytes(), options.load.seed);
  bool going = true;
  const auto reply = client_->UploadWeights(id_, [&]() -> std::optional<client::WeightsChunk> {
    going = progress(chunks.done());
    return going ? chunks.Next() : std::nullopt;
  });
  if (!going) return absl::CancelledError("interrupted");
  return reply.status();
}

// -------------------------------------------------------------------------------------- Worker

absl::StatusOr<std::unique_ptr<BenchWorker>> BenchWorker::Create(const BenchOptions& options,
                                                                 const BenchPoint& point,
                                                                 const std::string& model_id,
                                                                 uint32_t index) {
  std::unique_ptr<BenchWorker> worker(new BenchWorker(options, point, model_id));
  if (absl::Status status = worker->Open(index); !status.ok()) return status;
  return worker;
}

BenchWorker::~BenchWorker() {
  session_.reset();
  if (sequences_.empty()) return;
  // One call for all sequences, because their destructors would make one call each.
  std::vector<uint64_t> ids;
  for (client::Sequence& sequence : sequences_) {
    ids.push_back(sequence.id());
    sequence.Detach();
  }
  client_->ReleaseSequences(ids).status().IgnoreError();
}

absl::Status BenchWorker::Open(uint32_t index) {
  client::ClientOptions options = options_.client;
  const TensorBytes bytes = BytesOf(options_, point_);
  options.shared_bytes = AlignUp(bytes.in()) + AlignUp(bytes.out()) + (8u << 20);
  SetTransport(point_.transport, options_.spin_us, &options);
  auto client = client::Client::Connect(options_.target, options);
  if (!client.ok()) return client.status();
  client_ = *std::move(client);
  auto session = client_->OpenSession();
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  if (absl::Status status = OpenSequences(options_.shared_context ? 1 : point_.batch);
      !status.ok()) {
    return status;
  }
  attend_bytes_ = bytes.kv + bytes.q + bytes.lists + bytes.o + bytes.lse;
  PlaceTensors(index);
  return absl::OkStatus();
}

absl::Status BenchWorker::OpenSequences(uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    auto sequence = client_->OpenSequence(model_id_);
    if (!sequence.ok()) return sequence.status();
    sequences_.push_back(*std::move(sequence));
  }
  return absl::OkStatus();
}

// Takes memory in the shared region if there is one, else in `own`.
std::byte* BenchWorker::Allocate(uint64_t bytes, std::vector<std::byte>* own) {
  if (bytes == 0) return nullptr;
  if (const std::span<std::byte> shared = session_->Allocate(bytes); !shared.empty()) {
    return shared.data();
  }
  own->resize(bytes + kAlignment);
  void* start = own->data();
  size_t room = own->size();
  return static_cast<std::byte*>(std::align(kAlignment, bytes, start, room));
}

// Replaces tensors by their 8-bit forms in the same places.
void BenchWorker::EncodeTensors(uint32_t index) {
  const TensorBytes bytes = BytesOf(options_, point_);
  const v1::Geometry& geometry = options_.model.geometry();
  const uint64_t rows = uint64_t{point_.batch} * point_.rows;
  const auto random = [this, index](uint64_t count) {
    std::vector<uint16_t> values(count);
    FillRandomBf16(options_.load.seed + index, kDeviation, values);
    return ToFloats(std::as_bytes(std::span<const uint16_t>(values)), v1::DTYPE_BF16);
  };
  if (options_.kv_row_dtype == v1::DTYPE_F8_E4M3) {
    const std::vector<float> kv = random(rows * (geometry.kv_lora_rank() + geometry.rope_dim()));
    std::memcpy(in_.data(), client::EncodeFp8Rows(options_.model, kv).data(), bytes.kv);
  }
  if (options_.q_dtype == v1::DTYPE_F8_E4M3 && bytes.q > 0) {
    const bool absorbed = point_.profile == v1::PROFILE_ABSORBED;
    const uint64_t dim =
        (absorbed ? geometry.kv_lora_rank() : geometry.nope_dim()) + geometry.rope_dim();
    const std::vector<float> q = random(rows * geometry.num_heads() * dim);
    std::memcpy(in_.data() + AlignUp(bytes.kv),
                client::EncodeFp8Queries(options_.model, point_.profile, q).data(), bytes.q);
  }
}

void BenchWorker::PlaceTensors(uint32_t index) {
  const TensorBytes bytes = BytesOf(options_, point_);
  std::byte* const in = Allocate(bytes.in(), &own_in_);
  std::byte* const out = Allocate(bytes.out(), &own_out_);
  in_ = {in, bytes.in()};
  out_ = {out, bytes.out()};
  std::vector<uint16_t> values((bytes.in() + 1) / 2);
  FillRandomBf16(options_.load.seed + index, kDeviation, values);
  std::memcpy(in, values.data(), bytes.in());
  if (out != nullptr) std::memset(out, 0, bytes.out());
  EncodeTensors(index);
  call_.row_count = point_.batch * point_.rows;
  call_.num_heads = options_.model.geometry().num_heads();
  call_.profile = point_.profile;
  call_.q_dtype = options_.q_dtype;
  call_.kv_row_dtype = options_.kv_row_dtype;
  call_.o_dtype = options_.o_dtype;
  call_.kv = in;
  if (bytes.q > 0) call_.q = in + AlignUp(bytes.kv);
  if (bytes.lists > 0) {
    auto* const lists = reinterpret_cast<int32_t*>(in + bytes.lists_at());
    FillLists(options_, point_, options_.load.seed + index, lists);
    call_.lists = {lists, options_.model.top_k(), nullptr};
  }
  if (point_.profile == v1::PROFILE_PROJECTED) {
    rotations_ = RandomRotations(options_.load.seed + index, call_.row_count,
                                 options_.model.geometry().rope_dim());
  }
  call_.o = out;
  if (bytes.lse > 0) call_.lse = reinterpret_cast<float*>(out + AlignUp(bytes.o));
}

// ------------------------------------------------------------------------------------- Context

// Appends `rows` rows to one sequence. The requests of all layers are in flight at the same time.
absl::Status BenchWorker::Append(client::Sequence* sequence, uint32_t rows,
                                 const std::vector<uint16_t>& kv) {
  client::BeginOptions options;
  options.lease_ms = StepLeaseMs(*client_);
  auto step = session_->Begin(model_id_, {{sequence, rows}}, options);
  if (!step.ok()) return step.status();
  std::vector<client::PendingAttend> pending;
  for (uint32_t layer = 0; layer < options_.model.layers(); ++layer) {
    client::AttendCall call;
    call.layer = layer;
    call.row_count = rows;
    call.num_heads = options_.model.geometry().num_heads();
    call.profile = v1::PROFILE_APPEND_ONLY;
    call.kv = kv.data();
    pending.push_back((*step)->AttendAsync(call));
  }
  absl::Status status;
  for (client::PendingAttend& one : pending) {
    const absl::Status waited = one.Wait().status();
    if (status.ok()) status = waited;
  }
  return status.ok() ? (*step)->End().status() : status;
}

absl::Status BenchWorker::FillContext(const std::function<bool(double)>& progress) {
  const v1::Geometry& geometry = options_.model.geometry();
  const uint32_t rows_a_step = std::clamp(client_->info().limits().max_step_rows(), 1u, kFillRows);
  const uint64_t most = std::min(rows_a_step, point_.context);
  // A row completes at most one entry.
  std::vector<uint16_t> kv((options_.model.window() > 0 ? 2 : 1) * most *
                           (geometry.kv_lora_rank() + geometry.rope_dim()));
  FillRandomBf16(options_.load.seed, kDeviation, kv);
  const double total = static_cast<double>(sequences_.size()) * point_.context;
  double done = 0;
  for (client::Sequence& sequence : sequences_) {
    while (sequence.length() < point_.context) {
      if (!progress(done / total)) return absl::CancelledError("interrupted");
      const auto rows = static_cast<uint32_t>(
          std::min<uint64_t>(rows_a_step, point_.context - sequence.length()));
      if (absl::Status status = Append(&sequence, rows, kv); !status.ok()) return status;
      done += rows;
    }
  }
  while (sequences_.size() < point_.batch) {
    auto fork = sequences_.front().Fork();
    if (!fork.ok()) return fork.status();
    sequences_.push_back(*std::move(fork));
  }
  for (client::Sequence& sequence : sequences_) rows_.push_back({&sequence, point_.rows});
  if (!options_.grow) keep_.assign(sequences_.size(), 0);
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------------------- Step

void BenchWorker::TouchTensors() {
  for (const std::byte byte : out_) touched_ ^= static_cast<uint8_t>(byte);
  // Writes the same values again, so that results do not change.
  for (std::byte& byte : in_) {
    volatile std::byte* const place = &byte;
    *place = byte;
  }
}

absl::Status BenchWorker::Step(LoadRecorder* recorder) {
  client::BeginOptions options;
  options.lease_ms = StepLeaseMs(*client_);
  options.rotations = rotations_;
  LoadClock::time_point before = LoadClock::now();
  auto step = session_->Begin(model_id_, rows_, options);
  LoadClock::time_point after = LoadClock::now();
  if (!step.ok()) return step.status();
  recorder->Begin(before, after);
  for (uint32_t layer = 0; layer < options_.model.layers(); ++layer) {
    if (recorder->stopping()) return absl::CancelledError("the run has ended");
    call_.layer = layer;
    before = LoadClock::now();
    if (options_.touch) TouchTensors();
    const auto times = (*step)->Attend(call_);
    after = LoadClock::now();
    if (!times.ok()) return times.status();
    recorder->Attend(before, after, *times, attend_bytes_);
  }
  before = LoadClock::now();
  const auto lengths = keep_.empty() ? (*step)->End() : (*step)->End(keep_);
  const absl::Status ended = lengths.status();
  if (ended.ok()) recorder->End(before, LoadClock::now());
  return ended;
}

}  // namespace mla::mlactl
