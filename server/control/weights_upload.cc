#include "server/control/weights_upload.h"

#include <span>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "scheduler/fault.h"
#include "server/grpc/grpc_status.h"
#include "server/grpc/request_validator.h"

namespace mla::server {
namespace {

constexpr size_t kDigestBytes = 32;

}  // namespace

WeightsUpload::WeightsUpload(scheduler::Engine* engine, std::string tenant,
                             std::shared_ptr<const scheduler::ModelSpec> model, int64_t chunk_bytes)
    : engine_(engine),
      tenant_(std::move(tenant)),
      model_(std::move(model)),
      chunk_bytes_(chunk_bytes),
      upload_(engine->NewUpload()),
      digest_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  EVP_DigestInit_ex(digest_.get(), EVP_sha256(), nullptr);
}

WeightsUpload::~WeightsUpload() {
  if (!committed_) engine_->DiscardWeights(tenant_, model_->id, upload_);
}

absl::Status WeightsUpload::Add(const v1::UploadWeightsRequest& message, scheduler::Fault* fault) {
  if (!expected_.empty()) {
    return InvalidField(fault, "part", "nothing after the trailer", "another message", "order");
  }
  if (message.has_chunk()) return AddChunk(message.chunk(), fault);
  if (!message.has_trailer()) {
    return InvalidField(fault, "part", "chunk or trailer after the header",
                        message.has_header() ? "header" : "nothing", "order");
  }
  if (message.trailer().sha256().size() != kDigestBytes) {
    return InvalidField(fault, "trailer.sha256", absl::StrCat(kDigestBytes, " bytes"),
                        absl::StrCat(message.trailer().sha256().size(), " bytes"));
  }
  expected_ = message.trailer().sha256();
  return absl::OkStatus();
}

absl::Status WeightsUpload::AddChunk(const v1::UploadWeightsRequest::Chunk& chunk,
                                     scheduler::Fault* fault) {
  if (chunk.payload().size() > static_cast<size_t>(chunk_bytes_)) {
    return InvalidField(fault, "chunk.payload", absl::StrCat("at most ", chunk_bytes_, " bytes"),
                        absl::StrCat(chunk.payload().size(), " bytes"), "payload_size");
  }
  int64_t bytes = 0;
  absl::Status status = ParseWeightsChunk(chunk, *model_, &bytes, fault);
  if (!status.ok()) return status;
  for (uint32_t i = 0; i < chunk.head_count(); ++i) {
    const uint32_t head = chunk.head_begin() + i;
    if (!seen_.insert({chunk.layer(), head}).second) {
      return InvalidField(fault, "chunk.head_begin", "heads not yet sent in this call",
                          absl::StrCat("layer ", chunk.layer(), " head ", head, " again"),
                          "repeated");
    }
  }
  EVP_DigestUpdate(digest_.get(), chunk.payload().data(), chunk.payload().size());
  bytes_ += chunk.payload().size();
  return engine_->LoadWeights(tenant_, model_->id, upload_, static_cast<int32_t>(chunk.layer()),
                              static_cast<int32_t>(chunk.head_begin()),
                              static_cast<int32_t>(chunk.head_count()),
                              std::as_bytes(std::span(chunk.payload())), fault);
}

absl::Status WeightsUpload::Finish(v1::UploadWeightsReply* reply, scheduler::Fault* fault) {
  if (expected_.empty()) {
    return InvalidField(fault, "trailer", "the last message of the call", "nothing", "missing");
  }
  std::string got(kDigestBytes, '\0');
  EVP_DigestFinal_ex(digest_.get(), reinterpret_cast<unsigned char*>(got.data()), nullptr);
  if (got != expected_) {
    scheduler::Blame(fault, "trailer.sha256", absl::BytesToHexString(expected_),
                     absl::StrCat(absl::BytesToHexString(got), ", the digest of what arrived"));
    fault->reason = "digest_mismatch";
    return absl::DataLossError("trailer.sha256: differs from the digest of the bytes received");
  }
  const auto missing = engine_->CommitWeights(tenant_, model_->id, upload_);
  if (!missing.ok()) {  // unregistered meanwhile
    scheduler::Blame(fault, "header.model_id", model_->id, "a registered model of this tenant");
    fault->reason = "model_not_found";
    return missing.status();
  }
  committed_ = true;
  reply->set_bytes(bytes_);
  reply->set_complete(missing->empty());
  for (const int32_t layer : *missing) reply->add_missing_layers(static_cast<uint32_t>(layer));
  return absl::OkStatus();
}

}  // namespace mla::server
