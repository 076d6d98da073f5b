#include "kernels/hip/hip_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/launch/page_ranges.h"

namespace mla::kernels::hip {

namespace {

constexpr uint32_t kThreads = 256;  // of every kernel

int32_t PackedRows(int32_t q_begin, int32_t q_end, uint32_t heads) {
  return (q_end - q_begin) * static_cast<int32_t>((heads >> 16) - (heads & 0xffffu));
}

uint32_t DivideUp(int64_t a, int64_t b) { return static_cast<uint32_t>((a + b - 1) / b); }

}  // namespace

absl::Status HipBackend::CanRun(const AttentionDesc& desc) const {
  const Geometry& g = desc.geometry;
  const char* missing = nullptr;
  if (g.num_heads < 1 || g.num_heads > 65535) missing = "this head count";
  // The matrix cores take bf16: rounding fp32 queries would cost more than the promised accuracy.
  if (desc.q_dtype != DType::kBf16) missing = "this query dtype";
  if (desc.page_size < 1) missing = "this page size";
  const bool windowed = desc.attention == AttentionKind::kWindow;
  if (g.kv_lora_rank != (windowed ? 448 : 512)) missing = "this kv_lora_rank";
  if (g.rope_dim != 64) missing = "this rope_dim";
  if (g.nope_dim < 0 || g.nope_dim % 8 != 0) missing = "this nope_dim";
  if (g.v_dim < 0 || g.v_dim % 8 != 0) missing = "this v_dim";
  const bool expanded = desc.form == AttentionForm::kExpanded;
  if (windowed) {
    if (expanded || MostRows(*arch_, desc.kv_format, DType::kBf16, desc.attention) == 0) {
      missing = expanded ? "a window in the expanded form" : "a window over this row format";
    }
    if (desc.entry_format != desc.kv_format) missing = "entries of another format than rows";
    if (desc.products != DType::kBf16) missing = "these products with a window";
  } else if (expanded
                 ? FindExpand(*arch_, desc.kv_format, DType::kBf16) == arch_->expand.size()
                 : MostRows(*arch_, desc.kv_format, DType::kBf16, AttentionKind::kDense) == 0) {
    missing = "this row format";
  } else if (desc.attention == AttentionKind::kSparse &&
             (expanded || MostRows(*arch_, desc.kv_format, DType::kBf16, desc.attention) == 0)) {
    missing = expanded ? "index lists in the expanded form" : "index lists";
  } else if (!expanded && desc.products != DType::kBf16 &&
             MostRows(*arch_, desc.kv_format, desc.products, desc.attention) == 0) {
    missing = "these products";
  } else if (expanded && desc.products != DType::kBf16 &&
             (info_.fp8_prefill_keys == 0 ||
              FindExpand(*arch_, desc.kv_format, desc.products) == arch_->expand.size())) {
    missing = "these products in the expanded form";
  }
  if (expanded) {
    if (g.nope_dim != kExpandedNope) missing = "this nope_dim in the expanded form";
    if (g.v_dim != kExpandedValue) missing = "this v_dim in the expanded form";
  }
  if (missing == nullptr) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("wanted: ", ToString(desc), "; supported: ", info_.supported,
                   "; missing: ", missing, "; device: ", info_.device, " (", info_.arch, ")"));
}

