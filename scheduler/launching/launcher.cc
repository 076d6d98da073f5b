#include "scheduler/launching/launcher.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "scheduler/launching/launch_sizes.h"

namespace mla::scheduler {
namespace {

using kernels::AttentionForm;

int32_t WidestHeads(std::span<const PlanSegment> requests) {
  int32_t heads = 1;
  for (const PlanSegment& request : requests) heads = std::max(heads, request.num_heads);
  return heads;
}

template <typename T>
int32_t CountDistinct(std::vector<T>& values) {
  std::sort(values.begin(), values.end());
  return static_cast<int32_t>(std::unique(values.begin(), values.end()) - values.begin());
}

// Returns true if queries and outputs of the batch are copied request by request, in order.
bool CopiesInOrder(const Batch& batch) {
  return batch.key.profile == Profile::kAbsorbed && batch.slices.empty() && batch.runs.empty() &&
         std::none_of(batch.requests.begin(), batch.requests.end(), [](const StreamRequest* r) {
           return r->attend.on_device || Selects(r->attend);
         });
}

// Returns true if queries of the absorbed form arrive during the launch (AttentionDesc::streamed).
bool IsStreamed(const BatchLaunch& launch, int64_t least_bytes) {
  if (least_bytes == 0 || launch.batch.key.q_dtype != kernels::DType::kBf16 ||
      !CopiesInOrder(launch.batch)) {
    return false;
  }
  int64_t bytes = 0;
  for (const kernels::SegmentRecord& r : launch.absorbed.records) {
    bytes += r.q_rows * r.q_row_stride * static_cast<int64_t>(sizeof(kernels::Bf16));
  }
  return bytes >= least_bytes;
}

// Returns true if CheckResults always reads the request's tensors after the launch. The client may
// not change them before that.
bool IsReadAfterLaunch(const StreamRequest& request) {
  return !Computes(request) || IsSparse(request.attend) ||
         request.engine.step->model->spec->windowed();
}

}  // namespace

Launcher::Launcher(const Limits& limits, kernels::AttentionBackend* backend,
                   kvcache::KvCache* cache, std::span<const uint32_t> page_tables,
                   const ModelTable* models, const Clock* clock)
    : backend_(backend),
      page_tables_(page_tables),
      clock_(clock),
      ahead_ns_(limits.ahead_us * 1000),
      stager_(limits, backend->Info(), models),
      records_(backend->Info(), cache, models),
      launches_(static_cast<size_t>(LaunchSlots(*backend))) {
  layers_.reserve(static_cast<size_t>(limits.launch_requests));
  streams_.reserve(static_cast<size_t>(limits.launch_requests));
}

absl::StatusOr<std::unique_ptr<Launcher>> Launcher::Create(
    const Limits& limits, kernels::AttentionBackend* backend, kvcache::KvCache* cache,
    std::span<const uint32_t> page_tables, const ModelTable* models, const Clock* clock) {
  std::unique_ptr<Launcher> launcher(
      new Launcher(limits, backend, cache, page_tables, models, clock));
  for (size_t slot = 0; slot < launcher->launches_.size(); ++slot) {
    absl::Status made =
        launcher->launches_[slot].Create(limits, *backend, static_cast<int32_t>(slot));
    if (!made.ok()) return made;
  }
  PlanCacheOptions options;
  options.capacity = PlanCapacityOf(limits, *backend);
  options.launch_slots = LaunchSlots(*backend);
  options.rounds = RoundCapacityOf(limits, *backend);
  if (options.rounds.units > 0) options.round_plans = kRoundPlansPerSlot * options.launch_slots;
  options.plans = kPlansPerSlot * options.launch_slots + options.round_plans;
  options.plan_segments = limits.launch_requests;
  absl::StatusOr<std::unique_ptr<PlanCache>> plans = PlanCache::Create(options, *backend);
  if (!plans.ok()) return plans.status();
  launcher->plans_ = *std::move(plans);
  return launcher;
}

BatchLaunch* Launcher::FreeSlot() {
  const int32_t slots = static_cast<int32_t>(launches_.size());
  if (inflight_ == slots) return nullptr;
  return &launches_[(oldest_ + inflight_) % slots];
}

absl::Status Launcher::Submit(BatchLaunch* to, MonotonicNanos chosen_from) {
  const bool again = records_.MayUpdate(*to);
  to->Clear();
  if (!again) to->ClearRecords();  // before Stage, which adds the projections of slices
  to->report = LaunchReport();
  absl::Status status = stager_.Stage(to);
  if (status.ok()) status = again ? records_.Update(stager_, to) : records_.Build(stager_, to);
  const MonotonicNanos begin = clock_->Now();
  to->report.schedule_ns = begin - chosen_from;
  if (status.ok()) status = Plan(to);
  if (absl::IsResourceExhausted(status) && !to->expanded.records.empty()) {
    status = PlanAbsorbedAlone(to);
  }
  to->report.plan_ns = clock_->Now() - begin;
  if (status.ok()) {
    Assemble(to);
    status = backend_->Submit(to->slot, to->launch);
  }
  Report(to);
  if (!status.ok()) {
    for (StreamRequest* request : to->batch.requests) request->signalled = false;
    plans_->Unpin(to->slot);
    return status;
  }
  ++inflight_;
  return status;
}

bool Launcher::AwaitsClient() const {
  for (int32_t i = 0; i < inflight_; ++i) {
    const size_t at = static_cast<size_t>(oldest_ + i) % launches_.size();
    const kernels::WordValue& ready = launches_[at].launch.gate.ready;
    if (ready.word != nullptr && !ready.Reached()) return true;
  }
  return false;
}

bool Launcher::OldestDone() { return inflight_ > 0 && backend_->Done(launches_[oldest_].slot); }

absl::Status Launcher::WaitOldest() {
  BatchLaunch& launch = launches_[oldest_];
  const absl::StatusOr<int64_t> kernel_ns = backend_->Wait(launch.slot);
  plans_->Unpin(launch.slot);
  oldest_ = (oldest_ + 1) % static_cast<int32_t>(launches_.size());
  --inflight_;
  launch.report.ok = kernel_ns.ok();
  if (kernel_ns.ok()) launch.report.kernel_ns = *kernel_ns;
  launch.late = kernel_ns.ok() && backend_->WasLate(launch.slot);
  const bool signalled = kernel_ns.ok() && !launch.late && backend_->Signalled(launch.slot);
  for (StreamRequest* request : launch.batch.requests) request->signalled &= signalled;
  launch.waited_ns = kernel_ns.ok() ? backend_->GateNanos(launch.slot) : 0;
  return kernel_ns.status();
}

int64_t MeanSeenKeys(std::span<const kernels::SegmentRecord> records) {
  int64_t rows = 0, keys = 0;
  for (const kernels::SegmentRecord& r : records) {
    const int64_t weight = int64_t{r.q_rows} * r.num_heads;
    rows += weight;
    keys += weight * (r.causal != 0 ? r.kv_rows - r.q_rows / 2 : r.kv_rows);
  }
  return rows > 0 ? keys / rows : 0;
}

kernels::AttentionDesc Launcher::Desc(const BatchKey& key, AttentionForm form) const {
  kernels::AttentionDesc desc;
  desc.geometry = key.geometry;
  desc.form = form;
  desc.kv_format = key.kv_format;
  desc.attention = key.attention;
  desc.entry_format = key.entry_format;
  const kernels::BackendInfo& info = backend_->Info();
  if (form == AttentionForm::kAbsorbed) desc.products = key.products;
  const bool between = key.profile == Profile::kExpanded && form == AttentionForm::kAbsorbed;
  desc.q_dtype = between ? info.absorbed_q_dtype(key.q_dtype, key.split_queries) : key.q_dtype;
  desc.o_dtype = between ? info.latent_o_dtype : key.o_dtype;
  return desc;
}

absl::Status Launcher::PlanRecords(FormRecords& form, BatchLaunch* to,
                                   kernels::AttentionParams* params) {
  params->segments = form.records;
  const std::span<const PlanSegment> lengths = form.lengths;
  const int32_t least_keys = backend_->Info().fp8_prefill_keys;
  if (params->desc.form == AttentionForm::kExpanded && least_keys > 0 &&
      MeanSeenKeys(params->segments) >= least_keys) {
    kernels::AttentionDesc desc = params->desc;
    desc.products = to->batch.key.products;
    if (backend_->CanRun(desc).ok()) params->desc = desc;
  }
  // Cut for the heads that are there: few heads of a large model need not share units as all do.
  kernels::AttentionDesc widest = params->desc;
  widest.geometry.num_heads = WidestHeads(lengths);
  absl::StatusOr<const ExecutionPlan*> plan =
      plans_->Get(lengths, backend_->Traits(widest), to->slot);
  if (params->desc.streamed && absl::IsResourceExhausted(plan.status())) {
    // Its parts have more rows than there is room for.
    params->desc.streamed = widest.streamed = false;
    plan = plans_->Get(lengths, backend_->Traits(widest), to->slot);
  }
  if (!plan.ok()) return plan.status();
  params->plan = (*plan)->view();
  LaunchReport& report = to->report;
  report.work_items += static_cast<int32_t>(params->plan.work_info.size());
  report.partials += static_cast<int32_t>(params->plan.reduce_partial_map.size());
  report.imbalance = std::max(report.imbalance, (*plan)->imbalance());
  return absl::OkStatus();
}

absl::Status Launcher::Plan(BatchLaunch* to) {
  const uint64_t misses = plans_->stats().misses;
  const struct {
    AttentionForm form;
    FormRecords& records;
    kernels::AttentionParams& params;
  } forms[] = {
      {AttentionForm::kAbsorbed, to->absorbed, to->launch.absorbed},
      {AttentionForm::kExpanded, to->expanded, to->launch.expanded},
  };
  for (const auto& form : forms) {
    form.params = {};
    const size_t records = form.records.records.size();
    if (records == 0) continue;
    kernels::AttentionParams params;
    params.desc = Desc(to->batch.key, form.form);
    params.q_fragments = form.records.fragments.Of(records);
    params.windows = form.records.windows;
    params.desc.streamed =
        form.form == AttentionForm::kAbsorbed && IsStreamed(*to, backend_->Info().stream_bytes);
    form.params = params;
    absl::Status s = PlanRecords(form.records, to, &form.params);
    if (!s.ok()) return s;
  }
  to->report.plan_reused = plans_->stats().misses == misses;
  return absl::OkStatus();
}

// The changes of page tables that the first records have taken stay in the launch.
absl::Status Launcher::PlanAbsorbedAlone(BatchLaunch* to) {
  plans_->Unpin(to->slot);
  to->layout.Clear();
  to->ClearRecords();
  LaunchReport& report = to->report;
  report.rounds_refused = 1;
  report.work_items = report.partials = 0;
  report.imbalance = 1.0;
  absl::Status status = stager_.Stage(to);
  if (status.ok()) status = records_.Build(stager_, to, /*absorbed_alone=*/true);
  to->origin.Forget();  // which says nothing of the form
  return status.ok() ? Plan(to) : status;
}

void Launcher::Assemble(BatchLaunch* to) const {
  const BatchKey& key = to->batch.key;
  const kernels::BackendInfo& info = backend_->Info();
  kernels::Launch& launch = to->launch;
  launch.inputs = to->layout.inputs();
  launch.outputs = to->layout.outputs();
  launch.gate = {};
  to->signals.clear();
  for (StreamRequest* request : to->batch.requests) {
    const AttendArgs& args = request->attend;
    // Alone in its batch then.
    if (request->engine.ahead) launch.gate = {args.ready, ahead_ns_};
    const bool ends = request->engine.rows_done + request->engine.rows_launched == args.row_count;
    request->signalled = args.done.word != nullptr && ends && !IsReadAfterLaunch(*request);
    if (request->signalled) to->signals.push_back(args.done);
  }
  launch.signals = to->signals;
  launch.page_writes = to->batch.page_writes;
  launch.page_reads = to->batch.page_reads;
  launch.pages = to->batch.pages.ranges();
  launch.page_tables = page_tables_;
  launch.table_changes = to->tables;
  launch.appends = to->appends;
  launch.selects = to->selects;
  launch.absorb = {key.geometry, key.q_dtype, info.absorbed_q_dtype(key.q_dtype, key.split_queries),
                   to->absorbs.records, to->absorbs.fragments.Of(to->absorbs.records.size())};
  launch.project = {key.geometry, info.latent_o_dtype, key.o_dtype, to->projects.records, {}};
}

void Launcher::Report(BatchLaunch* to) {
  const Batch& batch = to->batch;
  LaunchReport& report = to->report;
  report.requests = static_cast<int32_t>(batch.requests.size());
  report.records = static_cast<int32_t>(batch.segments.size());
  for (const FusedSlices& slices : batch.slices) report.slices_fused += slices.count;
  for (const FormRecords* form : {&to->absorbed, &to->expanded}) {
    for (size_t i = 0; i < form->records.size(); ++i) {
      const kernels::SegmentRecord& record = form->records[i];
      // Sparse attention reads KV rows separately for every query row.
      const int64_t times =
          batch.key.attention == kernels::AttentionKind::kDense ? 1 : record.q_rows;
      report.kv_bytes_read += times * form->lengths[i].kv_rows * record.row_stride;
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
