#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/usable_cpus.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/items/weights.h"
#include "kernels/host_memory/transfers.h"

namespace mla::kernels {
namespace {

using cpu::KernelSet;
using cpu::kTileRows;

constexpr int32_t kAppendRows = 256;       // rows an item of appends copies
constexpr int32_t kFixedSplitRows = 2048;  // KV rows a piece, with --deterministic
constexpr int64_t kCopyBytes = 1 << 20;    // bytes an item of page work fills
static_assert(kCopyBytes % kDigestPartBytes == 0);

std::string CpuModel() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(':');
    if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

// Returns the largest desc that limits allow, in the given form, with the widest queries and rows.
AttentionDesc LargestDesc(const BackendLimits& limits, AttentionForm form) {
  AttentionDesc desc;
  desc.geometry = limits.max_geometry;
  desc.form = form;
  desc.kv_format = KvFormat::kFp8Row;
  desc.q_dtype = DType::kF32;
  return desc;
}

int64_t BlocksOf(int64_t rows, int64_t block) { return (rows + block - 1) / block; }

int64_t AppendItems(std::span<const AppendRecord> records) {
  int64_t items = 0;
  for (const AppendRecord& record : records) items += BlocksOf(record.rows, kAppendRows);
  return items;
}

int64_t ProjectionItems(const ProjectionRecord& record) {
  return BlocksOf(record.rows, kTileRows) * record.num_heads;
}

// Returns the number of shares that the merge of a split tile is cut into.
int32_t MergeShares(int32_t threads) { return threads == 1 ? 1 : 16; }

int64_t PageItems(const PageRange& range) {
  return BlocksOf(range.bytes, kCopyBytes) * range.count;
}

}  // namespace

CpuBackend::CpuBackend(const KernelSet& kernels, const BackendOptions& options, int32_t threads)
    : kernels_(kernels), options_(options) {
  options_.threads = threads;
  info_.name = "cpu";
  info_.description = absl::StrCat("host CPU, ", kernels.name, ", ", threads, " threads",
                                   options.deterministic ? ", deterministic" : "");
  info_.device = CpuModel();
  info_.arch = kernels.name;
  info_.supported =
      "bf16, fp8_tensor, fp8_row or fp8_page rows, bf16 or fp32 queries and outputs, heads "
      "1..65535, any "
      "dims "
      "up to 8192, page >= 1";
  info_.kv_formats.assign(std::begin(kKvFormats), std::end(kKvFormats));
  info_.sparse = true;
  info_.selects = true;
  info_.windows = true;
  info_.projects = true;
  info_.units = threads;
  info_.unified_memory = true;
  info_.reads_fragments = true;
  info_.splits_queries = true;
  // Levels that compute in fp32 read fp32 queries as fast as bf16 ones.
  if (!kernels.bf16_operands) info_.absorbed_q_of_bf16 = DType::kF32;
}

CpuBackend::~CpuBackend() = default;

absl::StatusOr<std::unique_ptr<CpuBackend>> CpuBackend::Create(const BackendOptions& options) {
  MLA_ASSIGN_OR_RETURN(const auto* kernels, cpu::SelectLevel(options.cpu_isa, /*exact=*/true));
  return CreateWith(*kernels, options);
}

absl::StatusOr<std::unique_ptr<CpuBackend>> CpuBackend::CreateWith(const KernelSet& kernels,
                                                                   const BackendOptions& options) {
  if (options.threads < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("backend.threads: got ", options.threads, ", want >= 0"));
  }
  BackendOptions chosen = options;
  if (options.threads == 0) {
    chosen.threads = base::UsableCpuCount();
    // With a CPU quota below the CPU count, other servers share these CPUs and all would pin to the
    // same few.
    if (chosen.threads < base::AllowedCpuCount()) chosen.pin_threads = false;
  }
  return std::unique_ptr<CpuBackend>(new CpuBackend(kernels, chosen, chosen.threads));
}

absl::Status CpuBackend::CanRun(const AttentionDesc& desc) const {
  const bool dense = desc.attention == AttentionKind::kDense;
  if (dense || desc.form == AttentionForm::kAbsorbed) return HostBackend::CanRun(desc);
  return absl::UnimplementedError(
      absl::StrCat("wanted: ", ToString(desc), "; supported: ", info_.supported,
                   "; missing: index lists or a window in the expanded form"));
}