PlanTraits HipBackend::Traits(const AttentionDesc& desc) const {
  PlanTraits traits;
  if (desc.form == AttentionForm::kExpanded) {
    traits.units = std::max(1, runtime_->units() * arch_->expanded_blocks);
    traits.tile_rows = kExpandedRows;
    traits.max_heads_per_tile = 1;
    traits.kv_granularity = kExpandedRows;
    traits.item_overhead_rows = 2 * kExpandedRows;
    traits.rounds.workspace_bytes =
        configured_ ? expanded_workspace_.bytes() : options_.expanded_workspace_bytes;
    traits.rounds.cache_bytes = arch_->cache_bytes;
    traits.rounds.first_carry_row = static_cast<int32_t>(limits_.partial_rows);
    traits.rounds.carry_rows = limits_.launch_rows;
    return traits;
  }
  int32_t largest = MostRows(*arch_, desc.kv_format, desc.products, desc.attention);
  // Of shapes that are refused, numbers that any shape may have.
  if (largest == 0) largest = MostRows(*arch_, KvFormat::kBf16, DType::kBf16, desc.attention);
  largest = std::max(1, largest);
  // Few heads fit one block's tile, so every unit is a block; many are shared by neighbours.
  const int32_t blocks = desc.geometry.num_heads > largest ? arch_->blocks_per_unit : 1;
  traits.units = std::max(1, runtime_->units() / blocks);
  traits.tile_rows = largest * blocks;
  traits.max_q_rows_per_tile = desc.attention == AttentionKind::kDense ? 0 : 1;
  traits.kv_granularity = arch_->kv_granularity;
  traits.item_overhead_rows = arch_->item_overhead_rows;
  return traits;
}

absl::Status HipBackend::CheckSlot(int32_t slot) const {
  if (slot < 0 || slot >= static_cast<int32_t>(slots_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("launch slot: got ", slot, ", limit ", slots_.size()));
  }
  return absl::OkStatus();
}

SlotMemory HipBackend::Memory(int32_t slot) { return slots_[static_cast<size_t>(slot)]->Memory(); }

absl::Status HipBackend::AddAppends(LaunchSlot& launch, std::span<const AppendRecord> records) {
  if (records.empty()) return absl::OkStatus();
  const int64_t count = static_cast<int64_t>(records.size());
  absl::StatusOr<int64_t> prefix = launch.metadata().Take((count + 1) * sizeof(int32_t));
  if (!prefix.ok()) return prefix.status();
  StagedRegion& metadata = launch.metadata();
  const auto put_first_row = [&metadata, &prefix](int64_t i, int32_t first_row) {
    metadata.Write(*prefix + i * int64_t{sizeof(first_row)}, &first_row, sizeof(first_row));
  };
  int32_t rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    const AppendRecord& r = records[i];
    if (r.row_dim % 8 != 0 || r.row_stride % 16 != 0 || r.layer_offset % 16 != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "append.records[", i, "]: row_dim ", r.row_dim, ", row_stride ", r.row_stride,
          ", layer_offset ", r.layer_offset, "; want multiples of 8 elements, 16 and 16 bytes"));
    }
    if (const int32_t group = TraitsOf(r.format).group;
        group > 0 && (r.row_dim - r.rope_dim) % group != 0) {
      return absl::InvalidArgumentError(absl::StrCat("append.records[", i,
                                                     "]: ", r.row_dim - r.rope_dim,
                                                     " latent values; want a multiple of ", group));
    }
    put_first_row(i, rows);
    rows += r.rows;
  }
  put_first_row(count, rows);
  if (rows == 0) return absl::OkStatus();
  const int64_t layer = records[0].layer_offset;
  auto uploaded = metadata.PutEach(records, [&](AppendRecord record) {
    record.layer_offset -= layer;
    record.kv_scale = DeviceScale(record.format, record.kv_scale);
    return record;
  });
  if (!uploaded.ok()) return uploaded.status();
  AppendArgs args = {};
  args.records = *uploaded;
  args.first_row = reinterpret_cast<const int32_t*>(metadata.device(*prefix));
  args.page_tables = table_mirror_.As<uint32_t>();
  args.pool = pool_.As<uint8_t>() + layer;
  args.count = static_cast<int32_t>(count);
  const LaunchShape shape{.grid_x = DivideUp(rows, arch_->waves_per_block), .threads = kThreads};
  return launch.AddKernel(kernels_.append, shape, args);
}

absl::Status HipBackend::CheckProjections(const char* verb,
                                          std::span<const ProjectionRecord> records) const {
  for (size_t i = 0; i < records.size(); ++i) {
    const ProjectionRecord& r = records[i];
    if (weights_.Holds(r.weights_slot, r.head_offset, r.num_heads)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        verb, ".records[", i, "]: weights slot ", r.weights_slot, " does not hold heads [",
        r.head_offset, ", ", r.head_offset + r.num_heads, ")"));
  }
  return absl::OkStatus();
}

