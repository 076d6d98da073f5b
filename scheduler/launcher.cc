#include "scheduler/launcher.h"

#include <algorithm>
#include <utility>

namespace mla::scheduler {
namespace {

using kernels::AttentionForm;
using kernels::DType;
using kernels::ElementSize;

// Plans kept: the ones that launches in flight pin, and the ones that alternate between them (each
// batch may need one per form; workers that drift apart by a layer alternate between few
// compositions).
constexpr int32_t kPlansPerSlot = 4;

int32_t LaunchSlots(const kernels::AttentionBackend& backend) {
  // A CPU backend has one set of workers: a second launch could only wait. A GPU overlaps copies
  // with the running launch.
  return backend.Info().unified_memory ? 1 : 2;
}

kernels::Geometry MaxGeometry(const Limits& limits) {
  kernels::Geometry g;
  g.num_heads = limits.max_heads;
  g.kv_lora_rank = limits.max_row_dim;
  g.rope_dim = limits.max_row_dim;
  g.nope_dim = limits.max_v_dim;
  g.v_dim = limits.max_v_dim;
  return g;
}

PlanLimits PlanLimitsOf(const Limits& limits) {
  PlanLimits plan;
  plan.requests = limits.launch_requests;
  plan.q_rows = limits.launch_rows;
  plan.packed_rows = limits.launch_packed_rows;
  plan.kv_rows = limits.max_sequence_rows;
  plan.min_heads = 1;
  plan.max_heads = limits.max_heads;
  return plan;
}

template <typename T>
int32_t CountDistinct(std::vector<T>& values) {
  std::sort(values.begin(), values.end());
  return static_cast<int32_t>(std::unique(values.begin(), values.end()) - values.begin());
}

}  // namespace

PlanCapacity Launcher::PlanCapacityOf(const Limits& limits,
                                      const kernels::AttentionBackend& backend) {
  PlanCapacity most;
  // A backend may cut differently by the model's heads, so the worst of all sizes counts.
  for (int32_t heads = 1;; heads = std::min(2 * heads, limits.max_heads)) {
    for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kExpanded}) {
      kernels::AttentionDesc desc;
      desc.geometry = MaxGeometry(limits);
      desc.geometry.num_heads = heads;
      desc.form = form;
      const PlanCapacity one = Planner::Capacity(PlanLimitsOf(limits), backend.Traits(desc));
      most.units = std::max(most.units, one.units);
      most.work_items = std::max(most.work_items, one.work_items);
      most.reduce_tiles = std::max(most.reduce_tiles, one.reduce_tiles);
      most.reduce_partials = std::max(most.reduce_partials, one.reduce_partials);
      most.partial_rows = std::max(most.partial_rows, one.partial_rows);
    }
    if (heads == limits.max_heads) break;
  }
  return most;
}

int64_t Launcher::PlanBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  return PlanCapacityOf(limits, backend).bytes() * kPlansPerSlot * LaunchSlots(backend);
}

kernels::BackendLimits Launcher::BackendLimitsOf(const Limits& limits,
                                                 const kernels::AttentionBackend& backend) {
  const PlanCapacity plan = PlanCapacityOf(limits, backend);
  const int64_t packed = limits.launch_packed_rows;
  const int64_t wide = ElementSize(DType::kF32);
  kernels::BackendLimits out;
  out.kv_pool_bytes = limits.kv_cache_bytes;
  out.page_table_entries = int64_t{limits.max_sequences} * limits.max_pages_per_sequence;
  out.weights_bytes = limits.weights_bytes;
  out.weights_slots = limits.max_models * limits.max_layers;
  out.launch_slots = LaunchSlots(backend);
  out.launch_requests = limits.launch_requests;
  out.launch_rows = limits.launch_rows;
  out.launch_packed_rows = packed;
  out.partial_rows = plan.partial_rows;
  out.max_o_dim = std::max(limits.max_row_dim, limits.max_v_dim);
  out.staging_in_bytes = (packed + limits.launch_rows) * limits.max_row_dim * wide;
  out.staging_out_bytes = packed * (out.max_o_dim + 1) * wide;
  // Absorbed queries and latent outputs, plus alignment of each record.
  out.slot_workspace_bytes =
      packed * 2 * limits.max_row_dim * int64_t(ElementSize(backend.Info().intermediate_dtype)) +
      int64_t{limits.launch_requests} * 128;
  out.work_items = plan.work_items;
  out.reduce_tiles = plan.reduce_tiles;
  out.reduce_partials = plan.reduce_partials;
  out.max_geometry = MaxGeometry(limits);
  return out;
}