PlanTraits CpuBackend::Traits(const AttentionDesc& desc) const {
  PlanTraits traits;
  traits.units = options_.threads;
  const bool expanded = desc.form == AttentionForm::kExpanded;
  traits.tile_rows = expanded ? cpu::kExpandedTileRows : kTileRows;
  traits.max_heads_per_tile = expanded ? 1 : 0;
  traits.max_q_rows_per_tile = desc.attention == AttentionKind::kDense ? 0 : 1;
  traits.kv_granularity = expanded ? kTileRows : 32;
  traits.item_overhead_rows = expanded ? 16 : 32;
  traits.fixed_split_rows = options_.deterministic ? kFixedSplitRows : 0;
  return traits;
}

// Balances the FLOP saved per query row with the up-projection's FLOP per KV row; see
// kernels/cpu/README.md.
int32_t CpuBackend::ExpandedFormMinRows(const Geometry& g) const {
  const int64_t absorbed = 2 * g.kv_lora_rank + g.rope_dim;
  const int64_t expanded = g.nope_dim + g.rope_dim + g.v_dim;
  const int64_t up = static_cast<int64_t>(g.kv_lora_rank) * (g.nope_dim + g.v_dim);
  if (absorbed <= expanded) return limits().launch_rows + 1;
  return static_cast<int32_t>(std::min<int64_t>(up / (absorbed - expanded) + 1, int64_t{1} << 30));
}

int64_t CpuBackend::ScratchBytes(const BackendLimits& limits) const {
  const Geometry& g = limits.max_geometry;
  const int32_t widest = std::max(g.kv_lora_rank, std::max(g.nope_dim, g.v_dim));
  int64_t bytes = cpu::MakeProjectionLayout(kernels_, widest, widest).bytes;
  bytes = std::max(bytes, cpu::RowProjectionScratch(kernels_, g));
  for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kExpanded}) {
    bytes = std::max(bytes, cpu::MakeRunLayout(kernels_, LargestDesc(limits, form)).bytes);
  }
  AttentionDesc window = LargestDesc(limits, AttentionForm::kAbsorbed);
  window.attention = AttentionKind::kWindow;
  bytes = std::max(bytes, cpu::MakeRunLayout(kernels_, window).bytes);
  return std::max(bytes, cpu::MakeSelectLayout(kernels_, limits.max_top_k).bytes);
}

int64_t CpuBackend::PartialRowFloats(const BackendLimits& limits) const {
  return (limits.max_o_dim + cpu::kPanel - 1) / cpu::kPanel * cpu::kPanel;
}

int64_t CpuBackend::OwnWorkspaceSize(const BackendLimits& limits) const {
  const int64_t per_partial =
      PartialRowFloats(limits) * 4 + 4 + static_cast<int64_t>(sizeof(int32_t));
  int64_t bytes = limits.partial_rows * per_partial + limits.reduce_tiles * 4;
  bytes += ScratchBytes(limits) * options_.threads;
  bytes += cpu::LaunchSelects::Bytes(options_.threads, limits.max_top_k);
  bytes += limits.launch_slots * (kMaxPhases * static_cast<int64_t>(sizeof(Phase) + 8) +
                                  limits.page_ranges * static_cast<int64_t>(sizeof(int64_t)));
  return bytes + limits.weights_bytes * (kernels_.bf16_operands ? 1 : 2);
}

