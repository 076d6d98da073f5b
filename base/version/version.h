// The version of the server and of mlactl, in one place, and the commit that they were built from.
//
// The revision enters at the link, of binaries that are built with --stamp and --embed_label, as
// ./dev build and ./dev package do. So no source is compiled again because of a new commit.
#ifndef MLA_BASE_VERSION_VERSION_H_
#define MLA_BASE_VERSION_VERSION_H_

#include <string>

namespace mla::base {

inline constexpr char kVersion[] = "0.2.0";
inline constexpr char kApiVersion[] = "mla.v1";

namespace internal {
extern const char* const kRevision;  // revision.cc
}

// Returns the commit, as ./dev names it: its hash, with ".changed" where files differ from it.
// "unknown" in binaries that the build does not stamp, such as tests.
inline const char* Revision() { return internal::kRevision; }

// Returns a version with build metadata, as semantic versioning writes it: "0.2.0+9386d26197e1", or
// "0.2.0" where the revision is unknown.
inline std::string FullVersion() {
  constexpr size_t kShownDigits = 12;
  constexpr size_t kHashDigits = 40;
  const std::string revision = Revision();
  if (revision == "unknown") return kVersion;
  const std::string mark = revision.size() > kHashDigits ? revision.substr(kHashDigits) : "";
  return std::string(kVersion) + "+" + revision.substr(0, kShownDigits) + mark;
}

}  // namespace mla::base

#endif  // MLA_BASE_VERSION_VERSION_H_
