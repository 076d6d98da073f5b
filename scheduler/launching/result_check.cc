#include "scheduler/launching/result_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "scheduler/tables/step_table.h"

namespace mla::scheduler {
namespace {

using kernels::DType;
using kernels::ElementSize;

constexpr int64_t kBlock = 4096;  // elements checked at once
#if defined(__x86_64__)
#define MLA_AVX2 __attribute__((target("avx2")))
bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}
#else
#define MLA_AVX2
bool HasAvx2() { return false; }
#endif

// Returns true if one of `count` elements of `Bits` has all exponent bits, given by `mask`, set. If
// they are, adding the mask's lowest bit carries into the sign.
template <typename Bits>
[[gnu::always_inline]] inline bool AnyAllOnes(const std::byte* elements, int64_t count, Bits mask) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
  using Lanes [[gnu::vector_size(32)]] = Bits;
  constexpr int64_t kLanes = 32 / kSize;
  const auto one = static_cast<Bits>(mask & (~mask + 1));
  const auto sign = static_cast<Bits>(~(mask | (one - 1)));
  Lanes carried = {};
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kLanes <= count; i += kLanes) {
    Lanes bits;
    std::memcpy(&bits, elements + i * kSize, sizeof(bits));
    carried |= (bits & mask) + one;
  }
  Bits combined = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) combined |= carried[lane];
  for (; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, elements + i * kSize, sizeof(bits));
    combined |= static_cast<Bits>((bits & mask) + one);
  }
  return (combined & sign) != 0;
}

[[gnu::always_inline]] inline bool AnyNotFinite(const std::byte* elements, DType dtype,
                                                int64_t count) {
  return dtype == DType::kF32 ? AnyAllOnes<uint32_t>(elements, count, 0x7f800000u)
                              : AnyAllOnes<uint16_t>(elements, count, uint16_t{0x7f80});
}
bool AnyNotFinitePlain(const std::byte* elements, DType dtype, int64_t count) {
  return AnyNotFinite(elements, dtype, count);
}
// A launch with many heads has thousands of elements checked, so this uses AVX2 where it can.
MLA_AVX2 bool AnyNotFiniteAvx2(const std::byte* elements, DType dtype, int64_t count) {
  return AnyNotFinite(elements, dtype, count);
}

bool BlockHoldsNotFinite(const std::byte* elements, DType dtype, int64_t count) {
  return HasAvx2() ? AnyNotFiniteAvx2(elements, dtype, count)
                   : AnyNotFinitePlain(elements, dtype, count);
}

// Returns true if one of `count` elements is a NaN or an infinity. Elements may begin at any
// address.
bool HoldsNotFinite(const std::byte* elements, DType dtype, int64_t count) {
  const auto size = static_cast<int64_t>(ElementSize(dtype));
  for (int64_t at = 0; at < count; at += kBlock) {
    if (BlockHoldsNotFinite(elements + at * size, dtype, std::min(kBlock, count - at))) return true;
  }
  return false;
}

// Returns the index of the first value that is NaN or infinite, or `count`.
int64_t FirstNotFinite(const float* values, int64_t count) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(values);
  constexpr auto kSize = static_cast<int64_t>(sizeof(float));
  int64_t index = 0;
  while (index < count && !BlockHoldsNotFinite(bytes + index * kSize, DType::kF32,
                                               std::min(kBlock, count - index))) {
    index += kBlock;
  }
  while (index < count && !BlockHoldsNotFinite(bytes + index * kSize, DType::kF32, 1)) ++index;
  return std::min(index, count);
}

// Reads a request's tensors where the host can read them. Tensors in device memory are copied, and
// outputs are copied back if they were changed.
class HostTensors {
 public:
  HostTensors(const StreamRequest& request, kernels::AttentionBackend* backend)
      : request_(request),
        backend_(backend),
        args_(request.attend),
        first_(args_.on_device ? request.engine.rows_done : 0) {}
  HostTensors(const HostTensors&) = delete;
  HostTensors& operator=(const HostTensors&) = delete;
  ~HostTensors() {
    if (!changed_) return;
    const AttendArgs& client = request_.attend;
    Write(client.o + first_ * o_.row_bytes, o_);
    if (client.want_lse) {
      Write(reinterpret_cast<std::byte*>(client.lse) + first_ * lse_.row_bytes, lse_);
    }
  }

