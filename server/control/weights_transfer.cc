#include "server/control/weights_transfer.h"

#include <cstddef>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/weights_chunk.h"

namespace mla::server {
namespace {

// Returns the number of (layer, part, head) of a model.
size_t HeadsOf(const scheduler::ModelSpec& model) {
  const int parts = 1 + (model.projected.present() ? kernels::kProjectedParts : 0);
  return size_t(model.layers) * static_cast<size_t>(parts * model.geometry.num_heads);
}

}  // namespace

WeightsTransfer::WeightsTransfer(scheduler::Engine* engine, std::string tenant,
                                 std::shared_ptr<const scheduler::ModelSpec> model, bool whole)
    : engine_(engine),
      tenant_(std::move(tenant)),
      model_(std::move(model)),
      whole_(whole),
      upload_(engine->NewUpload()) {}

absl::Status WeightsTransfer::CheckOpen() const {
  if (open_ && !part_failed_) return absl::OkStatus();
  return RefuseField("header.attempt", part_failed_ ? "a transfer that has failed" : "an old one",
                     "the attempt of a transfer that is under way", "transfer_ended",
                     absl::StatusCode::kFailedPrecondition);
}

absl::Status WeightsTransfer::Claim(const v1::UploadWeightsRequest::Chunk& chunk) {
  for (uint32_t i = 0; i < chunk.head_count(); ++i) {
    const uint32_t head = chunk.head_begin() + i;
    if (!seen_.insert({chunk.layer(), chunk.part(), head}).second) {
      return RefuseField("chunk.head_begin",
                         absl::StrCat("layer ", chunk.layer(), " head ", head, " again"),
                         "heads not yet sent in this transfer", "repeated");
    }
  }
  return absl::OkStatus();
}

absl::Status WeightsTransfer::Load(const v1::UploadWeightsRequest::Chunk& chunk) {
  {
    const MutexLock lock(mutex_);
    MLA_RETURN_IF_ERROR(CheckOpen());
    MLA_RETURN_IF_ERROR(Claim(chunk));
    ++loading_;
  }
  // Not under the lock: the engine takes one head at a time, and lets launches in between.
  const absl::Status status =
      chunk.part() == v1::WEIGHT_PART_UP ? LoadHeads(chunk) : LoadProjected(chunk);
  const MutexLock lock(mutex_);
  --loading_;
  if (status.ok()) bytes_ += chunk.payload().size();
  changed_.NotifyAll();
  return status;
}

absl::Status WeightsTransfer::LoadHeads(const v1::UploadWeightsRequest::Chunk& chunk) {
  return engine_->LoadWeights(tenant_, model_->id, upload_, static_cast<int32_t>(chunk.layer()),
                              static_cast<int32_t>(chunk.head_begin()),
                              static_cast<int32_t>(chunk.head_count()),
                              std::as_bytes(std::span(chunk.payload())));
}

absl::Status WeightsTransfer::LoadProjected(const v1::UploadWeightsRequest::Chunk& chunk) {
  const auto part = chunk.part() == v1::WEIGHT_PART_QUERIES ? kernels::ProjectedPart::kQueries
                                                            : kernels::ProjectedPart::kOutputs;
  std::vector<std::byte> head;
  absl::Status status;
  for (uint32_t i = 0; i < chunk.head_count() && status.ok(); ++i) {
    ReadProjectedHead(chunk, *model_, static_cast<int32_t>(i), &head);
    status = engine_->LoadProjected(tenant_, model_->id, upload_, part,
                                    static_cast<int32_t>(chunk.layer()),
                                    static_cast<int32_t>(chunk.head_begin() + i), head);
  }
  return status;
}

absl::Status WeightsTransfer::BeginPart() {
  const MutexLock lock(mutex_);
  MLA_RETURN_IF_ERROR(CheckOpen());
  if (begun_ >= kMostWeightParts) {
    return RefuseField("header.is_part", absl::StrCat("part ", begun_ + 1),
                       absl::StrCat("at most ", kMostWeightParts, " parts of a transfer"),
                       "too_many_parts", absl::StatusCode::kResourceExhausted);
  }
  ++begun_;
  ++running_;
  return absl::OkStatus();
}

void WeightsTransfer::EndPart(bool ok) {
  const MutexLock lock(mutex_);
  --running_;
  ended_ += ok ? 1 : 0;
  part_failed_ = part_failed_ || !ok;
}

absl::Status WeightsTransfer::CheckWhole(uint32_t parts) const {
  const auto refuse = [](const char* field, const std::string& got, const std::string& limit,
                         const char* reason) {
    return RefuseField(field, got, limit, reason, absl::StatusCode::kFailedPrecondition);
  };
  if (part_failed_) {
    return refuse("trailer.parts", absl::StrCat(parts, ", of which one has failed"),
                  "parts that have all been answered with OK", "part_failed");
  }
  if (running_ > 0 || ended_ != parts) {
    return refuse(
        "trailer.parts", absl::StrCat(parts),
        absl::StrCat(ended_, ", the parts that have ended, with ", running_, " still under way"),
        "parts_differ");
  }
  const size_t heads = HeadsOf(*model_);
  if (!whole_ || seen_.size() == heads) return absl::OkStatus();
  return refuse("trailer", absl::StrCat("the end after ", seen_.size(), " heads"),
                absl::StrCat(heads, ", those of all layers and parts of the weights"),
                "weights_missing");
}

absl::StatusOr<std::vector<int32_t>> WeightsTransfer::Commit(uint32_t parts) {
  {
    const MutexLock lock(mutex_);
    MLA_RETURN_IF_ERROR(CheckWhole(parts));
    open_ = false;  // no part is under way, and none can begin: nothing is being loaded
  }
  auto missing = engine_->CommitWeights(tenant_, model_->id, upload_);
  if (missing.ok()) return missing;
  return MakeError(missing.status().code(), missing.status().message(),
                   {.field = "header.model_id",
                    .got = model_->id,
                    .limit = "a model that stays registered during the upload",
                    .reason = "model_not_found"});
}

void WeightsTransfer::Close() {
  {
    MutexLock lock(mutex_);
    open_ = false;
    changed_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return loading_ == 0; });
  }
  engine_->DiscardWeights(tenant_, model_->id, upload_);
}

uint64_t WeightsTransfer::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace mla::server
