#include "scheduler/launching/launch_sizes.h"

#include <algorithm>
#include <limits>

#include "kernels/launch_layout.h"
#include "scheduler/planning/planner.h"

namespace mla::scheduler {
namespace {

using kernels::AttentionForm;
using kernels::DType;
using kernels::ElementSize;

// The alignment of one request's tensors in a region may waste this number of bytes.
constexpr int64_t kAlignmentBytes = 8 * kernels::kLaunchAlignment;

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
  plan.segments = limits.launch_requests;
  plan.q_rows = limits.launch_rows;
  plan.packed_rows = limits.launch_packed_rows;
  plan.kv_rows = limits.max_sequence_rows;
  plan.min_heads = 1;
  plan.max_heads = limits.max_heads;
  return plan;
}

// Returns the bytes of the widest row that a worker of PROJECTED sends or receives, with its
// rotation.
int64_t WidestProjectedRow(const Limits& limits) {
  return (int64_t{limits.max_hidden_size} + limits.max_row_dim) * int64_t(ElementSize(DType::kF32));
}

// Returns the workspace of a launch for tensors that belong neither to requests nor to the cache.
// One row of all heads always fits, whatever its dtypes.
int64_t WorkspaceBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  const kernels::BackendInfo& info = backend.Info();
  const auto between = static_cast<int64_t>(ElementSize(info.widest_absorbed_q()) +
                                            ElementSize(info.latent_o_dtype));
  const auto widest = static_cast<int64_t>(2 * ElementSize(DType::kF32));
  const int64_t latents =
      limits.max_row_dim * std::max(limits.launch_packed_rows * between, limits.max_heads * widest);
  if (!info.projects) return latents;
  // A row of PROJECTED needs its queries and outputs in addition to the latent ones.
  const int64_t sent = limits.max_v_dim + limits.max_row_dim + limits.max_v_dim;
  const auto wide = int64_t(ElementSize(DType::kF32));
  return std::max({latents, limits.max_heads * (limits.max_row_dim * widest + sent * wide),
                   2 * WidestProjectedRow(limits)});
}

// Calls visit(traits) for one form and number of heads, with every format of rows and every type of
// products. A backend may cut tiles differently for each of them.
template <typename Visit>
void ForEachFormat(kernels::AttentionDesc desc, const kernels::BackendInfo& info,
                   const kernels::AttentionBackend& backend, const Visit& visit) {
  const bool absorbed = desc.form == AttentionForm::kAbsorbed;
  const auto visit_kind = [&](kernels::AttentionKind kind, bool there) {
    desc.attention = kind;
    if (there) visit(backend.Traits(desc));
  };
  for (const kernels::KvFormat format : info.kv_formats) {
    desc.kv_format = format;
    for (const DType products : {DType::kBf16, DType::kFp8E4m3}) {
      if (products != DType::kBf16 && (!info.fp8_products || format == kernels::KvFormat::kBf16)) {
        continue;
      }
      desc.products = products;
      visit_kind(kernels::AttentionKind::kDense, true);
      visit_kind(kernels::AttentionKind::kSparse, info.sparse && absorbed);
      visit_kind(kernels::AttentionKind::kWindow, info.windows && absorbed);
    }
    if (info.stream_bytes == 0 || !absorbed) continue;
    desc.products = DType::kBf16;
    desc.streamed = true;
    visit_kind(kernels::AttentionKind::kDense, true);
    desc.streamed = false;
  }
}