Launcher::Launcher(const Limits& limits, kernels::AttentionBackend* backend,
                   kvcache::KvCache* cache, ModelTable* models, const Clock* clock)
    : limits_(limits),
      backend_(backend),
      cache_(cache),
      models_(models),
      clock_(clock),
      launches_(LaunchSlots(*backend)) {
  for (size_t slot = 0; slot < launches_.size(); ++slot) {
    Launch& launch = launches_[slot];
    launch.slot = static_cast<int32_t>(slot);
    launch.batch.requests.reserve(limits.launch_requests);
    launch.batch.segments.reserve(limits.launch_requests);
    launch.appends.reserve(limits.launch_requests);
    launch.absorbed.reserve(limits.launch_requests);
    launch.expanded.reserve(limits.launch_requests);
    launch.absorbs.reserve(limits.launch_requests);
    launch.projects.reserve(limits.launch_requests);
    launch.plan_absorbed.reserve(limits.launch_requests);
    launch.plan_expanded.reserve(limits.launch_requests);
  }
  staged_.reserve(limits.launch_requests);
  layers_.reserve(limits.launch_requests);
  streams_.reserve(limits.launch_requests);
}

absl::StatusOr<std::unique_ptr<Launcher>> Launcher::Create(const Limits& limits,
                                                           kernels::AttentionBackend* backend,
                                                           kvcache::KvCache* cache,
                                                           ModelTable* models, const Clock* clock) {
  std::unique_ptr<Launcher> launcher(new Launcher(limits, backend, cache, models, clock));
  PlanCacheOptions options;
  options.capacity = PlanCapacityOf(limits, *backend);
  options.launch_slots = LaunchSlots(*backend);
  options.plans = kPlansPerSlot * options.launch_slots;
  options.plan_requests = limits.launch_requests;
  absl::StatusOr<std::unique_ptr<PlanCache>> plans = PlanCache::Create(options, *backend);
  if (!plans.ok()) return plans.status();
  launcher->plans_ = *std::move(plans);
  return launcher;
}

Launch* Launcher::FreeSlot() {
  const int32_t slots = static_cast<int32_t>(launches_.size());
  if (inflight_ == slots) return nullptr;
  return &launches_[(oldest_ + inflight_) % slots];
}

absl::Status Launcher::Submit(Launch* launch) {
  launch->start_ns = clock_->Now();
  absl::Status status = Fill(launch);
  if (status.ok()) status = Plan(launch);
  if (status.ok()) status = Enqueue(launch);
  if (status.ok()) status = backend_->Submit(launch->slot);
  Report(launch);
  if (!status.ok()) {
    plans_->Unpin(launch->slot);
    return status;
  }
  ++inflight_;
  return status;
}

bool Launcher::OldestDone() { return inflight_ > 0 && backend_->Done(launches_[oldest_].slot); }

absl::Status Launcher::WaitOldest() {
  Launch& launch = launches_[oldest_];
  const absl::StatusOr<int64_t> kernel_ns = backend_->Wait(launch.slot);
  plans_->Unpin(launch.slot);
  oldest_ = (oldest_ + 1) % static_cast<int32_t>(launches_.size());
  --inflight_;
  launch.report.ok = kernel_ns.ok();
  if (kernel_ns.ok()) launch.report.kernel_ns = *kernel_ns;
  return kernel_ns.status();
}

