#include "scheduler/launching/tensor_stager.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <span>

#include "base/status_macros.h"

namespace mla::scheduler {

using kernels::ElementSize;

namespace {

// Returns true if none of the slices' clients wants log-sum-exps.
bool Unwanted(const Batch& batch, const FusedSlices& slices) {
  bool wanted = false;
  for (int32_t i = 0; i < slices.count; ++i) {
    wanted |= WantsLseOnHost(batch.requests[slices.first + i]->attend);
  }
  return !wanted;
}

// Returns the number of compared rows of a repeat: its KV rows, then its index keys or entries if
// the model has them.
int64_t ComparedRows(const StreamRequest& request) {
  const ModelSpec& spec = *request.engine.step->model->spec;
  const int64_t planes = spec.indexer.heads > 0 || spec.windowed() ? 2 : 1;
  return planes * request.engine.rows_launched;
}

// Takes room in unwanted_lse for `rows` rows of `heads` heads; sets `*host` to its host address.
float* TakeUnwantedLse(BatchLaunch* launch, int64_t rows, int64_t heads, const float** host) {
  const int64_t first = launch->unwanted_used;
  launch->unwanted_used += rows * heads;
  *host = reinterpret_cast<const float*>(launch->unwanted_lse->bytes().data()) + first;
  return launch->unwanted_staged + first;
}

// Has the log-sum-exps of a request copied to its client's device memory, if it wants them there:
// `from` is the launch's address of the first row; rows are `stride` floats apart.
void CopyLse(BatchLaunch* launch, const StreamRequest& request, const float* from, int64_t stride) {
  const AttendArgs& args = request.attend;
  if (!args.want_lse || !args.on_device) return;
  constexpr int64_t kSize = sizeof(float);
  launch->layout.CopyToShared(args.lse + int64_t{request.engine.rows_done} * args.num_heads, from,
                              args.num_heads * kSize, request.engine.rows_launched, stride * kSize);
}

// Returns the bytes of all outputs in host memory, including log-sum-exps. If log-sum-exps are
// copied on the device, outputs lie in device memory and the result is the largest number.
int64_t OutputBytes(const Batch& batch) {
  int64_t bytes = 0;
  for (const StreamRequest* request : batch.requests) {
    const AttendArgs& args = request->attend;
    if (args.profile == Profile::kAppendOnly) continue;
    if (args.on_device && args.want_lse) return std::numeric_limits<int64_t>::max();
    const ModelSpec& spec = *request->engine.step->model->spec;
    const int64_t o_row = args.on_device ? 0 : spec.o_row_dim(args.profile, args.num_heads);
    bytes += request->engine.rows_launched *
             (o_row * int64_t(ElementSize(args.o_dtype)) + args.num_heads * int64_t{sizeof(float)});
  }
  return bytes;
}

}  // namespace

TensorStager::TensorStager(const Limits& limits, const kernels::BackendInfo& info,
                           const ModelTable* models)
    : launch_packed_rows_(limits.launch_packed_rows), info_(info), models_(models) {
  requests_.reserve(static_cast<size_t>(limits.launch_requests));
  slices_.reserve(static_cast<size_t>(limits.launch_requests));
  in_run_.reserve(static_cast<size_t>(limits.launch_requests));
  const auto parts = static_cast<size_t>(std::max(limits.max_heads, limits.launch_requests));
  in_parts_.reserve(parts);
  out_parts_.reserve(parts);
  lse_parts_.reserve(parts);
}

absl::Status TensorStager::StageKv(BatchLaunch* launch, const StreamRequest& request,
                                   StagedTensors* staged) {
  if (!request.attend.has_kv) return absl::OkStatus();
  const AttendArgs& args = request.attend;
  const int64_t row =
      request.engine.step->model->spec->sent_row_dim() * int64_t(ElementSize(args.q_dtype));
  const std::byte* const from = args.kv + request.engine.rows_done * row;
  const int64_t bytes = request.engine.rows_launched * row;
  if (args.on_device) {
    staged->kv = static_cast<const std::byte*>(launch->layout.SharedInput(from, bytes));
    return absl::OkStatus();
  }
  MLA_ASSIGN_OR_RETURN(const void* const kv, launch->layout.InputReadOnce(from, bytes));
  staged->kv = static_cast<const std::byte*>(kv);
  const Step& step = *request.engine.step;
  const int32_t first = FirstRow(request), end = first + request.engine.rows_launched;
  const int64_t whole = EntriesOfRows(step, args.layer, first, end);
  if (whole == 0) return absl::OkStatus();
  const int64_t before = EntriesOfRows(step, args.layer, args.row_begin, first);
  MLA_ASSIGN_OR_RETURN(
      const void* const entries,
      launch->layout.InputReadOnce(args.kv + (args.row_count + before) * row, whole * row));
  staged->entries = static_cast<const std::byte*>(entries);
  return absl::OkStatus();
}

absl::Status TensorStager::StageSinks(BatchLaunch* launch, const StreamRequest& request,
                                      StagedTensors* staged) {
  const Model& model = *request.engine.step->model;
  if (model.sinks.empty()) return absl::OkStatus();
  const AttendArgs& args = request.attend;
  const int64_t first = int64_t{args.layer} * model.spec->geometry.num_heads + args.head_offset;
  MLA_ASSIGN_OR_RETURN(
      const void* const sinks,
      launch->layout.Input(reinterpret_cast<const std::byte*>(model.sinks.data() + first),
                           args.num_heads * int64_t{sizeof(float)}));
  staged->sinks = static_cast<const float*>(sinks);
  return absl::OkStatus();
}

absl::Status TensorStager::StageComparisons(BatchLaunch* launch) {
  const std::vector<StreamRequest*>& requests = launch->batch.requests;
  launch->differs.clear();
  int64_t rows = 0;
  for (const StreamRequest* request : requests) {
    if (request->engine.repeat) rows += ComparedRows(*request);
  }
  if (rows == 0) return absl::OkStatus();
  auto* const host = reinterpret_cast<int32_t*>(launch->compared->bytes().data());
  MLA_ASSIGN_OR_RETURN(void* const staged,
                       launch->layout.Output(host, rows * int64_t{sizeof(int32_t)}));
  launch->differs.assign(requests.size(), nullptr);
  int64_t row = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!requests[i]->engine.repeat) continue;
    launch->differs[i] = host + row;
    requests_[i].differs = static_cast<int32_t*>(staged) + row;
    row += ComparedRows(*requests[i]);
  }
  return absl::OkStatus();
}

