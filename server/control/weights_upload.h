// One UploadWeights call: checks the order of its parts and its digest, and passes the weights to
// the engine.
//
// Feed each message to Add; Finish after the last. Destroying an unfinished upload discards the
// chunks that it has loaded. Not thread-safe.
#ifndef MLA_SERVER_CONTROL_WEIGHTS_UPLOAD_H_
#define MLA_SERVER_CONTROL_WEIGHTS_UPLOAD_H_

#include <openssl/evp.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "mla/v1/model.pb.h"
#include "scheduler/engine.h"

namespace mla::server {

class WeightsUpload final {
 public:
  // `model` is the registered model named in the header. A chunk's payload has at most
  // `chunk_bytes`.
  WeightsUpload(scheduler::Engine* engine, std::string tenant,
                std::shared_ptr<const scheduler::ModelSpec> model, int64_t chunk_bytes);
  ~WeightsUpload();

  // Adds a part of the upload. INVALID_ARGUMENT if parts are out of order or have wrong sizes, or a
  // head is sent twice; otherwise the engine's errors.
  absl::Status Add(const v1::UploadWeightsRequest& message);
  // Ends the upload and fills the reply. DATA_LOSS if the digest differs; INVALID_ARGUMENT if there
  // was no trailer.
  absl::Status Finish(v1::UploadWeightsReply* reply);

 private:
  absl::Status AddChunk(const v1::UploadWeightsRequest::Chunk& chunk);
  absl::Status LoadProjected(const v1::UploadWeightsRequest::Chunk& chunk);

  scheduler::Engine* engine_;
  std::string tenant_;
  std::shared_ptr<const scheduler::ModelSpec> model_;
  const int64_t chunk_bytes_;
  const scheduler::UploadId upload_;
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> digest_;
  std::set<std::tuple<uint32_t, int, uint32_t>> seen_;  // (layer, part, head)
  std::vector<kernels::Bf16> head_;                     // of a chunk, as it is loaded
  std::string expected_;                                // from the trailer
  uint64_t bytes_ = 0;
  bool committed_ = false;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_WEIGHTS_UPLOAD_H_
