// Step: its attends and its end.
#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/row_bytes.h"
#include "client/cpp/session.h"
#include "client/cpp/streams/errors.h"
#include "client/cpp/streams/step_stream.h"
#include "proto/wire/fp8/fp8_tensor.h"

namespace mla::client {
namespace {

// This is more than the header of any message takes.
constexpr uint64_t kHeaderBytes = 1024;

wire::Fp8Tensor QueryVectors(const v1::Geometry& geometry, v1::Profile profile) {
  const auto latent = static_cast<int32_t>(geometry.kv_lora_rank());
  const auto rope = static_cast<int32_t>(geometry.rope_dim());
  if (profile == v1::PROFILE_EXPANDED) {
    return wire::MakeFp8Tensor(0, {static_cast<int32_t>(geometry.nope_dim()) + rope});
  }
  return wire::MakeFp8Tensor(0, {latent, rope});
}

wire::Fp8Tensor KvVectors(const v1::ModelSpec& model) {
  return wire::MakeFp8Tensor(0, {static_cast<int32_t>(model.geometry().kv_lora_rank()),
                                 static_cast<int32_t>(model.geometry().rope_dim()),
                                 static_cast<int32_t>(model.index_dim())});
}

wire::Fp8Tensor WithVectors(wire::Fp8Tensor tensor, uint64_t vectors) {
  tensor.vectors = static_cast<int64_t>(vectors);
  return tensor;
}

std::vector<std::byte> Encode(wire::Fp8Tensor tensor, std::span<const float> values) {
  tensor = WithVectors(tensor, values.size() / static_cast<uint64_t>(tensor.dim()));
  std::vector<std::byte> sent(static_cast<size_t>(tensor.bytes()));
  wire::EncodeFp8Tensor(tensor, values.data(), sent.data());
  return sent;
}

// Returns vectors [first, first + count) of a tensor that stores the scales of all vectors after
// the codes of all vectors. The result has the same form.
std::vector<std::byte> SliceFp8(const wire::Fp8Tensor& whole, const void* sent, uint64_t first,
                                uint64_t count) {
  const auto* const codes = static_cast<const std::byte*>(sent);
  const std::byte* const scales = codes + whole.values();
  const auto dim = static_cast<uint64_t>(whole.dim());
  const uint64_t scale_bytes = static_cast<uint64_t>(whole.scales()) * sizeof(float);
  std::vector<std::byte> slice;
  slice.reserve(count * (dim + scale_bytes));
  slice.insert(slice.end(), codes + first * dim, codes + (first + count) * dim);
  slice.insert(slice.end(), scales + first * scale_bytes, scales + (first + count) * scale_bytes);
  return slice;
}

// Returns the number of entries of the longest list.
uint64_t LongestList(const AttendCall& call) {
  if (call.lists.entries == nullptr || call.lists.width > 0) return call.lists.width;
  uint64_t longest = 0;
  for (uint32_t row = 0; row < call.row_count; ++row) {
    const int64_t length = int64_t{call.lists.begin[row + 1]} - call.lists.begin[row];
    longest = std::max(longest, static_cast<uint64_t>(std::max<int64_t>(0, length)));
  }
  return longest;
}

// Returns the lists of rows [first, first + count) as they are sent, and describes them in
// `attend`. `width`: the width that a transport requires; 0: unchanged.
std::vector<int32_t> ListsOf(const AttendCall& call, uint32_t first, uint32_t count, uint32_t width,
                             v1::Attend* attend) {
  const IndexLists& lists = call.lists;
  if (lists.entries == nullptr) return {};
  const bool fixed = lists.width > 0;
  const auto begin = [&](uint32_t row) {
    return fixed ? int64_t{row} * lists.width : int64_t{lists.begin[row]};
  };
  std::vector<int32_t> sent;
  if (width > 0) {
    sent.assign(size_t{count} * width, -1);
    for (uint32_t i = 0; i < count; ++i) {
      std::copy(lists.entries + begin(first + i), lists.entries + begin(first + i + 1),
                sent.begin() + int64_t{i} * width);
    }
    attend->set_lists(v1::INDEX_LISTS_FIXED);
    attend->set_list_entries(width);
    return sent;
  }
  if (!fixed) {
    for (uint32_t i = 0; i <= count; ++i)
      sent.push_back(static_cast<int32_t>(begin(first + i) - begin(first)));
  }
  sent.insert(sent.end(), lists.entries + begin(first), lists.entries + begin(first + count));
  attend->set_lists(fixed ? v1::INDEX_LISTS_FIXED : v1::INDEX_LISTS_RAGGED);
  attend->set_list_entries(fixed ? lists.width
                                 : static_cast<uint32_t>(begin(first + count) - begin(first)));
  return sent;
}

// Divides the rows into as few messages of `room` bytes as possible, of equal size, so that the
// reply to one travels while the next one arrives.
absl::StatusOr<uint32_t> RowsOfAMessage(uint32_t rows, uint64_t row_bytes, uint64_t room) {
  if (row_bytes > room) {
    return absl::InvalidArgumentError(
        absl::StrCat("one row takes ", row_bytes, " bytes, messages ", room,
                     ": send fewer heads at a time or raise wire.message_bytes"));
  }
  const auto largest = static_cast<uint32_t>(
      std::min<uint64_t>(room / row_bytes, std::numeric_limits<uint32_t>::max()));
  if (rows <= largest) return largest;
  const uint32_t pieces = (rows - 1) / largest + 1;
  return (rows - 1) / pieces + 1;
}

std::span<const std::byte> Rows(const void* base, uint64_t row_bytes, uint64_t first,
                                uint64_t count) {
  return {static_cast<const std::byte*>(base) + first * row_bytes, count * row_bytes};
}

std::span<std::byte> MutableRows(void* base, uint64_t row_bytes, uint64_t first, uint64_t count) {
  return {static_cast<std::byte*>(base) + first * row_bytes, count * row_bytes};
}

void FillAttend(const AttendCall& call, uint64_t step_id, uint32_t first, uint32_t count,
                v1::Attend* attend) {
  attend->set_step_id(step_id);
  attend->set_layer(call.layer);
  attend->set_row_begin(call.row_begin + first);
  attend->set_row_count(count);
  attend->set_head_offset(call.head_offset);
  attend->set_num_heads(call.num_heads);
  attend->set_profile(call.profile);
  attend->set_has_kv(call.kv != nullptr);
  attend->set_want_lse(call.lse != nullptr);
  attend->set_q_dtype(call.q_dtype);
  attend->set_kv_row_dtype(call.kv_row_dtype);
  attend->set_o_dtype(call.o_dtype);
  attend->set_timeout_us(call.timeout_us);
}

// Returns the tensors of rows [first, first + count) in the form in which they are sent. Parts of
// 8-bit tensors are copied to `piece`.
InputTensors InputsOf(const AttendCall& call, const v1::ModelSpec& model, const RowBytes& row,
                      uint32_t first, uint32_t count, PendingReply* piece) {
  InputTensors sent{Rows(call.kv, row.kv, first, count), Rows(call.q, row.q, first, count), {}};
  if (count == call.row_count) return sent;
  if (HasFp8Kv(call)) {
    piece->kv = SliceFp8(WithVectors(KvVectors(model), call.row_count), call.kv, first, count);
    sent.kv = piece->kv;
  }
  if (HasFp8Queries(call)) {
    const uint64_t heads = call.num_heads;
    piece->q =
        SliceFp8(WithVectors(QueryVectors(model.geometry(), call.profile), call.row_count * heads),
                 call.q, first * heads, count * heads);
    sent.q = piece->q;
  }
  return sent;
}

}  // namespace

std::vector<std::byte> EncodeFp8Queries(const v1::ModelSpec& model, v1::Profile profile,
                                        std::span<const float> values) {
  return Encode(QueryVectors(model.geometry(), profile), values);
}

std::vector<std::byte> EncodeFp8Rows(const v1::ModelSpec& model, std::span<const float> values) {
  return Encode(KvVectors(model), values);
}

uint64_t Fp8QueryBytes(const v1::ModelSpec& model, v1::Profile profile, uint64_t rows_heads) {
  return static_cast<uint64_t>(
      WithVectors(QueryVectors(model.geometry(), profile), rows_heads).bytes());
}

uint64_t Fp8RowBytes(const v1::ModelSpec& model, uint64_t rows) {
  return static_cast<uint64_t>(WithVectors(KvVectors(model), rows).bytes());
}

PendingAttend::~PendingAttend() { Wait().status().IgnoreError(); }

PendingAttend& PendingAttend::operator=(PendingAttend&& other) noexcept {
  if (this == &other) return *this;
  Wait().status().IgnoreError();
  begun_ = std::move(other.begun_);
  stream_ = std::move(other.stream_);
  pieces_ = std::exchange(other.pieces_, {});
  refused_ = other.refused_;
  return *this;
}

absl::StatusOr<AttendTimes> PendingAttend::Wait() {
  absl::Status status = refused_;
  AttendTimes times;
  times.messages = static_cast<uint32_t>(pieces_.size());
  uint32_t slowest = 0;
  for (const auto& piece : pieces_) {
    absl::Status one = stream_->Wait(piece.get());
    if (status.ok()) status = std::move(one);
    const v1::Timings& t = piece->reply.timings();
    if (const uint32_t total = t.queue_us() + t.plan_us() + t.kernel_us(); total >= slowest) {
      slowest = total;
      times = {t.queue_us(),       t.plan_us(),         t.kernel_us(),
               t.write_us(),       t.launch_requests(), t.launch_layers(),
               t.launch_clients(), times.messages,      t.plan_reused()};
    }
  }
  pieces_.clear();
  if (!status.ok() && begun_ != nullptr) {
    // The server also answers requests of a step that it has refused.
    const absl::Status begun = stream_->Wait(begun_.get());
    if (!begun.ok()) return begun;
  }
  if (!status.ok()) return status;
  return times;
}

bool PendingAttend::Ready() {
  return std::all_of(pieces_.begin(), pieces_.end(),
                     [this](const auto& piece) { return stream_->Ready(piece.get()); });
}

uint64_t Step::EntriesOf(uint32_t layer, uint64_t begin, uint64_t end) const {
  const auto ratios = model_.ratios();
  const uint32_t ratio =
      layer < static_cast<uint32_t>(ratios.size()) ? ratios[static_cast<int>(layer)] : 0;
  uint64_t entries = 0, offset = 0;
  for (const StepRows& one : rows_) {
    const uint64_t first = std::clamp<uint64_t>(begin, offset, offset + one.rows) - offset;
    const uint64_t last = std::clamp<uint64_t>(end, offset, offset + one.rows) - offset;
    const uint64_t start = one.sequence->length();
    if (ratio > 0) entries += (start + last) / ratio - (start + first) / ratio;
    offset += one.rows;
  }
  return entries;
}

// Returns KV rows [first, first + count) of a call, followed by the entries that they complete. If
// these do not lie together, they are copied to `gathered`.
std::span<const std::byte> Step::KvOf(const AttendCall& call, uint64_t row_bytes, uint32_t first,
                                      uint32_t count, std::vector<std::byte>* gathered) const {
  if (call.kv == nullptr || model_.window() == 0) return Rows(call.kv, row_bytes, first, count);
  const uint64_t begin = call.row_begin + uint64_t{first};
  const uint64_t before = EntriesOf(call.layer, call.row_begin, begin);
  const uint64_t own = EntriesOf(call.layer, begin, begin + count);
  if (count == call.row_count) return Rows(call.kv, row_bytes, 0, count + own);
  const auto rows = Rows(call.kv, row_bytes, first, count);
  const auto entries = Rows(call.kv, row_bytes, call.row_count + before, own);
  gathered->assign(rows.begin(), rows.end());
  gathered->insert(gathered->end(), entries.begin(), entries.end());
  return *gathered;
}

PendingAttend Step::AttendAsync(const AttendCall& call) {
  PendingAttend pending;
  pending.stream_ = stream_;
  pending.begun_ = begun_;
  RowBytes row = RowBytesOf(call, model_);
  const uint64_t longest = LongestList(call);
  const bool sparse = call.lists.entries != nullptr;
  const uint32_t width = sparse && stream_->FillsLists() ? model_.top_k() : 0;
  if (width > 0 && longest > width) {
    pending.refused_ = absl::InvalidArgumentError(
        absl::StrCat("an index list has ", longest, " entries, the model's top_k is ", width));
    return pending;
  }
  const bool selects = call.index_inputs != nullptr;
  const bool as_they_are =
      selects || (call.lists.width > 0 && (width == 0 || width == call.lists.width));
  const void* const entries = selects ? call.index_inputs : call.lists.entries;
  // Ragged lists have one offset a row and a last one.
  if (sparse && !selects) row.lists = sizeof(int32_t) * (std::max<uint64_t>(longest, width) + 2);
  if (as_they_are && !selects) row.lists = sizeof(int32_t) * call.lists.width;
  PendingReply whole;
  whole.o = MutableRows(call.o, row.o, 0, call.row_count);
  whole.lse = MutableRows(call.lse, row.lse, 0, call.row_count);
  whole.chosen = MutableRows(call.chosen, row.chosen, 0, call.row_count);
  uint32_t rows_a_message = call.row_count;
  const InputTensors inputs{
      KvOf(call, row.kv, 0, call.row_count, nullptr), Rows(call.q, row.q, 0, call.row_count),
      as_they_are ? Rows(entries, row.lists, 0, call.row_count) : std::span<const std::byte>()};
  if ((sparse && !as_they_are) || !stream_->InPlace(inputs, whole)) {
    // A row completes at most one entry.
    const uint64_t entry = model_.window() > 0 ? row.kv : 0;
    const absl::StatusOr<uint32_t> rows =
        RowsOfAMessage(call.row_count, std::max({row.in() + entry, row.out(), uint64_t{1}}),
                       std::max(stream_->message_bytes(), kHeaderBytes) - kHeaderBytes);
    if (!rows.ok()) {
      pending.refused_ = rows.status();
      return pending;
    }
    rows_a_message = *rows;
  }
  stream_->Hold();
  for (uint32_t first = 0; first < call.row_count || first == 0;) {
    const uint32_t count = std::min(rows_a_message, call.row_count - first);
    v1::AttendStreamRequest request;
    FillAttend(call, id_, first, count, request.mutable_attend());
    auto piece = std::make_shared<PendingReply>();
    piece->o = MutableRows(call.o, row.o, first, count);
    piece->lse = MutableRows(call.lse, row.lse, first, count);
    piece->chosen = MutableRows(call.chosen, row.chosen, first, count);
    piece->stream = call.stream;
    piece->chained = call.chained;
    pending.pieces_.push_back(piece);
    InputTensors sent = InputsOf(call, model_, row, first, count, piece.get());
    if (model_.window() > 0) sent.kv = KvOf(call, row.kv, first, count, &piece->kv);
    if (as_they_are) {
      v1::Attend* const attend = request.mutable_attend();
      attend->set_lists(selects ? v1::INDEX_LISTS_SERVER : v1::INDEX_LISTS_FIXED);
      if (!selects) attend->set_list_entries(call.lists.width);
      attend->set_want_lists(!piece->chosen.empty());
      sent.lists = Rows(entries, row.lists, first, count);
    } else {
      piece->lists = ListsOf(call, first, count, width, request.mutable_attend());
      sent.lists = std::as_bytes(std::span<const int32_t>(piece->lists));
    }
    stream_->Send(&request, sent, piece);
    first += std::max(count, 1u);
  }
  if (!call.more) stream_->SendHeld();
  return pending;
}

absl::StatusOr<std::vector<uint64_t>> Step::End(std::span<const SequenceTail> tails) {
  return EndWith(nullptr, tails);
}

absl::StatusOr<std::vector<uint64_t>> Step::End(const std::vector<uint32_t>& committed_rows,
                                                std::span<const SequenceTail> tails) {
  if (committed_rows.size() != rows_.size()) {
    v1::ErrorDetail detail;
    detail.set_field("end_step.committed_rows");
    detail.set_got(absl::StrCat(committed_rows.size(), " entries"));
    detail.set_limit(absl::StrCat(rows_.size()));
    return MakeStatus(static_cast<int32_t>(absl::StatusCode::kInvalidArgument),
                      absl::StrCat(detail.field(), ": got ", detail.got(), ", must be ",
                                   detail.limit(), ", one for each sequence"),
                      detail);
  }
  return EndWith(&committed_rows, tails);
}

absl::StatusOr<std::vector<uint64_t>> Step::EndWith(const std::vector<uint32_t>* committed_rows,
                                                    std::span<const SequenceTail> tails) {
  v1::AttendStreamRequest request;
  request.mutable_end_step()->set_step_id(id_);
  if (committed_rows != nullptr) {
    request.mutable_end_step()->mutable_committed_rows()->Add(committed_rows->begin(),
                                                              committed_rows->end());
  }
  auto result = std::make_shared<PendingReply>();
  for (const SequenceTail& tail : tails) {
    if (tail.bytes.size() != model_.tail_bytes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tails: got ", tail.bytes.size(), " bytes, must be ", model_.tail_bytes()));
    }
    request.mutable_end_step()->add_tails(tail.sequence);
    result->kv.insert(result->kv.end(), tail.bytes.begin(), tail.bytes.end());
  }
  stream_->Send(&request, {.kv = result->kv, .q = {}, .lists = {}}, result);
  stream_->SendHeld();
  const absl::Status ended = stream_->Wait(result.get());
  MLA_RETURN_IF_ERROR(AwaitBegin());
  MLA_RETURN_IF_ERROR(ended);
  open_ = false;
  const auto& lengths = result->reply.end_step().lengths();
  if (static_cast<size_t>(lengths.size()) != rows_.size()) {
    return absl::DataLossError(absl::StrCat("the step has ", rows_.size(), " sequences, and ",
                                            lengths.size(), " lengths have come"));
  }
  for (size_t i = 0; i < rows_.size(); ++i) {
    const uint32_t kept = committed_rows != nullptr ? (*committed_rows)[i] : rows_[i].rows;
    const uint64_t length = rows_[i].sequence->length_ + kept;
    if (lengths[static_cast<int>(i)] != length) {
      return absl::DataLossError(absl::StrCat("sequence ", i, " of the step has length ", length,
                                              ", and ", lengths[static_cast<int>(i)], " has come"));
    }
  }
  for (size_t i = 0; i < rows_.size(); ++i) {
    rows_[i].sequence->length_ = lengths[static_cast<int>(i)];
  }
  return std::vector<uint64_t>(lengths.begin(), lengths.end());
}

absl::Status Step::AwaitBegin() {
  if (begun_ == nullptr) return absl::OkStatus();
  absl::Status status = stream_->Wait(begun_.get());
  if (status.ok() && begun_->reply.begin_step().total_rows() != total_rows_) {
    status =
        absl::DataLossError(absl::StrCat("the step has ", total_rows_, " rows, and ",
                                         begun_->reply.begin_step().total_rows(), " have come"));
  }
  if (!status.ok()) open_ = false;
  return status;
}

absl::Status Step::Abort() {
  v1::AttendStreamRequest request;
  request.mutable_abort_step()->set_step_id(id_);
  open_ = false;
  PendingReply result;
  return stream_->Call(&request, &result);
}

Step::~Step() {
  if (open_) Abort().IgnoreError();
}

}  // namespace mla::client
