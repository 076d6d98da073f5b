#include "base/error.h"

#include <optional>

#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace mla {
namespace {

constexpr absl::string_view kPayload = "mla.ErrorDetail";

constexpr struct {
  absl::string_view key;
  std::string ErrorDetail::*at;
} kTexts[] = {{"field", &ErrorDetail::field},       {"got", &ErrorDetail::got},
              {"limit", &ErrorDetail::limit},       {"reason", &ErrorDetail::reason},
              {"resource", &ErrorDetail::resource}, {"peer", &ErrorDetail::peer}};

constexpr struct {
  absl::string_view key;
  int64_t ErrorDetail::*at;
} kNumbers[] = {{"retry_after_ms", &ErrorDetail::retry_after_ms},
                {"last_good_position", &ErrorDetail::last_good_position},
                {"next_row", &ErrorDetail::next_row},
                {"wanted", &ErrorDetail::wanted},
                {"free", &ErrorDetail::free},
                {"bound", &ErrorDetail::bound}};

constexpr absl::string_view kOwner = "bound_of";

// Returns a line for each field that is set: key=value, the value escaped as in C.
std::string Encode(const ErrorDetail& detail) {
  static const ErrorDetail kUnset;
  std::string lines;
  for (const auto& [key, at] : kTexts) {
    if (!(detail.*at).empty()) absl::StrAppend(&lines, key, "=", absl::CEscape(detail.*at), "\n");
  }
  for (const auto& [key, at] : kNumbers) {
    if (detail.*at != kUnset.*at) absl::StrAppend(&lines, key, "=", detail.*at, "\n");
  }
  if (detail.bound_of != BoundOwner::kNone) {
    absl::StrAppend(&lines, kOwner, "=", static_cast<int>(detail.bound_of), "\n");
  }
  return lines;
}

void SetField(absl::string_view key, absl::string_view value, ErrorDetail* detail) {
  for (const auto& [name, at] : kTexts) {
    if (key == name) absl::CUnescape(value, &(detail->*at));
  }
  int64_t number = 0;
  if (!absl::SimpleAtoi(value, &number)) return;
  for (const auto& [name, at] : kNumbers) {
    if (key == name) detail->*at = number;
  }
  if (key == kOwner) detail->bound_of = static_cast<BoundOwner>(number);
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, absl::string_view message,
                       const ErrorDetail& detail) {
  absl::Status status(code, message);
  status.SetPayload(kPayload, absl::Cord(Encode(detail)));
  return status;
}

ErrorDetail DetailOf(const absl::Status& status) {
  ErrorDetail detail;
  const auto payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return detail;
  const std::string lines(*payload);
  for (const absl::string_view line : absl::StrSplit(lines, '\n')) {
    const size_t equals = line.find('=');
    if (equals == absl::string_view::npos) continue;
    SetField(line.substr(0, equals), line.substr(equals + 1), &detail);
  }
  return detail;
}

absl::Status RefuseField(const ErrorDetail& detail, absl::StatusCode code) {
  return MakeError(
      code, absl::StrCat(detail.field, ": got ", detail.got, ", must be ", detail.limit), detail);
}

absl::Status RefuseField(std::string field, std::string got, std::string limit, std::string reason,
                         absl::StatusCode code) {
  return RefuseField({.field = std::move(field),
                      .got = std::move(got),
                      .limit = std::move(limit),
                      .reason = std::move(reason)},
                     code);
}

absl::Status RefuseRange(absl::string_view field, std::string got, int64_t low, int64_t high) {
  return RefuseField(std::string(field), std::move(got), absl::StrCat(low, "..", high));
}

}  // namespace mla