  // Returns the request's new KV rows, except rows that earlier launches have stored.
  const std::byte* Kv() {
    const int64_t row_bytes = request_.engine.step->model->spec->sent_row_dim() *
                              static_cast<int64_t>(ElementSize(args_.q_dtype));
    const std::byte* const at = args_.kv + int64_t{request_.engine.rows_done} * row_bytes;
    if (!args_.on_device) return at;
    Read(at, row_bytes, &kv_);
    return kv_.bytes.data();
  }
  // Returns the arguments with host pointers; row 0 of queries and outputs is the request's row
  // first().
  const AttendArgs& Outputs() {
    if (!args_.on_device || !q_.bytes.empty()) return args_;
    const ModelSpec& spec = *request_.engine.step->model->spec;
    const auto row_bytes = [](int64_t dim, DType dtype) {
      return dim * static_cast<int64_t>(ElementSize(dtype));
    };
    const int64_t q_row = row_bytes(spec.q_row_dim(args_.profile, args_.num_heads), args_.q_dtype);
    const int64_t o_row = row_bytes(spec.o_row_dim(args_.profile, args_.num_heads), args_.o_dtype);
    Read(args_.q + first_ * q_row, q_row, &q_);
    Read(args_.o + first_ * o_row, o_row, &o_);
    args_.q = q_.bytes.data();
    args_.o = o_.bytes.data();
    if (!args_.want_lse) return args_;
    Read(reinterpret_cast<const std::byte*>(args_.lse + first_ * args_.num_heads),
         row_bytes(args_.num_heads, DType::kF32), &lse_);
    args_.lse = reinterpret_cast<float*>(lse_.bytes.data());
    return args_;
  }
  int64_t first() const { return first_; }
  void NoteChange() { changed_ = args_.on_device; }

 private:
  struct Copy {
    std::vector<std::byte> bytes;
    int64_t row_bytes = 0;
  };
  // A failure of the device here is found by the next launch. Until then rows count as finite, so
  // that a result which is not finite becomes an error.
  void Read(const std::byte* from, int64_t row_bytes, Copy* copy) {
    copy->row_bytes = row_bytes;
    copy->bytes.assign(static_cast<size_t>(row_bytes * request_.engine.rows_launched),
                       std::byte{0});
    if (!backend_->ReadShared(copy->bytes.data(), from, static_cast<int64_t>(copy->bytes.size()))
             .ok()) {
      std::fill(copy->bytes.begin(), copy->bytes.end(), std::byte{0});
    }
  }
  void Write(std::byte* to, const Copy& from) {
    (void)backend_->WriteShared(to, from.bytes.data(), static_cast<int64_t>(from.bytes.size()));
  }

  const StreamRequest& request_;
  kernels::AttentionBackend* const backend_;
  AttendArgs args_;
  const int64_t first_;
  Copy kv_, q_, o_, lse_;
  bool changed_ = false;
};

// The elements that belong to one row and head in a client's tensor.
struct OfHead {
  int64_t begin, count;
};

// In PROJECTED all heads of a row share its elements; `row_dim` of them are a row.
OfHead ElementsOf(const AttendArgs& args, int64_t row, int64_t head, int64_t row_dim) {
  if (args.profile == Profile::kProjected) return {row * row_dim, row_dim};
  const int64_t dim = row_dim / args.num_heads;
  return {row * row_dim + head * dim, dim};
}

