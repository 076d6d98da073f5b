#include "client/mlactl/replay/record_fields.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::mlactl {
namespace {

constexpr int kMostDepth = 8;

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

std::string Shown(const nlohmann::json& value) {
  constexpr size_t kMost = 80;
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, kMost);
}

}  // namespace

// The library copies and prints values by recursion, so the depth needs a limit.
RecordFields::RecordFields(const std::string& text) {
  bool too_deep = false;
  const auto visit = [&too_deep](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
    too_deep = too_deep || depth > kMostDepth;
    return !too_deep;
  };
  object_ = nlohmann::json::parse(text, visit, /*allow_exceptions=*/false);
  if (too_deep) {
    status_ = absl::DataLossError(absl::StrCat("nested deeper than ", kMostDepth));
  } else if (!object_.is_object()) {
    status_ = absl::DataLossError("not a JSON object");
  }
}

RecordFields::RecordFields(nlohmann::json object) : object_(std::move(object)) {
  if (!object_.is_object()) status_ = absl::DataLossError("not a JSON object");
}

void RecordFields::Fault(std::string_view key, std::string_view got, std::string_view must) {
  if (!status_.ok()) return;
  status_ =
      absl::DataLossError(absl::StrCat(View(key), ": got ", View(got), ", must be ", View(must)));
}

const nlohmann::json* RecordFields::Find(const char* key) {
  if (!status_.ok()) return nullptr;
  const auto found = object_.find(key);
  if (found != object_.end()) return &*found;
  status_ = absl::DataLossError(absl::StrCat(key, ": missing"));
  return nullptr;
}

uint64_t RecordFields::Number(const char* key, uint64_t least, uint64_t limit) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return 0;
  if (value->is_number_unsigned()) {
    const auto number = value->get<uint64_t>();
    if (number >= least && number <= limit) return number;
  }
  Fault(key, Shown(*value), absl::StrCat(least, "..", limit));
  return 0;
}

double RecordFields::Real(const char* key) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return 0;
  if (value->is_number() && std::isfinite(value->get<double>())) return value->get<double>();
  Fault(key, Shown(*value), "a number");
  return 0;
}

bool RecordFields::Flag(const char* key) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return false;
  if (value->is_boolean()) return value->get<bool>();
  Fault(key, Shown(*value), "true or false");
  return false;
}

std::string RecordFields::Text(const char* key) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  Fault(key, Shown(*value), "a string");
  return "";
}

std::vector<RecordFields> RecordFields::Objects(const char* key) {
  const nlohmann::json* value = Find(key);
  std::vector<RecordFields> objects;
  if (value == nullptr) return objects;
  if (!value->is_array()) Fault(key, Shown(*value), "an array");
  if (status_.ok()) objects.reserve(value->size());
  for (size_t i = 0; status_.ok() && i < value->size(); ++i) objects.emplace_back((*value)[i]);
  return objects;
}

std::vector<uint64_t> RecordFields::Numbers(const char* key, uint64_t limit) {
  const nlohmann::json* value = Find(key);
  std::vector<uint64_t> numbers;
  if (value == nullptr) return numbers;
  if (!value->is_array()) Fault(key, Shown(*value), "an array");
  for (size_t i = 0; status_.ok() && i < value->size(); ++i) {
    const nlohmann::json& one = (*value)[i];
    if (!one.is_number_unsigned() || one.get<uint64_t>() > limit) {
      Fault(key, Shown(one), absl::StrCat("0..", limit));
    } else {
      numbers.push_back(one.get<uint64_t>());
    }
  }
  return numbers;
}

}  // namespace mla::mlactl