absl::StatusOr<Launcher::Staged> Launcher::Stage(const Launch& launch,
                                                 const StreamRequest& request) {
  const AttendArgs& args = request.attend;
  const ModelSpec& spec = *request.engine.step->model->spec;
  const int64_t first = request.engine.rows_done;
  const int64_t rows = request.engine.rows_launched;
  const int64_t in_size = ElementSize(args.q_dtype);
  Staged staged;
  if (args.has_kv && !request.engine.repeat) {
    const int64_t row = spec.geometry.kv_row_dim() * in_size;
    absl::StatusOr<const void*> kv =
        backend_->StageInput(launch.slot, args.kv + first * row, rows * row);
    if (!kv.ok()) return kv.status();
    staged.kv = static_cast<const std::byte*>(*kv);
  }
  if (args.profile == Profile::kAppendOnly) return staged;
  const int64_t q_row = int64_t{args.num_heads} * spec.q_dim(args.profile) * in_size;
  absl::StatusOr<const void*> q =
      backend_->StageInput(launch.slot, args.q + first * q_row, rows * q_row);
  if (!q.ok()) return q.status();
  staged.q = static_cast<const std::byte*>(*q);
  const int64_t o_row = int64_t{args.num_heads} * spec.o_dim(args.profile) *
                        static_cast<int64_t>(ElementSize(args.o_dtype));
  absl::StatusOr<void*> o =
      backend_->StageOutput(launch.slot, args.o + first * o_row, rows * o_row);
  if (!o.ok()) return o.status();
  staged.o = static_cast<std::byte*>(*o);
  if (args.want_lse) {
    absl::StatusOr<void*> lse =
        backend_->StageOutput(launch.slot, args.lse + first * args.num_heads,
                              rows * args.num_heads * int64_t{sizeof(float)});
    if (!lse.ok()) return lse.status();
    staged.lse = static_cast<float*>(*lse);
  }
  return staged;
}

void Launcher::AddAppend(Launch* launch, const Segment& segment, const Staged& staged) {
  const StreamRequest& request = *segment.request;
  const Model& model = *request.engine.step->model;
  const int64_t row_dim = model.spec->geometry.kv_row_dim();
  const int64_t skip = segment.row_begin - request.attend.row_begin - request.engine.rows_done;
  kernels::AppendRecord record;
  record.kv = staged.kv + skip * row_dim * int64_t(ElementSize(request.attend.q_dtype));
  record.dtype = request.attend.q_dtype;
  record.kv_row_stride = row_dim;
  record.page_table = cache_->page_table(segment.entry->sequence->slot);
  record.layer_offset = model.layout.layer_offset(request.attend.layer);
  record.row_stride = model.layout.row_bytes;
  record.page_size = model.layout.page_size;
  record.first_position = segment.cached();
  record.rows = segment.rows;
  record.row_dim = static_cast<int32_t>(row_dim);
  launch->appends.push_back(record);
}

absl::Status Launcher::AddAbsorbedOfExpanded(Launch* launch, const Segment& segment,
                                             kernels::RequestRecord record) {
  const kernels::Geometry& g = launch->batch.key.geometry;
  const int64_t heads = record.num_heads;
  const int64_t size = ElementSize(backend_->Info().intermediate_dtype);
  const int64_t q_bytes = segment.rows * heads * g.absorbed_q_dim() * size;
  absl::StatusOr<void*> q = backend_->SlotWorkspace(launch->slot, q_bytes);
  if (!q.ok()) return q.status();
  absl::StatusOr<void*> o =
      backend_->SlotWorkspace(launch->slot, segment.rows * heads * g.kv_lora_rank * size);
  if (!o.ok()) return o.status();
  kernels::ProjectionRecord absorb;
  absorb.in = record.q;
  absorb.out = *q;
  absorb.in_row_stride = record.q_row_stride;
  absorb.in_head_stride = record.q_head_stride;
  absorb.out_row_stride = heads * g.absorbed_q_dim();
  absorb.out_head_stride = g.absorbed_q_dim();
  absorb.rows = segment.rows;
  absorb.num_heads = record.num_heads;
  absorb.head_offset = record.head_offset;
  absorb.weights_slot = record.weights_slot;
  kernels::ProjectionRecord project = absorb;
  project.in = *o;
  project.out = record.o;
  project.in_row_stride = heads * g.kv_lora_rank;
  project.in_head_stride = g.kv_lora_rank;
  project.out_row_stride = record.o_row_stride;
  project.out_head_stride = record.o_head_stride;
  launch->absorbs.push_back(absorb);
  launch->projects.push_back(project);

  record.q = *q;
  record.q_row_stride = absorb.out_row_stride;
  record.q_head_stride = absorb.out_head_stride;
  record.o = *o;
  record.o_row_stride = project.in_row_stride;
  record.o_head_stride = project.in_head_stride;
  launch->absorbed.push_back(record);
  return absl::OkStatus();
}

