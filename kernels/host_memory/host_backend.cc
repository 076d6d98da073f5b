#include "kernels/host_memory/host_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/projected_weights.h"
#include "kernels/types/page_ranges.h"

namespace mla::kernels {
namespace {

constexpr int32_t kMaxDim = 8192;
// The bytes of one row of the widest model, in the widest format.
constexpr int32_t kMaxHostRowBytes = MakeKvRowLayout(KvFormat::kBf16, kMaxDim, kMaxDim).row_bytes;

void CopyRows(const std::byte* from, int64_t from_pitch, std::byte* to, int64_t to_pitch,
              int64_t rows, int64_t row_bytes) {
  for (int64_t row = 0; row < rows; ++row, from += from_pitch, to += to_pitch) {
    std::memcpy(to, from, static_cast<size_t>(row_bytes));
  }
}

absl::Status Refuse(const AttentionDesc& desc, const char* missing) {
  return absl::UnimplementedError(absl::StrCat(
      "wanted: ", ToString(desc),
      "; supported: bf16, fp8_tensor, fp8_row or fp8_page rows, bf16 or fp32 queries and outputs, "
      "heads ",
      "1..65535, any dims up to 8192, page >= 1; missing: ", missing, "; device: host CPU"));
}

absl::Status NotHeld(int32_t slot, int32_t head) {
  return absl::FailedPreconditionError(
      absl::StrCat("weights slot ", slot, " does not hold such weights of head ", head));
}

}  // namespace

void AppendRows(const PoolView& pool, const AppendRecord& record, int32_t row_begin,
                int32_t row_end) {
  if (record.first_position < 0) return;
  const KvRowLayout layout =
      MakeKvRowLayout(record.format, record.row_dim - record.rope_dim, record.rope_dim);
  const int64_t stride = record.kv_row_stride * static_cast<int64_t>(ElementSize(record.dtype));
  const auto* source = static_cast<const std::byte*>(record.kv) + row_begin * stride;
  for (int32_t row = row_begin; row < row_end; ++row, source += stride) {
    const int32_t position = record.first_position + row;
    const int32_t in_page = position % record.page_size;
    std::byte* const page = pool.Row(record.page_table, record.layer_offset, record.row_stride,
                                     record.page_size, position - in_page);
    const KvRowPlace<std::byte> target =
        KvRowIn(layout, page, record.row_stride, record.page_size, in_page);
    if (record.differs == nullptr) {
      EncodeKvRow(layout, kHostFp8, source, record.dtype, record.kv_scale, target);
      continue;
    }
    std::byte sent[kMaxHostRowBytes];
    const KvRowPlace<std::byte> own = KvRowIn(layout, sent, layout.row_bytes, 1, 0);
    EncodeKvRow(layout, kHostFp8, source, record.dtype, record.kv_scale, own);
    const bool same = SameKvRow(layout, {own.row, own.scales}, {target.row, target.scales});
    record.differs[row] = same ? 0 : 1;
  }
}

void WritePageRange(const PoolView& pool, const PageRange& range) {
  for (int32_t i = 0; i < range.count; ++i) {
    const PageRange place = range.place(i);
    std::byte* const target = pool.base + place.target_offset;
    if (place.zeroes()) {
      std::memset(target, 0, static_cast<size_t>(place.bytes));
    } else {
      std::memcpy(target, pool.base + place.source_offset, static_cast<size_t>(place.bytes));
    }
  }
}

absl::Status HostBackend::CanRun(const AttentionDesc& desc) const {
  const Geometry& g = desc.geometry;
  if (desc.products != DType::kBf16) return Refuse(desc, "products of 8 bits");
  for (const DType dtype : {desc.q_dtype, desc.o_dtype}) {
    if (dtype == DType::kFp8E4m3) return Refuse(desc, "queries or outputs of 8 bits");
  }
  if (g.num_heads < 1 || g.num_heads > 65535) return Refuse(desc, "this head count");
  if (desc.page_size < 1) return Refuse(desc, "this page size");
  if (g.kv_lora_rank < 1 || g.kv_lora_rank > kMaxDim) return Refuse(desc, "this kv_lora_rank");
  if (g.rope_dim < 0 || g.rope_dim > kMaxDim) return Refuse(desc, "this rope_dim");
  if (g.nope_dim < 0 || g.nope_dim > kMaxDim) return Refuse(desc, "this nope_dim");
  if (g.v_dim < 0 || g.v_dim > kMaxDim) return Refuse(desc, "this v_dim");
  if (desc.form == AttentionForm::kExpanded && (g.nope_dim < 1 || g.v_dim < 1)) {
    return Refuse(desc, "the expanded form without nope_dim and v_dim");
  }
  const bool by_layer = desc.kv_format == KvFormat::kFp8Tensor;
  if (desc.attention == AttentionKind::kWindow &&
      by_layer != (desc.entry_format == KvFormat::kFp8Tensor)) {
    return Refuse(desc, "a scale a layer for rows or for entries alone");
  }
  return absl::OkStatus();
}

int64_t HostBackend::WorkspaceSize(const BackendLimits& limits) const {
  int64_t bytes = limits.kv_pool_bytes;
  bytes += limits.launch_slots * limits.slot_workspace_bytes;
  return bytes + OwnWorkspaceSize(limits);
}

absl::Status HostBackend::Configure(const BackendLimits& limits) {
  if (configured_) return absl::FailedPreconditionError("Configure was called before");
  if (limits.launch_slots < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("limits.launch_slots: got ", limits.launch_slots, ", want >= 1"));
  }
  MLA_ASSIGN_OR_RETURN(auto pool,
                       MappedMemory::Create("kv pool", limits.kv_pool_bytes, /*huge_pages=*/true));
  slots_.resize(static_cast<size_t>(limits.launch_slots));
  for (Slot& slot : slots_) {
    MLA_ASSIGN_OR_RETURN(slot.workspace,
                         MappedMemory::Create("slot workspace", limits.slot_workspace_bytes, true));
  }
  pool_ = std::move(pool);
  weights_.resize(static_cast<size_t>(limits.weights_slots));
  limits_ = limits;
  MLA_RETURN_IF_ERROR(ConfigureOwn(limits));
  configured_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<HostBuffer>> HostBackend::AllocateHost(size_t bytes) {
  MLA_ASSIGN_OR_RETURN(auto memory,
                       MappedMemory::Create("host buffer", static_cast<int64_t>(bytes), false));
  return std::make_unique<MappedHostBuffer>(std::move(memory));
}

absl::Status HostBackend::LoadWeights(int32_t slot, const Geometry& geometry, int32_t head_begin,
                                      int32_t head_end, const Bf16* w_uk, const Bf16* w_uv) {
  MLA_RETURN_IF_ERROR(CheckWeightsSlot(slot));
  if (head_begin < 0 || head_end <= head_begin) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights heads: got [", head_begin, ", ", head_end, ")"));
  }
  WeightSlot& target = weights_[slot];
  // The slot has no room for these heads, or holds another model's weights, so it starts empty.
  const int32_t capacity = std::max(geometry.num_heads, head_end);
  const bool fits = target.used && target.geometry == geometry &&
                    capacity <= static_cast<int32_t>(target.loaded.size());
  if (target.used && !fits) {
    MLA_RETURN_IF_ERROR(FreeWeights(slot));
  }
  const int32_t heads = head_end - head_begin;
  const int64_t head_bytes = static_cast<int64_t>(sizeof(Bf16)) * geometry.kv_lora_rank *
                             (geometry.nope_dim + geometry.v_dim);
  int64_t charged = 0;
  for (int32_t head = head_begin; head < head_end; ++head) {
    if (!target.used || !target.loaded[head]) charged += head_bytes;
  }
  MLA_RETURN_IF_ERROR(CheckBudget(charged));
  if (!target.used) {
    MLA_ASSIGN_OR_RETURN(
        target.memory,
        MappedMemory::Create("weights", PackedWeightBytes(geometry, capacity), true));
    target.used = true;
    target.geometry = geometry;
    target.loaded.assign(static_cast<size_t>(capacity), false);
  }
  PackWeights(geometry, heads, w_uk, w_uv,
              target.memory.data() + PackedWeightBytes(geometry, head_begin));
  std::fill(target.loaded.begin() + head_begin, target.loaded.begin() + head_end, true);
  target.charged_bytes += charged;
  weight_bytes_used_ += charged;
  return absl::OkStatus();
}

