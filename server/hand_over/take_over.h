// The receiving side of a hand-over: models for the weights that come, and an import that its
// caller may give up.
//
// Threading: any thread.
#ifndef MLA_SERVER_HAND_OVER_TAKE_OVER_H_
#define MLA_SERVER_HAND_OVER_TAKE_OVER_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mla/v1/model.pb.h"
#include "scheduler/engine.h"
#include "server/hand_over/abandoned_imports.h"
#include "server/pages/page_transfer.h"

namespace mla::server {

// Runs BeginImport, all parts after the header, and the end of the import, successful or not.
// CANCELLED if another server has given up this try (`attempt` is not 0). `bytes` receives the
// bytes of all payloads. `digests` is the kind that the header's version has.
absl::StatusOr<scheduler::SequenceInfo> RunImport(scheduler::Engine* engine,
                                                  const AbandonedImports& abandoned,
                                                  const scheduler::ImportArgs& args,
                                                  uint64_t attempt, int64_t chunk_bytes,
                                                  const PartSource& source, uint64_t* bytes,
                                                  DigestKind digests = DigestKind::kSha256);

// The model that takes the weights which another server sends.
struct WeightsTarget {
  bool registered = false;  // the model was made for them: Engine::WithdrawModel undoes it
  bool complete = false;    // the model has these weights already, or needs sinks alone
};
// Finds or registers the model that the header of an UploadWeights call names, with the header's
// sinks. REQUIRES: the header has a valid model_id and tenant, and the caller may act for that
// tenant. INVALID_ARGUMENT if the model is missing or not valid; FAILED_PRECONDITION
// (weights_differ, sinks_differ) if the tenant has another model of this name, or other sinks, and
// (other_dtype) if its model waits for codes and the other server has bf16; otherwise the errors of
// Engine::RegisterModel. A model that has its codes is complete for weights of bf16, which cannot
// be compared with them.
absl::StatusOr<WeightsTarget> RegisterForWeights(scheduler::Engine* engine,
                                                 const v1::UploadWeightsRequest::Header& header);

// Gives the sinks of all layers and heads to a model of the tenant that waits for its sinks. Leaves
// other models as they are. Errors come from Engine::SetSinks.
absl::Status BringSinks(scheduler::Engine* engine, const std::string& tenant,
                        const std::string& model_id, std::span<const float> sinks);

// Evicts the selected sequences, and gives up the try that may bring one of them (0: no try).
int32_t EvictAndGiveUp(scheduler::Engine* engine, AbandonedImports* abandoned, uint64_t attempt,
                       const scheduler::SequenceSelection& selection,
                       std::vector<scheduler::SequenceId>* not_found);

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_TAKE_OVER_H_