// Returns true if the query of one row and head holds a NaN or an infinity.
bool QueryHoldsNotFinite(const AttendArgs& args, const OfHead& query) {
  const auto size = static_cast<int64_t>(ElementSize(args.q_dtype));
  const int64_t begin = query.begin * size, dim = query.count;
  if (args.q_fragments.empty()) return HoldsNotFinite(args.q + begin, args.q_dtype, dim);
  // An element may lie in two fragments, so the row is assembled first.
  std::vector<std::byte> whole(static_cast<size_t>(dim * size));
  const int64_t first = args.q_fragments_offset + begin;
  for (size_t i = 0; i < args.q_fragments.size(); ++i) {
    const kernels::InputFragment& piece = args.q_fragments[i];
    const int64_t piece_end = i + 1 < args.q_fragments.size() ? args.q_fragments[i + 1].begin
                                                              : std::numeric_limits<int64_t>::max();
    const int64_t from = std::max(first, piece.begin);
    const int64_t end = std::min(first + dim * size, piece_end);
    if (from >= end) continue;
    std::memcpy(whole.data() + (from - first), piece.data + (from - piece.begin),
                static_cast<size_t>(end - from));
  }
  return HoldsNotFinite(whole.data(), args.q_dtype, dim);
}

// Writes NaN to the outputs of one row and head, and to its log-sum-exp if there is one.
void MarkNotANumber(const AttendArgs& args, int64_t row, int64_t head, const OfHead& outputs) {
  const int64_t pair = row * args.num_heads + head;
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = outputs.begin; i < outputs.begin + outputs.count; ++i) {
    if (args.o_dtype == DType::kF32) {
      std::memcpy(args.o + i * int64_t{sizeof(float)}, &kNaN, sizeof(kNaN));
    } else {
      const kernels::Bf16 nan = kernels::ToBf16(kNaN);
      std::memcpy(args.o + i * int64_t{sizeof(nan)}, &nan, sizeof(nan));
    }
  }
  if (args.want_lse) args.lse[pair] = kNaN;
}

// Calls visit(entry) for each entry of the step that has some of the request's rows [first, end).
template <typename Visit>
void ForEachEntry(const StreamRequest& request, int32_t first, int32_t end, Visit&& visit) {
  const Step& step = *request.engine.step;
  const StepEntry* const past = step.entries.data() + step.entries.size();
  for (const StepEntry* entry = EntryOf(step, first); entry != past && entry->offset < end;
       ++entry) {
    visit(*entry);
  }
}

// Notes compressed entries that are not finite. Such an entry counts as the first row that it
// stands for, or as the step's first row if that comes later.
void NoteEntries(const StreamRequest& request) {
  const AttendArgs& args = request.attend;
  const Step& step = *request.engine.step;
  const int32_t ratio = step.model->spec->ratio(args.layer);
  if (ratio == 0) return;
  const int64_t dim = step.model->spec->sent_row_dim();
  const int64_t bytes = dim * static_cast<int64_t>(kernels::ElementSize(args.q_dtype));
  const int32_t begin = FirstRow(request), end = begin + request.engine.rows_launched;
  int64_t index = EntriesOfRows(step, args.layer, args.row_begin, begin);
  ForEachEntry(request, begin, end, [&](const StepEntry& entry) {
    const int32_t first = std::max(begin, entry.offset) - entry.offset;
    const int32_t last = std::min(end, entry.offset + entry.rows) - entry.offset;
    for (int64_t whole = (entry.start + first) / ratio; whole < (entry.start + last) / ratio;
         ++whole, ++index) {
      if (!HoldsNotFinite(args.kv + (args.row_count + index) * bytes, args.q_dtype, dim)) continue;
      int64_t& known = entry.sequence->not_finite_from;
      known = std::min(known, std::max<int64_t>(whole * ratio, entry.start));
    }
  });
}