absl::Status TensorStager::StageQueryAndOutput(BatchLaunch* launch, const StreamRequest& request,
                                               StagedTensors* staged) {
  const AttendArgs& args = request.attend;
  const ModelSpec& spec = *request.engine.step->model->spec;
  const int64_t first = request.engine.rows_done;
  const int64_t rows = request.engine.rows_launched;
  const int64_t q_row =
      spec.q_row_dim(args.profile, args.num_heads) * int64_t(ElementSize(args.q_dtype));
  const int64_t o_row =
      spec.o_row_dim(args.profile, args.num_heads) * int64_t(ElementSize(args.o_dtype));
  if (args.on_device) {
    staged->q = static_cast<const std::byte*>(
        launch->layout.SharedInput(args.q + first * q_row, rows * q_row));
    staged->o =
        static_cast<std::byte*>(launch->layout.SharedOutput(args.o + first * o_row, rows * o_row));
    return absl::OkStatus();
  }
  if (args.q_fragments.empty()) {
    MLA_ASSIGN_OR_RETURN(const void* const q,
                         launch->layout.Input(args.q + first * q_row, rows * q_row));
    staged->q = static_cast<const std::byte*>(q);
  } else {
    staged->q_fragments = {args.q_fragments, args.q_fragments_offset + first * q_row, rows * q_row};
  }
  MLA_ASSIGN_OR_RETURN(void* const o, launch->layout.Output(args.o + first * o_row, rows * o_row));
  staged->o = static_cast<std::byte*>(o);
  return absl::OkStatus();
}