absl::Status HipBackend::AddProjection(LaunchSlot& launch,
                                       std::span<const ProjectionRecord> records,
                                       const ProjectArgs& args) {
  tiles_.clear();
  project_rows_.clear();
  const int64_t in_bytes = args.in_is_f32 ? 4 : 2, out_bytes = args.out_is_f32 ? 4 : 2;
  int32_t heads = 0;
  const int32_t layer = records.empty() ? 0 : records[0].weights_slot;
  for (const ProjectionRecord& r : records) {
    heads = std::max(heads, r.num_heads);
    const int32_t weights_slot = r.weights_slot - layer;
    if (project_rows_.size() + static_cast<size_t>(r.rows) > project_rows_.capacity()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("projection rows: limit ", project_rows_.capacity()));
    }
    for (int32_t row = 0; row < r.rows; ++row) {
      const bool joins = !tiles_.empty() && tiles_.back().rows < kProjectRows &&
                         tiles_.back().weights_slot == weights_slot &&
                         tiles_.back().head_offset == r.head_offset &&
                         tiles_.back().num_heads == r.num_heads;
      if (!joins) {
        if (tiles_.size() == tiles_.capacity()) {
          return absl::ResourceExhaustedError(
              absl::StrCat("projection tiles: limit ", tiles_.capacity()));
        }
        tiles_.push_back({static_cast<int32_t>(project_rows_.size()), 0, weights_slot,
                          r.head_offset, r.num_heads});
      }
      ++tiles_.back().rows;
      project_rows_.push_back(
          {static_cast<const std::byte*>(r.in) + row * r.in_row_stride * in_bytes,
           static_cast<std::byte*>(r.out) + row * r.out_row_stride * out_bytes, r.in_head_stride,
           r.out_head_stride});
    }
  }
  if (tiles_.empty()) return absl::OkStatus();
  auto rows = launch.metadata().Put(std::span<const ProjectRow>(project_rows_));
  if (!rows.ok()) return rows.status();
  auto tiles = launch.metadata().Put(std::span<const ProjectTile>(tiles_));
  if (!tiles.ok()) return tiles.status();
  ProjectArgs complete = args;
  complete.rows = *rows;
  complete.tiles = *tiles;
  complete.weights += layer;
  const bool rows_alone =
      kernels_.project_row_wide != nullptr &&
      std::all_of(tiles_.begin(), tiles_.end(), [](const ProjectTile& t) { return t.rows == 1; });
  LaunchShape shape{.grid_x = static_cast<uint32_t>(tiles_.size()),
                    .threads = kThreads,
                    .overlap_predecessor = true};
  const auto add = [&](Function function, int32_t columns, int32_t shared_bytes) {
    shape.grid_y = static_cast<uint32_t>(heads) * DivideUp(args.n, columns);
    shape.shared_bytes = static_cast<uint32_t>(shared_bytes);
    return launch.AddKernel(function, shape, complete);
  };
  if (!rows_alone) return add(kernels_.project, kProjectCols, arch_->project_shared_bytes);
  return args.k <= kProjectWideDepth
             ? add(kernels_.project_row_wide, kProjectWideCols,
                   arch_->project_row_wide_shared_bytes)
             : add(kernels_.project_row_deep, kProjectCols, arch_->project_row_deep_shared_bytes);
}

absl::Status HipBackend::AddAbsorb(LaunchSlot& slot, const Projection& projection) {
  if (absl::Status s = CheckProjections("absorb", projection.records); !s.ok()) return s;
  ProjectArgs args = {};
  args.weights = weights_.w_uk();
  args.weight_panels = weights_.InPanels(projection.geometry);
  args.k = projection.geometry.nope_dim;
  args.n = projection.geometry.kv_lora_rank;
  args.copy = projection.geometry.rope_dim;
  args.in_is_f32 = projection.in == DType::kF32;
  args.out_is_f32 = projection.out == DType::kF32;
  return AddProjection(slot, projection.records, args);
}

