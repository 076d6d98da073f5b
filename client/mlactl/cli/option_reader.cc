#include "client/mlactl/cli/option_reader.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace mla::mlactl {
namespace {

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

}  // namespace

void OptionReader::Fault(std::string_view name, std::string_view got, std::string_view must) {
  faults_.push_back(
      absl::StrCat("--", View(name), ": got \"", View(got), "\", must be ", View(must)));
}

absl::Status OptionReader::status() const {
  return faults_.empty() ? absl::OkStatus()
                         : absl::InvalidArgumentError(absl::StrJoin(faults_, "\n"));
}

std::vector<std::string> OptionReader::Parts(std::string_view name, size_t count) {
  if (!arguments_.Has(name)) return {};
  const std::string text = arguments_.Get(name);
  std::vector<std::string> parts = absl::StrSplit(text, ',');
  if (parts.size() > count) {
    Fault(name, text, absl::StrCat("at most ", count, " value", count == 1 ? "" : "s"));
    return {};
  }
  return parts;
}

void OptionReader::Numbers(std::string_view name, uint64_t least, uint64_t most, size_t count,
                           std::vector<uint64_t>* values) {
  std::vector<uint64_t> read;
  for (const std::string& part : Parts(name, count)) {
    uint64_t value = 0;
    if (!absl::SimpleAtoi(part, &value) || value < least || value > most) {
      return Fault(name, part, absl::StrCat(least, "..", most));
    }
    read.push_back(value);
  }
  if (!read.empty()) *values = read;
}

void OptionReader::Reals(std::string_view name, double least, double most, size_t count,
                         std::vector<double>* values) {
  std::vector<double> read;
  for (const std::string& part : Parts(name, count)) {
    double value = 0;
    if (!absl::SimpleAtod(part, &value) || !(value >= least && value <= most)) {
      return Fault(name, part, absl::StrCat(least, "..", most));
    }
    read.push_back(value);
  }
  if (!read.empty()) *values = read;
}

void OptionReader::Real(std::string_view name, double least, double most, double* value) {
  std::vector<double> read;
  Reals(name, least, most, 1, &read);
  if (!read.empty()) *value = read[0];
}

void OptionReader::Choices(std::string_view name, const std::vector<std::string>& choices,
                           std::vector<std::string>* values) {
  std::vector<std::string> read;
  for (const std::string& part : Parts(name, choices.size())) {
    if (part == "all") {
      read = choices;
    } else if (std::find(choices.begin(), choices.end(), part) == choices.end()) {
      return Fault(name, part, absl::StrCat("one of ", absl::StrJoin(choices, ", ")));
    } else {
      read.push_back(part);
    }
  }
  if (!read.empty()) *values = read;
}

void OptionReader::Choice(std::string_view name, const std::vector<std::string>& choices,
                          std::string* value) {
  if (!arguments_.Has(name)) return;
  const std::string text = arguments_.Get(name);
  if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
    return Fault(name, text, absl::StrCat("one of ", absl::StrJoin(choices, ", ")));
  }
  *value = text;
}

}  // namespace mla::mlactl
