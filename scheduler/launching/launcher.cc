#include "scheduler/launching/launcher.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "base/status_macros.h"
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
    MLA_RETURN_IF_ERROR(
        launcher->launches_[slot].Create(limits, *backend, static_cast<int32_t>(slot)));
  }
  PlanCacheOptions options;
  options.capacity = PlanCapacityOf(limits, *backend);
  options.launch_slots = LaunchSlots(*backend);
  options.rounds = RoundCapacityOf(limits, *backend);
  if (options.rounds.units > 0) options.round_plans = kRoundPlansPerSlot * options.launch_slots;
  options.plans = kPlansPerSlot * options.launch_slots + options.round_plans;
  options.plan_segments = limits.launch_requests;
  options.clock = clock;
  MLA_ASSIGN_OR_RETURN(launcher->plans_, PlanCache::Create(options, *backend));
  return launcher;
}

BatchLaunch* Launcher::FreeSlot() {
  const int32_t slots = static_cast<int32_t>(launches_.size());
  if (inflight_ == slots) return nullptr;
  return &launches_[(oldest_ + inflight_) % slots];
}

absl::Status Launcher::Submit(BatchLaunch* launch, MonotonicNanos chosen_from) {
  const bool updates = records_.MayUpdate(*launch);
  launch->Clear();
  // This comes before Stage, because Stage adds projection records of slices.
  if (!updates) launch->ClearRecords();
  launch->report = LaunchReport();
  absl::Status status = stager_.Stage(launch);
  if (status.ok())
    status = updates ? records_.Update(stager_, launch) : records_.Build(stager_, launch);
  if (status.ok()) status = Plan(launch);
  if (!status.ok() && absl::IsResourceExhausted(status) && !launch->expanded.records.empty()) {
    status = PlanAbsorbedAlone(launch);
  }
  launch->report.schedule_ns = clock_->Now() - chosen_from - launch->report.plan_ns;
  if (status.ok()) {
    Assemble(launch);
    status = backend_->Submit(launch->slot, launch->launch);
  }
  Report(launch);
  if (!status.ok()) {
    for (StreamRequest* request : launch->batch.requests) request->signalled = false;
    plans_->Unpin(launch->slot);
    return status;
  }
  ++inflight_;
  return status;
}

