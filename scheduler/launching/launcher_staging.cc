// Launcher: the tensors of a batch where its launch reads and writes them.
#include <cassert>
#include <span>

#include "scheduler/launching/launcher.h"

namespace mla::scheduler {

using kernels::ElementSize;

absl::Status Launcher::StageKv(const Launch& launch, const StreamRequest& request, Staged* staged) {
  if (!request.attend.has_kv) return absl::OkStatus();
  const AttendArgs& args = request.attend;
  const int64_t row =
      request.engine.step->model->spec->geometry.kv_row_dim() * int64_t(ElementSize(args.q_dtype));
  absl::StatusOr<const void*> kv = backend_->StageInput(
      launch.slot, args.kv + request.engine.rows_done * row, request.engine.rows_launched * row);
  if (!kv.ok()) return kv.status();
  staged->kv = static_cast<const std::byte*>(*kv);
  return absl::OkStatus();
}

absl::Status Launcher::StageComparisons(Launch* launch) {
  const std::vector<StreamRequest*>& requests = launch->batch.requests;
  launch->differs.clear();
  int64_t rows = 0;
  for (const StreamRequest* request : requests) {
    if (request->engine.repeat) rows += request->engine.rows_launched;
  }
  if (rows == 0) return absl::OkStatus();
  auto* const host = reinterpret_cast<int32_t*>(launch->compared->bytes().data());
  absl::StatusOr<void*> staged =
      backend_->StageOutput(launch->slot, host, rows * int64_t{sizeof(int32_t)});
  if (!staged.ok()) return staged.status();
  launch->differs.assign(requests.size(), nullptr);
  int64_t row = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!requests[i]->engine.repeat) continue;
    launch->differs[i] = host + row;
    staged_[i].differs = static_cast<int32_t*>(*staged) + row;
    row += requests[i]->engine.rows_launched;
  }
  return absl::OkStatus();
}

absl::Status Launcher::StageQueryAndOutput(const Launch& launch, const StreamRequest& request,
                                           Staged* staged) {
  const AttendArgs& args = request.attend;
  const ModelSpec& spec = *request.engine.step->model->spec;
  const int64_t first = request.engine.rows_done;
  const int64_t rows = request.engine.rows_launched;
  const int64_t q_row =
      int64_t{args.num_heads} * spec.q_dim(args.profile) * int64_t(ElementSize(args.q_dtype));
  absl::StatusOr<const void*> q =
      args.q_fragments.empty()
          ? backend_->StageInput(launch.slot, args.q + first * q_row, rows * q_row)
          : backend_->StageInputFragments(
                launch.slot,
                {args.q_fragments, args.q_fragments_offset + first * q_row, rows * q_row});
  if (!q.ok()) return q.status();
  staged->q = static_cast<const std::byte*>(*q);
  const int64_t o_row =
      int64_t{args.num_heads} * spec.o_dim(args.profile) * int64_t(ElementSize(args.o_dtype));
  absl::StatusOr<void*> o =
      backend_->StageOutput(launch.slot, args.o + first * o_row, rows * o_row);
  if (!o.ok()) return o.status();
  staged->o = static_cast<std::byte*>(*o);
  return absl::OkStatus();
}

absl::Status Launcher::StageRequest(Launch* launch, size_t index, Staged* staged) {
  const StreamRequest& request = *launch->batch.requests[index];
  if (absl::Status s = StageQueryAndOutput(*launch, request, staged); !s.ok()) return s;
  const AttendArgs& args = request.attend;
  Launch::LseRows& seen = launch->lse[index];
  seen.row_stride = args.num_heads;
  if (!args.want_lse) {
    staged->lse = TakeUnwantedLse(launch, request.engine.rows_launched, args.num_heads, &seen.at);
    return absl::OkStatus();
  }
  float* const own = args.lse + int64_t{request.engine.rows_done} * args.num_heads;
  absl::StatusOr<void*> lse = backend_->StageOutput(
      launch->slot, own,
      int64_t{request.engine.rows_launched} * args.num_heads * int64_t{sizeof(float)});
  if (!lse.ok()) return lse.status();
  staged->lse = static_cast<float*>(*lse);
  seen.at = own;
  return absl::OkStatus();
}

