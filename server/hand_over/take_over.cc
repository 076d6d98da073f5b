#include "server/hand_over/take_over.h"

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/request_validator.h"

namespace mla::server {
namespace {

// Returns true if weights of one model are weights of the other.
bool SameWeights(const scheduler::ModelSpec& a, const scheduler::ModelSpec& b) {
  return a.geometry == b.geometry && a.layers == b.layers && a.projected == b.projected &&
         a.weights_digest == b.weights_digest;
}

}  // namespace

absl::StatusOr<scheduler::SequenceInfo> RunImport(scheduler::Engine* engine,
                                                  const AbandonedImports& abandoned,
                                                  const scheduler::ImportArgs& args,
                                                  uint64_t attempt, int64_t chunk_bytes,
                                                  const PartSource& source, uint64_t* bytes,
                                                  DigestKind digests) {
  MLA_ASSIGN_OR_RETURN(const scheduler::MovingPages pages, engine->BeginImport(args));
  // Asked after BeginImport: a server that gives the try up later finds the sequence.
  const auto next = [&]() -> absl::StatusOr<v1::PagesPart*> {
    absl::StatusOr<v1::PagesPart*> part = source();
    if (!part.ok() || *part != nullptr || !abandoned.Contains(attempt)) return part;
    return MakeError(absl::StatusCode::kCancelled, "the caller has given this import up",
                     {.reason = "cancelled"});
  };
  return TakePages(engine, args.tenant, pages, chunk_bytes, next, nullptr, bytes, digests);
}

absl::StatusOr<WeightsTarget> RegisterForWeights(scheduler::Engine* engine,
                                                 const v1::UploadWeightsRequest::Header& header) {
  if (!header.has_model()) {
    return RefuseField("header.model", "nothing", "the model, together with header.tenant",
                       "missing");
  }
  scheduler::ModelSpec spec;
  MLA_RETURN_IF_ERROR(ParseModelSpec(header.model(), engine->limits(), &spec));
  spec.id = header.model_id();
  if (spec.geometry.nope_dim == 0 || spec.geometry.v_dim == 0) {
    return RefuseField("header.model.geometry", "no nope_dim or no v_dim",
                       "a model with nope_dim and v_dim: others have no weights",
                       "no_expanded_profile", absl::StatusCode::kFailedPrecondition);
  }
  for (const scheduler::ModelInfo& there : engine->ListModels(header.tenant())) {
    if (there.spec.id != spec.id) continue;
    if (SameWeights(there.spec, spec)) {
      // Without a digest of their own, the weights are compared as they come.
      return WeightsTarget{false, there.weights_complete && !spec.weights_digest.empty()};
    }
    return RefuseField("header.model", absl::StrCat("other contents than the tenant's ", spec.id),
                       "equal geometry, layers, weights_digest and shapes of PROJECTED",
                       "weights_differ", absl::StatusCode::kFailedPrecondition);
  }
  const std::vector<float> scales(header.kv_scales().begin(), header.kv_scales().end());
  MLA_ASSIGN_OR_RETURN(const scheduler::ModelInfo made,
                       engine->RegisterModel(header.tenant(), spec, 0, scales));
  // Another model of the tenant may have the same weights, which it then shares.
  return WeightsTarget{true, made.weights_complete};
}

int32_t EvictAndGiveUp(scheduler::Engine* engine, AbandonedImports* abandoned, uint64_t attempt,
                       const scheduler::SequenceSelection& selection,
                       std::vector<scheduler::SequenceId>* not_found) {
  abandoned->Add(attempt);  // first, since otherwise an import could begin and end between the two
  return engine->EvictSequences(selection, not_found);
}

}  // namespace mla::server
