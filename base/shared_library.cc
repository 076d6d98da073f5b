#include "base/shared_library.h"

#include <dlfcn.h>

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace mla {

absl::StatusOr<SharedLibrary> OpenSharedLibrary(std::span<const std::string> names,
                                                LoadedCopy loaded, absl::string_view missing) {
  if (loaded == LoadedCopy::kShare) {
    for (const std::string& name : names) {
      void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
      if (handle != nullptr) return SharedLibrary{handle, name};
    }
  }
  std::vector<std::string> reasons;
  for (const std::string& name : names) {
    void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return SharedLibrary{handle, name};
    // If a dependency of this library is missing, the loader's message names only the dependency.
    const char* const reason = dlerror();
    reasons.push_back(absl::StartsWith(reason, name) ? std::string(reason)
                                                     : absl::StrCat(name, ": ", reason));
  }
  return absl::UnavailableError(absl::StrCat(missing, ": ", absl::StrJoin(reasons, "; ")));
}

void* FindSymbol(void* library, const char* name) { return dlsym(library, name); }

absl::Status SymbolTable::Check(absl::string_view owner) const {
  if (missing_ == nullptr) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(owner, " has no entry point ", missing_));
}

}  // namespace mla
