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

// Returns the bytes of device memory for one plan.
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

// Returns the bytes of all copies together, both in device memory and in pinned memory.
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
      row_products_(device),
      absorbed_(device, index_.scratch()),
      expanded_(device) {}

absl::StatusOr<std::unique_ptr<LaunchBuilder>> LaunchBuilder::Create(const DeviceState& device,
                                                                     const BackendLimits& limits,
                                                                     Stream stream) {
  std::unique_ptr<LaunchBuilder> builder(new LaunchBuilder(device, limits));
  MLA_RETURN_IF_ERROR(builder->index_.Allocate(limits, stream));
  MLA_RETURN_IF_ERROR(builder->row_products_.Allocate(limits));
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
         RowWork::MetadataBytes(l) + IndexWork::MetadataBytes(l, info) + kSlack;
}

int64_t LaunchBuilder::HostBytes(const DeviceState& device, const BackendLimits& l) {
  return PlanBytesOnEither(device, l) + StreamWork::HostBytes(l);
}

int64_t LaunchBuilder::WorkspaceBytes(const DeviceState& device, const BackendLimits& l) {
  return IndexWork::WorkspaceBytes(l, device.info) + StreamWork::WorkspaceBytes(l) +
         RowWork::WorkspaceBytes(l) + PlanBytesOnEither(device, l);
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

absl::StatusOr<LaunchForm> LaunchBuilder::Choose(LaunchRecording& recording, int32_t index,
                                                 const Launch& launch) {
  for (const AttentionParams* params : {&launch.absorbed, &launch.expanded}) {
    if (!params->segments.empty()) MLA_RETURN_IF_ERROR(CheckAttention(*params));
  }
  LaunchForm form{.tensors = {launch.inputs, launch.outputs}};
  const AttentionParams& params = launch.absorbed;
  if (params.segments.empty() || params.plan.work_info.empty() ||
      params.desc.form == AttentionForm::kExpanded) {
    return form;
  }
  if (const auto tensors = streams_->Take(recording, index, launch)) {
    form.absorbed = AbsorbedForm::kStreamed;
    form.tensors = *tensors;
  } else if (const auto split = absorbed_.SplitOf(params)) {
    form.absorbed = AbsorbedForm::kSplit;
    form.split = *split;
  }
  return form;
}

absl::Status LaunchBuilder::AddAttention(LaunchRecording& recording, int32_t index,
                                         const AttentionParams& params, const LaunchForm& form) {
  if (params.segments.empty() || params.plan.work_info.empty()) return absl::OkStatus();
  const bool expanded = params.desc.form == AttentionForm::kExpanded;
  if (expanded) MLA_RETURN_IF_ERROR(expanded_.Check(params));
  if (form.absorbed == AbsorbedForm::kSplit) {
    return absorbed_.AddSplit(recording, params, form.split);
  }
  const int64_t uploads = plans_->uploads();
  MLA_ASSIGN_OR_RETURN(const DevicePlan plan,
                       plans_->Get(params.plan, index, recording.input_stream()));
  if (plans_->uploads() != uploads) recording.NoteInput();
  if (form.absorbed == AbsorbedForm::kStreamed) {
    return streams_->Add(recording, index, params, plan);
  }
  return expanded ? expanded_.Add(recording, params, plan) : absorbed_.Add(recording, params, plan);
}

absl::Status LaunchBuilder::Build(LaunchRecording& recording, int32_t index, const Launch& launch,
                                  const LaunchForm& form) {
  const bool streamed = form.absorbed == AbsorbedForm::kStreamed;
  if (streamed) streams_->AddArrivals(recording, index);
  absl::Status s =
      pages_.AddTensors(recording, recording.input_moves(), recording.kernels_begun(), nullptr);
  recording.BeginTimed();
  if (s.ok()) s = gate_.AddGate(recording, launch);
  if (s.ok()) s = CheckPageTransfers("page_writes", launch.page_writes, limits_);
  if (s.ok()) s = CheckPageTransfers("page_reads", launch.page_reads, limits_);
  if (s.ok()) s = pages_.AddDigests(recording, launch);
  if (s.ok()) s = pages_.AddPages(recording, launch.pages);
  if (s.ok()) s = pages_.AddTables(recording, launch);
  // Without selects and queries, absorb follows append. Its blocks may then read their weights
  // while the gate waits: the gate waits for work on another device, which needs no unit of this
  // one.
  const bool early = recording.gate_is_far() && launch.selects.empty() &&
                     launch.queries.records.empty() && projections_.StartsEarly(launch.absorb);
  const bool by_attention = streamed && streams_->Appends(index);
  if (s.ok() && !by_attention) s = pages_.AddAppends(recording, launch.appends, early);
  if (s.ok()) s = index_.Add(recording, launch.selects);
  if (s.ok()) s = row_products_.Add(recording, launch.queries, ProjectedPart::kQueries);
  if (s.ok()) s = projections_.AddAbsorb(recording, launch.absorb);
  if (s.ok()) s = AddAttention(recording, index, launch.absorbed, form);
  if (s.ok()) s = projections_.AddProject(recording, launch.project);
  if (s.ok()) s = AddAttention(recording, index, launch.expanded, {});
  if (s.ok()) s = row_products_.Add(recording, launch.hiddens, ProjectedPart::kOutputs);
  if (s.ok()) s = gate_.AddTimedSignals(recording, launch.signals);
  recording.EndTimed();
  if (s.ok()) {
    s = pages_.AddTensors(recording, recording.output_moves(), recording.kernels_begun(),
                          recording.kernels_lasted());
  }
  return s.ok() ? gate_.AddSignalsBehindMoves(recording, launch.signals) : s;
}

}  // namespace mla::kernels::hip