// Notes in each sequence the first of the request's rows that is not finite.
void NoteRows(const StreamRequest& request, kernels::AttentionBackend* backend) {
  const AttendArgs& args = request.attend;
  HostTensors tensors(request, backend);
  const std::byte* const launched = tensors.Kv();
  const int64_t dim = request.engine.step->model->spec->sent_row_dim();
  const int64_t row_bytes = dim * static_cast<int64_t>(kernels::ElementSize(args.q_dtype));
  const int32_t begin = FirstRow(request), end = begin + request.engine.rows_launched;
  ForEachEntry(request, begin, end, [&](const StepEntry& entry) {
    const int64_t first = std::max(begin, entry.offset);
    const int64_t rows = std::min(end, entry.offset + entry.rows) - first;
    const int64_t position = entry.start + first - entry.offset;
    int64_t& known = entry.sequence->not_finite_from;
    const std::byte* const data = launched + (first - begin) * row_bytes;
    if (known <= position || !HoldsNotFinite(data, args.q_dtype, rows * dim)) return;
    int64_t row = 0;
    while (row < rows && !HoldsNotFinite(data + row * row_bytes, args.q_dtype, dim)) ++row;
    // If the second look finds nothing, the client has changed the memory. Then none of
    // these rows is trusted.
    known = std::min(known, row < rows ? position + row : position);
  });
  NoteEntries(request);
}

// Decides what a log-sum-exp that is not finite means for its row and head. It is an error of the
// request, unless inputs that are not finite explain it; then the result becomes NaN.
void JudgeRow(StreamRequest* request, HostTensors* tensors, int64_t row, int64_t head, float lse) {
  StreamRequest::EngineFields& note = request->engine;
  const AttendArgs& args = request->attend;
  const ModelSpec& spec = *note.step->model->spec;
  const bool listed = IsSparse(args) && !spec.windowed();
  if (listed && args.list_begin[row] == args.list_begin[row + 1]) return;  // it sees no key
  const auto step_row = static_cast<int32_t>(args.row_begin + row);
  const StepEntry& entry = *EntryOf(*note.step, step_row);
  const int64_t position = entry.start + step_row - entry.offset;
  const int64_t held = row - tensors->first();  // its number in the tensors
  const bool expected =
      position >= entry.sequence->not_finite_from ||
      QueryHoldsNotFinite(
          tensors->Outputs(),
          ElementsOf(args, held, head, spec.q_row_dim(args.profile, args.num_heads)));
  // Outputs that the client may already be using cannot be marked any more.
  const bool late = args.done.word != nullptr && !std::isnan(lse);
  if (!expected || late) {
    note.bad_inputs = expected;
    note.bad_row = static_cast<int32_t>(row);
    note.bad_head = static_cast<int32_t>(head);
  } else if (!std::isnan(lse)) {
    // The result of an infinite input may look as if the row had seen no key, so NaN is written
    // instead.
    MarkNotANumber(tensors->Outputs(), held, head,
                   ElementsOf(args, held, head, spec.o_row_dim(args.profile, args.num_heads)));
    tensors->NoteChange();
  }
}

// Notes the first row of hidden states that is not finite although the log-sum-exps of all its
// heads are: the sum over the heads exceeds what the outputs can hold.
void CheckHidden(StreamRequest* request, const BatchLaunch::LseRows& lse) {
  const AttendArgs& args = request->attend;
  if (lse.at == nullptr || args.on_device) return;
  const int64_t dim = request->engine.step->model->spec->o_row_dim(args.profile, args.num_heads);
  const int64_t bytes = dim * static_cast<int64_t>(ElementSize(args.o_dtype));
  for (int64_t row = 0; row < request->engine.rows_launched; ++row) {
    const int64_t sent_row = request->engine.rows_done + row;
    if (!HoldsNotFinite(args.o + sent_row * bytes, args.o_dtype, dim)) continue;
    if (FirstNotFinite(lse.at + row * lse.row_stride, args.num_heads) < args.num_heads) continue;
    request->engine.bad_row = static_cast<int32_t>(sent_row);
    request->engine.bad_head = 0;
    return;
  }
}

}  // namespace