absl::Status Launcher::AddCompute(Launch* launch, const Segment& segment, const Staged& staged) {
  const StreamRequest& request = *segment.request;
  const AttendArgs& args = request.attend;
  const Model& model = *request.engine.step->model;
  const int64_t skip = segment.row_begin - args.row_begin - request.engine.rows_done;
  kernels::RequestRecord record{};
  record.q_head_stride = model.spec->q_dim(args.profile);
  record.q_row_stride = record.q_head_stride * args.num_heads;
  record.o_head_stride = model.spec->o_dim(args.profile);
  record.o_row_stride = record.o_head_stride * args.num_heads;
  record.lse_head_stride = 1;
  record.lse_row_stride = args.num_heads;
  record.q = staged.q + skip * record.q_row_stride * int64_t(ElementSize(args.q_dtype));
  record.o = staged.o + skip * record.o_row_stride * int64_t(ElementSize(args.o_dtype));
  if (staged.lse != nullptr) record.lse = staged.lse + skip * record.lse_row_stride;
  record.page_table = cache_->page_table(segment.entry->sequence->slot);
  record.layer_offset = model.layout.layer_offset(args.layer);
  record.row_stride = model.layout.row_bytes;
  record.page_size = model.layout.page_size;
  record.q_rows = segment.rows;
  record.kv_rows = segment.cached() + segment.rows;
  record.num_heads = args.num_heads;
  record.head_offset = args.head_offset;
  record.softmax_scale = static_cast<float>(model.spec->softmax_scale);
  record.causal = 1;
  if (args.profile == Profile::kAbsorbed) {
    record.weights_slot = -1;
    launch->absorbed.push_back(record);
  } else {
    record.weights_slot = models_->weights_slot(model, args.layer);
    if (segment.rows < model.expanded_min_rows) {
      if (absl::Status s = AddAbsorbedOfExpanded(launch, segment, record); !s.ok()) return s;
    } else {
      launch->expanded.push_back(record);
      launch->plan_expanded.push_back({record.q_rows, record.kv_rows, record.num_heads, true});
      return absl::OkStatus();
    }
  }
  launch->plan_absorbed.push_back({record.q_rows, record.kv_rows, record.num_heads, true});
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
  staged_.clear();
  for (const StreamRequest* request : launch->batch.requests) {
    absl::StatusOr<Staged> staged = Stage(*launch, *request);
    if (!staged.ok()) return staged.status();
    staged_.push_back(*staged);
  }
  for (const Segment& segment : launch->batch.segments) {
    const StreamRequest& request = *segment.request;
    const Staged& staged = staged_[request.engine.batch_index];
    if (staged.kv != nullptr) AddAppend(launch, segment, staged);
    if (request.attend.profile == Profile::kAppendOnly) continue;
    if (absl::Status s = AddCompute(launch, segment, staged); !s.ok()) return s;
  }
  return absl::OkStatus();
}

