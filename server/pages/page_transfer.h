// Moves rows of sequences between the engine's pool and a stream of parts, on the wire or in a
// file.
//
// Threading: any thread. Each call holds one chunk of memory, and its thread until it ends.
// Launches of the engine carry the chunks, so steps of other clients go on at the same time.
#ifndef MLA_SERVER_PAGES_PAGE_TRANSFER_H_
#define MLA_SERVER_PAGES_PAGE_TRANSFER_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mla/v1/cache.pb.h"
#include "scheduler/engine.h"
#include "server/pages/page_digest.h"

namespace mla::server {

// Size of sent chunks: any client accepts messages of this size.
inline constexpr int64_t kSentChunkBytes = int64_t{1} << 20;
// The fields that lead to the bytes of rows in a message of Cache.Import.
inline constexpr int kImportRowsPath[] = {v1::ImportRequest::kPartFieldNumber,
                                          v1::PagesPart::kChunkFieldNumber};

// Takes a part. It may change the part or take its contents.
using PartSink = std::function<absl::Status(v1::PagesPart&)>;
// Returns the next part, or null after the last one. The caller may change the part.
using PartSource = std::function<absl::StatusOr<v1::PagesPart*>()>;

struct SendOptions {
  DigestKind digests = DigestKind::kSha256;
  int64_t chunk_bytes = kSentChunkBytes;  // the most in one part, unless a row has more
};

// Sends all parts of an export that has begun. If `sink` returns an error, stops and returns it.
absl::Status SendPages(scheduler::Engine* engine, const std::string& tenant,
                       const scheduler::MovingPages& pages, const PartSink& sink,
                       const SendOptions& options = {});

// Takes the parts after the header and ends the import that has begun, successfully or not. `state`
// goes to Engine::EndImport, together with the rows known not to be finite. `bytes` receives the
// bytes of all payloads.
absl::StatusOr<scheduler::SequenceInfo> TakePages(
    scheduler::Engine* engine, const std::string& tenant, const scheduler::MovingPages& pages,
    int64_t chunk_bytes, const PartSource& source, const scheduler::SequenceState* state,
    uint64_t* bytes, DigestKind digests = DigestKind::kSha256);

}  // namespace mla::server

#endif  // MLA_SERVER_PAGES_PAGE_TRANSFER_H_