void CheckResults(BatchLaunch* launch, kernels::AttentionBackend* backend) {
  const std::vector<StreamRequest*>& requests = launch->batch.requests;
  // Rows first: a query may see rows brought by a later request of the launch. A non-finite row
  // also makes the results of queries over it non-finite. So the rows are read only if their
  // request has no queries, or if its index lists may leave rows out.
  const auto first_bad = [&](size_t i) {
    const BatchLaunch::LseRows& lse = launch->lse[i];
    const int64_t heads = requests[i]->attend.num_heads;
    const int64_t rows = lse.at == nullptr ? 0 : requests[i]->engine.rows_launched;
    if (lse.row_stride == heads) return FirstNotFinite(lse.at, rows * heads);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = FirstNotFinite(lse.at + row * lse.row_stride, heads);
      if (head < heads) return row * heads + head;
    }
    return rows * heads;
  };
  bool all_finite = true;
  for (size_t i = 0; i < requests.size(); ++i) {
    const StreamRequest& request = *requests[i];
    const bool computed = launch->lse[i].at != nullptr;
    const bool bad =
        computed && first_bad(i) < int64_t{request.engine.rows_launched} * request.attend.num_heads;
    all_finite &= !bad;
    const bool unseen = IsSparse(request.attend) || request.engine.step->model->spec->windowed();
    if (Appends(request) && (bad || !computed || unseen)) NoteRows(request, backend);
  }
  for (size_t i = 0; !all_finite && i < requests.size(); ++i) {
    StreamRequest* const request = requests[i];
    const BatchLaunch::LseRows& lse = launch->lse[i];
    const int64_t heads = request->attend.num_heads;
    if (lse.at == nullptr) continue;
    const int64_t count = int64_t{request->engine.rows_launched} * heads;
    HostTensors tensors(*request, backend);
    for (int64_t index = first_bad(i); index < count && request->engine.bad_row < 0; ++index) {
      const float value = lse.at[index / heads * lse.row_stride + index % heads];
      if (std::isfinite(value)) continue;
      JudgeRow(request, &tensors, request->engine.rows_done + index / heads, index % heads, value);
    }
  }
  if (launch->batch.key.profile != Profile::kProjected) return;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (requests[i]->engine.bad_row < 0) CheckHidden(requests[i], launch->lse[i]);
  }
}

void CheckRepeats(const BatchLaunch& launch) {
  for (size_t i = 0; i < launch.differs.size(); ++i) {
    const int32_t* const differs = launch.differs[i];
    if (differs == nullptr) continue;
    StreamRequest* const request = launch.batch.requests[i];
    const int32_t rows = request->engine.rows_launched;
    const bool keys = request->engine.step->model->spec->indexer.heads > 0;
    int32_t row = 0;
    while (row < rows && differs[row] == 0 && (!keys || differs[rows + row] == 0)) ++row;
    const int32_t first = FirstRow(*request);
    const auto entries = static_cast<int32_t>(
        EntriesOfRows(*request->engine.step, request->attend.layer, first, first + rows));
    const int32_t* const of_entries = differs + rows;
    if (std::any_of(of_entries, of_entries + entries, [](int32_t other) { return other != 0; })) {
      row = 0;  // rows and entries are sent again together, so the error names row 0
    }
    if (row < rows) request->engine.other_row = FirstRow(*request) + row;
  }
}

absl::Status ResultOf(const StreamRequest& request) {
  const StreamRequest::EngineFields& note = request.engine;
  if (note.other_row >= 0) {
    return RefuseField("payload", absl::StrCat("other KV bytes at row ", note.other_row),
                       "equal to the rows stored before", "kv_rows_differ",
                       absl::StatusCode::kAlreadyExists);
  }
  if (note.bad_row < 0) return absl::OkStatus();
  const std::string place = absl::StrCat(" at row ", note.bad_row, ", head ", note.bad_head);
  return note.bad_inputs
             ? RefuseField("payload", absl::StrCat("inputs that are not finite,", place),
                           "finite inputs of a chained call", "result_not_finite")
             : RefuseField("payload", absl::StrCat("finite inputs of a result that is not,", place),
                           "inputs of which fp32 can hold the result", "result_not_finite");
}

}  // namespace mla::scheduler
