// Compiled at the link of each of about a hundred binaries, with the header of Bazel's build
// information in front. So it includes nothing.

#ifndef BUILD_EMBED_LABEL
#define BUILD_EMBED_LABEL ""
#endif

namespace mla::base::internal {
namespace {

constexpr bool Same(const char* a, const char* b) {
  while (*a != '\0' && *a == *b) ++a, ++b;
  return *a == *b;
}

// "redacted" is what Bazel writes without --stamp.
constexpr bool Known(const char* label) { return !Same(label, "") && !Same(label, "redacted"); }

}  // namespace

// As version.h declares it.
extern const char* const kRevision;
const char* const kRevision = Known(BUILD_EMBED_LABEL) ? BUILD_EMBED_LABEL : "unknown";

}  // namespace mla::base::internal