absl::Status TensorStager::StageProjected(BatchLaunch* launch, const StreamRequest& request,
                                          StagedTensors* staged) {
  const AttendArgs& args = request.attend;
  const Step& step = *request.engine.step;
  const ModelSpec& spec = *step.model->spec;
  const int32_t rows = request.engine.rows_launched;
  const int32_t rope = spec.geometry.rope_dim;
  kernels::RowProjectionRecord queries{}, hiddens{};
  queries.rows = hiddens.rows = rows;
  queries.weights_slot = hiddens.weights_slot = models_->weights_slot(*step.model, args.layer);
  queries.in = staged->q;
  queries.in_row_stride = spec.projected.q_lora_rank;
  queries.out_row_stride = int64_t{args.num_heads} * spec.q_dim(args.profile);
  hiddens.out = staged->o;
  hiddens.out_row_stride = spec.projected.hidden_size;
  hiddens.in_row_stride = int64_t{args.num_heads} * spec.o_dim(args.profile);
  if (rope > 0) {
    const int64_t row_bytes = rope * int64_t{sizeof(float)};
    MLA_ASSIGN_OR_RETURN(
        const void* const rotations,
        launch->layout.Input(step.rotations->data.get() + FirstRow(request) * row_bytes,
                             rows * row_bytes));
    queries.rotations = static_cast<const float*>(rotations);
  }
  MLA_ASSIGN_OR_RETURN(void* const q, launch->layout.Workspace(rows * queries.out_row_stride *
                                                               int64_t(ElementSize(args.q_dtype))));
  MLA_ASSIGN_OR_RETURN(void* const o, launch->layout.Workspace(rows * hiddens.in_row_stride *
                                                               int64_t(ElementSize(args.o_dtype))));
  queries.out = q;
  hiddens.in = o;
  staged->q = static_cast<const std::byte*>(q);
  staged->o = static_cast<std::byte*>(o);
  launch->queries.push_back(queries);
  launch->hiddens.push_back(hiddens);
  return absl::OkStatus();
}

absl::Status TensorStager::StageLists(BatchLaunch* launch, const StreamRequest& request,
                                      StagedTensors* staged) {
  const AttendArgs& args = request.attend;
  if (!IsSparse(args)) return absl::OkStatus();
  constexpr int64_t kSize = sizeof(int32_t);
  const int64_t rows = request.engine.rows_launched;
  const int32_t* const begin = args.list_begin + request.engine.rows_done;
  MLA_ASSIGN_OR_RETURN(const void* const begins, launch->layout.Input(begin, (rows + 1) * kSize));
  staged->list_begin = static_cast<const int32_t*>(begins);
  if (Selects(args)) return StageSelection(launch, request, staged);
  if (begin[rows] == begin[0]) return absl::OkStatus();
  MLA_ASSIGN_OR_RETURN(
      const void* const list,
      launch->layout.Input(args.list + begin[0], (begin[rows] - begin[0]) * kSize));
  staged->list = static_cast<const int32_t*>(list);
  return absl::OkStatus();
}

absl::Status TensorStager::StageSelection(BatchLaunch* launch, const StreamRequest& request,
                                          StagedTensors* staged) {
  constexpr int64_t kSize = sizeof(int32_t);
  const AttendArgs& args = request.attend;
  const ModelSpec& spec = *request.engine.step->model->spec;
  const int64_t first = request.engine.rows_done;
  const int64_t rows = request.engine.rows_launched;
  const int64_t row_bytes = spec.indexer.input_bytes(args.q_dtype);
  MLA_ASSIGN_OR_RETURN(
      const void* const inputs,
      launch->layout.Input(args.index_inputs + first * row_bytes, rows * row_bytes));
  staged->index_inputs = static_cast<const std::byte*>(inputs);
  const int32_t entries = args.list_begin[first + rows] - args.list_begin[first];
  MLA_ASSIGN_OR_RETURN(void* const list, launch->layout.Workspace(entries * kSize));
  staged->selected = static_cast<int32_t*>(list);
  staged->list = staged->selected;
  if (args.lists_out == nullptr) return absl::OkStatus();
  MLA_ASSIGN_OR_RETURN(
      void* const wanted,
      launch->layout.Output(args.lists_out + first * spec.top_k, rows * spec.top_k * kSize));
  staged->wanted = static_cast<int32_t*>(wanted);
  return absl::OkStatus();
}

absl::Status TensorStager::StageRequest(BatchLaunch* launch, size_t index, StagedTensors* staged) {
  const StreamRequest& request = *launch->batch.requests[index];
  MLA_RETURN_IF_ERROR(StageQueryAndOutput(launch, request, staged));
  if (request.attend.profile == Profile::kProjected) {
    MLA_RETURN_IF_ERROR(StageProjected(launch, request, staged));
  }
  MLA_RETURN_IF_ERROR(StageLists(launch, request, staged));
  MLA_RETURN_IF_ERROR(StageSinks(launch, request, staged));
  const AttendArgs& args = request.attend;
  BatchLaunch::LseRows& seen = launch->lse[index];
  seen.row_stride = args.num_heads;
  if (!WantsLseOnHost(args)) {
    staged->lse = TakeUnwantedLse(launch, request.engine.rows_launched, args.num_heads, &seen.at);
    CopyLse(launch, request, staged->lse, args.num_heads);
    return absl::OkStatus();
  }
  float* const own = args.lse + int64_t{request.engine.rows_done} * args.num_heads;
  MLA_ASSIGN_OR_RETURN(void* const lse,
                       launch->layout.Output(own, int64_t{request.engine.rows_launched} *
                                                      args.num_heads * int64_t{sizeof(float)}));
  staged->lse = static_cast<float*>(lse);
  seen.at = own;
  return absl::OkStatus();
}