absl::Status HostBackend::CheckWeightsSlot(int32_t slot) const {
  if (slot >= 0 && slot < static_cast<int32_t>(weights_.size())) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("weights slot: got ", slot, ", limit ", weights_.size()));
}

absl::Status HostBackend::CheckBudget(int64_t charged) const {
  if (weight_bytes_used_ + charged <= limits_.weights_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("weights: ", weight_bytes_used_, " bytes used, ",
                                                   charged, " wanted, limit ",
                                                   limits_.weights_bytes));
}

absl::Status HostBackend::LoadProjected(int32_t slot, const Geometry& geometry,
                                        const ProjectedShape& shape, ProjectedPart part,
                                        int32_t head, const void* weights) {
  if (!Info().projects || (shape.codes() && !Info().projects_codes)) {
    return AttentionBackend::LoadProjected(slot, geometry, shape, part, head, weights);
  }
  MLA_RETURN_IF_ERROR(CheckWeightsSlot(slot));
  if (head < 0 || head >= geometry.num_heads || !shape.present()) {
    return absl::InvalidArgumentError(absl::StrCat("weights head: got ", head, " of ",
                                                   geometry.num_heads, ", q_lora_rank ",
                                                   shape.q_lora_rank));
  }
  WeightSlot& target = weights_[slot];
  const bool holds = target.shape.present();
  if (holds && (target.shape != shape || !(target.projected_geometry == geometry))) {
    return absl::FailedPreconditionError(
        absl::StrCat("weights slot ", slot, " holds weights of another shape"));
  }
  const auto index = static_cast<size_t>(part);
  const bool again = holds && target.projected_heads[index][static_cast<size_t>(head)];
  const int64_t charged = again ? 0 : WindowOf(geometry, shape, part, head, 1).Bytes(shape.weights);
  MLA_RETURN_IF_ERROR(CheckBudget(charged));
  if (!holds) {
    MLA_ASSIGN_OR_RETURN(
        target.projected,
        MappedMemory::Create("projected weights", PackedProjectedBytes(geometry, shape), true));
    target.shape = shape;
    target.projected_geometry = geometry;
    for (std::vector<bool>& heads : target.projected_heads) {
      heads.assign(static_cast<size_t>(geometry.num_heads), false);
    }
  }
  PackProjected(geometry, shape, part, head, weights, target.projected.data());
  target.projected_heads[index][static_cast<size_t>(head)] = true;
  target.charged_bytes += charged;
  weight_bytes_used_ += charged;
  return absl::OkStatus();
}

