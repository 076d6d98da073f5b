#include "scheduler/launching/launcher.h"

#include <algorithm>
#include <limits>
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
// What aligning the workspaces of one request may waste.
constexpr int64_t kAlignmentBytes = 3 * 256;

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

// Of a launch, for tensors that are neither the request's nor the cache's. One row of all heads
// always fits, whatever its dtypes.
int64_t WorkspaceBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  const kernels::BackendInfo& info = backend.Info();
  const auto between = static_cast<int64_t>(ElementSize(info.widest_absorbed_q()) +
                                            ElementSize(info.latent_o_dtype));
  const auto widest = static_cast<int64_t>(2 * ElementSize(DType::kF32));
  return limits.max_row_dim *
         std::max(limits.launch_packed_rows * between, limits.max_heads * widest);
}

// Calls visit(traits) for either form and models of few and of many heads: a backend may cut
// differently by them.
template <typename Visit>
void ForEachTraits(const Limits& limits, const kernels::AttentionBackend& backend, Visit&& visit) {
  for (int32_t heads = 1;; heads = std::min(2 * heads, limits.max_heads)) {
    for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kExpanded}) {
      kernels::AttentionDesc desc;
      desc.geometry = MaxGeometry(limits);
      desc.geometry.num_heads = heads;
      desc.form = form;
      visit(backend.Traits(desc));
    }
    if (heads == limits.max_heads) break;
  }
}

int32_t WidestHeads(const std::vector<PlanRequest>& requests) {
  int32_t heads = 1;
  for (const PlanRequest& request : requests) heads = std::max(heads, request.num_heads);
  return heads;
}

template <typename T>
int32_t CountDistinct(std::vector<T>& values) {
  std::sort(values.begin(), values.end());
  return static_cast<int32_t>(std::unique(values.begin(), values.end()) - values.begin());
}

}  // namespace

PieceBudget Launcher::PieceBudgetOf(const Limits& limits,
                                    const kernels::AttentionBackend& backend) {
  PieceBudget budget;
  ForEachTraits(limits, backend, [&](const kernels::PlanTraits& traits) {
    if (traits.fixed_split_rows == 0) return;
    const int32_t rows = Planner::SplitRows(traits);
    budget.split_rows = budget.split_rows == 0 ? rows : std::min(budget.split_rows, rows);
  });
  if (budget.split_rows == 0) return budget;
  budget.piece_rows = std::max<int64_t>(limits.launch_packed_rows,
                                        limits.max_heads * budget.pieces(limits.max_sequence_rows));
  return budget;
}

PlanCapacity Launcher::PlanCapacityOf(const Limits& limits,
                                      const kernels::AttentionBackend& backend) {
  PlanCapacity most;
  const int64_t piece_rows = PieceBudgetOf(limits, backend).piece_rows;
  ForEachTraits(limits, backend, [&](const kernels::PlanTraits& traits) {
    PlanLimits plan = PlanLimitsOf(limits);
    // Tiles that are not cut, and at worst a tile for every piece row.
    if (traits.fixed_split_rows > 0) plan.kv_rows = 0;
    PlanCapacity one = Planner::Capacity(plan, traits);
    if (traits.fixed_split_rows > 0) {
      one.work_items += piece_rows;
      one.reduce_tiles = one.reduce_partials = one.partial_rows = piece_rows;
    }
    most.units = std::max(most.units, one.units);
    most.work_items = std::max(most.work_items, one.work_items);
    most.reduce_tiles = std::max(most.reduce_tiles, one.reduce_tiles);
    most.reduce_partials = std::max(most.reduce_partials, one.reduce_partials);
    most.partial_rows = std::max(most.partial_rows, one.partial_rows);
  });
  return most;
}

int64_t Launcher::PlanBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  const int64_t unwanted_lse = limits.launch_packed_rows * int64_t{sizeof(float)};
  const int64_t compared = limits.launch_rows * int64_t{sizeof(int32_t)};
  return (PlanCapacityOf(limits, backend).bytes() * kPlansPerSlot + unwanted_lse + compared) *
         LaunchSlots(backend);
}