absl::Status TensorStager::StageUnwantedLse(BatchLaunch* launch) {
  const Batch& batch = launch->batch;
  int64_t count = 0;
  for (const StreamRequest* request : batch.requests) {
    const AttendArgs& args = request->attend;
    if (args.profile == Profile::kAppendOnly || WantsLseOnHost(args)) continue;
    count += int64_t{request->engine.rows_launched} * args.num_heads;
  }
  for (const FusedSlices& slices : batch.slices) {
    // If some slices of a group are wanted, the unwanted ones are staged with them.
    if (Unwanted(launch->batch, slices)) continue;
    for (int32_t i = 0; i < slices.count; ++i) {
      const StreamRequest& request = *batch.requests[slices.first + i];
      if (WantsLseOnHost(request.attend)) continue;
      count -= int64_t{request.engine.rows_launched} * request.attend.num_heads;
    }
  }
  launch->unwanted_left = launch_packed_rows_;
  launch->unwanted_used = 0;
  launch->unwanted_staged = nullptr;
  if (count == 0) return absl::OkStatus();
  // A client that waits on the device need not wait for values that only the engine looks at.
  const bool chained = std::all_of(batch.requests.begin(), batch.requests.end(),
                                   [](const auto* r) { return r->attend.done.word != nullptr; });
  std::byte* const host = launch->unwanted_lse->bytes().data();
  const int64_t bytes = count * int64_t{sizeof(float)};
  MLA_ASSIGN_OR_RETURN(void* const lse, chained ? launch->layout.PrivateOutput(host, bytes)
                                                : launch->layout.Output(host, bytes));
  launch->unwanted_staged = static_cast<float*>(lse);
  return absl::OkStatus();
}

absl::Status TensorStager::StageAbsorbedSlices(BatchLaunch* launch, const FusedSlices& slices,
                                               StagedTensors* staged) {
  in_parts_.clear();
  out_parts_.clear();
  int32_t rows = 0;
  for (int32_t i = 0; i < slices.count; ++i) {
    const StreamRequest& request = *launch->batch.requests[slices.first + i];
    const AttendArgs& args = request.attend;
    const ModelSpec& spec = *request.engine.step->model->spec;
    const int64_t q_row =
        int64_t{args.num_heads} * spec.q_dim(args.profile) * int64_t(ElementSize(args.q_dtype));
    const int64_t o_row =
        int64_t{args.num_heads} * spec.o_dim(args.profile) * int64_t(ElementSize(args.o_dtype));
    assert(args.q_fragments.empty());  // slices are never fragmented
    in_parts_.push_back({args.q + request.engine.rows_done * q_row, q_row, args.on_device});
    out_parts_.push_back({args.o + request.engine.rows_done * o_row, o_row, args.on_device});
    rows = request.engine.rows_launched;
  }
  MLA_ASSIGN_OR_RETURN(const void* const q, launch->layout.InputParts(rows, in_parts_));
  staged->q = static_cast<const std::byte*>(q);
  MLA_ASSIGN_OR_RETURN(void* const o, launch->layout.OutputParts(rows, out_parts_));
  staged->o = static_cast<std::byte*>(o);
  return absl::OkStatus();
}