absl::Status Launcher::StageUnwantedLse(Launch* launch) {
  const Batch& batch = launch->batch;
  int64_t count = 0;
  for (const StreamRequest* request : batch.requests) {
    const AttendArgs& args = request->attend;
    if (args.profile == Profile::kAppendOnly || args.want_lse) continue;
    count += int64_t{request->engine.rows_launched} * args.num_heads;
  }
  for (const FusedSlices& slices : batch.slices) {
    // Beside slices of which some are wanted, the others are staged with them.
    if (Unwanted(*launch, slices)) continue;
    for (int32_t i = 0; i < slices.count; ++i) {
      const StreamRequest& request = *batch.requests[slices.first + i];
      if (request.attend.want_lse) continue;
      count -= int64_t{request.engine.rows_launched} * request.attend.num_heads;
    }
  }
  launch->unwanted_left = limits_.launch_packed_rows;
  launch->unwanted_used = 0;
  launch->unwanted_staged = nullptr;
  if (count == 0) return absl::OkStatus();
  absl::StatusOr<void*> lse = backend_->StageOutput(
      launch->slot, launch->unwanted_lse->bytes().data(), count * int64_t{sizeof(float)});
  if (!lse.ok()) return lse.status();
  launch->unwanted_staged = static_cast<float*>(*lse);
  return absl::OkStatus();
}

bool Launcher::Unwanted(const Launch& launch, const FusedSlices& slices) {
  bool wanted = false;
  for (int32_t i = 0; i < slices.count; ++i) {
    wanted |= launch.batch.requests[slices.first + i]->attend.want_lse;
  }
  return !wanted;
}

float* Launcher::TakeUnwantedLse(Launch* launch, int64_t rows, int64_t heads, const float** host) {
  const int64_t first = launch->unwanted_used;
  launch->unwanted_used += rows * heads;
  *host = reinterpret_cast<const float*>(launch->unwanted_lse->bytes().data()) + first;
  return launch->unwanted_staged + first;
}

absl::Status Launcher::StageAbsorbedSlices(const Launch& launch, const FusedSlices& slices,
                                           Staged* staged) {
  in_parts_.clear();
  out_parts_.clear();
  int32_t rows = 0;
  for (int32_t i = 0; i < slices.count; ++i) {
    const StreamRequest& request = *launch.batch.requests[slices.first + i];
    const AttendArgs& args = request.attend;
    const ModelSpec& spec = *request.engine.step->model->spec;
    const int64_t q_row =
        int64_t{args.num_heads} * spec.q_dim(args.profile) * int64_t(ElementSize(args.q_dtype));
    const int64_t o_row =
        int64_t{args.num_heads} * spec.o_dim(args.profile) * int64_t(ElementSize(args.o_dtype));
    assert(args.q_fragments.empty());  // slices lie whole beside their siblings
    in_parts_.push_back({args.q + request.engine.rows_done * q_row, q_row});
    out_parts_.push_back({args.o + request.engine.rows_done * o_row, o_row});
    rows = request.engine.rows_launched;
  }
  absl::StatusOr<const void*> q = backend_->StageInputParts(launch.slot, rows, in_parts_);
  if (!q.ok()) return q.status();
  staged->q = static_cast<const std::byte*>(*q);
  absl::StatusOr<void*> o = backend_->StageOutputParts(launch.slot, rows, out_parts_);
  if (!o.ok()) return o.status();
  staged->o = static_cast<std::byte*>(*o);
  return absl::OkStatus();
}

