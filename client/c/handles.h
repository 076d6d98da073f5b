// Converts between the types of C and of C++.
#ifndef MLA_CLIENT_C_HANDLES_H_
#define MLA_CLIENT_C_HANDLES_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/c/mla_client.h"

namespace mla::capi {

// Returns INVALID_ARGUMENT that names `field`.
absl::Status Refuse(std::string_view field, std::string_view limit, std::string_view got);

// Returns OK if the caller's pointer is not null.
absl::Status CheckNotNull(const void* pointer, std::string_view field);

// Sets *error, unless it is null, and returns the code.
mla_code Report(const absl::Status& status, mla_error** error) noexcept;

// Runs `call`, which returns a Status; no exception leaves it.
template <typename Call>
mla_code Guard(mla_error** error, Call call) noexcept {
  try {
    return Report(call(), error);
  } catch (const std::bad_alloc&) {
    return Report(absl::ResourceExhaustedError("no memory"), error);
  } catch (const std::exception& exception) {
    return Report(absl::InternalError(exception.what()), error);
  }
}

// Returns a struct of the caller as this library knows it: fields that the caller's header does not
// have are 0. Null means that all fields are 0, if `required` is false.
template <typename Struct>
absl::Status Read(const Struct* given, bool required, std::string_view name, Struct* known) {
  *known = {};
  if (given == nullptr) return required ? CheckNotNull(given, name) : absl::OkStatus();
  const size_t size = given->struct_size;
  if (size < sizeof(size_t)) {
    return Refuse(std::string(name) + ".struct_size", "sizeof the struct", std::to_string(size));
  }
  std::memcpy(known, given, std::min(size, sizeof(Struct)));
  // The caller uses a later header with fields that this library does not know.
  const char* bytes = reinterpret_cast<const char*>(given);
  const bool more = size > sizeof(Struct) && std::any_of(bytes + sizeof(Struct), bytes + size,
                                                         [](char byte) { return byte != 0; });
  if (more) return Refuse(name, "fields of this library", "fields of a later one");
  return absl::OkStatus();
}

// Writes the fields of `value` that the caller's header has; `out` may be null.
template <typename Struct>
void Write(Struct value, Struct* out) {
  if (out == nullptr) return;
  value.struct_size = out->struct_size;
  std::memcpy(out, &value, std::min(out->struct_size, sizeof(Struct)));
}

inline std::string Text(const char* text) { return text == nullptr ? "" : text; }

}  // namespace mla::capi

#endif  // MLA_CLIENT_C_HANDLES_H_