// Calls visit(traits) for both forms and for models of few and of many heads: a backend may cut
// tiles differently for each of them.
template <typename Visit>
void ForEachTraits(const Limits& limits, const kernels::AttentionBackend& backend, Visit&& visit) {
  const kernels::BackendInfo& info = backend.Info();
  for (int32_t heads = 1;; heads = std::min(2 * heads, limits.max_heads)) {
    for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kExpanded}) {
      kernels::AttentionDesc desc;
      desc.geometry = MaxGeometry(limits);
      desc.geometry.num_heads = heads;
      desc.form = form;
      ForEachFormat(desc, info, backend, visit);
      if (form == AttentionForm::kAbsorbed) continue;
      // In the expanded form the number of units depends on the dims and does not grow with them,
      // so each pair of dims is visited.
      for (const kernels::ExpandedDims& dims : {kernels::kDims128, kernels::kDims256}) {
        desc.geometry.nope_dim = dims.nope;
        desc.geometry.v_dim = dims.value;
        ForEachFormat(desc, info, backend, visit);
      }
    }
    if (heads == limits.max_heads) break;
  }
}

}  // namespace

int32_t LaunchSlots(const kernels::AttentionBackend& backend) {
  // A CPU backend has one set of workers, so a second launch could only wait. A GPU copies for one
  // launch while the other runs.
  return backend.Info().unified_memory ? 1 : 2;
}

PieceBudget PieceBudgetOf(const Limits& limits, const kernels::AttentionBackend& backend) {
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

PlanCapacity PlanCapacityOf(const Limits& limits, const kernels::AttentionBackend& backend) {
  PlanCapacity capacity;
  const int64_t piece_rows = PieceBudgetOf(limits, backend).piece_rows;
  ForEachTraits(limits, backend, [&](const kernels::PlanTraits& traits) {
    PlanLimits plan = PlanLimitsOf(limits);
    // With fixed cuts: room for the tiles without their pieces here, and below one more for every
    // piece row.
    if (traits.fixed_split_rows > 0) plan.kv_rows = 0;
    PlanCapacity one = Planner::Capacity(plan, traits);
    if (traits.fixed_split_rows > 0) {
      one.work_items += piece_rows;
      one.reduce_tiles = one.reduce_partials = one.partial_rows = piece_rows;
    }
    capacity.units = std::max(capacity.units, one.units);
    capacity.work_items = std::max(capacity.work_items, one.work_items);
    capacity.reduce_tiles = std::max(capacity.reduce_tiles, one.reduce_tiles);
    capacity.reduce_partials = std::max(capacity.reduce_partials, one.reduce_partials);
    capacity.partial_rows = std::max(capacity.partial_rows, one.partial_rows);
  });
  return capacity;
}

RoundCapacity RoundCapacityOf(const Limits& limits, const kernels::AttentionBackend& backend) {
  RoundCapacity rounds;
  ForEachTraits(limits, backend, [&](const kernels::PlanTraits& traits) {
    if (traits.rounds.workspace_bytes > 0) rounds.units = std::max(rounds.units, traits.units);
  });
  if (rounds.units == 0) return rounds;
  // The tiles of the plan, and the same number again for cut contexts.
  rounds.items = 2 * PlanCapacityOf(limits, backend).work_items + 1024;
  rounds.expansions = int64_t{limits.launch_requests} + 4096;
  rounds.segments = limits.launch_requests;
  return rounds;
}

int64_t PageTableEntries(const Limits& limits) {
  return int64_t{limits.max_sequences} * limits.max_pages_per_sequence;
}

int64_t LaunchHostBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  const int64_t unwanted_lse = limits.launch_packed_rows * int64_t{sizeof(float)};
  const int64_t compared = limits.launch_rows * int64_t{2 * sizeof(int32_t)};
  const int64_t plan = PlanCapacityOf(limits, backend).bytes();
  const RoundCapacity rounds = RoundCapacityOf(limits, backend);
  const int64_t with_rounds = rounds.units == 0 ? 0 : plan + rounds.bytes();
  const int64_t slot =
      kPlansPerSlot * plan + kRoundPlansPerSlot * with_rounds + unwanted_lse + compared;
  return PageTableEntries(limits) * int64_t{sizeof(uint32_t)} + LaunchSlots(backend) * slot;
}

