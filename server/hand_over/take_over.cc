#include "server/hand_over/take_over.h"

#include "base/error.h"
#include "base/status_macros.h"

namespace mla::server {

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

int32_t EvictAndGiveUp(scheduler::Engine* engine, AbandonedImports* abandoned, uint64_t attempt,
                       const scheduler::SequenceSelection& selection,
                       std::vector<scheduler::SequenceId>* not_found) {
  abandoned->Add(attempt);  // first, since otherwise an import could begin and end between the two
  return engine->EvictSequences(selection, not_found);
}

}  // namespace mla::server
