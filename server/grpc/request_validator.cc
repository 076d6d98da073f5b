#include "server/grpc/request_validator.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/printable.h"
#include "base/status_macros.h"
#include "server/grpc/field_checks.h"

namespace mla::server {
namespace {

using kernels::DType;
using scheduler::Limits;
using scheduler::ModelSpec;
using scheduler::Profile;

absl::Status CheckWireDType(v1::DType value, const char* field, const char* accepted, DType* out) {
  switch (value) {
    case v1::DTYPE_UNSPECIFIED:
    case v1::DTYPE_BF16:
      *out = DType::kBf16;
      return absl::OkStatus();
    case v1::DTYPE_F32:
      *out = DType::kF32;
      return absl::OkStatus();
    default:
      return RefuseField(field, absl::StrCat(static_cast<int>(value)), accepted, "unknown_value");
  }
}

// DTYPE_F8_E4M3 is decoded on arrival: the engine sees bf16, or fp32 rows if the queries are fp32.
absl::Status CheckInputDTypes(const v1::Attend& message, DType* dtype, bool* q_fp8, bool* kv_fp8) {
  *q_fp8 = message.q_dtype() == v1::DTYPE_F8_E4M3;
  if (*q_fp8) {
    *dtype = DType::kBf16;
  } else {
    MLA_RETURN_IF_ERROR(CheckWireDType(message.q_dtype(), "attend.q_dtype",
                                       "DTYPE_BF16, DTYPE_F32 or DTYPE_F8_E4M3", dtype));
  }
  *kv_fp8 = message.kv_row_dtype() == v1::DTYPE_F8_E4M3;
  if (*kv_fp8 || message.kv_row_dtype() == v1::DTYPE_UNSPECIFIED) return absl::OkStatus();
  const v1::DType same = *dtype == DType::kF32 ? v1::DTYPE_F32 : v1::DTYPE_BF16;
  if (message.kv_row_dtype() == same) return absl::OkStatus();
  return RefuseField("attend.kv_row_dtype", absl::StrCat(static_cast<int>(message.kv_row_dtype())),
                     absl::StrCat("DTYPE_F8_E4M3, or ", v1::DType_Name(same), " as q"));
}

absl::Status CheckProfile(const v1::Attend& message, const ModelSpec& model, Profile* out) {
  switch (message.profile()) {
    case v1::PROFILE_ABSORBED:
      *out = Profile::kAbsorbed;
      break;
    case v1::PROFILE_APPEND_ONLY:
      *out = Profile::kAppendOnly;
      if (message.want_lse()) {
        return RefuseField("attend.want_lse", "true", "false with PROFILE_APPEND_ONLY");
      }
      break;
    case v1::PROFILE_EXPANDED:
      *out = Profile::kExpanded;
      break;
    case v1::PROFILE_PROJECTED:
      *out = Profile::kProjected;
      break;
    default:
      return RefuseField("attend.profile", absl::StrCat(static_cast<int>(message.profile())),
                         "PROFILE_ABSORBED, PROFILE_EXPANDED, PROFILE_APPEND_ONLY or "
                         "PROFILE_PROJECTED",
                         "unknown_value");
  }
  return model.CheckProfile(*out, message.has_kv());
}

// Sets in `sizes` the index inputs, except for their bytes, and the lists that are wanted.
absl::Status CheckIndexer(const v1::Attend& message, const ModelSpec& model, AttendSizes* sizes) {
  if (model.indexer.heads == 0) {
    return RefuseField("attend.lists", "INDEX_LISTS_SERVER",
                       "lists: the model was registered without index_heads", "no_indexer");
  }
  MLA_RETURN_IF_ERROR(CheckRange("attend.list_entries", message.list_entries(), 0, 0));
  const int64_t entries = int64_t{message.row_count()} * model.top_k;
  if (entries > std::numeric_limits<int32_t>::max()) {
    return RefuseField("attend.row_count", absl::StrCat(message.row_count(), " rows"),
                       "so few that their lists have 2^31 - 1 entries");
  }
  sizes->selects = true;
  sizes->list_top_k = model.top_k;
  if (message.want_lists()) sizes->lists_out_bytes = entries * int64_t{sizeof(int32_t)};
  return absl::OkStatus();
}

// Checks the lists of the message and sets their fields in `sizes`.
absl::Status CheckLists(const v1::Attend& message, const ModelSpec& model, Profile profile,
                        AttendSizes* sizes) {
  const v1::IndexLists lists = message.lists();
  if (!v1::IndexLists_IsValid(lists)) {
    return RefuseField("attend.lists", absl::StrCat(static_cast<int>(lists)),
                       "INDEX_LISTS_FIXED, INDEX_LISTS_RAGGED or INDEX_LISTS_SERVER",
                       "unknown_value");
  }
  if (message.want_lists() && lists != v1::INDEX_LISTS_SERVER) {
    return RefuseField("attend.want_lists", "true", "false without INDEX_LISTS_SERVER");
  }
  const int64_t entries = message.list_entries();
  if (lists == v1::INDEX_LISTS_UNSPECIFIED) {
    if (entries == 0) return absl::OkStatus();
    return RefuseField("attend.list_entries", absl::StrCat(entries), "0 without lists");
  }
  const bool none = model.top_k == 0 || model.ratio(static_cast<int32_t>(message.layer())) == 0;
  const bool dense = model.windowed() ? none : model.attention == kernels::AttentionKind::kDense;
  if (dense || profile == Profile::kAppendOnly) {
    return RefuseField("attend.lists", v1::IndexLists_Name(lists),
                       profile == Profile::kAppendOnly ? "none with PROFILE_APPEND_ONLY"
                       : model.windowed() ? "none: the layer has no entries, or the model no top_k"
                                          : "none: the model's attention is dense",
                       "no_lists_here");
  }
  if (lists == v1::INDEX_LISTS_SERVER) return CheckIndexer(message, model, sizes);
  const bool fixed = lists == v1::INDEX_LISTS_FIXED;
  const int64_t rows = message.row_count();
  const int64_t most = fixed ? model.top_k : rows * model.top_k;
  MLA_RETURN_IF_ERROR(CheckRange("attend.list_entries", entries, 0, most));
  const int64_t width = entries == 0 ? model.top_k : entries;
  const int64_t total = fixed ? rows * width : entries;
  if (total > std::numeric_limits<int32_t>::max()) {
    return RefuseField("attend.row_count", absl::StrCat(rows, " rows, ", total, " entries"),
                       "so few that their lists have 2^31 - 1 entries");
  }
  sizes->list_width = fixed ? static_cast<int32_t>(width) : 0;
  sizes->list_entries = static_cast<int32_t>(total);
  sizes->list_top_k = model.top_k;
  if (model.windowed()) sizes->list_ratio = model.ratio(static_cast<int32_t>(message.layer()));
  sizes->list_bytes = (total + (fixed ? 0 : rows + 1)) * int64_t{sizeof(int32_t)};
  return absl::OkStatus();
}

// Return the layout of one 8-bit vector of a tensor.
wire::Fp8Tensor KvTensor(const ModelSpec& model) {
  return wire::MakeFp8Tensor(
      1, {model.geometry.kv_lora_rank, model.geometry.rope_dim, model.indexer.dim});
}

wire::Fp8Tensor QueryTensor(const ModelSpec& model, Profile profile) {
  if (profile == Profile::kExpanded) return wire::MakeFp8Tensor(1, {model.q_dim(profile)});
  return wire::MakeFp8Tensor(1, {model.geometry.kv_lora_rank, model.geometry.rope_dim});
}

// Multiplies a tensor of 8 bits by rows and heads; leaves other tensors unchanged.
bool SizeFp8(int64_t rows, int64_t heads, wire::Fp8Tensor* tensor) {
  int64_t bytes = 0;
  if (tensor->vectors == 0) return true;
  if (!Product(rows, heads, tensor->bytes(), 1, &bytes)) return false;
  tensor->vectors = rows * heads;
  return true;
}

// Keeps the sizes of the lists and the parts of tensors of 8 bits, and sets the others. `entries`:
// number of entries after the KV rows.
absl::Status CheckSizes(const scheduler::AttendArgs& args, const ModelSpec& model, int64_t entries,
                        int64_t payload_bytes, int64_t message_bytes, AttendSizes* sizes) {
  const auto q_element = static_cast<int64_t>(kernels::ElementSize(args.q_dtype));
  const auto o_element = static_cast<int64_t>(kernels::ElementSize(args.o_dtype));
  bool fits = true;
  if (args.has_kv) {
    fits &= Product(args.row_count + entries, 1, model.sent_row_dim(), q_element, &sizes->kv_bytes);
  }
  if (sizes->selects) {
    fits &=
        Product(args.row_count, 1, model.indexer.input_bytes(args.q_dtype), 1, &sizes->list_bytes);
  }
  if (args.profile != Profile::kAppendOnly) {
    fits &= Product(args.row_count, 1, model.q_row_dim(args.profile, args.num_heads), q_element,
                    &sizes->q_bytes);
    fits &= Product(args.row_count, 1, model.o_row_dim(args.profile, args.num_heads), o_element,
                    &sizes->o_bytes);
  }
  if (args.want_lse) {
    fits &= Product(args.row_count, args.num_heads, 1, int64_t{sizeof(float)}, &sizes->lse_bytes);
  }
  fits = fits && SizeFp8(args.row_count, 1, &sizes->kv_fp8) &&
         SizeFp8(args.row_count, args.num_heads, &sizes->q_fp8);
  int64_t in = 0, out = 0;
  fits = fits && !__builtin_add_overflow(sizes->kv_sent(), sizes->q_sent(), &in) &&
         !__builtin_add_overflow(in, sizes->list_bytes, &in) &&
         !__builtin_add_overflow(sizes->o_bytes, sizes->lse_bytes, &out) &&
         !__builtin_add_overflow(out, sizes->lists_out_bytes, &out);
  if (!fits || out > message_bytes - kReplyHeaderBytes) {
    return RefuseField("attend.row_count", absl::StrCat(args.row_count),
                       absl::StrCat("so few that the reply's tensors stay within ",
                                    message_bytes - kReplyHeaderBytes, " bytes"),
                       "reply_too_large");
  }
  if (payload_bytes != kTensorsElsewhere && in != payload_bytes) {
    return RefuseField(
        "payload", absl::StrCat(payload_bytes, " bytes"),
        absl::StrCat(in, " bytes (kv ", sizes->kv_sent(), ", q ", sizes->q_sent(),
                     sizes->list_bytes == 0 ? ""
                                            : absl::StrCat(sizes->selects ? ", index " : ", lists ",
                                                           sizes->list_bytes),
                     ")"),
        "payload_size");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckName(const std::string& name, std::string_view field, bool optional,
                       const Limits& limits) {
  const size_t least = optional ? 0 : 1;
  if (name.size() < least || name.size() > static_cast<size_t>(limits.max_name_bytes)) {
    return RefuseField(std::string(field), absl::StrCat(name.size(), " bytes"),
                       absl::StrCat(least, "..", limits.max_name_bytes, " bytes"), "name_length");
  }
  if (!base::IsPrintable(name)) {
    return RefuseField(std::string(field), "a character that is not printed",
                       "without control and format characters", "name_characters");
  }
  return absl::OkStatus();
}

size_t MostHeaderBytes(const Limits& limits) {
  constexpr size_t kSequence = 64;  // a StepSequence has at most 41 bytes, a count of rows 10
  constexpr size_t kRest = 4096;    // for numbers, a region's handle, and fields of later clients
  return kRest + static_cast<size_t>(limits.max_name_bytes) +
         kSequence * static_cast<size_t>(limits.max_step_sequences);
}

absl::Status ParseBeginStep(const v1::BeginStep& message, const Limits& limits,
                            scheduler::BeginStepArgs* args, int32_t* total_rows) {
  MLA_RETURN_IF_ERROR(CheckName(message.model_id(), "begin_step.model_id", false, limits));
  const int count = message.sequences_size();
  const int64_t participants = std::max(message.participants(), 1u);
  MLA_RETURN_IF_ERROR(scheduler::CheckStepBounds(count, participants, message.lease_ms(), limits));
  args->model_id = message.model_id();
  args->participants = static_cast<int32_t>(participants);
  args->lease_ms = message.lease_ms();
  args->sequences.resize(static_cast<size_t>(count));
  int64_t rows = 0;
  for (int i = 0; i < count; ++i) {
    const v1::StepSequence& from = message.sequences(i);
    scheduler::StepSequenceArgs& sequence = args->sequences[static_cast<size_t>(i)];
    sequence.id = from.sequence_id();
    sequence.epoch = from.epoch();
    // Rows that follow at once are checked with these numbers before the engine has seen them.
    if (from.start_position() > static_cast<uint64_t>(limits.max_sequence_rows)) {
      return RefuseField(absl::StrCat("begin_step.sequences[", i, "].start_position"),
                         absl::StrCat(from.start_position()), Range(0, limits.max_sequence_rows));
    }
    sequence.start_position = static_cast<int64_t>(from.start_position());
    MLA_RETURN_IF_ERROR(
        CheckRange([i] { return absl::StrCat("begin_step.sequences[", i, "].rows"); }, from.rows(),
                   1, limits.max_step_rows));
    sequence.rows = static_cast<int32_t>(from.rows());
    rows += sequence.rows;
  }
  MLA_RETURN_IF_ERROR(scheduler::CheckStepRows(rows, limits));
  *total_rows = static_cast<int32_t>(rows);
  return absl::OkStatus();
}

absl::Status ParseAttend(const v1::Attend& message, const ModelSpec& model, int32_t total_rows,
                         int64_t payload_bytes, int64_t message_bytes, scheduler::AttendArgs* args,
                         AttendSizes* sizes, const scheduler::StepPositions& positions) {
  MLA_RETURN_IF_ERROR(CheckProfile(message, model, &args->profile));
  MLA_RETURN_IF_ERROR(model.CheckAttend({message.layer(), message.row_begin(), message.row_count(),
                                         message.head_offset(), message.num_heads()},
                                        args->profile, total_rows));
  bool q_fp8 = false, kv_fp8 = false;
  MLA_RETURN_IF_ERROR(CheckInputDTypes(message, &args->q_dtype, &q_fp8, &kv_fp8));
  MLA_RETURN_IF_ERROR(CheckWireDType(message.o_dtype(), "attend.o_dtype", "DTYPE_BF16 or DTYPE_F32",
                                     &args->o_dtype));
  if (q_fp8 && args->profile == Profile::kProjected) {
    return RefuseField("attend.q_dtype", "DTYPE_F8_E4M3",
                       "DTYPE_BF16 or DTYPE_F32 with PROFILE_PROJECTED", "no_fp8_queries_here");
  }
  if (kv_fp8 && message.has_kv() && model.windowed()) {
    return RefuseField("attend.kv_row_dtype", "DTYPE_F8_E4M3",
                       "DTYPE_BF16 or DTYPE_F32: entries of the model come with its rows",
                       "no_fp8_rows_here");
  }
  args->layer = static_cast<int32_t>(message.layer());
  args->row_begin = static_cast<int32_t>(message.row_begin());
  args->row_count = static_cast<int32_t>(message.row_count());
  args->head_offset = static_cast<int32_t>(message.head_offset());
  args->num_heads = static_cast<int32_t>(message.num_heads());
  args->has_kv = message.has_kv();
  args->want_lse = message.want_lse();
  args->timeout_us = message.timeout_us();
  args->sized_for = model.geometry;
  args->sized_indexer = model.indexer;
  args->sized_projected = model.projected;
  args->sized_window = model.window;
  args->sized_ratio = model.ratio(args->layer);
  *sizes = {};
  if (kv_fp8 && args->has_kv) sizes->kv_fp8 = KvTensor(model);
  if (q_fp8 && args->profile != Profile::kAppendOnly) {
    sizes->q_fp8 = QueryTensor(model, args->profile);
  }
  MLA_RETURN_IF_ERROR(CheckLists(message, model, args->profile, sizes));
  args->listed_top_k = model.windowed() ? model.top_k : sizes->list_top_k;
  int64_t entries = 0;
  if (model.windowed()) {
    entries = scheduler::EntriesOf(*positions, model.ratio(args->layer), args->row_begin,
                                   int64_t{args->row_begin} + args->row_count);
  }
  return CheckSizes(*args, model, entries, payload_bytes, message_bytes, sizes);
}

absl::Status ParseEndStep(const v1::EndStep& message, const Limits& limits,
                          scheduler::EndStepArgs* args) {
  const int count = message.committed_rows_size();
  if (count > limits.max_step_sequences) {
    return RefuseField("end_step.committed_rows", absl::StrCat(count),
                       absl::StrCat("at most ", limits.max_step_sequences, " entries"));
  }
  args->committed_rows.resize(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    const uint32_t rows = message.committed_rows(i);
    if (rows > static_cast<uint32_t>(limits.max_step_rows)) {
      return RefuseField(absl::StrCat("end_step.committed_rows[", i, "]"), absl::StrCat(rows),
                         Range(0, limits.max_step_rows));
    }
    args->committed_rows[static_cast<size_t>(i)] = static_cast<int32_t>(rows);
  }
  MLA_RETURN_IF_ERROR(
      CheckCount("end_step.tails", message.tails_size(), limits.max_step_sequences));
  args->tails.resize(static_cast<size_t>(message.tails_size()));
  for (int i = 0; i < message.tails_size(); ++i) {
    MLA_RETURN_IF_ERROR(CheckRange([i] { return absl::StrCat("end_step.tails[", i, "]"); },
                                   message.tails(i), 0, limits.max_step_sequences - 1));
    args->tails[static_cast<size_t>(i)].sequence = static_cast<int32_t>(message.tails(i));
  }
  return absl::OkStatus();
}

}  // namespace mla::server