absl::Status HipBackend::AddProject(LaunchSlot& slot, const Projection& projection) {
  if (absl::Status s = CheckProjections("project", projection.records); !s.ok()) return s;
  ProjectArgs args = {};
  args.weights = weights_.w_uv();
  args.weight_panels = weights_.InPanels(projection.geometry);
  args.k = projection.geometry.kv_lora_rank;
  args.n = projection.geometry.v_dim;
  args.in_is_f32 = projection.in == DType::kF32;
  args.out_is_f32 = projection.out == DType::kF32;
  return AddProjection(slot, projection.records, args);
}

absl::Status HipBackend::CheckRun(const AttentionParams& params) const {
  if (absl::Status s = CanRun(params.desc); !s.ok()) return s;
  if (params.plan.partial_rows > limits_.partial_rows) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "plan: ", params.plan.partial_rows, " partial rows, limit ", limits_.partial_rows));
  }
  for (size_t i = 0; i < params.segments.size(); ++i) {
    const SegmentRecord& r = params.segments[i];
    if (r.row_stride % 16 == 0 && r.layer_offset % 16 == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("run.segments[", i, "]: row_stride ",
                                                   r.row_stride, ", layer_offset ", r.layer_offset,
                                                   "; want multiples of 16 bytes"));
  }
  if (params.desc.attention != AttentionKind::kWindow) return absl::OkStatus();
  if (params.windows.size() != params.segments.size()) {
    return absl::InvalidArgumentError(absl::StrCat("run.windows: got ", params.windows.size(),
                                                   ", want ", params.segments.size()));
  }
  for (size_t i = 0; i < params.windows.size(); ++i) {
    const WindowRecord& w = params.windows[i];
    if (w.ratio == 0 || (w.row_stride % 16 == 0 && w.layer_offset % 16 == 0)) continue;
    return absl::InvalidArgumentError(absl::StrCat("run.windows[", i, "]: row_stride ",
                                                   w.row_stride, ", layer_offset ", w.layer_offset,
                                                   "; want multiples of 16 bytes"));
  }
  return absl::OkStatus();
}

absl::Status HipBackend::AddAttention(int32_t slot, const AttentionParams& params) {
  if (params.segments.empty()) return absl::OkStatus();
  if (absl::Status s = CheckRun(params); !s.ok()) return s;
  if (params.plan.work_info.empty()) return absl::OkStatus();
  const bool expanded = params.desc.form == AttentionForm::kExpanded;
  if (expanded) {
    if (absl::Status s = CheckExpanded(params); !s.ok()) return s;
  }
  LaunchSlot& owner = *slots_[static_cast<size_t>(slot)];
  absl::StatusOr<DevicePlan> plan = plans_->Get(params.plan, slot, owner.input_stream());
  if (!plan.ok()) return plan.status();
  return expanded ? AddExpanded(owner, params, *plan) : AddAbsorbed(owner, params, *plan);
}

float HipBackend::DeviceScale(KvFormat format, float scale) const {
  if (TraitsOf(format).scales != KvScales::kLayer) return 1.0f;
  return arch_->fp8 == Fp8Kind::kE4m3Fn ? scale : ScaleToKind(scale, arch_->fp8);
}

absl::StatusOr<const SegmentRecord*> HipBackend::PutSegments(LaunchSlot& slot,
                                                             const AttentionParams& params) {
  const SegmentRecord& first = params.segments[0];
  return slot.metadata().PutEach(params.segments, [&](SegmentRecord record) {
    record.layer_offset -= first.layer_offset;
    record.weights_slot -= first.weights_slot;
    record.kv_scale = DeviceScale(params.desc.kv_format, record.kv_scale);
    return record;
  });
}

