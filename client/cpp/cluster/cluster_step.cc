#include "client/cpp/cluster/cluster_step.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "client/cpp/cluster/faults.h"
#include "client/cpp/cluster/row_tensors.h"

namespace mla::client {
namespace {

constexpr uint16_t kNanBf16 = 0x7fc0;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kNoEntry = -1;

std::span<const std::byte> BytesOf(const void* value, size_t size) {
  return {static_cast<const std::byte*>(value), size};
}

}  // namespace

// The sub-calls of an attend with several owners.
struct PendingClusterAttend::Whole {
  struct Sent {
    size_t part = 0;
    std::vector<uint32_t> places;  // of its rows in the call's tensors
    bool direct = true;            // outputs go to their places at once
    std::vector<std::byte> kv, q, index_inputs, o, lse, chosen;
    std::vector<int32_t> list_entries, list_begins;
    std::optional<PendingAttend> attend;  // absent: its owner has failed
  };

  AttendCall call;
  CallForms forms;
  absl::Status refused;
  std::vector<std::unique_ptr<Sent>> sent;
};

PendingClusterAttend::PendingClusterAttend() = default;
PendingClusterAttend::PendingClusterAttend(PendingClusterAttend&&) noexcept = default;
PendingClusterAttend& PendingClusterAttend::operator=(PendingClusterAttend&&) noexcept = default;
// The destructors of the parts wait for their replies.
PendingClusterAttend::~PendingClusterAttend() = default;

absl::StatusOr<AttendTimes> PendingClusterAttend::Wait() {
  if (whole_ != nullptr) return WaitWhole();
  absl::StatusOr<AttendTimes> times = one_->Wait();
  if (!times.ok() && BreaksSession(times.status())) step_->parts_[0].session->broken = true;
  return times;
}

bool PendingClusterAttend::Ready() {
  if (one_) return one_->Ready();
  return whole_ == nullptr ||
         std::all_of(whole_->sent.begin(), whole_->sent.end(),
                     [](const auto& sent) { return !sent->attend || sent->attend->Ready(); });
}

absl::StatusOr<AttendTimes> PendingClusterAttend::WaitWhole() {
  const std::unique_ptr<Whole> whole = std::move(whole_);
  if (!whole->refused.ok()) return whole->refused;
  const AttendCall& call = whole->call;
  AttendTimes times;
  uint32_t slowest = 0, messages = 0;
  absl::Status wrong;
  for (const auto& sent : whole->sent) {
    ClusterStep::Part& part = step_->parts_[sent->part];
    // Without a call under way the owner had failed before.
    const absl::StatusOr<AttendTimes> one =
        sent->attend ? sent->attend->Wait() : absl::StatusOr<AttendTimes>(part.error);
    if (absl::IsInvalidArgument(one.status()) && part.error.ok()) {
      wrong = one.status();  // the call itself is wrong, for every owner
      continue;
    }
    if (!one.ok()) {
      step_->Fail(&part, one.status());
      if (call.o != nullptr && call.o_dtype == v1::DTYPE_F32) {
        FillRows(whole->forms.o, BytesOf(&kNan, sizeof(kNan)), sent->places, call.o);
      } else if (call.o != nullptr) {
        FillRows(whole->forms.o, BytesOf(&kNanBf16, sizeof(kNanBf16)), sent->places, call.o);
      }
      FillRows(whole->forms.lse, BytesOf(&kNan, sizeof(kNan)), sent->places, call.lse);
      FillRows(whole->forms.chosen, BytesOf(&kNoEntry, sizeof(kNoEntry)), sent->places,
               call.chosen);
      continue;
    }
    if (!sent->direct) {
      PutRows(whole->forms.o, sent->o.data(), sent->places, call.o);
      PutRows(whole->forms.lse, sent->lse.data(), sent->places, call.lse);
      PutRows(whole->forms.chosen, sent->chosen.data(), sent->places, call.chosen);
    }
    messages += one->messages;
    if (const uint32_t total = one->queue_us + one->plan_us + one->kernel_us; total >= slowest) {
      slowest = total;
      times = *one;
    }
  }
  if (!wrong.ok()) return wrong;
  MLA_RETURN_IF_ERROR(step_->Told());
  times.messages = messages;
  return times;
}

// ------------------------------------------------------------------------------------- Step

ClusterStep::~ClusterStep() {
  std::vector<Part*> open;
  for (Part& part : parts_) {
    if (part.step != nullptr) open.push_back(&part);
  }
  ForEachAtOnce(open.size(), [&](size_t i) { open[i]->step.reset(); });  // which aborts it
}

std::vector<FailedOwner> ClusterStep::failed() const {
  std::vector<FailedOwner> failed;
  for (const Part& part : parts_) {
    if (!part.error.ok()) failed.push_back({part.connection->address(), part.error, part.places});
  }
  return failed;
}

absl::Status ClusterStep::FailedStatus() const {
  size_t sequences = 0;
  std::set<std::string> owners;
  v1::ErrorDetail detail;
  for (const FailedOwner& one : failed()) {
    sequences += one.sequences.size();
    owners.insert(absl::StrCat(one.address, ": ", std::string(one.status.message())));
  }
  detail.set_field("sequences");
  detail.set_got(absl::StrCat(sequences));
  detail.set_reason(kOwnersFailed);
  return MakeStatus(static_cast<int32_t>(absl::StatusCode::kAborted),
                    absl::StrCat("the owners of ", sequences, " of the step's ", rows_.size(),
                                 " sequences have failed: ", absl::StrJoin(owners, "; ")),
                    detail);
}

void ClusterStep::Fail(Part* part, const absl::Status& status) {
  if (!part->error.ok()) return;
  part->error = status;
  if (part->session != nullptr && BreaksSession(status)) part->session->broken = true;
  session_->client_->owners_->At(part->connection->address())->Failed(status);
  part->step.reset();  // which aborts it
}

absl::Status ClusterStep::Told() {
  const size_t now = failed().size();
  const bool all = now == parts_.size();
  if (!all && (partial_ || now <= told_)) return absl::OkStatus();
  told_ = now;
  return FailedStatus();
}

uint64_t ClusterStep::EntriesOf(uint32_t layer, uint64_t begin, uint64_t end) const {
  const auto places = EntryPlaces(layer);
  uint64_t entries = 0;
  for (uint64_t row = begin; row < std::min<uint64_t>(end, places.size()); ++row) {
    entries += places[row].size();
  }
  return entries;
}

// Returns the entries that each row of the step completes, numbered over the whole step.
std::vector<std::vector<uint64_t>> ClusterStep::EntryPlaces(uint32_t layer) const {
  const auto& ratios = model_.ratios();
  const uint64_t ratio =
      layer < static_cast<uint32_t>(ratios.size()) ? ratios[static_cast<int>(layer)] : 0;
  std::vector<std::vector<uint64_t>> places(total_rows_);
  uint64_t row = 0, entries = 0;
  for (const ClusterRows& one : rows_) {
    const uint64_t start = one.sequence->length();
    for (uint64_t i = 0; i < one.rows; ++i, ++row) {
      if (ratio > 0 && (start + i + 1) / ratio > (start + i) / ratio) {
        places[row].push_back(entries++);
      }
    }
  }
  return places;
}

absl::Status ClusterStep::CheckCall(const AttendCall& call) const {
  for (const Part& part : parts_) {
    if (part.step == nullptr && part.error.ok()) {
      return absl::FailedPreconditionError("attend: the step has ended");
    }
  }
  const uint64_t end = uint64_t{call.row_begin} + call.row_count;
  if (end > total_rows_) {
    return RefuseValue("attend.row_begin", absl::StrCat("rows ", call.row_begin, "..", end),
                       absl::StrCat("within the step's ", total_rows_));
  }
  bool on_device = call.stream != nullptr || call.chained;
  for (const void* tensor : {call.kv, call.q, static_cast<const void*>(call.o)}) {
    on_device = on_device || session_->IsOnDevice(tensor);
  }
  if (on_device) {
    return RefuseValue("attend.o",
                       absl::StrCat("memory of a GPU in a step of ", parts_.size(), " servers"),
                       "memory of this process: a GPU's belongs to one server");
  }
  if (model_.window() > 0 && call.kv != nullptr && call.kv_row_dtype == v1::DTYPE_F8_E4M3) {
    return RefuseValue("attend.kv_row_dtype", "8-bit floats",
                       "bf16 or fp32, in a step of several servers over a model with a window");
  }
  return absl::OkStatus();
}

void ClusterStep::Send(const AttendCall& call, size_t number, PendingClusterAttend::Whole* whole) {
  Part& part = parts_[number];
  const auto first = std::lower_bound(part.rows.begin(), part.rows.end(), call.row_begin);
  const auto last =
      std::lower_bound(first, part.rows.end(), uint64_t{call.row_begin} + call.row_count);
  if (first == last) return;
  auto sent = std::make_unique<PendingClusterAttend::Whole::Sent>();
  sent->part = number;
  for (auto row = first; row != last; ++row) sent->places.push_back(*row - call.row_begin);
  const auto count = static_cast<uint32_t>(sent->places.size());
  const CallForms& forms = whole->forms;
  AttendCall own = call;
  own.row_begin = static_cast<uint32_t>(first - part.rows.begin());
  own.row_count = count;
  own.q = TakeRows(forms.q, call.q, call.row_count, sent->places, &sent->q);
  own.index_inputs = TakeRows(forms.index_inputs, call.index_inputs, call.row_count, sent->places,
                              &sent->index_inputs);
  own.lists = TakeLists(call.lists, sent->places, &sent->list_entries, &sent->list_begins);
  std::vector<uint32_t> kv_places = sent->places;
  uint64_t kv_rows = call.row_count;
  if (model_.window() > 0 && call.kv != nullptr) {
    // The entries that rows complete lie after all rows.
    const auto entries = EntryPlaces(call.layer);
    const uint64_t before = EntriesOf(call.layer, 0, call.row_begin);
    for (auto row = first; row != last; ++row) {
      for (const uint64_t entry : entries[*row]) {
        kv_places.push_back(static_cast<uint32_t>(call.row_count + entry - before));
      }
    }
    kv_rows += EntriesOf(call.layer, call.row_begin, call.row_begin + call.row_count);
  }
  own.kv = TakeRows(forms.kv, call.kv, kv_rows, kv_places, &sent->kv);
  sent->direct = AreTogether(sent->places);
  const auto output = [&](uint64_t row_bytes, void* tensor, std::vector<std::byte>* copy) -> void* {
    if (tensor == nullptr) return nullptr;
    if (sent->direct) return static_cast<std::byte*>(tensor) + sent->places.front() * row_bytes;
    copy->resize(count * row_bytes);
    return copy->data();
  };
  own.o = output(forms.o, call.o, &sent->o);
  own.lse = static_cast<float*>(output(forms.lse, call.lse, &sent->lse));
  own.chosen = static_cast<int32_t*>(output(forms.chosen, call.chosen, &sent->chosen));
  if (part.step != nullptr) sent->attend = part.step->AttendAsync(own);
  whole->sent.push_back(std::move(sent));
}

PendingClusterAttend ClusterStep::AttendAsync(const AttendCall& call) {
  PendingClusterAttend pending;
  pending.step_ = this;
  if (parts_.size() == 1) {
    pending.one_ = parts_[0].step->AttendAsync(call);
    return pending;
  }
  pending.whole_ = std::make_unique<PendingClusterAttend::Whole>();
  pending.whole_->call = call;
  pending.whole_->forms = FormsOf(call, model_);
  pending.whole_->refused = CheckCall(call);
  if (pending.whole_->refused.ok()) {
    for (size_t i = 0; i < parts_.size(); ++i) Send(call, i, pending.whole_.get());
  }
  return pending;
}

absl::StatusOr<std::vector<uint64_t>> ClusterStep::End(std::span<const SequenceTail> tails) {
  return EndWith(nullptr, tails);
}

absl::StatusOr<std::vector<uint64_t>> ClusterStep::End(const std::vector<uint32_t>& committed_rows,
                                                       std::span<const SequenceTail> tails) {
  if (committed_rows.size() != rows_.size()) {
    return RefuseValue("end_step.committed_rows", absl::StrCat(committed_rows.size(), " entries"),
                       absl::StrCat(rows_.size(), ", one for each sequence"));
  }
  return EndWith(&committed_rows, tails);
}

absl::StatusOr<std::vector<uint64_t>> ClusterStep::EndPart(
    Part* part, const std::vector<uint32_t>* committed_rows, std::span<const SequenceTail> tails) {
  std::vector<uint32_t> kept;
  std::vector<SequenceTail> own;
  for (size_t i = 0; i < part->places.size(); ++i) {
    if (committed_rows != nullptr) kept.push_back((*committed_rows)[part->places[i]]);
    for (const SequenceTail& tail : tails) {
      if (tail.sequence == part->places[i]) own.push_back({static_cast<uint32_t>(i), tail.bytes});
    }
  }
  return committed_rows != nullptr ? part->step->End(kept, own) : part->step->End(own);
}

absl::StatusOr<std::vector<uint64_t>> ClusterStep::EndWith(
    const std::vector<uint32_t>* committed_rows, std::span<const SequenceTail> tails) {
  if (parts_.size() == 1) {
    auto lengths = committed_rows != nullptr ? parts_[0].step->End(*committed_rows, tails)
                                             : parts_[0].step->End(tails);
    if (BreaksSession(lengths.status())) parts_[0].session->broken = true;
    return lengths;
  }
  std::vector<absl::StatusOr<std::vector<uint64_t>>> ended(parts_.size(), std::vector<uint64_t>());
  ForEachAtOnce(parts_.size(), [&](size_t i) {
    if (parts_[i].step != nullptr) ended[i] = EndPart(&parts_[i], committed_rows, tails);
  });
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (absl::IsInvalidArgument(ended[i].status())) return ended[i].status();
  }
  for (size_t i = 0; i < parts_.size(); ++i) {
    // One that has no room for tails stays open.
    if (!ended[i].ok()) Fail(&parts_[i], ended[i].status());
    parts_[i].step.reset();
  }
  MLA_RETURN_IF_ERROR(Told());
  std::vector<uint64_t> lengths;
  for (const ClusterRows& one : rows_) lengths.push_back(one.sequence->length());
  return lengths;
}

absl::Status ClusterStep::Abort() {
  if (parts_.size() == 1) return parts_[0].step->Abort();
  std::vector<absl::Status> statuses(parts_.size());
  ForEachAtOnce(parts_.size(), [&](size_t i) {
    if (parts_[i].step != nullptr) statuses[i] = parts_[i].step->Abort();
    parts_[i].step.reset();
  });
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace mla::client
