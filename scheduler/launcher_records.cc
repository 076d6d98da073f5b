// Launcher: from a batch to the records of its launch.
#include "scheduler/launcher.h"

#include <cassert>

namespace mla::scheduler {

using kernels::DType;
using kernels::ElementSize;

namespace {

constexpr int64_t kWorkspaceAlignment = 64;  // of SlotWorkspace

}  // namespace

absl::Status Launcher::StageKv(const Launch& launch, const StreamRequest& request, Staged* staged) {
  if (!Appends(request)) return absl::OkStatus();
  const AttendArgs& args = request.attend;
  const int64_t row =
      request.engine.step->model->spec->geometry.kv_row_dim() * int64_t(ElementSize(args.q_dtype));
  absl::StatusOr<const void*> kv = backend_->StageInput(
      launch.slot, args.kv + request.engine.rows_done * row, request.engine.rows_launched * row);
  if (!kv.ok()) return kv.status();
  staged->kv = static_cast<const std::byte*>(*kv);
  return absl::OkStatus();
}

absl::Status Launcher::StageQueryAndOutput(const Launch& launch, const StreamRequest& request,
                                           Staged* staged) {
  const AttendArgs& args = request.attend;
  const ModelSpec& spec = *request.engine.step->model->spec;
  const int64_t first = request.engine.rows_done;
  const int64_t rows = request.engine.rows_launched;
  const int64_t q_row =
      int64_t{args.num_heads} * spec.q_dim(args.profile) * int64_t(ElementSize(args.q_dtype));
  absl::StatusOr<const void*> q =
      args.q_fragments.empty()
          ? backend_->StageInput(launch.slot, args.q + first * q_row, rows * q_row)
          : backend_->StageInputFragments(
                launch.slot,
                {args.q_fragments, args.q_fragments_offset + first * q_row, rows * q_row});
  if (!q.ok()) return q.status();
  staged->q = static_cast<const std::byte*>(*q);
  const int64_t o_row =
      int64_t{args.num_heads} * spec.o_dim(args.profile) * int64_t(ElementSize(args.o_dtype));
  absl::StatusOr<void*> o =
      backend_->StageOutput(launch.slot, args.o + first * o_row, rows * o_row);
  if (!o.ok()) return o.status();
  staged->o = static_cast<std::byte*>(*o);
  return absl::OkStatus();
}

absl::Status Launcher::StageRequest(Launch* launch, size_t index, Staged* staged) {
  const StreamRequest& request = *launch->batch.requests[index];
  if (absl::Status s = StageQueryAndOutput(*launch, request, staged); !s.ok()) return s;
  const AttendArgs& args = request.attend;
  Launch::LseRows& seen = launch->lse[index];
  seen.row_stride = args.num_heads;
  if (!args.want_lse) {
    staged->lse = TakeUnwantedLse(launch, request.engine.rows_launched, args.num_heads, &seen.at);
    return absl::OkStatus();
  }
  float* const own = args.lse + int64_t{request.engine.rows_done} * args.num_heads;
  absl::StatusOr<void*> lse = backend_->StageOutput(
      launch->slot, own,
      int64_t{request.engine.rows_launched} * args.num_heads * int64_t{sizeof(float)});
  if (!lse.ok()) return lse.status();
  staged->lse = static_cast<float*>(*lse);
  seen.at = own;
  return absl::OkStatus();
}

absl::Status Launcher::StageUnwantedLse(Launch* launch) {
  const Batch& batch = launch->batch;
  int64_t count = 0;
  for (const StreamRequest* request : batch.requests) {
    const AttendArgs& args = request->attend;
    if (args.profile == Profile::kAppendOnly || args.want_lse) continue;
    count += int64_t{request->engine.rows_launched} * args.num_heads;
  }
  for (const FusedSlices& slices : batch.slices) {
    // Beside slices of which some are wanted, the others are staged with them.
    if (Unwanted(*launch, slices)) continue;
    for (int32_t i = 0; i < slices.count; ++i) {
      const StreamRequest& request = *batch.requests[slices.first + i];
      if (request.attend.want_lse) continue;
      count -= int64_t{request.engine.rows_launched} * request.attend.num_heads;
    }
  }
  launch->unwanted_left = limits_.launch_packed_rows;
  launch->unwanted_used = 0;
  launch->unwanted_staged = nullptr;
  if (count == 0) return absl::OkStatus();
  absl::StatusOr<void*> lse = backend_->StageOutput(
      launch->slot, launch->unwanted_lse->bytes().data(), count * int64_t{sizeof(float)});
  if (!lse.ok()) return lse.status();
  launch->unwanted_staged = static_cast<float*>(*lse);
  return absl::OkStatus();
}

bool Launcher::Unwanted(const Launch& launch, const FusedSlices& slices) {
  bool wanted = false;
  for (int32_t i = 0; i < slices.count; ++i) {
    wanted |= launch.batch.requests[slices.first + i]->attend.want_lse;
  }
  return !wanted;
}

float* Launcher::TakeUnwantedLse(Launch* launch, int64_t rows, int64_t heads, const float** host) {
  const int64_t first = launch->unwanted_used;
  launch->unwanted_used += rows * heads;
  *host = reinterpret_cast<const float*>(launch->unwanted_lse->bytes().data()) + first;
  return launch->unwanted_staged + first;
}

absl::Status Launcher::StageAbsorbedSlices(const Launch& launch, const FusedSlices& slices,
                                           Staged* staged) {
  in_parts_.clear();
  out_parts_.clear();
  int32_t rows = 0;
  for (int32_t i = 0; i < slices.count; ++i) {
    const StreamRequest& request = *launch.batch.requests[slices.first + i];
    const AttendArgs& args = request.attend;
    const ModelSpec& spec = *request.engine.step->model->spec;
    const int64_t q_row =
        int64_t{args.num_heads} * spec.q_dim(args.profile) * int64_t(ElementSize(args.q_dtype));
    const int64_t o_row =
        int64_t{args.num_heads} * spec.o_dim(args.profile) * int64_t(ElementSize(args.o_dtype));
    assert(args.q_fragments.empty());  // slices lie whole beside their siblings
    in_parts_.push_back({args.q + request.engine.rows_done * q_row, q_row});
    out_parts_.push_back({args.o + request.engine.rows_done * o_row, o_row});
    rows = request.engine.rows_launched;
  }
  absl::StatusOr<const void*> q = backend_->StageInputParts(launch.slot, rows, in_parts_);
  if (!q.ok()) return q.status();
  staged->q = static_cast<const std::byte*>(*q);
  absl::StatusOr<void*> o = backend_->StageOutputParts(launch.slot, rows, out_parts_);
  if (!o.ok()) return o.status();
  staged->o = static_cast<std::byte*>(*o);
  return absl::OkStatus();
}

absl::Status Launcher::StageExpandedSlices(Launch* launch, const FusedSlices& slices,
                                           Staged* staged) {
  const kernels::Geometry& g = launch->batch.key.geometry;
  const kernels::BackendInfo& info = backend_->Info();
  const int64_t q_size = ElementSize(
      info.absorbed_q_dtype(launch->batch.key.q_dtype, launch->batch.key.split_queries));
  const int64_t o_size = ElementSize(info.latent_o_dtype);
  const int64_t rows = launch->batch.requests[slices.first]->engine.rows_launched;
  absl::StatusOr<void*> q =
      backend_->SlotWorkspace(launch->slot, rows * slices.heads * g.absorbed_q_dim() * q_size);
  if (!q.ok()) return q.status();
  absl::StatusOr<void*> o =
      backend_->SlotWorkspace(launch->slot, rows * slices.heads * g.kv_lora_rank * o_size);
  if (!o.ok()) return o.status();
  staged->q = static_cast<const std::byte*>(*q);
  staged->o = static_cast<std::byte*>(*o);
  int64_t head = 0;  // of the slice, side by side with the others
  for (int32_t i = 0; i < slices.count; ++i) {
    const StreamRequest& request = *launch->batch.requests[slices.first + i];
    const AttendArgs& args = request.attend;
    const Model& model = *request.engine.step->model;
    Staged own;
    // Without its log-sum-exps: StageLse has staged those of all slices, and what no kernel writes
    // must not be copied over them.
    if (absl::Status s = StageQueryAndOutput(*launch, request, &own); !s.ok()) return s;
    kernels::ProjectionRecord absorb;
    absorb.in = own.q;
    absorb.in_head_stride = model.spec->q_dim(args.profile);
    absorb.in_row_stride = absorb.in_head_stride * args.num_heads;
    absorb.out = static_cast<std::byte*>(*q) + head * g.absorbed_q_dim() * q_size;
    absorb.out_head_stride = g.absorbed_q_dim();
    absorb.out_row_stride = absorb.out_head_stride * slices.heads;
    absorb.rows = static_cast<int32_t>(rows);
    absorb.num_heads = args.num_heads;
    absorb.head_offset = args.head_offset;
    absorb.weights_slot = models_->weights_slot(model, args.layer);
    kernels::ProjectionRecord project = absorb;
    project.in = static_cast<const std::byte*>(*o) + head * g.kv_lora_rank * o_size;
    project.in_head_stride = g.kv_lora_rank;
    project.in_row_stride = project.in_head_stride * slices.heads;
    project.out = own.o;
    project.out_head_stride = model.spec->o_dim(args.profile);
    project.out_row_stride = project.out_head_stride * args.num_heads;
    launch->absorbs.push_back(absorb);
    launch->projects.push_back(project);
    head += args.num_heads;
  }
  return absl::OkStatus();
}

absl::Status Launcher::StageLse(Launch* launch, const FusedSlices& slices, Staged* staged) {
  const bool wanted = !Unwanted(*launch, slices);
  const int64_t rows = launch->batch.requests[slices.first]->engine.rows_launched;
  const float* side_by_side = nullptr;  // of all slices, where no client wants them
  if (!wanted) staged->lse = TakeUnwantedLse(launch, rows, slices.heads, &side_by_side);
  lse_parts_.clear();
  for (int32_t i = 0; i < slices.count; ++i) {
    const int32_t index = slices.first + i;
    const StreamRequest& request = *launch->batch.requests[index];
    const AttendArgs& args = request.attend;
    Launch::LseRows& seen = launch->lse[index];
    seen.at = side_by_side;
    seen.row_stride = slices.heads;
    if (!wanted) {
      side_by_side += args.num_heads;
      continue;
    }
    seen.at = args.lse + int64_t{request.engine.rows_done} * args.num_heads;
    if (!args.want_lse) {
      launch->unwanted_left -= rows * args.num_heads;
      seen.at = reinterpret_cast<const float*>(launch->unwanted_lse->bytes().data()) +
                launch->unwanted_left;
    }
    seen.row_stride = args.num_heads;
    lse_parts_.push_back({const_cast<float*>(seen.at), args.num_heads * int64_t{sizeof(float)}});
  }
  if (!wanted) return absl::OkStatus();
  absl::StatusOr<void*> lse =
      backend_->StageOutputParts(launch->slot, static_cast<int32_t>(rows), lse_parts_);
  if (!lse.ok()) return lse.status();
  staged->lse = static_cast<float*>(*lse);
  return absl::OkStatus();
}

absl::Status Launcher::StageSlices(Launch* launch, const FusedSlices& slices, Staged* staged) {
  if (absl::Status s = StageLse(launch, slices, staged); !s.ok()) return s;
  return launch->batch.key.profile == Profile::kAbsorbed
             ? StageAbsorbedSlices(*launch, slices, staged)
             : StageExpandedSlices(launch, slices, staged);
}

Launcher::Common Launcher::CommonOf(const Segment& segment, const Staged& staged,
                                    const BatchKey& key) const {
  const AttendArgs& args = segment.request->attend;
  const Model& model = *segment.request->engine.step->model;
  const kernels::Geometry& g = model.spec->geometry;
  Common common;
  common.request = segment.request;
  common.staged = staged;
  common.append.dtype = args.q_dtype;
  common.append.kv_row_stride = g.kv_row_dim();
  common.append.layer_offset = model.layout.layer_offset(args.layer);
  common.append.row_stride = model.layout.row_bytes;
  common.append.page_size = model.layout.page_size;
  common.append.row_dim = static_cast<int32_t>(g.kv_row_dim());
  common.kv_row_bytes = g.kv_row_dim() * int64_t(ElementSize(args.q_dtype));
  if (args.profile == Profile::kAppendOnly) return common;

  kernels::RequestRecord& sent = common.sent;
  sent = Record(segment);
  sent.q_head_stride = model.spec->q_dim(args.profile);
  sent.q_row_stride = sent.q_head_stride * args.num_heads;
  sent.o_head_stride = model.spec->o_dim(args.profile);
  sent.o_row_stride = sent.o_head_stride * args.num_heads;
  sent.lse_head_stride = 1;
  sent.lse_row_stride = args.num_heads;
  common.q_row_bytes = sent.q_row_stride * int64_t(ElementSize(args.q_dtype));
  common.o_row_bytes = sent.o_row_stride * int64_t(ElementSize(args.o_dtype));
  if (args.profile == Profile::kAbsorbed) return common;

  // The absorbed form of EXPANDED, between its two projections.
  const kernels::BackendInfo& info = backend_->Info();
  common.expanded_min_rows = model.ExpandedMinRows(args.q_dtype);
  kernels::RequestRecord& latent = common.latent;
  latent = sent;
  latent.q_head_stride = key.geometry.absorbed_q_dim();
  latent.q_row_stride = latent.q_head_stride * args.num_heads;
  latent.o_head_stride = key.geometry.kv_lora_rank;
  latent.o_row_stride = latent.o_head_stride * args.num_heads;
  common.latent_q_row_bytes =
      latent.q_row_stride *
      int64_t(ElementSize(info.absorbed_q_dtype(key.q_dtype, key.split_queries)));
  common.latent_o_row_bytes = latent.o_row_stride * int64_t(ElementSize(info.latent_o_dtype));
  kernels::ProjectionRecord& absorb = common.absorb;
  absorb.in_row_stride = sent.q_row_stride;
  absorb.in_head_stride = sent.q_head_stride;
  absorb.out_row_stride = latent.q_row_stride;
  absorb.out_head_stride = latent.q_head_stride;
  absorb.num_heads = args.num_heads;
  absorb.head_offset = args.head_offset;
  absorb.weights_slot = sent.weights_slot;
  kernels::ProjectionRecord& project = common.project;
  project = absorb;
  project.in_row_stride = latent.o_row_stride;
  project.in_head_stride = latent.o_head_stride;
  project.out_row_stride = sent.o_row_stride;
  project.out_head_stride = sent.o_head_stride;
  return common;
}

void Launcher::AddAppend(Launch* launch, const Segment& segment, const Common& common) {
  const int64_t skip = segment.row_begin - FirstRow(*segment.request);
  kernels::AppendRecord& record = launch->appends.emplace_back(common.append);
  record.kv = common.staged.kv + skip * common.kv_row_bytes;
  record.page_table = cache_->page_table(segment.entry->sequence->slot);
  record.first_position = segment.cached();
  record.rows = segment.rows;
}

// Takes workspace for segment `index` and for those behind it that need it alike, so that a step of
// many sequences asks once.
absl::Status Launcher::TakeLatents(const Launch& launch, size_t index, Common* common) {
  const std::vector<Segment>& segments = launch.batch.segments;
  int64_t rows = segments[index].rows;
  const bool aligned = common->latent_q_row_bytes % kWorkspaceAlignment == 0 &&
                       common->latent_o_row_bytes % kWorkspaceAlignment == 0;
  for (size_t next = index + 1; aligned && next < segments.size(); ++next) {
    const Segment& segment = segments[next];
    if (segment.request != common->request || segment.rows >= common->expanded_min_rows) break;
    rows += segment.rows;
  }
  absl::StatusOr<void*> q = backend_->SlotWorkspace(launch.slot, rows * common->latent_q_row_bytes);
  if (!q.ok()) return q.status();
  absl::StatusOr<void*> o = backend_->SlotWorkspace(launch.slot, rows * common->latent_o_row_bytes);
  if (!o.ok()) return o.status();
  common->latent_q = static_cast<std::byte*>(*q);
  common->latent_o = static_cast<std::byte*>(*o);
  common->latent_rows = rows;
  return absl::OkStatus();
}

kernels::RequestRecord Launcher::Record(const Segment& segment) const {
  const AttendArgs& args = segment.request->attend;
  const Model& model = *segment.request->engine.step->model;
  kernels::RequestRecord record{};
  record.page_table = cache_->page_table(segment.entry->sequence->slot);
  record.layer_offset = model.layout.layer_offset(args.layer);
  record.row_stride = model.layout.row_bytes;
  record.page_size = model.layout.page_size;
  record.q_rows = segment.rows;
  record.kv_rows = segment.cached() + segment.rows;
  record.num_heads = args.num_heads;
  record.head_offset = args.head_offset;
  record.weights_slot =
      args.profile == Profile::kAbsorbed ? -1 : models_->weights_slot(model, args.layer);
  record.softmax_scale = static_cast<float>(model.spec->softmax_scale);
  record.causal = 1;
  return record;
}

absl::Status Launcher::AddCompute(Launch* launch, size_t index, Common* common) {
  const Segment& segment = launch->batch.segments[index];
  const Staged& staged = common->staged;
  const int64_t skip = segment.row_begin - FirstRow(*segment.request);
  const std::byte* const q = staged.q + skip * common->q_row_bytes;
  std::byte* const o = staged.o + skip * common->o_row_bytes;
  const bool is_expanded = segment.request->attend.profile == Profile::kExpanded;
  const bool expands = is_expanded && segment.rows >= common->expanded_min_rows;
  const bool projects = is_expanded && !expands;
  kernels::RequestRecord& record = (expands ? launch->expanded : launch->absorbed)
                                       .emplace_back(projects ? common->latent : common->sent);
  record.q = q;
  record.o = o;
  if (staged.lse != nullptr) record.lse = staged.lse + skip * record.lse_row_stride;
  record.page_table = cache_->page_table(segment.entry->sequence->slot);
  record.q_rows = segment.rows;
  record.kv_rows = segment.cached() + segment.rows;
  (expands ? launch->plan_expanded : launch->plan_absorbed)
      .push_back({record.q_rows, record.kv_rows, record.num_heads, true});
  if (!projects) return absl::OkStatus();

  if (common->latent_rows == 0) {
    if (absl::Status s = TakeLatents(*launch, index, common); !s.ok()) return s;
  }
  record.q = common->latent_q;
  record.o = common->latent_o;
  kernels::ProjectionRecord& absorb = launch->absorbs.emplace_back(common->absorb);
  absorb.in = q;
  absorb.out = common->latent_q;
  absorb.rows = segment.rows;
  kernels::ProjectionRecord& project = launch->projects.emplace_back(common->project);
  project.in = common->latent_o;
  project.out = o;
  project.rows = segment.rows;
  common->latent_q += segment.rows * common->latent_q_row_bytes;
  common->latent_o += segment.rows * common->latent_o_row_bytes;
  common->latent_rows -= segment.rows;
  return absl::OkStatus();
}

void Launcher::AddFused(Launch* launch, const Segment& segment) {
  const AttendArgs& args = segment.request->attend;
  const kernels::Geometry& g = launch->batch.key.geometry;
  const kernels::BackendInfo& info = backend_->Info();
  const bool absorbed = args.profile == Profile::kAbsorbed;
  const DType q_dtype = absorbed
                            ? args.q_dtype
                            : info.absorbed_q_dtype(args.q_dtype, launch->batch.key.split_queries);
  const DType o_dtype = absorbed ? args.o_dtype : info.latent_o_dtype;
  const Staged& staged = fused_[segment.slices];
  const int64_t skip = segment.row_begin - FirstRow(*segment.request);
  kernels::RequestRecord record = Record(segment);
  record.num_heads = launch->batch.slices[segment.slices].heads;
  record.q_head_stride = g.absorbed_q_dim();
  record.q_row_stride = record.q_head_stride * record.num_heads;
  record.o_head_stride = g.kv_lora_rank;
  record.o_row_stride = record.o_head_stride * record.num_heads;
  record.lse_head_stride = 1;
  record.lse_row_stride = record.num_heads;
  record.q = staged.q + skip * record.q_row_stride * int64_t(ElementSize(q_dtype));
  record.o = staged.o + skip * record.o_row_stride * int64_t(ElementSize(o_dtype));
  if (staged.lse != nullptr) record.lse = staged.lse + skip * record.lse_row_stride;
  launch->absorbed.push_back(record);
  launch->plan_absorbed.push_back({record.q_rows, record.kv_rows, record.num_heads, true});
}

absl::Status Launcher::StageBatch(Launch* launch) {
  const Batch& batch = launch->batch;
  staged_.assign(batch.requests.size(), Staged());
  fused_.assign(batch.slices.size(), Staged());
  launch->lse.assign(batch.requests.size(), Launch::LseRows());
  if (absl::Status s = StageUnwantedLse(launch); !s.ok()) return s;
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    if (absl::Status s = StageKv(*launch, *batch.requests[i], &staged_[i]); !s.ok()) return s;
  }
  for (size_t i = 0; i < batch.slices.size(); ++i) {
    if (absl::Status s = StageSlices(launch, batch.slices[i], &fused_[i]); !s.ok()) return s;
  }
  size_t fused = 0;  // next of batch.slices, which are in the order of their requests
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    if (fused < batch.slices.size() && static_cast<int32_t>(i) == batch.slices[fused].first) {
      i += static_cast<size_t>(batch.slices[fused++].count) - 1;
      continue;
    }
    if (batch.requests[i]->attend.profile == Profile::kAppendOnly) continue;
    if (absl::Status s = StageRequest(launch, i, &staged_[i]); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status Launcher::Fill(Launch* launch) {
  launch->appends.clear();
  launch->absorbed.clear();
  launch->expanded.clear();
  launch->absorbs.clear();
  launch->projects.clear();
  launch->plan_absorbed.clear();
  launch->plan_expanded.clear();
  if (absl::Status s = backend_->BeginLaunch(launch->slot); !s.ok()) return s;
  if (absl::Status s = StageBatch(launch); !s.ok()) return s;
  Common common;
  for (size_t i = 0; i < launch->batch.segments.size(); ++i) {
    const Segment& segment = launch->batch.segments[i];
    const StreamRequest& request = *segment.request;
    if (&request != common.request) {
      common = CommonOf(segment, staged_[request.engine.batch_index], launch->batch.key);
    }
    if (common.staged.kv != nullptr) AddAppend(launch, segment, common);
    if (request.attend.profile == Profile::kAppendOnly) continue;
    if (segment.slices >= 0) {
      AddFused(launch, segment);
    } else if (absl::Status s = AddCompute(launch, i, &common); !s.ok()) {
      return s;
    }
  }
  return absl::OkStatus();
}

}  // namespace mla::scheduler