absl::Status CpuBackend::ConfigureOwn(const BackendLimits& limits) {
  scratch_bytes_ = ScratchBytes(limits);
  for (int32_t i = 0; i < options_.threads; ++i) {
    MLA_ASSIGN_OR_RETURN(auto scratch,
                         MappedMemory::Create("thread scratch", scratch_bytes_, true));
    scratch_.push_back(std::move(scratch));
  }
  MLA_RETURN_IF_ERROR(selects_.Configure(kernels_, options_.threads, limits.max_top_k));
  MLA_ASSIGN_OR_RETURN(
      auto o, MappedMemory::Create("partial outputs",
                                   limits.partial_rows * PartialRowFloats(limits) * 4, true));
  MLA_ASSIGN_OR_RETURN(
      auto lse, MappedMemory::Create("partial log-sum-exps", limits.partial_rows * 4, false));
  MLA_ASSIGN_OR_RETURN(auto tiles,
                       MappedMemory::Create("tiles of partials", limits.partial_rows * 4, false));
  partial_o_ = std::move(o);
  partial_lse_ = std::move(lse);
  tile_of_partial_ = std::move(tiles);
  unfinished_ = std::vector<std::atomic<int32_t>>(static_cast<size_t>(limits.reduce_tiles));
  for (int32_t slot = 0; slot < limits.launch_slots; ++slot) {
    jobs_.push_back(std::make_unique<Job>());
    Job* job = jobs_.back().get();
    job->phases.reserve(kMaxPhases);
    job->work.phase_items.reserve(kMaxPhases);
    job->first_item.reserve(static_cast<size_t>(limits.page_ranges));
    job->work.body = [this, job](int32_t phase, int64_t item, int32_t place) {
      Execute(*job, job->phases[static_cast<size_t>(phase)], item, place);
    };
  }
  page_runs_.Reserve(static_cast<size_t>(limits.page_ranges));
  cpu::WorkerPool::Options pool;
  pool.threads = options_.threads;
  pool.pin_threads = options_.pin_threads;
  pool.spin_us = options_.spin_us;
  pool_ = std::make_unique<cpu::WorkerPool>(pool, limits.launch_slots, kernels_.enter_thread,
                                            kernels_.leave_thread);
  return absl::OkStatus();
}

absl::Status CpuBackend::CheckAttention(const AttentionParams& params) const {
  MLA_RETURN_IF_ERROR(HostBackend::CheckAttention(params));
  const int64_t needed = cpu::MakeRunLayout(kernels_, params.desc).bytes;
  if (needed > scratch_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("thread scratch: ", ToString(params.desc), " needs ", needed, " bytes, limit ",
                     scratch_bytes_, " (limits.max_geometry is smaller)"));
  }
  return absl::OkStatus();
}

int64_t CpuBackend::PackedWeightBytes(const Geometry& geometry, int32_t heads) const {
  return cpu::MakeWeightLayout(kernels_, geometry).head_bytes * heads;
}

void CpuBackend::PackWeights(const Geometry& geometry, int32_t heads, const Bf16* w_uk,
                             const Bf16* w_uv, std::byte* packed) const {
  cpu::PackWeights(kernels_, geometry, heads, w_uk, w_uv, packed);
}

void CpuBackend::UnpackWeights(const Geometry& geometry, const std::byte* packed, Bf16* w_uk,
                               Bf16* w_uv) const {
  cpu::UnpackWeights(kernels_, geometry, packed, w_uk, w_uv);
}

int64_t CpuBackend::PackedProjectedBytes(const Geometry& geometry,
                                         const ProjectedShape& shape) const {
  return cpu::MakeProjectedLayout(kernels_, geometry, shape).bytes;
}

void CpuBackend::PackProjected(const Geometry& geometry, const ProjectedShape& shape,
                               ProjectedPart part, int32_t head, const void* weights,
                               std::byte* packed) const {
  cpu::PackProjected(kernels_, geometry, shape, part, head, static_cast<const Bf16*>(weights),
                     packed);
}

void CpuBackend::UnpackProjected(const Geometry& geometry, const ProjectedShape& shape,
                                 ProjectedPart part, int32_t head, const std::byte* packed,
                                 void* weights) const {
  cpu::UnpackProjected(kernels_, geometry, shape, part, head, packed, static_cast<Bf16*>(weights));
}

cpu::PackedWeights CpuBackend::WeightsOf(int32_t slot) const {
  if (slot < 0 || !Weights(slot).used) return {};
  return {Weights(slot).memory.data()};
}

void CpuBackend::AddPhase(Job& job, const Phase& phase, int64_t items) {
  job.phases.push_back(phase);
  job.work.phase_items.push_back(items);
}

void CpuBackend::AddPagePhases(Job& job) {
  std::span<const PageRange> remaining = job.launch->pages;
  while (!remaining.empty()) {
    Phase phase;
    int64_t items = 1;
    phase.pages = remaining;
    if (job.page_phases < kMaxPagePhases - 1) {
      phase.pages = remaining.first(page_runs_.Next(remaining));
      phase.first_item = job.first_item.data() + job.first_item.size();
      items = 0;
      for (const PageRange& range : phase.pages) {
        job.first_item.push_back(items);
        items += PageItems(range);
      }
    }
    remaining = remaining.subspan(phase.pages.size());
    AddPhase(job, phase, items);
    ++job.page_phases;
  }
}