absl::Status TensorStager::StageExpandedSlices(BatchLaunch* launch, const FusedSlices& slices,
                                               StagedTensors* staged) {
  const kernels::Geometry& g = launch->batch.key.geometry;
  const int64_t q_size = ElementSize(
      info_.absorbed_q_dtype(launch->batch.key.q_dtype, launch->batch.key.split_queries));
  const int64_t o_size = ElementSize(info_.latent_o_dtype);
  const int64_t rows = launch->batch.requests[slices.first]->engine.rows_launched;
  MLA_ASSIGN_OR_RETURN(void* const q,
                       launch->layout.Workspace(rows * slices.heads * g.absorbed_q_dim() * q_size));
  MLA_ASSIGN_OR_RETURN(void* const o,
                       launch->layout.Workspace(rows * slices.heads * g.kv_lora_rank * o_size));
  staged->q = static_cast<const std::byte*>(q);
  staged->o = static_cast<std::byte*>(o);
  int64_t head = 0;  // first head of the slice in the fused tensors
  for (int32_t i = 0; i < slices.count; ++i) {
    const StreamRequest& request = *launch->batch.requests[slices.first + i];
    const AttendArgs& args = request.attend;
    const Model& model = *request.engine.step->model;
    StagedTensors slice_tensors;
    // Without its log-sum-exps: StageLse has staged them for all slices, and uninitialized memory
    // must not be copied over them.
    MLA_RETURN_IF_ERROR(StageQueryAndOutput(launch, request, &slice_tensors));
    kernels::ProjectionRecord absorb;
    absorb.in = slice_tensors.q;
    absorb.in_head_stride = model.spec->q_dim(args.profile);
    absorb.in_row_stride = absorb.in_head_stride * args.num_heads;
    absorb.out = static_cast<std::byte*>(q) + head * g.absorbed_q_dim() * q_size;
    absorb.out_head_stride = g.absorbed_q_dim();
    absorb.out_row_stride = absorb.out_head_stride * slices.heads;
    absorb.rows = static_cast<int32_t>(rows);
    absorb.num_heads = args.num_heads;
    absorb.head_offset = args.head_offset;
    absorb.weights_slot = models_->weights_slot(model, args.layer);
    kernels::ProjectionRecord project = absorb;
    project.in = static_cast<const std::byte*>(o) + head * g.kv_lora_rank * o_size;
    project.in_head_stride = g.kv_lora_rank;
    project.in_row_stride = project.in_head_stride * slices.heads;
    project.out = slice_tensors.o;
    project.out_head_stride = model.spec->o_dim(args.profile);
    project.out_row_stride = project.out_head_stride * args.num_heads;
    launch->absorbs.fragments.Add(launch->absorbs.records.size(), slice_tensors.q_fragments);
    launch->absorbs.records.push_back(absorb);
    launch->projects.records.push_back(project);
    head += args.num_heads;
  }
  return absl::OkStatus();
}

absl::Status TensorStager::StageLse(BatchLaunch* launch, const FusedSlices& slices,
                                    StagedTensors* staged) {
  const bool wanted = !Unwanted(launch->batch, slices);
  const int64_t rows = launch->batch.requests[slices.first]->engine.rows_launched;
  const float* side_by_side = nullptr;  // for all slices, if no client wants them
  if (!wanted) staged->lse = TakeUnwantedLse(launch, rows, slices.heads, &side_by_side);
  const float* const first = side_by_side;
  lse_parts_.clear();
  for (int32_t i = 0; i < slices.count; ++i) {
    const int32_t index = slices.first + i;
    const StreamRequest& request = *launch->batch.requests[index];
    const AttendArgs& args = request.attend;
    BatchLaunch::LseRows& seen = launch->lse[index];
    seen.at = side_by_side;
    seen.row_stride = slices.heads;
    if (!wanted) {
      CopyLse(launch, request, staged->lse + (side_by_side - first), slices.heads);
      side_by_side += args.num_heads;
      continue;
    }
    seen.at = args.lse + int64_t{request.engine.rows_done} * args.num_heads;
    if (!WantsLseOnHost(args)) {
      launch->unwanted_left -= rows * args.num_heads;
      seen.at = reinterpret_cast<const float*>(launch->unwanted_lse->bytes().data()) +
                launch->unwanted_left;
    }
    seen.row_stride = args.num_heads;
    lse_parts_.push_back({const_cast<float*>(seen.at), args.num_heads * int64_t{sizeof(float)}});
  }
  if (!wanted) return absl::OkStatus();
  MLA_ASSIGN_OR_RETURN(void* const lse,
                       launch->layout.OutputParts(static_cast<int32_t>(rows), lse_parts_));
  staged->lse = static_cast<float*>(lse);
  int64_t head = 0;
  for (int32_t i = 0; i < slices.count; ++i) {
    const StreamRequest& request = *launch->batch.requests[slices.first + i];
    CopyLse(launch, request, staged->lse + head, slices.heads);
    head += request.attend.num_heads;
  }
  return absl::OkStatus();
}

absl::Status TensorStager::StageSlices(BatchLaunch* launch, const FusedSlices& slices,
                                       StagedTensors* staged) {
  MLA_RETURN_IF_ERROR(StageLse(launch, slices, staged));
  return launch->batch.key.profile == Profile::kAbsorbed
             ? StageAbsorbedSlices(launch, slices, staged)
             : StageExpandedSlices(launch, slices, staged);
}

