#include "server/control/weights_upload.h"

#include <span>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/weights_chunk.h"

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

absl::Status WeightsUpload::Add(const v1::UploadWeightsRequest& message) {
  if (!expected_.empty()) {
    return RefuseField("part", "another message", "nothing after the trailer", "order");
  }
  if (message.has_chunk()) return AddChunk(message.chunk());
  if (!message.has_trailer()) {
    return RefuseField("part", message.has_header() ? "header" : "nothing",
                       "chunk or trailer after the header", "order");
  }
  if (message.trailer().sha256().size() != kDigestBytes) {
    return RefuseField("trailer.sha256", absl::StrCat(message.trailer().sha256().size(), " bytes"),
                       absl::StrCat(kDigestBytes, " bytes"));
  }
  expected_ = message.trailer().sha256();
  return absl::OkStatus();
}

absl::Status WeightsUpload::AddChunk(const v1::UploadWeightsRequest::Chunk& chunk) {
  if (chunk.payload().size() > static_cast<size_t>(chunk_bytes_)) {
    return RefuseField("chunk.payload", absl::StrCat(chunk.payload().size(), " bytes"),
                       absl::StrCat("at most ", chunk_bytes_, " bytes"), "payload_size");
  }
  int64_t bytes = 0;
  MLA_RETURN_IF_ERROR(ParseWeightsChunk(chunk, *model_, &bytes));
  for (uint32_t i = 0; i < chunk.head_count(); ++i) {
    const uint32_t head = chunk.head_begin() + i;
    if (!seen_.insert({chunk.layer(), chunk.part(), head}).second) {
      return RefuseField("chunk.head_begin",
                         absl::StrCat("layer ", chunk.layer(), " head ", head, " again"),
                         "heads not yet sent in this call", "repeated");
    }
  }
  EVP_DigestUpdate(digest_.get(), chunk.payload().data(), chunk.payload().size());
  bytes_ += chunk.payload().size();
  if (chunk.part() != v1::WEIGHT_PART_UP) return LoadProjected(chunk);
  return engine_->LoadWeights(tenant_, model_->id, upload_, static_cast<int32_t>(chunk.layer()),
                              static_cast<int32_t>(chunk.head_begin()),
                              static_cast<int32_t>(chunk.head_count()),
                              std::as_bytes(std::span(chunk.payload())));
}

absl::Status WeightsUpload::LoadProjected(const v1::UploadWeightsRequest::Chunk& chunk) {
  const auto part = chunk.part() == v1::WEIGHT_PART_QUERIES ? kernels::ProjectedPart::kQueries
                                                            : kernels::ProjectedPart::kOutputs;
  absl::Status status;
  for (uint32_t i = 0; i < chunk.head_count() && status.ok(); ++i) {
    ReadProjectedHead(chunk, *model_, static_cast<int32_t>(i), &head_);
    status = engine_->LoadProjected(tenant_, model_->id, upload_, part,
                                    static_cast<int32_t>(chunk.layer()),
                                    static_cast<int32_t>(chunk.head_begin() + i), head_);
  }
  return status;
}

absl::Status WeightsUpload::Finish(v1::UploadWeightsReply* reply) {
  if (expected_.empty()) {
    return RefuseField("trailer", "nothing", "the last message of the call", "missing");
  }
  std::string got(kDigestBytes, '\0');
  EVP_DigestFinal_ex(digest_.get(), reinterpret_cast<unsigned char*>(got.data()), nullptr);
  if (got != expected_) {
    return MakeError(
        absl::StatusCode::kDataLoss,
        "trailer.sha256: differs from the digest of the bytes received",
        {.field = "trailer.sha256",
         .got = absl::BytesToHexString(expected_),
         .limit = absl::StrCat(absl::BytesToHexString(got), ", the digest of what arrived"),
         .reason = "digest_mismatch"});
  }
  const auto missing = engine_->CommitWeights(tenant_, model_->id, upload_);
  if (!missing.ok()) {  // unregistered during the upload
    return MakeError(missing.status().code(), missing.status().message(),
                     {.field = "header.model_id",
                      .got = model_->id,
                      .limit = "a registered model of this tenant",
                      .reason = "model_not_found"});
  }
  committed_ = true;
  reply->set_bytes(bytes_);
  reply->set_complete(missing->empty());
  for (const int32_t layer : *missing) reply->add_missing_layers(static_cast<uint32_t>(layer));
  return absl::OkStatus();
}

}  // namespace mla::server