void CpuBackend::WritePagesItem(const Job& job, const Phase& phase, int64_t item) const {
  if (phase.first_item == nullptr) {
    for (const PageRange& range : phase.pages) WritePageRange(job.pool, range);
    return;
  }
  const int64_t* const end = phase.first_item + phase.pages.size();
  const int64_t at = std::upper_bound(phase.first_item, end, item) - phase.first_item - 1;
  const PageRange& range = phase.pages[static_cast<size_t>(at)];
  const int64_t inside = item - phase.first_item[at];
  const int64_t blocks = BlocksOf(range.bytes, kCopyBytes);
  PageRange piece = range.place(static_cast<int32_t>(inside / blocks));
  const int64_t begin = inside % blocks * kCopyBytes;
  piece.target_offset += begin;
  if (!piece.zeroes()) piece.source_offset += begin;
  piece.bytes = std::min(kCopyBytes, piece.bytes - begin);
  WritePageRange(job.pool, piece);
}

void CpuBackend::AddTransfers(Job& job, Phase::Kind kind, std::span<const PageTransfer> transfers) {
  if (transfers.empty()) return;
  int64_t items = 0;
  for (const PageTransfer& transfer : transfers) items += BlocksOf(transfer.bytes, kCopyBytes);
  Phase phase;
  phase.kind = kind;
  AddPhase(job, phase, items);
}

void CpuBackend::TransferItem(const Job& job, const Phase& phase, int64_t item) {
  const bool writes = phase.kind == Phase::Kind::kWritePages;
  for (const PageTransfer& transfer : writes ? job.launch->page_writes : job.launch->page_reads) {
    const int64_t items = BlocksOf(transfer.bytes, kCopyBytes);
    if (item >= items) {
      item -= items;
      continue;
    }
    const int64_t begin = item * kCopyBytes;
    const PageTransfer piece =
        PieceOf(transfer, begin, std::min(kCopyBytes, transfer.bytes - begin));
    return writes ? WritePages(job.pool.base, piece) : ReadPages(job.pool.base, piece);
  }
}

void CpuBackend::AddAttention(Job& job, const AttentionParams& params) {
  if (params.segments.empty()) return;
  const PlanView& plan = params.plan;
  Phase phase;
  phase.run.kernels = &kernels_;
  phase.run.params = &params;
  phase.run.layout = cpu::MakeRunLayout(kernels_, params.desc);
  phase.run.pool = job.pool;
  phase.run.partials = {partial_o_.As<float>(), partial_lse_.As<float>(),
                        PartialRowFloats(limits())};
  int64_t items = plan.work_indptr.empty() ? 0 : plan.work_indptr.back();
  const auto tiles = static_cast<int64_t>(plan.reduce_final_map.size());
  phase.kind = Phase::Kind::kPrepareMerges;
  if (tiles > 0 && items > 0) AddPhase(job, phase, 1);
  phase.kind = Phase::Kind::kAttend;
  if (items > 0) items += tiles * MergeShares(options_.threads);
  AddPhase(job, phase, items);
}

void CpuBackend::Start(int32_t slot, const Launch& launch) {
  Job& job = *jobs_[static_cast<size_t>(slot)];
  job.launch = &launch;
  job.pool = Pool(launch.page_tables);
  job.phases.clear();
  job.first_item.clear();
  job.page_phases = 0;
  job.work.phase_items.clear();
  const auto project = [&job](const Projection& projection, Phase::Kind kind) {
    if (projection.records.empty()) return;
    int64_t items = 0;
    for (const ProjectionRecord& record : projection.records) items += ProjectionItems(record);
    Phase phase;
    phase.kind = kind;
    AddPhase(job, phase, items);
  };
  AddTransfers(job, Phase::Kind::kWritePages, launch.page_writes);
  AddPagePhases(job);
  if (!launch.appends.empty()) {
    Phase phase;
    phase.kind = Phase::Kind::kAppend;
    AddPhase(job, phase, AppendItems(launch.appends));
  }
  AddSelects(job);
  AddRowProjection(job, launch.queries, ProjectedPart::kQueries);
  project(launch.absorb, Phase::Kind::kAbsorb);
  AddAttention(job, launch.absorbed);
  project(launch.project, Phase::Kind::kProject);
  AddAttention(job, launch.expanded);
  AddRowProjection(job, launch.hiddens, ProjectedPart::kOutputs);
  AddTransfers(job, Phase::Kind::kReadPages, launch.page_reads);
  pool_->Start(job.work);
}

