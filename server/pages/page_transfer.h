// Rows of sequences between the engine's pool and a stream of parts: the wire's, or a file's.
//
// Threading: any thread; each call holds one chunk of memory, and its thread to its end. Chunks go
// with launches of the engine, so that steps of others go on.
#ifndef MLA_SERVER_PAGES_PAGE_TRANSFER_H_
#define MLA_SERVER_PAGES_PAGE_TRANSFER_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mla/v1/cache.pb.h"
#include "scheduler/engine.h"

namespace mla::server {

// Of the chunks that are sent: any client takes messages of this size.
inline constexpr int64_t kSentChunkBytes = int64_t{1} << 20;

using PartSink = std::function<absl::Status(const v1::PagesPart&)>;
// The next part, which may be changed; null: there is none.
using PartSource = std::function<absl::StatusOr<v1::PagesPart*>()>;

// All parts of an export that has begun. An error of `sink` ends it and is returned.
absl::Status SendPages(scheduler::Engine* engine, const std::string& tenant,
                       const scheduler::MovingPages& pages, const PartSink& sink);

// Takes the parts behind the header and ends the import that has begun, one way or the other.
// `state` as Engine::EndImport takes it, with the rows known not to be finite. `bytes` receives
// those of the payloads.
absl::StatusOr<scheduler::SequenceInfo> TakePages(scheduler::Engine* engine,
                                                  const std::string& tenant,
                                                  const scheduler::MovingPages& pages,
                                                  int64_t chunk_bytes, const PartSource& source,
                                                  const scheduler::SequenceState* state,
                                                  uint64_t* bytes);

}  // namespace mla::server

#endif  // MLA_SERVER_PAGES_PAGE_TRANSFER_H_
