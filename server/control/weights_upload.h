// One UploadWeights call: checks the order of its messages and its digest, and passes the weights
// to their transfer.
//
// Feed each message to Add; Finish after the last. Destroying an unfinished upload ends the
// transfer that it has begun, or makes the transfer fail that it is a part of. Not thread-safe.
#ifndef MLA_SERVER_CONTROL_WEIGHTS_UPLOAD_H_
#define MLA_SERVER_CONTROL_WEIGHTS_UPLOAD_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "mla/v1/model.pb.h"
#include "server/control/weights_transfer.h"
#include "server/pages/page_digest.h"

namespace mla::server {

class WeightsUpload final {
 public:
  // `is_part`: BeginPart of the transfer has succeeded; otherwise the upload has begun the
  // transfer, and ends it. A chunk's payload has at most `chunk_bytes`.
  WeightsUpload(std::shared_ptr<WeightsTransfer> transfer, bool is_part, DigestKind digest,
                int64_t chunk_bytes);
  ~WeightsUpload();

  // Adds a message of the upload. INVALID_ARGUMENT if they are out of order or have wrong sizes, or
  // a head is sent twice; otherwise the errors of WeightsTransfer::Load.
  absl::Status Add(const v1::UploadWeightsRequest& message);
  // Ends the upload and fills the reply. DATA_LOSS if the digest differs; INVALID_ARGUMENT if there
  // was no trailer; otherwise the errors of WeightsTransfer::Commit.
  absl::Status Finish(v1::UploadWeightsReply* reply);

 private:
  absl::Status AddChunk(const v1::UploadWeightsRequest::Chunk& chunk);
  absl::Status AddTrailer(const v1::UploadWeightsRequest::Trailer& trailer);
  absl::Status Commit(v1::UploadWeightsReply* reply);

  const std::shared_ptr<WeightsTransfer> transfer_;
  const bool is_part_;
  const DigestKind kind_;
  const int64_t chunk_bytes_;
  PageDigest digest_;
  std::string expected_;  // from the trailer
  uint32_t parts_ = 0;    // from the trailer, too
  uint64_t bytes_ = 0;
  bool finished_ = false;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_WEIGHTS_UPLOAD_H_