absl::Status HipBackend::AddAbsorbed(LaunchSlot& slot, const AttentionParams& params,
                                     const DevicePlan& plan) {
  Attended run;
  auto segments = PutSegments(slot, params);
  if (!segments.ok()) return segments.status();
  run.segments = *segments;
  if (!params.windows.empty()) {
    auto windows = slot.metadata().PutEach(params.windows, [&](WindowRecord record) {
      record.layer_offset -= params.segments[0].layer_offset;
      return record;
    });
    if (!windows.ok()) return windows.status();
    run.windows = *windows;
  }

  run.format = params.desc.kv_format;
  run.products = params.desc.products;
  run.page_tables = table_mirror_.As<uint32_t>();
  run.pool = pool_.As<uint8_t>() + params.segments[0].layer_offset;

  int32_t rows = 0;
  for (const WorkInfo& w : params.plan.work_info) {
    rows = std::max(rows, PackedRows(w.q_begin, w.q_end, w.heads));
  }
  if (Widens(params, run, rows)) {
    if (absl::Status s = AddWiden(slot, params, &run); !s.ok()) return s;
  }
  int32_t busy = 0;
  uint32_t units = 0;  // up to the last that has work
  for (size_t i = 0; i + 1 < params.plan.work_indptr.size(); ++i) {
    if (params.plan.work_indptr[i + 1] == params.plan.work_indptr[i]) continue;
    ++busy;
    units = static_cast<uint32_t>(i) + 1;
  }
  const size_t chosen = ChooseAttend(*arch_, run.format, run.products, params.desc.attention, rows,
                                     busy, runtime_->units());
  const AttendVariant& variant = arch_->attend[chosen];
  AttendArgs args = {};
  args.segments = run.segments;
  args.windows = run.windows;
  args.page_tables = run.page_tables;
  args.pool = run.pool;
  args.work_indptr = plan.work_indptr;
  args.work_info = plan.work_info;
  args.partial_o = partial_o_.As<float>();
  args.partial_lse = partial_lse_.As<float>();
  args.granule_bytes = kPageGranuleBytes;
  args.blocks_per_unit = static_cast<int32_t>(DivideUp(rows, variant.rows));
  args.o_is_f32 = params.desc.o_dtype == DType::kF32;
  args.blocks = static_cast<int32_t>(units) * args.blocks_per_unit;
  args.xcds = XcdsOf(*arch_, runtime_->units());
  run.exchanged = variant.exchanged_partials;
  run.idle_units = std::max(0, runtime_->units() - busy * args.blocks_per_unit);
  const LaunchShape shape{.grid_x = static_cast<uint32_t>(args.blocks),
                          .threads = static_cast<uint32_t>(variant.threads),
                          .shared_bytes = static_cast<uint32_t>(variant.shared_bytes),
                          .overlap_predecessor = true};
  if (absl::Status s = slot.AddKernel(kernels_.attend[chosen], shape, args); !s.ok()) return s;
  return AddCombine(slot, params, plan, run);
}

// Merges the partials of the attention before it by their log-sum-exp. A part that saw no key has
// LSE -inf and weight 0; a row with no key at all has output 0 and LSE -inf.
absl::Status HipBackend::AddCombine(LaunchSlot& slot, const AttentionParams& params,
                                    const DevicePlan& plan, const Attended& run) {
  if (params.plan.reduce_final_map.empty()) return absl::OkStatus();
  int32_t rows = 0, parts = 0;
  for (size_t i = 0; i < params.plan.reduce_final_map.size(); ++i) {
    const ReduceTile& t = params.plan.reduce_final_map[i];
    rows = std::max(rows, PackedRows(t.q_begin, t.q_end, t.heads));
    parts = std::max(parts, params.plan.reduce_indptr[i + 1] - params.plan.reduce_indptr[i]);
  }
  const auto tiles = static_cast<uint32_t>(params.plan.reduce_final_map.size());
  CombineArgs args = {};
  args.segments = run.segments;
  args.windows = run.windows;
  args.reduce_indptr = plan.reduce_indptr;
  args.reduce_final_map = plan.reduce_final_map;
  args.reduce_partial_map = plan.reduce_partial_map;
  args.partial_o = partial_o_.As<float>();
  args.partial_lse = partial_lse_.As<float>();
  args.o_dim = static_cast<int32_t>(params.desc.value_dim());
  args.o_is_f32 = params.desc.o_dtype == DType::kF32;
  args.waves_per_row = CombineWavesPerRow(*arch_, int64_t{tiles} * rows, parts, runtime_->units());
  args.column_blocks = CombineColumnBlocks(*arch_, int64_t{tiles} * rows, args.waves_per_row,
                                           args.o_dim, runtime_->units());
  args.waves_per_row = CombineWavesBeside(*arch_, int64_t{tiles} * rows, parts, args.waves_per_row,
                                          args.column_blocks, run.idle_units);
  args.exchanged = run.exchanged;
  const auto row_blocks = DivideUp(rows, arch_->waves_per_block / args.waves_per_row);
  const LaunchShape shape{.grid_x = tiles,
                          .grid_y = row_blocks * static_cast<uint32_t>(args.column_blocks),
                          .threads = kThreads,
                          .shared_bytes = static_cast<uint32_t>(arch_->combine_shared_bytes),
                          .overlap_predecessor = true};
  return slot.AddKernel(kernels_.combine, shape, args);
}

