// The weights of one model on their way in, by one UploadWeights call or, in a hand-over, by
// several at a time: the call that has begun the transfer, and its parts.
//
// Loaded heads count once Commit has succeeded. Until then, and if any part fails, nothing of the
// transfer is kept: Close discards it, and no part can load a head after that. The transfer ends
// with the call that has begun it, so a sender that dies leaves nothing.
//
// Threading: any thread, except that one call at a time may Close or Commit. Part calls keep the
// transfer's memory, not its weights.
#ifndef MLA_SERVER_CONTROL_WEIGHTS_TRANSFER_H_
#define MLA_SERVER_CONTROL_WEIGHTS_TRANSFER_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "mla/v1/model.pb.h"
#include "scheduler/engine.h"

namespace mla::server {

// A transfer has at most this number of parts in its whole life. Each also takes one of its
// caller's places for uploads.
inline constexpr uint32_t kMostWeightParts = 16;

class WeightsTransfer final {
 public:
  // `whole`: Commit refuses a transfer that has not brought every head of the model.
  WeightsTransfer(scheduler::Engine* engine, std::string tenant,
                  std::shared_ptr<const scheduler::ModelSpec> model, bool whole);

  const scheduler::ModelSpec& model() const { return *model_; }
  // Loads the heads of a chunk that ParseWeightsChunk has passed. INVALID_ARGUMENT (repeated) for
  // heads that the transfer has already; FAILED_PRECONDITION (transfer_ended) after Close, Commit
  // or the failure of a part; otherwise the engine's errors.
  absl::Status Load(const v1::UploadWeightsRequest::Chunk& chunk);

  // Begins a part. FAILED_PRECONDITION as Load; RESOURCE_EXHAUSTED (too_many_parts) beyond
  // kMostWeightParts. Each successful call is followed by one of EndPart.
  absl::Status BeginPart();
  // If the part has failed, the transfer has, too.
  void EndPart(bool ok);

  // Starts using the heads; returns the layers that are still incomplete. FAILED_PRECONDITION
  // (part_failed, parts_differ, weights_missing) unless `parts` parts have ended well, none is
  // under way, and nothing is missing from a whole transfer. After an error, call Close.
  absl::StatusOr<std::vector<int32_t>> Commit(uint32_t parts);
  // Refuses further heads, waits until none is being loaded, and discards all.
  void Close();
  // Returns the bytes of all payloads that were loaded.
  uint64_t bytes() const;

 private:
  absl::Status CheckOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWhole(uint32_t parts) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Notes the heads of the chunk as seen.
  absl::Status Claim(const v1::UploadWeightsRequest::Chunk& chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LoadHeads(const v1::UploadWeightsRequest::Chunk& chunk);
  absl::Status LoadProjected(const v1::UploadWeightsRequest::Chunk& chunk);

  scheduler::Engine* const engine_;
  const std::string tenant_;
  const std::shared_ptr<const scheduler::ModelSpec> model_;
  const bool whole_;
  const scheduler::UploadId upload_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
  bool part_failed_ ABSL_GUARDED_BY(mutex_) = false;
  int loading_ ABSL_GUARDED_BY(mutex_) = 0;  // chunks
  uint32_t begun_ ABSL_GUARDED_BY(mutex_) = 0, running_ ABSL_GUARDED_BY(mutex_) = 0,
                  ended_ ABSL_GUARDED_BY(mutex_) = 0;  // parts
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::tuple<uint32_t, int, uint32_t>> seen_
      ABSL_GUARDED_BY(mutex_);  // (layer, part of the weights, head)
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_WEIGHTS_TRANSFER_H_