absl::Status TensorStager::StageRun(BatchLaunch* launch, const RowRun& run) {
  in_parts_.clear();
  out_parts_.clear();
  lse_parts_.clear();
  const Batch& batch = launch->batch;
  const auto members = std::span(batch.run_segments).subspan(run.first, run.count);
  StagedTensors& staged = requests_[batch.segments[members[0]].request->engine.batch_index];
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
    in_parts_.push_back({args.q + first * q_row, rows * q_row, args.on_device});
    out_parts_.push_back({args.o + first * o_row, rows * o_row, args.on_device});
    BatchLaunch::LseRows& seen = launch->lse[request.engine.batch_index];
    seen.row_stride = args.num_heads;
    if (WantsLseOnHost(args)) {
      float* const own = args.lse + first * args.num_heads;
      lse_parts_.push_back({own, rows * args.num_heads * int64_t{sizeof(float)}});
      seen.at = own;
    } else {
      // Rows taken one after another are contiguous.
      float* const at = TakeUnwantedLse(launch, rows, args.num_heads, &seen.at);
      CopyLse(launch, request, at, args.num_heads);
      if (member == members[0]) staged.lse = at;
    }
  }
  // The queries are staged as a matrix of one row, so that its parts follow each other without
  // gaps.
  MLA_ASSIGN_OR_RETURN(const void* const q, launch->layout.InputParts(1, in_parts_));
  MLA_ASSIGN_OR_RETURN(void* const o, launch->layout.OutputParts(1, out_parts_));
  staged.q = static_cast<const std::byte*>(q);
  staged.o = static_cast<std::byte*>(o);
  if (lse_parts_.empty()) return absl::OkStatus();
  MLA_ASSIGN_OR_RETURN(void* const lse, launch->layout.OutputParts(1, lse_parts_));
  staged.lse = static_cast<float*>(lse);
  return absl::OkStatus();
}

absl::Status TensorStager::Stage(BatchLaunch* launch) {
  const Batch& batch = launch->batch;
  launch->layout.ExpectOutputs(OutputBytes(batch));
  launch->queries.clear();
  launch->hiddens.clear();
  requests_.assign(batch.requests.size(), StagedTensors());
  slices_.assign(batch.slices.size(), StagedTensors());
  in_run_.assign(batch.requests.size(), false);
  launch->lse.assign(batch.requests.size(), BatchLaunch::LseRows());
  MLA_RETURN_IF_ERROR(StageUnwantedLse(launch));
  MLA_RETURN_IF_ERROR(StageComparisons(launch));
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    MLA_RETURN_IF_ERROR(StageKv(launch, *batch.requests[i], &requests_[i]));
  }
  for (size_t i = 0; i < batch.slices.size(); ++i) {
    MLA_RETURN_IF_ERROR(StageSlices(launch, batch.slices[i], &slices_[i]));
  }
  for (const RowRun& run : batch.runs) {
    MLA_RETURN_IF_ERROR(StageRun(launch, run));
    for (int32_t i = 0; i < run.count; ++i) {
      const Segment& member = batch.segments[batch.run_segments[run.first + i]];
      in_run_[member.request->engine.batch_index] = true;
    }
  }
  absl::Status staged = StageOthers(launch);
  // Rows of all clients that need the same weights are computed together.
  const auto by_weights = [](const kernels::RowProjectionRecord& a,
                             const kernels::RowProjectionRecord& b) {
    return a.weights_slot < b.weights_slot;
  };
  std::sort(launch->queries.begin(), launch->queries.end(), by_weights);
  std::sort(launch->hiddens.begin(), launch->hiddens.end(), by_weights);
  return staged;
}

// Stages requests that are in neither slices nor runs.
absl::Status TensorStager::StageOthers(BatchLaunch* launch) {
  const Batch& batch = launch->batch;
  size_t fused = 0;  // index of the next one in batch.slices, which has the order of the requests
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    if (fused < batch.slices.size() && static_cast<int32_t>(i) == batch.slices[fused].first) {
      i += static_cast<size_t>(batch.slices[fused++].count) - 1;
      continue;
    }
    if (batch.requests[i]->attend.profile == Profile::kAppendOnly || in_run_[i]) continue;
    MLA_RETURN_IF_ERROR(StageRequest(launch, i, &requests_[i]));
  }
  return absl::OkStatus();
}

}  // namespace mla::scheduler
