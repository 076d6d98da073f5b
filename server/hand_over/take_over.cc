#include "server/hand_over/take_over.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/request_validator.h"

namespace mla::server {
namespace {

// Returns true if weights of one model are weights of the other, in whatever type they are held.
bool SameWeights(const scheduler::ModelSpec& a, const scheduler::ModelSpec& b) {
  return a.geometry == b.geometry && a.layers == b.layers &&
         a.projected.q_lora_rank == b.projected.q_lora_rank &&
         a.projected.hidden_size == b.projected.hidden_size && a.windowed() == b.windowed() &&
         a.weights_digest == b.weights_digest;
}

// Returns true if the tenant's model, which has all its sinks, has these.
bool HasSinks(scheduler::Engine* engine, const std::string& tenant, const std::string& model_id,
              const std::vector<float>& sinks) {
  for (const scheduler::HeldWeights& held : engine->AllWeights()) {
    if (held.tenant == tenant && held.spec->id == model_id) return held.sinks == sinks;
  }
  return std::all_of(sinks.begin(), sinks.end(),
                     [](float sink) { return sink == scheduler::kNoSink; });
}

// Returns what a model, which the tenant has already, takes of the same weights.
absl::StatusOr<WeightsTarget> TargetOf(const scheduler::ModelInfo& there,
                                       const scheduler::ModelSpec& offer) {
  if (there.spec.projected.codes() && !offer.projected.codes()) {
    // Codes cannot be made of bf16, so nothing that comes could be compared with them.
    if (there.weights_complete) return WeightsTarget{false, true};
    return RefuseField("header.model.projected_dtype", "DTYPE_BF16",
                       absl::StrCat("DTYPE_F8_E4M3, as which the tenant has registered ", offer.id,
                                    ": it waits for its worker's codes"),
                       "other_dtype", absl::StatusCode::kFailedPrecondition);
  }
  // Without a digest of their own, the weights are compared as they come.
  return WeightsTarget{false, there.weights_complete && !offer.weights_digest.empty()};
}

std::vector<float> FloatsOf(const google::protobuf::RepeatedField<float>& values) {
  return {values.begin(), values.end()};
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
  const std::vector<float> sinks = FloatsOf(header.sinks());
  if (!spec.has_expanded() && sinks.empty()) {
    return RefuseField("header.model.geometry", "no nope_dim or no v_dim",
                       "a model with nope_dim and v_dim, or with header.sinks: others have neither "
                       "weights nor sinks",
                       "no_expanded_profile", absl::StatusCode::kFailedPrecondition);
  }
  if (!spec.windowed() && !sinks.empty()) {
    return RefuseField("header.sinks", absl::StrCat(sinks.size(), " sinks"),
                       "none: the attention has no window", "wrong_count");
  }
  for (const scheduler::ModelInfo& there : engine->ListModels(header.tenant())) {
    if (there.spec.id != spec.id) continue;
    if (!SameWeights(there.spec, spec)) {
      return RefuseField("header.model", absl::StrCat("other contents than the tenant's ", spec.id),
                         "equal geometry, layers, weights_digest, window and shapes of PROJECTED",
                         "weights_differ", absl::StatusCode::kFailedPrecondition);
    }
    if (!sinks.empty()) {
      if (!there.sinks_complete) {
        MLA_RETURN_IF_ERROR(engine->SetSinks(header.tenant(), spec.id, {}, sinks).status());
      } else if (!HasSinks(engine, header.tenant(), spec.id, sinks)) {
        return RefuseField("header.sinks", "other sinks", "those that the tenant's model has",
                           "sinks_differ", absl::StatusCode::kFailedPrecondition);
      }
      return WeightsTarget{false, true};
    }
    return TargetOf(there, spec);
  }
  MLA_ASSIGN_OR_RETURN(
      const scheduler::ModelInfo made,
      engine->RegisterModel(header.tenant(), spec, 0, FloatsOf(header.kv_scales()), sinks));
  // Another model of the tenant may have the same weights, which it then shares.
  return WeightsTarget{true, sinks.empty() ? made.weights_complete : made.sinks_complete};
}

absl::Status BringSinks(scheduler::Engine* engine, const std::string& tenant,
                        const std::string& model_id, std::span<const float> sinks) {
  for (const scheduler::ModelInfo& there : engine->ListModels(tenant)) {
    if (there.spec.id != model_id || there.sinks_complete) continue;
    return engine->SetSinks(tenant, model_id, {}, sinks).status();
  }
  return absl::OkStatus();
}

int32_t EvictAndGiveUp(scheduler::Engine* engine, AbandonedImports* abandoned, uint64_t attempt,
                       const scheduler::SequenceSelection& selection,
                       std::vector<scheduler::SequenceId>* not_found) {
  abandoned->Add(attempt);  // first, since otherwise an import could begin and end between the two
  return engine->EvictSequences(selection, not_found);
}

}  // namespace mla::server