kernels::AttentionDesc Launcher::Desc(const Launch& launch, AttentionForm form) const {
  const BatchKey& key = launch.batch.key;
  kernels::AttentionDesc desc;
  desc.geometry = key.geometry;
  desc.form = form;
  const bool between = key.profile == Profile::kExpanded && form == AttentionForm::kAbsorbed;
  const DType intermediate = backend_->Info().intermediate_dtype;
  desc.q_dtype = between ? intermediate : key.q_dtype;
  desc.o_dtype = between ? intermediate : key.o_dtype;
  return desc;
}

absl::Status Launcher::Plan(Launch* launch) {
  const MonotonicNanos begin = clock_->Now();
  const uint64_t misses = plans_->stats().misses;
  LaunchReport& report = launch->report;
  report = LaunchReport();
  const struct {
    AttentionForm form;
    std::vector<kernels::RequestRecord>& records;
    std::vector<PlanRequest>& lengths;
    kernels::AttentionParams& params;
  } forms[] = {
      {AttentionForm::kAbsorbed, launch->absorbed, launch->plan_absorbed, launch->absorbed_params},
      {AttentionForm::kExpanded, launch->expanded, launch->plan_expanded, launch->expanded_params},
  };
  for (const auto& form : forms) {
    if (form.records.empty()) continue;
    form.params.desc = Desc(*launch, form.form);
    form.params.requests = form.records;
    form.params.page_tables = backend_->PageTables().data();
    absl::StatusOr<const ExecutionPlan*> plan =
        plans_->Get(form.lengths, backend_->Traits(form.params.desc), launch->slot);
    if (!plan.ok()) return plan.status();
    form.params.plan = (*plan)->view();
    report.work_items += static_cast<int32_t>(form.params.plan.work_info.size());
    report.partials += static_cast<int32_t>(form.params.plan.reduce_partial_map.size());
    report.imbalance = std::max(report.imbalance, (*plan)->imbalance());
  }
  report.plan_reused = plans_->stats().misses == misses;
  report.plan_ns = clock_->Now() - begin;
  return absl::OkStatus();
}

absl::Status Launcher::Enqueue(Launch* launch) {
  const int32_t slot = launch->slot;
  const BatchKey& key = launch->batch.key;
  const DType intermediate = backend_->Info().intermediate_dtype;
  kernels::AttentionBackend& b = *backend_;
  absl::Status status;
  const auto then = [&status](absl::Status next) {
    if (status.ok()) status = std::move(next);
  };
  for (const kvcache::KvWork& work : launch->work.parts()) {
    if (!work.copies.empty()) then(b.CopyKv(slot, work.copies));
    if (!work.scrubs.empty()) then(b.ScrubKv(slot, work.scrubs));
    if (!work.tables.empty()) then(b.PublishPageTable(slot, work.tables));
  }
  if (!launch->appends.empty()) then(b.AppendKv(slot, launch->appends));
  if (!launch->absorbs.empty()) {
    then(b.Absorb(slot, key.geometry, key.q_dtype, intermediate, launch->absorbs));
  }
  if (!launch->absorbed.empty()) {
    then(b.Run(slot, launch->absorbed_params));
    then(b.Combine(slot, launch->absorbed_params));
  }
  if (!launch->projects.empty()) {
    then(b.Project(slot, key.geometry, intermediate, key.o_dtype, launch->projects));
  }
  if (!launch->expanded.empty()) {
    then(b.Run(slot, launch->expanded_params));
    then(b.Combine(slot, launch->expanded_params));
  }
  return status;
}

void Launcher::Report(Launch* launch) {
  const Batch& batch = launch->batch;
  LaunchReport& report = launch->report;
  report.requests = static_cast<int32_t>(batch.requests.size());
  report.records = static_cast<int32_t>(batch.segments.size());
  report.rows_decode = batch.rows_by_stage[0];
  report.rows_extend = batch.rows_by_stage[1];
  report.rows_prefill = batch.rows_by_stage[2];
  layers_.clear();
  streams_.clear();
  for (const StreamRequest* request : batch.requests) {
    layers_.push_back(request->attend.layer);
    streams_.push_back(request->stream);
  }
  report.layers = CountDistinct(layers_);
  report.clients = CountDistinct(streams_);
}

}  // namespace mla::scheduler