bool Launcher::AwaitsClient(StreamId client) const {
  for (int32_t i = 0; i < inflight_; ++i) {
    const BatchLaunch& launch = launches_[static_cast<size_t>(oldest_ + i) % launches_.size()];
    if (!launch.batch.gated) continue;
    for (const StreamRequest* request : launch.batch.requests) {
      if (request->stream == client && request->engine.ahead && !request->attend.ready.Reached()) {
        return true;
      }
    }
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
  const bool between = IsExpanded(key.profile) && form == AttentionForm::kAbsorbed;
  desc.q_dtype = between ? info.absorbed_q_dtype(key.q_dtype, key.split_queries) : key.q_dtype;
  desc.o_dtype = between ? info.latent_o_dtype : key.o_dtype;
  return desc;
}

absl::Status Launcher::PlanRecords(FormRecords& form, BatchLaunch* launch,
                                   kernels::AttentionParams* params) {
  params->segments = form.records;
  const std::span<const PlanSegment> lengths = form.lengths;
  const int32_t least_keys = backend_->Info().fp8_prefill_keys;
  if (params->desc.form == AttentionForm::kExpanded && least_keys > 0 &&
      MeanSeenKeys(params->segments) >= least_keys) {
    kernels::AttentionDesc desc = params->desc;
    desc.products = launch->batch.key.products;
    if (backend_->CanRun(desc).ok()) params->desc = desc;
  }
  // Traits for the heads that the segments have: few heads of a large model need not be cut like
  // all of them.
  kernels::AttentionDesc widest = params->desc;
  widest.geometry.num_heads = WidestHeads(lengths);
  absl::StatusOr<const ExecutionPlan*> plan =
      plans_->Pin(lengths, backend_->Traits(widest), launch->slot);
  if (params->desc.streamed && absl::IsResourceExhausted(plan.status())) {
    // The streamed form has parts with more rows than the plan has room for, so it is not used.
    params->desc.streamed = widest.streamed = false;
    plan = plans_->Pin(lengths, backend_->Traits(widest), launch->slot);
  }
  if (!plan.ok()) return plan.status();
  params->plan = (*plan)->view();
  LaunchReport& report = launch->report;
  report.work_items += static_cast<int32_t>(params->plan.work_info.size());
  report.partials += static_cast<int32_t>(params->plan.reduce_partial_map.size());
  report.imbalance = std::max(report.imbalance, (*plan)->imbalance());
  return absl::OkStatus();
}

absl::Status Launcher::Plan(BatchLaunch* launch) {
  const PlanCacheStats before = plans_->stats();
  const struct {
    AttentionForm form;
    FormRecords& records;
    kernels::AttentionParams& params;
  } forms[] = {
      {AttentionForm::kAbsorbed, launch->absorbed, launch->launch.absorbed},
      {AttentionForm::kExpanded, launch->expanded, launch->launch.expanded},
  };
  for (const auto& form : forms) {
    form.params = {};
    const size_t records = form.records.records.size();
    if (records == 0) continue;
    kernels::AttentionParams params;
    params.desc = Desc(launch->batch.key, form.form);
    params.q_fragments = form.records.fragments.Of(records);
    params.windows = form.records.windows;
    params.desc.streamed =
        form.form == AttentionForm::kAbsorbed && IsStreamed(*launch, backend_->Info().stream_bytes);
    form.params = params;
    MLA_RETURN_IF_ERROR(PlanRecords(form.records, launch, &form.params));
  }
  launch->report.plan_reused = plans_->stats().misses == before.misses;
  launch->report.plan_ns += plans_->stats().build_ns - before.build_ns;
  return absl::OkStatus();
}

// Builds the records again without the expanded form. The launch keeps the page-table changes that
// the first build took.
absl::Status Launcher::PlanAbsorbedAlone(BatchLaunch* launch) {
  plans_->Unpin(launch->slot);
  launch->layout.Clear();
  launch->ClearRecords();
  LaunchReport& report = launch->report;
  report.rounds_refused = 1;
  report.work_items = report.partials = 0;
  report.imbalance = 1.0;
  absl::Status status = stager_.Stage(launch);
  if (status.ok()) status = records_.Build(stager_, launch, /*absorbed_alone=*/true);
  launch->origin.Forget();  // it does not record the form, so Update could not tell
  return status.ok() ? Plan(launch) : status;
}

void Launcher::Assemble(BatchLaunch* launch) const {
  const BatchKey& key = launch->batch.key;
  const kernels::BackendInfo& info = backend_->Info();
  kernels::Launch& backend_launch = launch->launch;
  backend_launch.inputs = launch->layout.inputs();
  backend_launch.outputs = launch->layout.outputs();
  launch->signals.clear();
  launch->gates.clear();
  for (StreamRequest* request : launch->batch.requests) {
    const AttendArgs& args = request->attend;
    if (request->engine.ahead) launch->gates.push_back(args.ready);
    const bool ends = request->engine.rows_done + request->engine.rows_launched == args.row_count;
    request->signalled = args.done.word != nullptr && ends && !IsReadAfterLaunch(*request);
    if (request->signalled) launch->signals.push_back(args.done);
  }
  backend_launch.gate = {};
  if (const std::span<const kernels::WordValue> words = launch->gates; !words.empty()) {
    backend_launch.gate = {words.front(), ahead_ns_, words.subspan(1)};
  }
  backend_launch.signals = launch->signals;
  backend_launch.page_writes = launch->batch.page_writes;
  backend_launch.page_reads = launch->batch.page_reads;
  backend_launch.pages = launch->batch.pages.ranges();
  backend_launch.page_tables = page_tables_;
  backend_launch.table_changes = launch->tables;
  backend_launch.appends = launch->appends;
  backend_launch.selects = launch->selects;
  backend_launch.absorb = {
      key.geometry, key.q_dtype, info.absorbed_q_dtype(key.q_dtype, key.split_queries),
      launch->absorbs.records, launch->absorbs.fragments.Of(launch->absorbs.records.size())};
  backend_launch.project = {
      key.geometry, info.latent_o_dtype, key.o_dtype, launch->projects.records, {}};
  if (key.profile != Profile::kProjected) {
    backend_launch.queries.records = backend_launch.hiddens.records = {};
    return;
  }
  // Between these and the attention, tensors have the dtypes of the client's.
  backend_launch.queries = {key.geometry, key.rope, key.q_dtype, key.q_dtype, launch->queries};
  backend_launch.hiddens = {key.geometry, key.rope, key.o_dtype, key.o_dtype, launch->hiddens};
}

void Launcher::Report(BatchLaunch* launch) {
  const Batch& batch = launch->batch;
  LaunchReport& report = launch->report;
  report.requests = static_cast<int32_t>(batch.requests.size());
  report.records = static_cast<int32_t>(batch.segments.size());
  for (const FusedSlices& slices : batch.slices) report.slices_fused += slices.count;
  for (const FormRecords* form : {&launch->absorbed, &launch->expanded}) {
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