absl::Status HipBackend::Fault(absl::Status status) {
  if (!status.ok() && health_.ok()) {
    health_ = absl::InternalError(absl::StrCat("device lost: ", status.message()));
    lost_ = true;
  }
  return status;
}

absl::Status HipBackend::Build(int32_t slot, const Launch& launch) {
  LaunchSlot& owner = *slots_[static_cast<size_t>(slot)];
  const bool alone = std::none_of(slots_.begin(), slots_.end(),
                                  [](const auto& other) { return other->running(); });
  owner.Begin(launch, alone);
  absl::Status s = page_work_->AddTensors(owner, owner.input_moves());
  owner.BeginTimed();
  if (s.ok()) s = CheckPageTransfers("page_writes", launch.page_writes, limits_);
  if (s.ok()) s = CheckPageTransfers("page_reads", launch.page_reads, limits_);
  if (s.ok()) s = page_work_->AddPages(owner, launch.pages);
  if (s.ok()) s = page_work_->AddTables(owner, launch);
  if (s.ok()) s = AddAppends(owner, launch.appends);
  if (s.ok()) s = AddSelects(owner, launch.selects);
  if (s.ok()) s = AddAbsorb(owner, launch.absorb);
  if (s.ok()) s = AddAttention(slot, launch.absorbed);
  if (s.ok()) s = AddProject(owner, launch.project);
  if (s.ok()) s = AddAttention(slot, launch.expanded);
  owner.EndTimed();
  if (s.ok()) s = page_work_->AddTensors(owner, owner.output_moves());
  return s;
}

absl::Status HipBackend::Submit(int32_t slot, const Launch& launch) {
  if (!health_.ok()) return health_;
  if (absl::Status s = CheckSlot(slot); !s.ok()) return s;
  LaunchSlot& owner = *slots_[static_cast<size_t>(slot)];
  if (owner.running()) return absl::FailedPreconditionError("the launch slot is still running");
  absl::Status s = Build(slot, launch);
  if (s.ok()) {
    s = owner.Submit(launch, pool_.at());
  } else {
    owner.Abandon();
  }
  if (s.ok()) return s;
  plans_->Release(slot);
  // A refused call leaves the device usable; a device that is gone refuses the next one too.
  if (s.code() == absl::StatusCode::kInternal) {
    if (absl::Status alive = runtime_->Synchronize(streams_.compute); !alive.ok()) {
      return Fault(std::move(alive));
    }
  }
  return s;
}

bool HipBackend::Done(int32_t slot) {
  if (!CheckSlot(slot).ok() || !slots_[slot]->running()) return true;
  absl::StatusOr<bool> done = slots_[slot]->Done();
  return !done.ok() || *done;  // Wait reports what is wrong
}

absl::StatusOr<int64_t> HipBackend::Wait(int32_t slot) {
  if (absl::Status s = CheckSlot(slot); !s.ok()) return s;
  if (!slots_[slot]->running()) {
    return absl::FailedPreconditionError(absl::StrCat("launch slot ", slot, " is not running"));
  }
  absl::StatusOr<int64_t> ns = slots_[slot]->Wait(std::chrono::milliseconds(options_.watchdog_ms));
  if (!ns.ok()) {
    (void)Fault(ns.status());
    return health_;
  }
  plans_->Release(slot);
  return ns;
}

}  // namespace mla::kernels::hip