absl::Status Launcher::StageExpandedSlices(Launch* launch, const FusedSlices& slices,
                                           Staged* staged) {
  const kernels::Geometry& g = launch->batch.key.geometry;
  const kernels::BackendInfo& info = backend_->Info();
  const int64_t q_size = ElementSize(
      info.absorbed_q_dtype(launch->batch.key.q_dtype, launch->batch.key.split_queries));
  const int64_t o_size = ElementSize(info.latent_o_dtype);
  const int64_t rows = launch->batch.requests[slices.first]->engine.rows_launched;
  absl::StatusOr<void*> q =
      backend_->SlotWorkspace(launch->slot, rows * slices.heads * g.absorbed_q_dim() * q_size);
  if (!q.ok()) return q.status();
  absl::StatusOr<void*> o =
      backend_->SlotWorkspace(launch->slot, rows * slices.heads * g.kv_lora_rank * o_size);
  if (!o.ok()) return o.status();
  staged->q = static_cast<const std::byte*>(*q);
  staged->o = static_cast<std::byte*>(*o);
  int64_t head = 0;  // of the slice, side by side with the others
  for (int32_t i = 0; i < slices.count; ++i) {
    const StreamRequest& request = *launch->batch.requests[slices.first + i];
    const AttendArgs& args = request.attend;
    const Model& model = *request.engine.step->model;
    Staged own;
    // Without its log-sum-exps: StageLse has staged those of all slices, and what no kernel writes
    // must not be copied over them.
    if (absl::Status s = StageQueryAndOutput(*launch, request, &own); !s.ok()) return s;
    kernels::ProjectionRecord absorb;
    absorb.in = own.q;
    absorb.in_head_stride = model.spec->q_dim(args.profile);
    absorb.in_row_stride = absorb.in_head_stride * args.num_heads;
    absorb.out = static_cast<std::byte*>(*q) + head * g.absorbed_q_dim() * q_size;
    absorb.out_head_stride = g.absorbed_q_dim();
    absorb.out_row_stride = absorb.out_head_stride * slices.heads;
    absorb.rows = static_cast<int32_t>(rows);
    absorb.num_heads = args.num_heads;
    absorb.head_offset = args.head_offset;
    absorb.weights_slot = models_->weights_slot(model, args.layer);
    kernels::ProjectionRecord project = absorb;
    project.in = static_cast<const std::byte*>(*o) + head * g.kv_lora_rank * o_size;
    project.in_head_stride = g.kv_lora_rank;
    project.in_row_stride = project.in_head_stride * slices.heads;
    project.out = own.o;
    project.out_head_stride = model.spec->o_dim(args.profile);
    project.out_row_stride = project.out_head_stride * args.num_heads;
    launch->absorbs.push_back(absorb);
    launch->projects.push_back(project);
    head += args.num_heads;
  }
  return absl::OkStatus();
}

absl::Status Launcher::StageLse(Launch* launch, const FusedSlices& slices, Staged* staged) {
  const bool wanted = !Unwanted(*launch, slices);
  const int64_t rows = launch->batch.requests[slices.first]->engine.rows_launched;
  const float* side_by_side = nullptr;  // of all slices, where no client wants them
  if (!wanted) staged->lse = TakeUnwantedLse(launch, rows, slices.heads, &side_by_side);
  lse_parts_.clear();
  for (int32_t i = 0; i < slices.count; ++i) {
    const int32_t index = slices.first + i;
    const StreamRequest& request = *launch->batch.requests[index];
    const AttendArgs& args = request.attend;
    Launch::LseRows& seen = launch->lse[index];
    seen.at = side_by_side;
    seen.row_stride = slices.heads;
    if (!wanted) {
      side_by_side += args.num_heads;
      continue;
    }
    seen.at = args.lse + int64_t{request.engine.rows_done} * args.num_heads;
    if (!args.want_lse) {
      launch->unwanted_left -= rows * args.num_heads;
      seen.at = reinterpret_cast<const float*>(launch->unwanted_lse->bytes().data()) +
                launch->unwanted_left;
    }
    seen.row_stride = args.num_heads;
    lse_parts_.push_back({const_cast<float*>(seen.at), args.num_heads * int64_t{sizeof(float)}});
  }
  if (!wanted) return absl::OkStatus();
  absl::StatusOr<void*> lse =
      backend_->StageOutputParts(launch->slot, static_cast<int32_t>(rows), lse_parts_);
  if (!lse.ok()) return lse.status();
  staged->lse = static_cast<float*>(*lse);
  return absl::OkStatus();
}

absl::Status Launcher::StageSlices(Launch* launch, const FusedSlices& slices, Staged* staged) {
  if (absl::Status s = StageLse(launch, slices, staged); !s.ok()) return s;
  return launch->batch.key.profile == Profile::kAbsorbed
             ? StageAbsorbedSlices(*launch, slices, staged)
             : StageExpandedSlices(launch, slices, staged);
}