absl::Status HostBackend::ReadWeights(int32_t slot, const Geometry& geometry, int32_t head,
                                      Bf16* w_uk, Bf16* w_uv) {
  MLA_RETURN_IF_ERROR(CheckWeightsSlot(slot));
  if (!HoldsHeads(slot, head, 1) || !(weights_[slot].geometry == geometry)) {
    return NotHeld(slot, head);
  }
  UnpackWeights(geometry, weights_[slot].memory.data() + PackedWeightBytes(geometry, head), w_uk,
                w_uv);
  return absl::OkStatus();
}

absl::Status HostBackend::ReadProjected(int32_t slot, const Geometry& geometry,
                                        const ProjectedShape& shape, ProjectedPart part,
                                        int32_t head, void* weights) {
  MLA_RETURN_IF_ERROR(CheckWeightsSlot(slot));
  const WeightSlot& held = weights_[slot];
  const std::vector<bool>& loaded = held.projected_heads[static_cast<size_t>(part)];
  const bool fits =
      held.shape.present() && held.shape == shape && held.projected_geometry == geometry;
  if (!fits || head < 0 || head >= geometry.num_heads || !loaded[static_cast<size_t>(head)]) {
    return NotHeld(slot, head);
  }
  UnpackProjected(geometry, shape, part, head, held.projected.data(), weights);
  return absl::OkStatus();
}

absl::Status HostBackend::FreeWeights(int32_t slot) {
  MLA_RETURN_IF_ERROR(CheckWeightsSlot(slot));
  weight_bytes_used_ -= weights_[slot].charged_bytes;
  weights_[slot] = WeightSlot();
  return absl::OkStatus();
}

PoolView HostBackend::Pool(std::span<const uint32_t> page_tables) const {
  return {pool_.data(), pool_.size(), page_tables.data()};
}

absl::Status HostBackend::CheckSlot(int32_t slot) const {
  if (slot >= 0 && slot < static_cast<int32_t>(slots_.size())) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("launch slot: got ", slot, ", limit ", slots_.size()));
}

SlotMemory HostBackend::Memory(int32_t slot) {
  const MappedMemory& workspace = slots_[static_cast<size_t>(slot)].workspace;
  return {{}, {}, {workspace.data(), static_cast<size_t>(workspace.size())}};
}

bool HostBackend::HoldsHeads(int32_t slot, int32_t head_begin, int32_t heads) const {
  if (slot < 0 || slot >= static_cast<int32_t>(weights_.size()) || !weights_[slot].used) {
    return false;
  }
  const std::vector<bool>& loaded = weights_[slot].loaded;
  if (head_begin < 0 || head_begin + heads > static_cast<int32_t>(loaded.size())) return false;
  return std::all_of(loaded.begin() + head_begin, loaded.begin() + head_begin + heads,
                     [](bool head) { return head; });
}

absl::Status HostBackend::CheckProjection(const char* part, const Projection& projection) const {
  for (size_t i = 0; i < projection.records.size(); ++i) {
    const ProjectionRecord& r = projection.records[i];
    if (HoldsHeads(r.weights_slot, r.head_offset, r.num_heads)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        part, ".records[", i, "]: weights slot ", r.weights_slot, " does not hold heads [",
        r.head_offset, ", ", r.head_offset + r.num_heads, ")"));
  }
  return absl::OkStatus();
}

