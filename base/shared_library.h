// Opens libraries that a machine may lack, by name, while the program runs.
//
// They are never closed: runtimes of GPUs and UCX do not survive being unloaded.
// Threading: any thread; a SymbolTable belongs to one.
#ifndef MLA_BASE_SHARED_LIBRARY_H_
#define MLA_BASE_SHARED_LIBRARY_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace mla {

struct SharedLibrary {
  void* handle = nullptr;
  std::string name;
};

// kShare takes the copy that the process has, whichever of the names that has: a second copy would
// not share the state of the first.
enum class LoadedCopy : uint8_t { kIgnore, kShare };

// Opens the first of `names` that can be opened. UNAVAILABLE begins with `missing`, such as "no GPU
// runtime", and has the loader's reason for each name.
absl::StatusOr<SharedLibrary> OpenSharedLibrary(std::span<const std::string> names,
                                                LoadedCopy loaded, absl::string_view missing);

// Returns null if the library lacks the name.
void* FindSymbol(void* library, const char* name);

// Fills function pointers from a library, and remembers the first name that it lacks.
class SymbolTable {
 public:
  explicit SymbolTable(void* library) : library_(library) {}

  // `name` null: the library is not supposed to have the function, which becomes null.
  template <typename Function>
  void Need(const char* name, Function** function) {
    Want(name, function);
    if (name != nullptr && *function == nullptr && missing_ == nullptr) missing_ = name;
  }
  // The function becomes null if the library lacks it.
  template <typename Function>
  void Want(const char* name, Function** function) {
    *function = name == nullptr ? nullptr : reinterpret_cast<Function*>(FindSymbol(library_, name));
  }

  // Returns the first missing name of Need; null if there is none.
  const char* missing() const { return missing_; }
  // Returns OK, or UNAVAILABLE: "OWNER has no entry point NAME".
  absl::Status Check(absl::string_view owner) const;

 private:
  void* library_;
  const char* missing_ = nullptr;
};

}  // namespace mla

#endif  // MLA_BASE_SHARED_LIBRARY_H_