int64_t Launcher::GatherBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  // Elsewhere slices are brought together by the copies into staging memory, which has the room.
  return backend.Info().unified_memory ? WorkspaceBytes(limits, backend)
                                       : std::numeric_limits<int64_t>::max();
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
  out.page_ranges = kPageRanges;
  out.table_ranges = limits.launch_requests;
  out.launch_packed_rows = packed;
  out.partial_rows = plan.partial_rows;
  out.max_o_dim = std::max(limits.max_row_dim, limits.max_v_dim);
  out.staging_in_bytes = (packed + limits.launch_rows) * limits.max_row_dim * wide;
  out.staging_out_bytes =
      packed * (out.max_o_dim + 1) * wide + limits.launch_rows * int64_t{sizeof(int32_t)};
  // Absorbed queries and latent outputs, or those of fused slices with their log-sum-exps; plus
  // alignment of each record.
  out.slot_workspace_bytes = WorkspaceBytes(limits, backend) + packed * int64_t{sizeof(float)} +
                             int64_t{limits.launch_requests} * kAlignmentBytes;
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
    launch.batch.slices.reserve(limits.launch_requests);
    launch.batch.runs.reserve(limits.launch_requests);
    launch.batch.run_segments.reserve(limits.launch_requests);
    launch.tables.reserve(limits.launch_requests);
    launch.appends.reserve(limits.launch_requests);
    launch.absorbed.reserve(limits.launch_requests);
    launch.expanded.reserve(limits.launch_requests);
    // One for each slice of fused requests, one for each record of the others.
    launch.absorbs.reserve(size_t{2} * limits.launch_requests);
    launch.projects.reserve(size_t{2} * limits.launch_requests);
    launch.plan_absorbed.reserve(limits.launch_requests);
    launch.plan_expanded.reserve(limits.launch_requests);
    launch.lse.reserve(limits.launch_requests);
    launch.differs.reserve(limits.launch_requests);
  }
  staged_.reserve(limits.launch_requests);
  fused_.reserve(limits.launch_requests);
  in_run_.reserve(limits.launch_requests);
  const auto parts = static_cast<size_t>(std::max(limits.max_heads, limits.launch_requests));
  in_parts_.reserve(parts);
  out_parts_.reserve(parts);
  lse_parts_.reserve(parts);
  layers_.reserve(limits.launch_requests);
  streams_.reserve(limits.launch_requests);
}

absl::StatusOr<std::unique_ptr<Launcher>> Launcher::Create(const Limits& limits,
                                                           kernels::AttentionBackend* backend,
                                                           kvcache::KvCache* cache,
                                                           ModelTable* models, const Clock* clock) {
  std::unique_ptr<Launcher> launcher(new Launcher(limits, backend, cache, models, clock));
  for (Launch& launch : launcher->launches_) {
    auto lse =
        backend->AllocateHost(static_cast<size_t>(limits.launch_packed_rows) * sizeof(float));
    if (!lse.ok()) return lse.status();
    launch.unwanted_lse = *std::move(lse);
    auto compared =
        backend->AllocateHost(static_cast<size_t>(limits.launch_rows) * sizeof(int32_t));
    if (!compared.ok()) return compared.status();
    launch.compared = *std::move(compared);
  }
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

kernels::AttentionDesc Launcher::Desc(const Launch& launch, AttentionForm form) const {
  const BatchKey& key = launch.batch.key;
  kernels::AttentionDesc desc;
  desc.geometry = key.geometry;
  desc.form = form;
  const bool between = key.profile == Profile::kExpanded && form == AttentionForm::kAbsorbed;
  const kernels::BackendInfo& info = backend_->Info();
  desc.q_dtype = between ? info.absorbed_q_dtype(key.q_dtype, key.split_queries) : key.q_dtype;
  desc.o_dtype = between ? info.latent_o_dtype : key.o_dtype;
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
    // Cut for the heads that are there: few heads of a large model need not share units as all do.
    kernels::AttentionDesc widest = form.params.desc;
    widest.geometry.num_heads = WidestHeads(form.lengths);
    absl::StatusOr<const ExecutionPlan*> plan =
        plans_->Get(form.lengths, backend_->Traits(widest), launch->slot);
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
  const kernels::BackendInfo& info = backend_->Info();
  kernels::AttentionBackend& b = *backend_;
  absl::Status status;
  const auto then = [&status](absl::Status next) {
    if (status.ok()) status = std::move(next);
  };
  if (!launch->batch.pages.empty()) then(b.WritePages(slot, launch->batch.pages.ranges()));
  if (!launch->tables.empty()) then(b.PublishPageTable(slot, launch->tables));
  if (!launch->appends.empty()) then(b.AppendKv(slot, launch->appends));
  if (!launch->absorbs.empty()) {
    then(b.Absorb(slot, key.geometry, key.q_dtype,
                  info.absorbed_q_dtype(key.q_dtype, key.split_queries), launch->absorbs));
  }
  if (!launch->absorbed.empty()) {
    then(b.Run(slot, launch->absorbed_params));
    then(b.Combine(slot, launch->absorbed_params));
  }
  if (!launch->projects.empty()) {
    then(b.Project(slot, key.geometry, info.latent_o_dtype, key.o_dtype, launch->projects));
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
  for (const FusedSlices& slices : batch.slices) report.slices_fused += slices.count;
  for (const auto* records : {&launch->absorbed, &launch->expanded}) {
    for (const kernels::RequestRecord& record : *records) {
      report.kv_bytes_read += record.kv_rows * record.row_stride;
    }
  }
  report.slice_waits_expired = batch.slice_waits_expired;
  report.slice_waits_skipped = batch.slice_waits_skipped;
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