int64_t GatherBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  // On other backends the copies into staging memory bring slices together, and that memory has
  // room for all. Rows of PROJECTED need workspace on every backend. There slices are counted too,
  // but never decide: the workspace has as many bytes for a packed row as its slices.
  const kernels::BackendInfo& info = backend.Info();
  return info.unified_memory || info.projects ? WorkspaceBytes(limits, backend)
                                              : std::numeric_limits<int64_t>::max();
}

kernels::BackendLimits BackendLimitsOf(const Limits& limits,
                                       const kernels::AttentionBackend& backend) {
  const PlanCapacity plan = PlanCapacityOf(limits, backend);
  const int64_t packed = limits.launch_packed_rows;
  const int64_t wide = ElementSize(DType::kF32);
  kernels::BackendLimits out;
  out.kv_pool_bytes = limits.kv_cache_bytes;
  out.page_table_entries = PageTableEntries(limits);
  out.weights_bytes = limits.weights_bytes;
  out.weights_slots = limits.max_models * limits.max_layers;
  out.launch_slots = LaunchSlots(backend);
  out.launch_requests = limits.launch_requests;
  out.launch_rows = limits.launch_rows;
  out.page_ranges = kPageRanges;
  out.table_ranges = limits.launch_requests * (backend.Info().windows ? 2 : 1);
  out.launch_packed_rows = packed;
  out.partial_rows = plan.partial_rows;
  out.max_o_dim = std::max(limits.max_row_dim, limits.max_v_dim);
  // Each request may need alignment, and so may the tensors that all share.
  const int64_t alignment = (int64_t{limits.launch_requests} + 1) * kAlignmentBytes;
  out.staging_in_bytes = (packed + limits.launch_rows) * limits.max_row_dim * wide + alignment;
  if (backend.Info().sparse) {
    out.staging_in_bytes +=
        int64_t{sizeof(int32_t)} *
        (int64_t{limits.launch_rows} * (limits.max_top_k + int64_t{1}) + limits.launch_requests);
  }
  if (backend.Info().windows) {
    // A row has at most one entry, and each request its sinks.
    out.staging_in_bytes += int64_t{limits.launch_rows} * limits.max_row_dim * wide +
                            int64_t{limits.launch_requests} * limits.max_heads * wide;
  }
  out.staging_out_bytes = packed * (out.max_o_dim + 1) * wide +
                          limits.launch_rows * int64_t{2 * sizeof(int32_t)} + alignment;
  if (backend.Info().projects) {  // one row fits, however few heads a launch may have
    out.staging_in_bytes += WidestProjectedRow(limits);
    out.staging_out_bytes += WidestProjectedRow(limits);
  }
  // The workspace holds absorbed queries and latent outputs, or queries and outputs of fused slices
  // with their log-sum-exps, plus the alignment of each record.
  out.slot_workspace_bytes =
      WorkspaceBytes(limits, backend) + packed * int64_t{sizeof(float)} + alignment;
  if (backend.Info().selects) {
    const kernels::IndexerShape widest{kernels::kMaxIndexHeads, kernels::kMaxIndexDim};
    const int64_t lists = int64_t{limits.launch_rows} * limits.max_top_k * int64_t{sizeof(int32_t)};
    out.max_top_k = limits.max_top_k;
    out.slot_workspace_bytes += lists;
    out.staging_in_bytes +=
        limits.launch_rows * (widest.dim * wide + widest.input_bytes(DType::kF32));
    out.staging_out_bytes += lists;
  }
  out.work_items = plan.work_items;
  out.reduce_tiles = plan.reduce_tiles;
  out.reduce_partials = plan.reduce_partials;
  const RoundCapacity rounds = RoundCapacityOf(limits, backend);
  out.round_items = rounds.items;
  out.round_expansions = rounds.expansions;
  out.max_geometry = MaxGeometry(limits);
  return out;
}

}  // namespace mla::scheduler
