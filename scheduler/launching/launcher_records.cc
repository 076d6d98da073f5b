// Launcher: from a batch, staged, to the records of its launch.
#include "scheduler/launching/launcher.h"

#include <cassert>

namespace mla::scheduler {

using kernels::DType;
using kernels::ElementSize;

namespace {

constexpr int64_t kWorkspaceAlignment = 64;  // of SlotWorkspace

}  // namespace

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
  if (common.staged.differs != nullptr) record.differs = common.staged.differs + skip;
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
  int32_t rows = segment.rows;
  if (segment.run >= 0) {
    const RowRun& run = launch->batch.runs[segment.run];
    if (launch->batch.run_segments[run.first] != static_cast<int32_t>(index)) {
      return absl::OkStatus();  // its rows are in the record of the first
    }
    rows = run.rows;
  }
  const bool expands = is_expanded && rows >= common->expanded_min_rows;
  const bool projects = is_expanded && !expands;
  kernels::RequestRecord& record = (expands ? launch->expanded : launch->absorbed)
                                       .emplace_back(projects ? common->latent : common->sent);
  record.q = q;
  record.o = o;
  if (staged.lse != nullptr) record.lse = staged.lse + skip * record.lse_row_stride;
  record.page_table = cache_->page_table(segment.entry->sequence->slot);
  record.q_rows = rows;
  record.kv_rows = segment.cached() + rows;
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

absl::Status Launcher::Fill(Launch* launch) {
  launch->tables.clear();
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
    const kernels::TableRange changed = cache_->TakeTableChange(segment.entry->sequence->slot);
    if (changed.count > 0) launch->tables.push_back(changed);
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
