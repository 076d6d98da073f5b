// Reads and writes the page-group format (docs/cache/page_groups.md): its digests, and the rules
// for a stream of its parts.
//
// Not thread-safe: one object for each stream.
#ifndef MLA_SERVER_PAGES_PAGE_STREAM_H_
#define MLA_SERVER_PAGES_PAGE_STREAM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "mla/v1/cache.pb.h"
#include "scheduler/engine.h"
#include "scheduler/kvcache/pool/group_pieces.h"
#include "server/pages/page_digest.h"

namespace mla::server {

inline constexpr uint32_t kPagesVersion = 1;
inline constexpr uint32_t kPagesVersionWithSinks = 2;  // for models with a window
// Such a stream has digests of XXH3 instead of SHA-256, and sinks if the model has a window.
inline constexpr uint32_t kPagesVersionWithXxh3 = 3;

// Returns the digests of streams of that version.
inline DigestKind DigestsOf(uint32_t version) {
  return version == kPagesVersionWithXxh3 ? DigestKind::kXxh3 : DigestKind::kSha256;
}

// Returns everything on which the meaning of the rows depends, as the bytes with which digests
// begin.
std::string TagText(const scheduler::PageTags& tags, DigestKind digests = DigestKind::kSha256);

void FillHeader(const scheduler::ModelSpec& model, const scheduler::PageTags& tags,
                v1::PagesHeader* header, DigestKind digests = DigestKind::kSha256);
// Reads the header of a stream. INVALID_ARGUMENT names a field inside "part.header".
absl::Status ParseHeader(const v1::PagesHeader& header, const scheduler::Limits& limits,
                         scheduler::PageTags* tags);
absl::Status ParseExport(const v1::ExportRequest& message, const scheduler::Limits& limits,
                         scheduler::ExportArgs* args);
absl::Status ParseTarget(const v1::ImportTarget& message, const scheduler::Limits& limits,
                         scheduler::ImportArgs* args);

// One page group of a stream.
struct StreamGroup {
  v1::PageContent content = v1::PAGE_CONTENT_ROWS;
  int64_t first_row = 0;  // for a tail: its position
  int32_t rows = 0;       // 0 of a tail
};
// Returns the number of groups of a stream. The rows come first, then the window and the tail if
// there are any.
int64_t GroupCount(const scheduler::MovingPages& pages);
// REQUIRES: index below GroupCount.
StreamGroup GroupAt(const scheduler::MovingPages& pages, int64_t index);
// Returns the pieces of the group's payload; a tail has one piece.
std::vector<kvcache::GroupPiece> PiecesOf(const scheduler::MovingPages& pages,
                                          const StreamGroup& group);
// Returns the most payload bytes of all groups together.
int64_t MostPayloadBytes(const scheduler::MovingPages& pages);
// Returns the number of rows of a page of the group's content. REQUIRES: the group is not a tail.
int32_t PageSizeOf(const scheduler::MovingPages& pages, const StreamGroup& group);

// Computes the digests of one stream, group after group.
class PageDigests final {
 public:
  explicit PageDigests(const scheduler::PageTags& tags, DigestKind kind = DigestKind::kSha256);

  void BeginGroup(const StreamGroup& group);
  void Add(absl::string_view payload);
  std::string EndGroup();
  // Returns the digest over all groups so far; call it once.
  std::string End();

 private:
  const std::string tags_;
  PageDigest group_, all_;
};

// A position in the pages of a sequence.
struct PagePlace {
  StreamGroup group;
  int64_t page = 0;    // in the sequence; unused for the tail
  int64_t offset = 0;  // offset in the payload of the group
};

// Reads the parts after the header, one after another. Every byte of every group comes once and in
// order, and every digest is compared.
class PageStreamReader final {
 public:
  // A chunk has at most `chunk_bytes`.
  PageStreamReader(const scheduler::MovingPages& pages, int64_t chunk_bytes,
                   DigestKind digests = DigestKind::kSha256);

  // Checks the next part. INVALID_ARGUMENT if it does not come next or has a wrong size, DATA_LOSS
  // if a digest differs. For a chunk, sets `place` to the place of its payload.
  absl::Status Add(const v1::PagesPart& part, std::optional<PagePlace>* place);
  // Returns OK if all parts have come, else INVALID_ARGUMENT.
  absl::Status Finish() const;
  uint64_t bytes() const { return bytes_; }

 private:
  absl::Status AddGroup(const v1::PageGroup& group);
  absl::Status AddChunk(const std::string& payload, std::optional<PagePlace>* place);
  absl::Status EndGroup(const v1::PageGroupEnd& end);
  absl::Status AddTrailer(const v1::PagesTrailer& trailer);
  const scheduler::MovingPages& pages_;
  const int64_t chunk_bytes_;
  PageDigests digests_;
  bool open_ = false;  // a group is
  StreamGroup group_;  // the present group, or the last one
  std::vector<kvcache::GroupPiece> pieces_;
  int64_t offset_ = 0;  // in its payload
  int64_t groups_ = 0;  // finished groups
  uint64_t bytes_ = 0;
  bool ended_ = false;
};

}  // namespace mla::server

#endif  // MLA_SERVER_PAGES_PAGE_STREAM_H_
