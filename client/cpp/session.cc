#include "client/cpp/session.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/streams/step_stream.h"
#include "proto/wire/fp8/fp8_tensor.h"

namespace mla::client {

absl::StatusOr<v1::ModelSpec> Session::FindModel(const std::string& id) {
  {
    const MutexLock lock(models_mutex_);
    if (const auto known = models_.find(id); known != models_.end()) return known->second;
  }
  // This call runs without the lock, so that steps of known models need not wait for it.
  MLA_ASSIGN_OR_RETURN(const auto list, client_->ListModels());
  const MutexLock lock(models_mutex_);
  for (const v1::ModelInfo& info : list.models()) {
    models_.insert_or_assign(info.model().model_id(), info.model());
  }
  const auto model = models_.find(id);
  if (model == models_.end()) return absl::NotFoundError("no such model: " + id);
  return model->second;
}

absl::StatusOr<std::unique_ptr<Step>> Session::Begin(const std::string& model_id,
                                                     const std::vector<StepRows>& rows,
                                                     const BeginOptions& options) {
  MLA_ASSIGN_OR_RETURN(v1::ModelSpec model, FindModel(model_id));
  std::unique_ptr<Step> step(new Step());
  step->stream_ = stream_;
  step->model_ = std::move(model);
  step->rows_ = rows;
  step->id_ = options.step_id != 0 ? options.step_id : client_->NewStepId();
  v1::AttendStreamRequest request;
  v1::BeginStep* begin = request.mutable_begin_step();
  begin->set_step_id(step->id_);
  begin->set_model_id(model_id);
  begin->set_participants(options.participants);
  begin->set_lease_ms(options.lease_ms);
  begin->set_traceparent(options.traceparent.empty() ? client_->Traceparent()
                                                     : options.traceparent);
  for (const StepRows& one : rows) {
    v1::StepSequence* sequence = begin->add_sequences();
    sequence->set_sequence_id(one.sequence->id());
    sequence->set_epoch(one.sequence->epoch());
    sequence->set_start_position(one.sequence->length());
    sequence->set_rows(one.rows);
  }
  uint64_t total = 0;
  for (const StepRows& one : rows) total += one.rows;
  const uint64_t rotated = total * step->model_.geometry().rope_dim();
  if (!options.rotations.empty() && options.rotations.size() != rotated) {
    return absl::InvalidArgumentError(absl::StrCat("rotations: got ", options.rotations.size(),
                                                   " numbers, must be ", rotated,
                                                   ", rope_dim for each row"));
  }
  begin->set_rotations(!options.rotations.empty());
  const auto pending = std::make_shared<PendingReply>();
  if (options.pipelined) {
    stream_->Hold();
    pending->kv.assign(std::as_bytes(options.rotations).begin(),
                       std::as_bytes(options.rotations).end());
    stream_->Send(&request, {.kv = pending->kv, .q = {}, .lists = {}}, pending);
    step->begun_ = pending;
    step->total_rows_ = static_cast<uint32_t>(total);
    step->open_ = true;
    return step;
  }
  stream_->Send(&request, {.kv = std::as_bytes(options.rotations), .q = {}, .lists = {}}, pending);
  MLA_RETURN_IF_ERROR(stream_->Wait(pending.get()));
  step->open_ = true;
  const v1::BeginStepReply& begun = pending->reply.begin_step();
  if (begun.total_rows() != total) {
    return absl::DataLossError(
        absl::StrCat("the step has ", total, " rows, and ", begun.total_rows(), " have come"));
  }
  step->total_rows_ = begun.total_rows();
  step->joined_ = begun.joined();
  return step;
}

std::string_view Session::transport() const { return stream_->transport(); }

std::span<std::byte> Session::Allocate(uint64_t bytes) { return stream_->Allocate(bytes); }

void Session::Free(std::span<std::byte> block) { stream_->Free(block); }

std::span<std::byte> Session::AllocateOnDevice(uint64_t bytes) {
  DeviceRegion* const device = stream_->device();
  return device == nullptr ? std::span<std::byte>() : device->Allocate(bytes);
}

void Session::FreeOnDevice(std::span<std::byte> block) {
  if (DeviceRegion* const device = stream_->device(); device != nullptr) device->Free(block);
}

absl::Status Session::DeviceStatus() const { return stream_->device_status(); }

std::string Session::DeviceWarning() const {
  const DeviceRegion* const device = stream_->device();
  return device == nullptr ? "" : device->warning();
}

absl::Status Session::Close() { return stream_->Close(); }

void Session::Cancel(const absl::Status& why) { stream_->Cancel(why); }

Session::~Session() {
  if (stream_ != nullptr) Close().IgnoreError();
}

}  // namespace mla::client
