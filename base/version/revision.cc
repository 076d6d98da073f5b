// Compiled at the link of each binary, with the header of Bazel's build information in front.
#include <string_view>

#include "base/version/version.h"

#ifndef BUILD_EMBED_LABEL
#define BUILD_EMBED_LABEL ""
#endif

namespace mla::base::internal {
namespace {

// "redacted" is what Bazel writes without --stamp.
constexpr bool Known(std::string_view label) { return !label.empty() && label != "redacted"; }

}  // namespace

const char* const kRevision = Known(BUILD_EMBED_LABEL) ? BUILD_EMBED_LABEL : "unknown";

}  // namespace mla::base::internal
