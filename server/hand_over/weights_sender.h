// Sends the weights or the sinks of a model that this server has, as the messages of one
// UploadWeights call or of several at a time.
//
// Weights go one head a chunk: as bf16, or as e4m3 if the model holds codes, in whatever form the
// backend keeps them, so that another backend can take them. Each call takes the next head that
// no call has taken, so calls end together however fast each of them is. At most one chunk a call
// is in memory. Sinks go in the header.
#ifndef MLA_SERVER_HAND_OVER_WEIGHTS_SENDER_H_
#define MLA_SERVER_HAND_OVER_WEIGHTS_SENDER_H_

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "mla/v1/model.pb.h"
#include "scheduler/engine.h"
#include "server/pages/page_digest.h"

namespace mla::server {

// The field numbers that lead to the bytes of weights in a message of Models.UploadWeights.
inline constexpr int kWeightsPath[] = {v1::UploadWeightsRequest::kChunkFieldNumber};

// Takes one message, whose contents it may move away. After an error no message follows.
using WeightsSink = std::function<absl::Status(v1::UploadWeightsRequest&)>;

// The heads that the calls of one transfer share. Any thread.
struct OutgoingWeights {
  scheduler::Engine* engine = nullptr;
  const scheduler::HeldWeights* model = nullptr;
  uint64_t attempt = 0;             // UploadWeightsRequest.Header.attempt; 0: one call brings all
  std::atomic<int64_t> taken = 0;   // heads of all layers, layer by layer, that calls have taken
  std::atomic<bool> failed{false};  // a call has failed, so the others stop
};

// Sends the weights of one call. Not thread-safe; takes the engine's role for each chunk. The
// methods return the sink's error, or the engine's: NOT_FOUND if the model was unregistered during
// the call.
class WeightsCall final {
 public:
  // Borrows both.
  WeightsCall(OutgoingWeights* weights, const WeightsSink& sink);

  absl::Status SendHeader(bool is_part);
  // Sends heads until none are left. CANCELLED if another call has failed.
  absl::Status SendHeads();
  // `parts` is the number of parts of the transfer that this call has begun.
  absl::Status SendTrailer(uint32_t parts);
  uint64_t bytes() const { return bytes_; }  // of all chunks

 private:
  absl::Status SendHead(int32_t layer, int32_t head);
  template <typename Read>
  absl::Status SendChunk(int32_t layer, int32_t head, v1::WeightPart part, v1::DType dtype,
                         int64_t bytes, const Read& read);

  OutgoingWeights* const weights_;
  const WeightsSink& sink_;
  PageDigest digest_;
  v1::UploadWeightsRequest message_;  // its memory is used again
  uint64_t bytes_ = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_WEIGHTS_SENDER_H_