absl::Status Launcher::StageRun(Launch* launch, const RowRun& run) {
  in_parts_.clear();
  out_parts_.clear();
  lse_parts_.clear();
  const Batch& batch = launch->batch;
  const auto members = std::span(batch.run_segments).subspan(run.first, run.count);
  Staged& staged = staged_[batch.segments[members[0]].request->engine.batch_index];
  for (const int32_t member : members) {
    const StreamRequest& request = *batch.segments[member].request;
    const AttendArgs& args = request.attend;
    const ModelSpec& spec = *request.engine.step->model->spec;
    assert(args.q_fragments.empty());  // only backends with unified memory read fragments
    const int64_t q_row =
        int64_t{args.num_heads} * spec.q_dim(args.profile) * int64_t(ElementSize(args.q_dtype));
    const int64_t o_row =
        int64_t{args.num_heads} * spec.o_dim(args.profile) * int64_t(ElementSize(args.o_dtype));
    const int64_t first = request.engine.rows_done;
    const int64_t rows = request.engine.rows_launched;
    in_parts_.push_back({args.q + first * q_row, rows * q_row});
    out_parts_.push_back({args.o + first * o_row, rows * o_row});
    Launch::LseRows& seen = launch->lse[request.engine.batch_index];
    seen.row_stride = args.num_heads;
    if (args.want_lse) {
      float* const own = args.lse + first * args.num_heads;
      lse_parts_.push_back({own, rows * args.num_heads * int64_t{sizeof(float)}});
      seen.at = own;
    } else {
      // These lie one after the other.
      float* const at = TakeUnwantedLse(launch, rows, args.num_heads, &seen.at);
      if (member == members[0]) staged.lse = at;
    }
  }
  // A matrix of one row: its parts lie one after the other.
  absl::StatusOr<const void*> q = backend_->StageInputParts(launch->slot, 1, in_parts_);
  if (!q.ok()) return q.status();
  absl::StatusOr<void*> o = backend_->StageOutputParts(launch->slot, 1, out_parts_);
  if (!o.ok()) return o.status();
  staged.q = static_cast<const std::byte*>(*q);
  staged.o = static_cast<std::byte*>(*o);
  if (lse_parts_.empty()) return absl::OkStatus();
  absl::StatusOr<void*> lse = backend_->StageOutputParts(launch->slot, 1, lse_parts_);
  if (!lse.ok()) return lse.status();
  staged.lse = static_cast<float*>(*lse);
  return absl::OkStatus();
}

absl::Status Launcher::StageBatch(Launch* launch) {
  const Batch& batch = launch->batch;
  staged_.assign(batch.requests.size(), Staged());
  fused_.assign(batch.slices.size(), Staged());
  in_run_.assign(batch.requests.size(), false);
  launch->lse.assign(batch.requests.size(), Launch::LseRows());
  if (absl::Status s = StageUnwantedLse(launch); !s.ok()) return s;
  if (absl::Status s = StageComparisons(launch); !s.ok()) return s;
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    if (absl::Status s = StageKv(*launch, *batch.requests[i], &staged_[i]); !s.ok()) return s;
  }
  for (size_t i = 0; i < batch.slices.size(); ++i) {
    if (absl::Status s = StageSlices(launch, batch.slices[i], &fused_[i]); !s.ok()) return s;
  }
  for (const RowRun& run : batch.runs) {
    if (absl::Status s = StageRun(launch, run); !s.ok()) return s;
    for (int32_t i = 0; i < run.count; ++i) {
      const Segment& member = batch.segments[batch.run_segments[run.first + i]];
      in_run_[member.request->engine.batch_index] = true;
    }
  }
  size_t fused = 0;  // next of batch.slices, which are in the order of their requests
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    if (fused < batch.slices.size() && static_cast<int32_t>(i) == batch.slices[fused].first) {
      i += static_cast<size_t>(batch.slices[fused++].count) - 1;
      continue;
    }
    if (batch.requests[i]->attend.profile == Profile::kAppendOnly || in_run_[i]) continue;
    if (absl::Status s = StageRequest(launch, i, &staged_[i]); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace mla::scheduler
