#include "scheduler/tables/step_table.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "scheduler/engine_types.h"

namespace mla::scheduler {
namespace {

constexpr size_t kAbortedRemembered = 256;
constexpr int kMissingListed = 8;

absl::Status CheckProfile(const Step& step, const AttendArgs& args) {
  const ModelSpec& spec = *step.model->spec;
  if (!step.model->scales_complete()) {
    return RefuseField("attend.step_id", absl::StrCat("a step of model ", spec.id),
                       absl::StrCat("of a model whose layers have their scales, as kv_format ",
                                    kernels::Name(spec.kv_format), " needs"),
                       "scales_missing", absl::StatusCode::kFailedPrecondition);
  }
  if (!step.model->sinks_complete) {
    return RefuseField("attend.step_id", absl::StrCat("a step of model ", spec.id),
                       "of a model that has the sinks of all layers and heads, as needs_sinks asks",
                       "sinks_missing", absl::StatusCode::kFailedPrecondition);
  }
  MLA_RETURN_IF_ERROR(spec.CheckProfile(args.profile, args.has_kv));
  const absl::Status& absorbed_f32 = step.model->absorbed_f32;
  if (args.profile == Profile::kAbsorbed && args.q_dtype == kernels::DType::kF32 &&
      !absorbed_f32.ok()) {
    return MakeError(absorbed_f32.code(), absorbed_f32.message(),
                     {.field = "attend.q_dtype",
                      .got = "DTYPE_F32",
                      .limit = "DTYPE_BF16 in the ABSORBED profile of this backend",
                      .reason = "unsupported_dtype"});
  }
  if (!IsExpanded(args.profile)) return absl::OkStatus();
  if (args.profile == Profile::kProjected && step.rotations == nullptr &&
      spec.geometry.rope_dim > 0) {
    return RefuseField("attend.step_id", absl::StrCat(step.id),
                       "a step whose BeginStep brought rotations", "rotations_missing",
                       absl::StatusCode::kFailedPrecondition);
  }
  if (step.model->contents->weights_complete) return absl::OkStatus();
  std::string layers;
  for (int32_t layer = 0, listed = 0; layer < spec.layers && listed < kMissingListed; ++layer) {
    if (step.model->contents->HasLayer(layer)) continue;
    absl::StrAppend(&layers, listed++ == 0 ? "" : ", ", layer);
  }
  return RefuseField("attend.profile",
                     args.profile == Profile::kProjected ? "PROJECTED" : "EXPANDED",
                     absl::StrCat("preceded by weights of layers ", layers), "weights_missing",
                     absl::StatusCode::kFailedPrecondition);
}

absl::Status CheckKvOrder(const Step& step, const AttendArgs& args, bool* repeat) {
  const LayerProgress& layer = step.layers[args.layer];
  const int32_t end = args.row_begin + args.row_count;
  *repeat = args.has_kv && end <= layer.accepted;
  if (!args.has_kv) return absl::OkStatus();
  if (layer.writer_head >= 0 && layer.writer_head != args.head_offset) {
    return RefuseField("attend.has_kv", absl::StrCat("true at head ", args.head_offset),
                       absl::StrCat("false: the slice at head ", layer.writer_head,
                                    " brings the KV rows of layer ", args.layer),
                       "kv_writer_taken", absl::StatusCode::kFailedPrecondition);
  }
  if (*repeat || args.row_begin == layer.accepted) return absl::OkStatus();
  return RefuseField(
      {.field = "attend.row_begin",
       .got = absl::StrCat(args.row_begin),
       .limit = absl::StrCat(layer.accepted, ": rows of layer ", args.layer, " come in order"),
       .reason = "rows_out_of_order",
       .last_good_position = CommittedAt(step, args.row_begin),
       .next_row = layer.accepted},
      absl::StatusCode::kFailedPrecondition);
}

bool StandsAt(const Step& step, const std::vector<StepSequenceArgs>& positions) {
  return std::equal(step.entries.begin(), step.entries.end(), positions.begin(), positions.end(),
                    [](const StepEntry& entry, const StepSequenceArgs& args) {
                      return entry.start == args.start_position && entry.rows == args.rows;
                    });
}

absl::Status CheckLists(const Step& step, const AttendArgs& args) {
  const ModelSpec& spec = *step.model->spec;
  if (!IsSparse(args) && !spec.windowed()) return absl::OkStatus();
  if (spec.attention == kernels::AttentionKind::kDense) {
    return RefuseField("attend.lists", "index lists", "none: the model's attention is dense",
                       "dense_model");
  }
  if (args.listed_for == nullptr) return absl::OkStatus();
  // Wanted lists are written, and tenants charged, by the top_k of the step's model, so it must be
  // the one checked.
  const bool same_top_k = args.listed_top_k == step.model->spec->top_k;
  if (same_top_k && StandsAt(step, *args.listed_for)) return absl::OkStatus();
  return RefuseField("attend.step_id", absl::StrCat(step.id),
                     "the id of the step that lists and entries were checked for", "step_reused",
                     absl::StatusCode::kFailedPrecondition);
}

}  // namespace

int64_t MostPlaces(const StreamRequest& request) {
  const ModelSpec& spec = *request.engine.step->model->spec;
  if (IsSparse(request.attend)) return int64_t{spec.window} + spec.top_k;
  if (!spec.windowed()) return std::numeric_limits<int64_t>::max();
  const int32_t ratio = spec.ratio(request.attend.layer);
  if (ratio == 0) return spec.window;
  int64_t longest = 0;
  for (const StepEntry& entry : request.engine.step->entries) {
    longest = std::max<int64_t>(longest, int64_t{entry.start} + entry.rows);
  }
  return spec.window + longest / ratio;
}

bool Step::Includes(StreamId stream) const {
  return std::find(streams.begin(), streams.end(), stream) != streams.end();
}

StepTable::StepTable(const Limits& limits, TenantTable* tenants) : tenants_(tenants) {
  pool_.reserve(limits.max_open_steps);
  free_.reserve(limits.max_open_steps);
  open_.reserve(limits.max_open_steps);
}

Step* StepTable::Lookup(TenantKey tenant, StepId id) const {
  for (Step* step : open_) {
    if (step->id == id && step->tenant == tenant) return step;
  }
  return nullptr;
}

absl::StatusOr<Step*> StepTable::Find(TenantKey tenant, StreamId stream, StepId id) const {
  Step* step = Lookup(tenant, id);
  if (step != nullptr && step->Includes(stream)) return step;
  if (step == nullptr) {
    for (auto gone = aborted_.rbegin(); gone != aborted_.rend(); ++gone) {
      if (gone->tenant != tenant || gone->id != id) continue;
      return MakeError(absl::StatusCode::kAborted,
                       absl::StrCat("step ", id, " was aborted: ", gone->why),
                       {.field = "step_id",
                        .got = absl::StrCat(id),
                        .limit = "an open step",
                        .reason = "step_aborted",
                        .last_good_position = gone->committed});
    }
  }
  return MakeError(absl::StatusCode::kNotFound,
                   absl::StrCat("step ", id, " is not open on this stream"),
                   {.field = "step_id",
                    .got = absl::StrCat(id),
                    .limit = "an open step that this stream began or joined",
                    .reason = "step_not_found"});
}

absl::StatusOr<Step*> StepTable::Create(Model* model, StepId id) {
  MLA_RETURN_IF_ERROR(tenants_->Take(*model->account, Resource::kOpenSteps, 1, "begin_step"));
  if (free_.empty()) {
    pool_.push_back(std::make_unique<Step>());
    free_.push_back(pool_.back().get());
  }
  Step* step = free_.back();
  free_.pop_back();
  step->id = id;
  step->tenant = model->tenant;
  step->model = model;
  open_.push_back(step);
  // From now on the id names this step, so the end of an earlier one is forgotten.
  std::erase_if(aborted_, [step](const AbortedStep& gone) {
    return gone.tenant == step->tenant && gone.id == step->id;
  });
  return step;
}

// Forgets the oldest entry of the tenant that has the most, so that no tenant displaces the entries
// of another one.
void StepTable::ForgetAborted() {
  std::map<TenantKey, size_t> counts;
  for (const AbortedStep& gone : aborted_) ++counts[gone.tenant];
  const auto largest =
      std::max_element(counts.begin(), counts.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  aborted_.erase(std::find_if(aborted_.begin(), aborted_.end(), [&](const AbortedStep& gone) {
    return gone.tenant == largest->first;
  }));
}

void StepTable::Remove(Step* step, const std::string& why) {
  if (!why.empty()) {
    if (aborted_.size() == kAbortedRemembered) ForgetAborted();
    aborted_.push_back(AbortedStep{step->tenant, step->id, why, CommittedAt(*step, 0)});
  }
  open_.erase(std::find(open_.begin(), open_.end(), step));
  tenants_->Return(*step->model->account, Resource::kOpenSteps, 1);
  step->Clear();
  free_.push_back(step);
}

absl::Status CheckAttend(const Step& step, const AttendArgs& args, bool* repeat) {
  // This comes first: if the step is of another model, the request's memory has the wrong size.
  const ModelSpec& spec = *step.model->spec;
  const bool in_range = args.layer >= 0 && args.layer < spec.layers;  // otherwise refused below
  const bool same_window =
      args.sized_window == spec.window && (!in_range || args.sized_ratio == spec.ratio(args.layer));
  const bool same_sizes = args.sized_for == spec.geometry && args.sized_indexer == spec.indexer &&
                          args.sized_projected == spec.projected && same_window;
  if (args.sized_for.num_heads != 0 && !same_sizes) {
    return RefuseField("attend.step_id", absl::StrCat(step.id),
                       "the id of a step of the model that this request was sized for",
                       "step_reused", absl::StatusCode::kFailedPrecondition);
  }
  absl::Status status = spec.CheckAttend(
      {args.layer, args.row_begin, args.row_count, args.head_offset, args.num_heads}, args.profile,
      step.total_rows);
  if (status.ok()) status = CheckProfile(step, args);
  if (status.ok()) status = CheckLists(step, args);
  if (status.ok()) status = CheckKvOrder(step, args, repeat);
  return status;
}

absl::Status CheckTails(const Step& step, const std::vector<TailArgs>& tails) {
  int32_t last = -1;
  for (size_t i = 0; i < tails.size(); ++i) {
    const auto& [sequence, tail] = tails[i];
    const auto largest = static_cast<int32_t>(step.entries.size()) - 1;
    if (sequence <= last || sequence > largest) {
      return RefuseField(
          absl::StrCat("end_step.tails[", i, "]"), absl::StrCat(sequence),
          absl::StrCat(last + 1, "..", largest, ": sequences of the step, ascending"),
          "out_of_range");
    }
    last = sequence;
    if (tail != nullptr && tail->size == static_cast<size_t>(step.model->spec->tail_bytes)) {
      continue;
    }
    return RefuseField("end_step.step_id", absl::StrCat(step.id),
                       "the id of a step of the model that this request was sized for",
                       "step_reused", absl::StatusCode::kFailedPrecondition);
  }
  return absl::OkStatus();
}

absl::Status CheckRotations(const ModelSpec& spec, int64_t rows, const BeginStepArgs& args) {
  if (args.rotations == nullptr) return absl::OkStatus();
  const int64_t want = rows * spec.geometry.rope_dim * int64_t{sizeof(float)};
  if (spec.projected.present() && static_cast<int64_t>(args.rotations->size) == want) {
    return absl::OkStatus();
  }
  // The transport has checked the rotations, so another model has taken the name since then.
  return RefuseField("begin_step.model_id", spec.id, "the model that the rotations were sized for",
                     "step_reused", absl::StatusCode::kFailedPrecondition);
}

bool SameStep(const Step& step, const BeginStepArgs& args) {
  if (args.rotations != nullptr && args.rotations != step.rotations &&
      (step.rotations == nullptr || args.rotations->size != step.rotations->size ||
       std::memcmp(args.rotations->data.get(), step.rotations->data.get(), step.rotations->size) !=
           0)) {
    return false;
  }
  if (step.model->spec->id != args.model_id || step.participants != args.participants ||
      step.entries.size() != args.sequences.size()) {
    return false;
  }
  for (size_t i = 0; i < step.entries.size(); ++i) {
    const StepEntry& entry = step.entries[i];
    const StepSequenceArgs& wanted = args.sequences[i];
    if (entry.sequence->id != wanted.id || entry.sequence->epoch != wanted.epoch ||
        entry.start != wanted.start_position || entry.rows != wanted.rows) {
      return false;
    }
  }
  return true;
}

int64_t CommittedAt(const Step& step, int32_t row) {
  int64_t committed = 0;
  for (const StepEntry& entry : step.entries) {
    committed = entry.start;
    if (row < entry.offset + entry.rows) break;
  }
  return committed;
}

std::string MissingRows(const Step& step, int32_t rows_needed) {
  std::string missing;
  int listed = 0;
  int more = 0;
  for (size_t layer = 0; layer < step.layers.size(); ++layer) {
    const int32_t stored = step.layers[layer].stored;
    if (stored >= rows_needed) continue;
    if (listed == kMissingListed) {
      ++more;
      continue;
    }
    absl::StrAppend(&missing, listed++ == 0 ? "" : ", ", "layer ", layer, ": rows ", stored, "..",
                    rows_needed - 1);
  }
  if (more > 0) absl::StrAppend(&missing, " and ", more, " more layers");
  return missing;
}

}  // namespace mla::scheduler
