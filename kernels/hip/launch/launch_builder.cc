#include "kernels/hip/launch/launch_builder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/hip/device_state/capabilities.h"
#include "kernels/read_rows.h"

namespace mla::kernels::hip {
namespace {

absl::Status CheckRecord(const char* what, size_t i, int64_t row_stride, int64_t layer_offset) {
  if (row_stride % 16 == 0 && layer_offset % 16 == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("run.", what, "[", i, "]: row_stride ", row_stride,
                                                 ", layer_offset ", layer_offset,
                                                 "; want multiples of 16 bytes"));
}

// Device memory for one plan.
int64_t PlanBytes(const DeviceState& device, const BackendLimits& l) {
  constexpr int64_t kMaxUnits = 4096;
  constexpr int64_t kArrays = 8;
  const auto entries = [](int64_t count, size_t size) {
    return count * static_cast<int64_t>(size);
  };
  const int64_t items =
      entries(l.work_items, sizeof(WorkInfo)) + entries(kMaxUnits, sizeof(int32_t));
  const int64_t reduce = entries(l.reduce_tiles + 1, sizeof(int32_t) + sizeof(ReduceTile)) +
                         entries(l.reduce_partials, sizeof(int32_t));
  const int64_t units = device.runtime->units() * MostExpandedBlocks(*device.arch) + 1;
  const int64_t rounds =
      entries(l.round_items, sizeof(ExpandedItem)) +
      entries(l.round_expansions, sizeof(Expansion)) +
      entries(std::min<int64_t>(l.round_expansions + 1, kMostRounds) * units, sizeof(int32_t));
  return std::max(items, rounds) + reduce + kArrays * kRegionAlignment;
}

// A launch holds at most one plan of each form. Two more copies let alternating compositions find
// their plans again.
int32_t PlanCopies(const BackendLimits& l) { return 2 * l.launch_slots + 2; }

// Bytes of all copies together, both in device memory and in pinned memory.
int64_t PlanBytesOnEither(const DeviceState& device, const BackendLimits& l) {
  return PlanCopies(l) * AlignRegion(PlanBytes(device, l));
}

}  // namespace

LaunchBuilder::LaunchBuilder(const DeviceState& device, const BackendLimits& limits)
    : device_(device),
      limits_(limits),
      gate_(device),
      pages_(device, limits),
      index_(device),
      projections_(device, limits),
      absorbed_(device, index_.scratch()),
      expanded_(device) {}

absl::StatusOr<std::unique_ptr<LaunchBuilder>> LaunchBuilder::Create(const DeviceState& device,
                                                                     const BackendLimits& limits,
                                                                     Stream stream) {
  std::unique_ptr<LaunchBuilder> builder(new LaunchBuilder(device, limits));
  MLA_RETURN_IF_ERROR(builder->index_.Allocate(limits, stream));
  MLA_ASSIGN_OR_RETURN(builder->streams_, StreamWork::Create(device, limits, stream));
  MLA_ASSIGN_OR_RETURN(builder->plans_, PlanStore::Create(device.runtime, PlanCopies(limits),
                                                          PlanBytes(device, limits)));
  return builder;
}

int64_t LaunchBuilder::MetadataBytes(const BackendLimits& l, const BackendInfo& info) {
  constexpr int64_t kForms = 2;
  constexpr int64_t kSlack = 256 * 1024;  // the alignment of arrays
  const int64_t segments =
      int64_t{l.launch_requests} *
      (kForms * static_cast<int64_t>(sizeof(SegmentRecord)) +
       static_cast<int64_t>(sizeof(StreamedTensors)) + kRegionAlignment +
       static_cast<int64_t>(sizeof(int32_t) + sizeof(WindowRecord)) + kRegionAlignment);
  return segments + PageWork::MetadataBytes(l) + ProjectWork::MetadataBytes(l) +
         IndexWork::MetadataBytes(l, info) + kSlack;
}

int64_t LaunchBuilder::HostBytes(const DeviceState& device, const BackendLimits& l) {
  return PlanBytesOnEither(device, l) + StreamWork::HostBytes(l);
}

int64_t LaunchBuilder::WorkspaceBytes(const DeviceState& device, const BackendLimits& l) {
  return IndexWork::WorkspaceBytes(l, device.info) + StreamWork::WorkspaceBytes(l) +
         PlanBytesOnEither(device, l);
}

absl::Status LaunchBuilder::CheckAttention(const AttentionParams& params) const {
  absl::Status s = CheckSupported(*device_.arch, device_.info, params.desc);
  if (!s.ok()) return s;
  if (params.plan.partial_rows > limits_.partial_rows) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "plan: ", params.plan.partial_rows, " partial rows, limit ", limits_.partial_rows));
  }
  for (size_t i = 0; i < params.segments.size() && s.ok(); ++i) {
    s = CheckRecord("segments", i, params.segments[i].row_stride, params.segments[i].layer_offset);
  }
  if (!s.ok() || params.desc.attention != AttentionKind::kWindow) return s;
  if (params.windows.size() != params.segments.size()) {
    return absl::InvalidArgumentError(absl::StrCat("run.windows: got ", params.windows.size(),
                                                   ", want ", params.segments.size()));
  }
  for (size_t i = 0; i < params.windows.size() && s.ok(); ++i) {
    const WindowRecord& w = params.windows[i];
    if (w.ratio != 0) s = CheckRecord("windows", i, w.row_stride, w.layer_offset);
  }
  return s;
}

