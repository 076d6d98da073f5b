#include "kernels/hip/launch/expanded_work.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/hip/launch/combine.h"

namespace mla::kernels::hip {

// Operations per head and KV row: what a query row saves, compared with the up-projection. The
// expanded form wins somewhat earlier than this says, because the absorbed form also pays for
// absorb and project. Measured on an H200, both take the same time at about 130 rows.
int32_t ExpandedWork::MinRows(const Geometry& g, int32_t launch_rows) {
  const int64_t saved = 2 * g.kv_lora_rank + g.rope_dim - (g.nope_dim + g.rope_dim + g.v_dim);
  const int64_t up = static_cast<int64_t>(g.kv_lora_rank) * (g.nope_dim + g.v_dim);
  if (saved <= 0) return launch_rows + 1;
  return static_cast<int32_t>(std::min<int64_t>(3 * up / (4 * saved) + 1, launch_rows + 1));
}

int64_t ExpandedWork::WorkspaceBytes(const ArchTraits& arch, const BackendLimits& l,
                                     int64_t limit) {
  if (l.weights_slots < 1) return 0;
  const int64_t least = LeastRoundWorkspace(LargestDims(arch, l.max_geometry));
  // At most the bytes for all rows of the pool and all heads, with each segment's last tile padded.
  const int64_t row_bytes = (kExpandedLora + kExpandedRope) * 2;
  const int64_t rows =
      l.kv_pool_bytes / row_bytes + int64_t{std::max(1, l.launch_requests)} * kExpandedRows;
  const int64_t heads = std::max(1, l.max_geometry.num_heads);
  const int64_t all = rows / kExpandedRows * (least * heads);
  return std::max(least, std::min(limit, all));
}

absl::Status ExpandedWork::Check(const AttentionParams& params) const {
  if (device_.expanded_workspace.bytes() == 0) {
    return absl::FailedPreconditionError("run: the expanded form needs limits.weights_slots >= 1");
  }
  if (params.plan.rounds == nullptr) {
    return absl::FailedPreconditionError("run: the plan of the expanded form has no rounds");
  }
  for (size_t i = 0; i < params.segments.size(); ++i) {
    const SegmentRecord& r = params.segments[i];
    if (r.q_rows == 0 || device_.weights.Holds(r.weights_slot, r.head_offset, r.num_heads))
      continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "run.segments[", i, "]: weights slot ", r.weights_slot, " does not hold heads [",
        r.head_offset, ", ", r.head_offset + r.num_heads, ")"));
  }
  return absl::OkStatus();
}

absl::Status ExpandedWork::Add(LaunchRecording& recording, const AttentionParams& params,
                               const DevicePlan& plan) const {
  MLA_ASSIGN_OR_RETURN(auto segments, PutSegments(recording, device_, params));
  const Attended run{.segments = segments};

  ExpandArgs expand = {};
  expand.segments = run.segments;
  expand.page_tables = device_.table_mirror.As<uint32_t>();
  const SegmentRecord& first = params.segments[0];
  expand.pool = device_.pool.As<uint8_t>() + first.layer_offset;
  expand.expansions = plan.expansions;
  expand.w_uk = device_.weights.w_uk() + first.weights_slot;
  expand.w_uv = device_.weights.w_uv() + first.weights_slot;
  expand.workspace = device_.expanded_workspace.As<uint8_t>();
  expand.granule_bytes = kPageGranuleBytes;
  ExpandedArgs attend = {};
  attend.segments = run.segments;
  attend.items = plan.items;
  attend.unit_indptr = plan.unit_indptr;
  attend.workspace = expand.workspace;
  attend.partial_o = device_.partial_o.As<float>();
  attend.partial_lse = device_.partial_lse.As<float>();
  attend.o_is_f32 = params.desc.o_dtype == DType::kF32;
  const RoundView& rounds = *params.plan.rounds;
  const RoundKernels kernels = KernelsOf(params.desc, rounds.units);
  for (const Round& round : rounds.rounds) {
    MLA_RETURN_IF_ERROR(AddRound(recording, round, kernels, expand, attend));
  }
  return rounds.merges ? AddCombine(recording, device_, params, plan, run) : absl::OkStatus();
}

ExpandedWork::RoundKernels ExpandedWork::KernelsOf(const AttentionDesc& desc, int32_t units) const {
  const ExpandedDims dims{desc.geometry.nope_dim, desc.geometry.v_dim};
  const size_t attend = FindExpanded(*device_.arch, dims, desc.products);
  RoundKernels kernels;
  kernels.expand = FindExpand(*device_.arch, dims, desc.kv_format, desc.products);
  kernels.attend = device_.kernels.expanded[attend];
  kernels.shape.grid_x = static_cast<uint32_t>(units);
  kernels.shape.threads = static_cast<uint32_t>(device_.arch->expanded[attend].threads);
  kernels.shape.shared_bytes = static_cast<uint32_t>(device_.arch->expanded[attend].shared_bytes);
  return kernels;
}

// `expand` and `attend` hold the arguments of the first round.
absl::Status ExpandedWork::AddRound(LaunchRecording& recording, const Round& round,
                                    const RoundKernels& kernels, const ExpandArgs& expand,
                                    const ExpandedArgs& attend) const {
  if (round.pairs > 0) {
    const ExpandVariant& variant = device_.arch->expand[kernels.expand];
    const auto units = static_cast<int32_t>(kernels.shape.grid_x);
    LaunchShape shape;
    ExpandArgs args = expand;
    args.expansions += round.first_expansion;
    args.expansion_count = round.expansions;
    args.pairs = round.pairs;
    args.blocks = ExpandBlocks(*device_.arch, round.pairs, round.heads, round.expansions, units);
    args.first_tile_pairs = FirstTilePairs(*device_.arch, round.pairs, round.heads, args.blocks);
    shape.grid_x = static_cast<uint32_t>(args.blocks);
    shape.threads = static_cast<uint32_t>(variant.threads);
    shape.shared_bytes = static_cast<uint32_t>(variant.shared_bytes);
    MLA_RETURN_IF_ERROR(recording.AddKernel(device_.kernels.expand[kernels.expand], shape, args));
  }
  ExpandedArgs args = attend;
  args.unit_indptr += round.first_indptr;
  return recording.AddKernel(kernels.attend, kernels.shape, args);
}

}  // namespace mla::kernels::hip
