// Validates chunks of UploadWeights and reads their weights. Pure; any thread.
#ifndef MLA_SERVER_GRPC_WEIGHTS_CHUNK_H_
#define MLA_SERVER_GRPC_WEIGHTS_CHUNK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/formats/dtype.h"
#include "mla/v1/model.pb.h"
#include "scheduler/model.h"

namespace mla::server {

// Checks an UploadWeights chunk against its model and sets `bytes` to the size that its payload
// must have. The errors are INVALID_ARGUMENT, or FAILED_PRECONDITION for a part that the model does
// not have.
absl::Status ParseWeightsChunk(const v1::UploadWeightsRequest::Chunk& message,
                               const scheduler::ModelSpec& model, int64_t* bytes);

// Reads the weights of one head of a chunk that ParseWeightsChunk has passed, of QUERIES or
// OUTPUTS, in the form of AttentionBackend::LoadProjected and the type that the model has: codes
// are widened for a model of bf16, and -0 becomes 0. `head` counts from the chunk's first.
void ReadProjectedHead(const v1::UploadWeightsRequest::Chunk& chunk,
                       const scheduler::ModelSpec& model, int32_t head,
                       std::vector<std::byte>* weights);

}  // namespace mla::server

#endif  // MLA_SERVER_GRPC_WEIGHTS_CHUNK_H_