absl::Status LaunchBuilder::AddAttention(LaunchSlot& slot, int32_t index,
                                         const AttentionParams& params) {
  if (params.segments.empty()) return absl::OkStatus();
  MLA_RETURN_IF_ERROR(CheckAttention(params));
  if (params.plan.work_info.empty()) return absl::OkStatus();
  const bool expanded = params.desc.form == AttentionForm::kExpanded;
  if (expanded) {
    MLA_RETURN_IF_ERROR(expanded_.Check(params));
  }
  const bool whole = !expanded && !streams_->Has(index);
  if (const auto split = whole ? absorbed_.SplitOf(params) : std::nullopt) {
    return absorbed_.AddSplit(slot, params, *split);
  }
  const int64_t uploads = plans_->uploads();
  MLA_ASSIGN_OR_RETURN(DevicePlan plan, plans_->Get(params.plan, index, slot.input_stream()));
  if (plans_->uploads() != uploads) slot.NoteInput();
  if (!expanded && streams_->Has(index)) return streams_->Add(slot, index, plan);
  return expanded ? expanded_.Add(slot, params, plan) : absorbed_.Add(slot, params, plan);
}

absl::Status LaunchBuilder::Build(LaunchSlot& slot, int32_t index, const Launch& launch) {
  if (streams_->Has(index)) streams_->AddArrivals(slot, index);
  absl::Status s = pages_.AddTensors(slot, slot.input_moves(), slot.kernels_begun(), nullptr);
  slot.BeginTimed();
  if (s.ok()) s = gate_.AddGate(slot, launch);
  if (s.ok()) s = CheckPageTransfers("page_writes", launch.page_writes, limits_);
  if (s.ok()) s = CheckPageTransfers("page_reads", launch.page_reads, limits_);
  if (s.ok()) s = pages_.AddDigests(slot, launch);
  if (s.ok()) s = pages_.AddPages(slot, launch.pages);
  if (s.ok()) s = pages_.AddTables(slot, launch);
  // Without selects, absorb follows append. Its blocks may then read their weights while the gate
  // waits: the gate waits for work on another device, which needs no unit of this one.
  const bool early =
      slot.gate_is_far() && launch.selects.empty() && projections_.StartsEarly(launch.absorb);
  const bool by_attention = streams_->Has(index) && streams_->Appends(index);
  if (s.ok() && !by_attention) s = pages_.AddAppends(slot, launch.appends, early);
  if (s.ok()) s = index_.Add(slot, launch.selects);
  if (s.ok()) s = projections_.AddAbsorb(slot, launch.absorb);
  if (s.ok()) s = AddAttention(slot, index, launch.absorbed);
  if (s.ok()) s = projections_.AddProject(slot, launch.project);
  if (s.ok()) s = AddAttention(slot, index, launch.expanded);
  if (s.ok()) s = gate_.AddTimedSignals(slot, launch.signals);
  slot.EndTimed();
  if (s.ok()) {
    s = pages_.AddTensors(slot, slot.output_moves(), slot.kernels_begun(), slot.kernels_lasted());
  }
  return s.ok() ? gate_.AddSignalsBehindMoves(slot, launch.signals) : s;
}

}  // namespace mla::kernels::hip