absl::Status HostBackend::CheckRowProjection(const char* name, const RowProjection& projection,
                                             ProjectedPart part) const {
  for (size_t i = 0; i < projection.records.size(); ++i) {
    const int32_t slot = projection.records[i].weights_slot;
    if (CheckWeightsSlot(slot).ok()) {
      const std::vector<bool>& heads = weights_[slot].projected_heads[static_cast<size_t>(part)];
      if (weights_[slot].shape.present() &&
          weights_[slot].projected_geometry == projection.geometry &&
          std::all_of(heads.begin(), heads.end(), [](bool head) { return head; })) {
        continue;
      }
    }
    return absl::FailedPreconditionError(absl::StrCat(name, ".records[", i, "]: weights slot ",
                                                      slot,
                                                      " does not hold all heads of this geometry"));
  }
  return absl::OkStatus();
}

absl::Status HostBackend::CheckAttention(const AttentionParams& params) const {
  MLA_RETURN_IF_ERROR(CanRun(params.desc));
  if (params.plan.partial_rows > limits_.partial_rows ||
      static_cast<int64_t>(params.plan.reduce_final_map.size()) > limits_.reduce_tiles) {
    return absl::ResourceExhaustedError(
        absl::StrCat("plan: ", params.plan.partial_rows, " partial rows and ",
                     params.plan.reduce_final_map.size(), " reduce tiles, limits ",
                     limits_.partial_rows, " and ", limits_.reduce_tiles));
  }
  if (params.desc.attention == AttentionKind::kWindow &&
      params.windows.size() != params.segments.size()) {
    return absl::InvalidArgumentError(absl::StrCat("windows: got ", params.windows.size(),
                                                   ", want ", params.segments.size(),
                                                   ", one a segment"));
  }
  if (params.desc.form == AttentionForm::kAbsorbed) return absl::OkStatus();
  for (size_t i = 0; i < params.segments.size(); ++i) {
    const SegmentRecord& r = params.segments[i];
    if (r.q_rows == 0 || HoldsHeads(r.weights_slot, r.head_offset, r.num_heads)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "run.segments[", i, "]: weights slot ", r.weights_slot, " does not hold heads [",
        r.head_offset, ", ", r.head_offset + r.num_heads, ")"));
  }
  return absl::OkStatus();
}

absl::Status HostBackend::Check(const Launch& launch) const {
  absl::Status status = CheckPageRanges(launch.pages, limits_);
  if (status.ok()) status = CheckPageTransfers("page_writes", launch.page_writes, limits_);
  if (status.ok()) status = CheckPageTransfers("page_reads", launch.page_reads, limits_);
  if (status.ok()) {
    status = CheckTableRanges(launch.table_changes, limits_, launch.page_tables.size());
  }
  if (status.ok()) status = CheckProjection("absorb", launch.absorb);
  if (status.ok()) status = CheckProjection("project", launch.project);
  if (status.ok()) status = CheckRowProjection("queries", launch.queries, ProjectedPart::kQueries);
  if (status.ok()) status = CheckRowProjection("hiddens", launch.hiddens, ProjectedPart::kOutputs);
  for (const AttentionParams* params : {&launch.absorbed, &launch.expanded}) {
    if (status.ok() && !params->segments.empty()) status = CheckAttention(*params);
  }
  return status;
}

absl::Status HostBackend::Submit(int32_t slot, const Launch& launch) {
  MLA_RETURN_IF_ERROR(CheckSlot(slot));
  Slot& owner = slots_[static_cast<size_t>(slot)];
  if (owner.launch != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("launch slot ", slot, " is running"));
  }
  MLA_RETURN_IF_ERROR(Check(launch));
  for (const HostInput& in : launch.inputs) {
    if (!in.in_place()) CopyRows(in.host, in.row_bytes, in.device, in.pitch, in.rows, in.row_bytes);
  }
  owner.launch = &launch;
  Start(slot, launch);
  return absl::OkStatus();
}

bool HostBackend::Done(int32_t slot) {
  return slots_[static_cast<size_t>(slot)].launch == nullptr || Finished(slot);
}

absl::StatusOr<int64_t> HostBackend::Wait(int32_t slot) {
  if (!CheckSlot(slot).ok() || slots_[static_cast<size_t>(slot)].launch == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("launch slot ", slot, " is not running"));
  }
  const Launch& launch = *std::exchange(slots_[static_cast<size_t>(slot)].launch, nullptr);
  auto nanoseconds = Finish(slot);
  if (!nanoseconds.ok()) return nanoseconds;
  for (const HostOutput& out : launch.outputs) {
    if (out.in_place()) continue;
    CopyRows(out.device, out.pitch, out.host, out.row_bytes, out.rows, out.row_bytes);
  }
  return nanoseconds;
}

}  // namespace mla::kernels
