#include "server/control/weights_upload.h"

#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/weights_chunk.h"

namespace mla::server {
namespace {

constexpr size_t kSha256Bytes = 32, kXxh3Bytes = 16;

}  // namespace

WeightsUpload::WeightsUpload(std::shared_ptr<WeightsTransfer> transfer, bool is_part,
                             DigestKind digest, int64_t chunk_bytes)
    : transfer_(std::move(transfer)),
      is_part_(is_part),
      kind_(digest),
      chunk_bytes_(chunk_bytes),
      digest_(digest) {
  digest_.Begin();
}

WeightsUpload::~WeightsUpload() {
  if (finished_) return;
  if (is_part_) {
    transfer_->EndPart(false);
  } else {
    transfer_->Close();
  }
}

absl::Status WeightsUpload::Add(const v1::UploadWeightsRequest& message) {
  if (!expected_.empty()) {
    return RefuseField("part", "another message", "nothing after the trailer", "order");
  }
  if (message.has_chunk()) return AddChunk(message.chunk());
  if (message.has_trailer()) return AddTrailer(message.trailer());
  return RefuseField("part", message.has_header() ? "header" : "nothing",
                     "chunk or trailer after the header", "order");
}

absl::Status WeightsUpload::AddTrailer(const v1::UploadWeightsRequest::Trailer& trailer) {
  const bool sha256 = kind_ == DigestKind::kSha256;
  const std::string& digest = sha256 ? trailer.sha256() : trailer.xxh3();
  const size_t size = sha256 ? kSha256Bytes : kXxh3Bytes;
  if (digest.size() != size) {
    return RefuseField(sha256 ? "trailer.sha256" : "trailer.xxh3",
                       absl::StrCat(digest.size(), " bytes"), absl::StrCat(size, " bytes"));
  }
  if (is_part_ && trailer.parts() != 0) {
    return RefuseField("trailer.parts", absl::StrCat(trailer.parts()),
                       "0 in a part: parts have no parts", "conflict");
  }
  expected_ = digest;
  parts_ = trailer.parts();
  return absl::OkStatus();
}

absl::Status WeightsUpload::AddChunk(const v1::UploadWeightsRequest::Chunk& chunk) {
  if (chunk.payload().size() > static_cast<size_t>(chunk_bytes_)) {
    return RefuseField("chunk.payload", absl::StrCat(chunk.payload().size(), " bytes"),
                       absl::StrCat("at most ", chunk_bytes_, " bytes"), "payload_size");
  }
  int64_t bytes = 0;
  MLA_RETURN_IF_ERROR(ParseWeightsChunk(chunk, transfer_->model(), &bytes));
  MLA_RETURN_IF_ERROR(transfer_->Load(chunk));
  digest_.Add(chunk.payload());
  bytes_ += chunk.payload().size();
  return absl::OkStatus();
}

absl::Status WeightsUpload::Finish(v1::UploadWeightsReply* reply) {
  if (expected_.empty()) {
    return RefuseField("trailer", "nothing", "the last message of the call", "missing");
  }
  const std::string got = digest_.End();
  if (got != expected_) {
    const char* const field = kind_ == DigestKind::kSha256 ? "trailer.sha256" : "trailer.xxh3";
    return MakeError(
        absl::StatusCode::kDataLoss,
        absl::StrCat(field, ": differs from the digest of the bytes received"),
        {.field = field,
         .got = absl::BytesToHexString(expected_),
         .limit = absl::StrCat(absl::BytesToHexString(got), ", the digest of what arrived"),
         .reason = "digest_mismatch"});
  }
  if (!is_part_) return Commit(reply);
  finished_ = true;
  transfer_->EndPart(true);
  reply->set_bytes(bytes_);
  return absl::OkStatus();
}

absl::Status WeightsUpload::Commit(v1::UploadWeightsReply* reply) {
  MLA_ASSIGN_OR_RETURN(const std::vector<int32_t> missing, transfer_->Commit(parts_));
  finished_ = true;
  reply->set_bytes(transfer_->bytes());
  reply->set_complete(missing.empty());
  for (const int32_t layer : missing) reply->add_missing_layers(static_cast<uint32_t>(layer));
  return absl::OkStatus();
}

}  // namespace mla::server
