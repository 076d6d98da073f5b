#include "server/control/incoming_weights.h"

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/control/weights_upload.h"
#include "server/hand_over/take_over.h"

namespace mla::server {
namespace {

// Feeds all messages to an upload, and ends it.
absl::Status Feed(WeightsUpload& upload, const WeightsSource& source,
                  v1::UploadWeightsReply* reply) {
  while (true) {
    MLA_ASSIGN_OR_RETURN(const v1::UploadWeightsRequest* const message, source());
    if (message == nullptr) return upload.Finish(reply);
    MLA_RETURN_IF_ERROR(upload.Add(*message));
  }
}

}  // namespace

absl::Status IncomingWeights::CheckHeader(const Header& header) {
  const auto conflict = [](const char* field, const char* with) {
    return RefuseField(field, "a value", absl::StrCat("nothing ", with), "conflict");
  };
  const std::pair<const char*, bool> of_model[] = {
      {"header.model", header.has_model()},
      {"header.kv_scales", header.kv_scales_size() > 0},
      {"header.sinks", header.sinks_size() > 0}};
  for (const auto& [field, there] : of_model) {
    if (there && header.tenant().empty()) return conflict(field, "without header.tenant");
    if (there && header.is_part()) return conflict(field, "in a part of a transfer");
  }
  if (header.tenant().empty() && header.attempt() != 0) {
    return conflict("header.attempt", "without header.tenant");
  }
  if (header.is_part() && header.attempt() == 0) {
    return RefuseField("header.attempt", "0", "the attempt of the transfer that this is a part of",
                       "missing");
  }
  return absl::OkStatus();
}

absl::Status IncomingWeights::Take(const std::string& caller, const Header& header,
                                   const WeightsSource& source,
                                   const std::function<void()>& accepted,
                                   v1::UploadWeightsReply* reply) {
  MLA_RETURN_IF_ERROR(CheckHeader(header));
  if (header.is_part()) return TakePart(caller, header, source, accepted, reply);
  if (!header.tenant().empty()) return TakeOver(caller, header, source, accepted, reply);
  return TakeTransfer(caller, caller, header, source, accepted, reply);
}

absl::Status IncomingWeights::TakeOver(const std::string& caller, const Header& header,
                                       const WeightsSource& source,
                                       const std::function<void()>& accepted,
                                       v1::UploadWeightsReply* reply) {
  MLA_ASSIGN_OR_RETURN(const WeightsTarget target, RegisterForWeights(engine_, header));
  if (target.complete) {
    reply->set_complete(true);
    return absl::OkStatus();
  }
  const absl::Status status =
      TakeTransfer(caller, header.tenant(), header, source, accepted, reply);
  if (!status.ok() && target.registered) engine_->WithdrawModel(header.tenant(), header.model_id());
  return status;
}

absl::Status IncomingWeights::TakeTransfer(const std::string& caller, const std::string& tenant,
                                           const Header& header, const WeightsSource& source,
                                           const std::function<void()>& accepted,
                                           v1::UploadWeightsReply* reply) {
  const auto model = engine_->FindModel(tenant, header.model_id());
  if (model == nullptr) {
    return RefuseField("header.model_id", header.model_id(), "a registered model of this tenant",
                       "model_not_found", absl::StatusCode::kNotFound);
  }
  const bool whole = !header.tenant().empty();
  const auto transfer = std::make_shared<WeightsTransfer>(engine_, tenant, model, whole);
  const auto key = std::pair(tenant, header.model_id());
  {
    const MutexLock lock(mutex_);
    if (!transfers_.try_emplace(key, UnderWay{caller, header.attempt(), transfer}).second) {
      return MakeError(absl::StatusCode::kAborted,
                       "header.model_id: another upload of this model is under way",
                       {.field = "header.model_id",
                        .got = header.model_id(),
                        .limit = "a model without an upload under way",
                        .reason = "upload_under_way",
                        .retry_after_ms = 1000});
    }
  }
  const absl::Cleanup forget = [&] {
    const MutexLock lock(mutex_);
    transfers_.erase(key);
  };
  const DigestKind digest = header.attempt() == 0 ? DigestKind::kSha256 : DigestKind::kXxh3;
  // Ends before the transfer is forgotten: the next one finds no heads of this one.
  WeightsUpload upload(transfer, /*is_part=*/false, digest, chunk_bytes_);
  accepted();
  MLA_RETURN_IF_ERROR(Feed(upload, source, reply));
  if (!whole || reply->complete()) return absl::OkStatus();
  return RefuseField("header.model_id", header.model_id(),
                     "a model that stays registered during the transfer", "weights_missing",
                     absl::StatusCode::kFailedPrecondition);
}

absl::Status IncomingWeights::TakePart(const std::string& caller, const Header& header,
                                       const WeightsSource& source,
                                       const std::function<void()>& accepted,
                                       v1::UploadWeightsReply* reply) {
  std::shared_ptr<WeightsTransfer> transfer;
  {
    const MutexLock lock(mutex_);
    const auto entry = transfers_.find(std::pair(header.tenant(), header.model_id()));
    if (entry != transfers_.end() && entry->second.attempt == header.attempt() &&
        entry->second.caller == caller) {
      transfer = entry->second.transfer;
    }
  }
  if (transfer == nullptr) {
    return RefuseField("header.attempt", absl::StrCat(header.attempt()),
                       "the attempt of a transfer that is under way", "transfer_ended",
                       absl::StatusCode::kFailedPrecondition);
  }
  MLA_RETURN_IF_ERROR(transfer->BeginPart());
  WeightsUpload upload(transfer, /*is_part=*/true, DigestKind::kXxh3, chunk_bytes_);
  accepted();
  return Feed(upload, source, reply);
}

}  // namespace mla::server