bool CpuBackend::Finished(int32_t slot) {
  return pool_->Done(jobs_[static_cast<size_t>(slot)]->work);
}

absl::StatusOr<int64_t> CpuBackend::Finish(int32_t slot) {
  return pool_->Wait(jobs_[static_cast<size_t>(slot)]->work);
}

void CpuBackend::AppendItem(const Job& job, int64_t item) {
  for (const AppendRecord& record : job.launch->appends) {
    const int64_t items = BlocksOf(record.rows, kAppendRows);
    if (item >= items) {
      item -= items;
      continue;
    }
    const auto first = static_cast<int32_t>(item) * kAppendRows;
    AppendRows(job.pool, record, first, std::min(record.rows, first + kAppendRows));
    return;
  }
}

void CpuBackend::AddSelects(Job& job) {
  const int64_t rows = cpu::LaunchSelects::Rows(job.launch->selects);
  if (rows == 0) return;
  Phase phase;
  phase.kind = Phase::Kind::kSelect;
  phase.shares = selects_.Shares(rows);
  AddPhase(job, phase, rows * phase.shares);
  phase.kind = Phase::Kind::kMergeSelected;
  if (phase.shares > 1) AddPhase(job, phase, rows);
}

void CpuBackend::Execute(const Job& job, const Phase& phase, int64_t item, int32_t place) {
  switch (phase.kind) {
    case Phase::Kind::kWritePages:
    case Phase::Kind::kReadPages:
      return TransferItem(job, phase, item);
    case Phase::Kind::kPages:
      return WritePagesItem(job, phase, item);
    case Phase::Kind::kAppend:
      return AppendItem(job, item);
    case Phase::Kind::kSelect:
      return selects_.Run(job.pool, job.launch->selects, phase.shares, item,
                          scratch_[static_cast<size_t>(place)].data());
    case Phase::Kind::kMergeSelected:
      return selects_.Merge(job.launch->selects, phase.shares, item);
    case Phase::Kind::kQueries:
      return ProjectRowsItem(job.launch->queries, ProjectedPart::kQueries, item, place);
    case Phase::Kind::kHiddens:
      return ProjectRowsItem(job.launch->hiddens, ProjectedPart::kOutputs, item, place);
    case Phase::Kind::kAbsorb:
      return ProjectItem(job.launch->absorb, true, item, place);
    case Phase::Kind::kProject:
      return ProjectItem(job.launch->project, false, item, place);
    case Phase::Kind::kPrepareMerges:
      return PrepareMerges(phase.run);
    case Phase::Kind::kAttend:
      return RunItem(phase.run, item, place);
  }
}

void CpuBackend::PrepareMerges(const cpu::RunContext& run) {
  const PlanView& plan = run.params->plan;
  for (size_t tile = 0; tile < plan.reduce_final_map.size(); ++tile) {
    const int32_t begin = plan.reduce_indptr[tile], end = plan.reduce_indptr[tile + 1];
    unfinished_[tile].store(end - begin, std::memory_order_relaxed);
    for (int32_t i = begin; i < end; ++i) {
      tile_of_partial_.As<int32_t>()[plan.reduce_partial_map[static_cast<size_t>(i)]] =
          static_cast<int32_t>(tile);
    }
  }
}

void CpuBackend::RunItem(const cpu::RunContext& run, int64_t item, int32_t place) {
  const int64_t pieces = run.params->plan.work_indptr.back();
  if (item >= pieces) return MergeItem(run, item - pieces);
  const WorkInfo& work = run.params->plan.work_info[static_cast<size_t>(item)];
  const SegmentRecord& segment = run.params->segments[static_cast<size_t>(work.segment)];
  cpu::AttendItem(run, work, WeightsOf(segment.weights_slot),
                  scratch_[static_cast<size_t>(place)].data());
  if (work.partial_row == kUnsplit) return;
  const int32_t tile = tile_of_partial_.As<int32_t>()[work.partial_row];
  unfinished_[static_cast<size_t>(tile)].fetch_sub(1, std::memory_order_release);
}

