// Sends the weights of a model that this server has, as the messages of an UploadWeights call.
//
// Weights go as bf16, one head a chunk, in the order of their layers: the form in which they were
// uploaded, whatever form the backend keeps them in, so that another backend can take them. At most
// one chunk is in memory. Threading: any thread; takes the engine's role for each chunk.
#ifndef MLA_SERVER_HAND_OVER_WEIGHTS_SENDER_H_
#define MLA_SERVER_HAND_OVER_WEIGHTS_SENDER_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "mla/v1/model.pb.h"
#include "scheduler/engine.h"

namespace mla::server {

// Takes one message, whose contents it may move away. After an error no message follows.
using WeightsSink = std::function<absl::Status(v1::UploadWeightsRequest&)>;

// Passes header, chunks and trailer to the sink, and adds the bytes of the chunks to `bytes`.
// Returns the sink's error, or the engine's: NOT_FOUND if the model was unregistered
// during the call.
absl::Status SendWeights(scheduler::Engine* engine, const scheduler::HeldWeights& model,
                         const WeightsSink& sink, uint64_t* bytes);

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_WEIGHTS_SENDER_H_