// Items are handed out in order. When a thread takes a merge, every piece is therefore done or in
// progress on another thread. The merge waits only for the pieces of its own tile.
void CpuBackend::MergeItem(const cpu::RunContext& run, int64_t item) {
  const int32_t shares = MergeShares(options_.threads);
  const auto tile = static_cast<int32_t>(item / shares);
  const std::atomic<int32_t>& unfinished = unfinished_[static_cast<size_t>(tile)];
  for (int32_t polls = 0; unfinished.load(std::memory_order_acquire) > 0; ++polls) {
    cpu::Relax(polls);
  }
  cpu::MergeTile(run, tile, static_cast<int32_t>(item % shares), shares);
}

void CpuBackend::ProjectItem(const Projection& projection, bool absorb, int64_t item,
                             int32_t place) {
  cpu::ProjectionContext context;
  context.kernels = &kernels_;
  context.geometry = projection.geometry;
  context.absorb = absorb;
  context.in = projection.in;
  context.out = projection.out;
  for (size_t i = 0; i < projection.records.size(); ++i) {
    const ProjectionRecord& record = projection.records[i];
    const int64_t items = ProjectionItems(record);
    if (item >= items) {
      item -= items;
      continue;
    }
    context.fragments = FragmentsOf(projection.fragments, static_cast<int64_t>(i));
    const auto head = static_cast<int32_t>(item % record.num_heads);
    const auto first = static_cast<int32_t>(item / record.num_heads) * kTileRows;
    cpu::ProjectBlock(context, record, WeightsOf(record.weights_slot), head, first,
                      std::min(record.rows, first + kTileRows),
                      scratch_[static_cast<size_t>(place)].data());
    return;
  }
}

CpuBackend::RowGroup CpuBackend::FirstGroup(std::span<const RowProjectionRecord> records,
                                            const Geometry& geometry, ProjectedPart part) const {
  RowGroup group;
  const int32_t slot = records.front().weights_slot;
  size_t count = 0;
  for (; count < records.size() && records[count].weights_slot == slot; ++count) {
    group.rows += records[count].rows;
  }
  group.records = records.first(count);
  group.blocks = BlocksOf(group.rows, kTileRows);
  group.columns = cpu::ColumnParts(part, geometry, Weights(slot).shape);
  return group;
}

void CpuBackend::AddRowProjection(Job& job, const RowProjection& projection,
                                  ProjectedPart part) const {
  int64_t items = 0;
  for (auto left = projection.records; !left.empty();) {
    const RowGroup group = FirstGroup(left, projection.geometry, part);
    items += group.items();
    left = left.subspan(group.records.size());
  }
  if (items == 0) return;
  Phase phase;
  phase.kind = part == ProjectedPart::kQueries ? Phase::Kind::kQueries : Phase::Kind::kHiddens;
  AddPhase(job, phase, items);
}

void CpuBackend::ProjectRowsItem(const RowProjection& projection, ProjectedPart part, int64_t item,
                                 int32_t place) {
  for (auto left = projection.records; !left.empty();) {
    const RowGroup group = FirstGroup(left, projection.geometry, part);
    left = left.subspan(group.records.size());
    if (item >= group.items()) {
      item -= group.items();
      continue;
    }
    const WeightSlot& weights = Weights(group.records.front().weights_slot);
    // Blocks of the same columns follow each other, because they read the same weights.
    const int64_t first = item % group.blocks * kTileRows;
    cpu::ProjectRows({&kernels_, &projection, part}, group.records,
                     {weights.shape, weights.projected.data()},
                     static_cast<int32_t>(item / group.blocks), first,
                     std::min<int64_t>(group.rows, first + kTileRows),
                     scratch_[static_cast<size_t>(place)].data());
    return;
  }
}

absl::Status RegisterCpu(BackendRegistry& registry) {
  return registry.Add(
      {"cpu", 10,
       [](const BackendOptions& options) -> absl::StatusOr<std::unique_ptr<AttentionBackend>> {
         return CpuBackend::Create(options);
       }});
}

}  // namespace mla::kernels
