#include "tests/bench/gpu/peers/peer_times.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace mla::bench {
namespace {

absl::Status Fault(int64_t line, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("line ", line, ": ", std::string(what)));
}

absl::StatusOr<std::string> Text(const nlohmann::json& row, const char* field, int64_t line) {
  const auto found = row.find(field);
  if (found == row.end() || !found->is_string() || found->get_ref<const std::string&>().empty()) {
    return Fault(line, absl::StrCat(field, ": want a text that is not empty"));
  }
  return found->get<std::string>();
}

absl::StatusOr<double> Microseconds(const nlohmann::json& row, int64_t line) {
  const auto found = row.find("us");
  if (found == row.end() || !found->is_number()) return Fault(line, "us: want a number");
  const auto us = found->get<double>();
  if (!std::isfinite(us) || us <= 0) return Fault(line, "us: want a number above 0");
  return us;
}

}  // namespace

std::string PeerTime::JsonFields(double own_us) const {
  const std::string name =
      nlohmann::json(peer).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return absl::StrFormat(R"("peer": %s, "peer_us": %.1f, "of_peer": %.3f)", name, us, us / own_us);
}

absl::StatusOr<PeerTimes> PeerTimes::Parse(std::string_view text) {
  PeerTimes times;
  int64_t number = 0;
  for (const absl::string_view line :
       absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++number;
    const absl::string_view json = absl::StripAsciiWhitespace(line);
    if (json.empty()) continue;
    const auto row = nlohmann::json::parse(json.begin(), json.end(), nullptr, false);
    if (!row.is_object()) return Fault(number, "want a JSON object");
    MLA_ASSIGN_OR_RETURN(std::string peer, Text(row, "peer", number));
    MLA_ASSIGN_OR_RETURN(std::string shape, Text(row, "shape", number));
    MLA_ASSIGN_OR_RETURN(const double us, Microseconds(row, number));
    PeerTime& best = times.best_[std::move(shape)];
    if (best.peer.empty() || us < best.us) best = {std::move(peer), us};
  }
  return times;
}

absl::StatusOr<PeerTimes> PeerTimes::Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("--peers: no file ", path));
  std::string text;
  text.resize(static_cast<size_t>(kMostBytes) + 1);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.gcount() > kMostBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--peers: ", path, " has more than ", kMostBytes, " bytes"));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  absl::StatusOr<PeerTimes> times = Parse(text);
  if (times.ok()) return times;
  return absl::Status(times.status().code(),
                      absl::StrCat("--peers: ", path, ": ", times.status().message()));
}

const PeerTime* PeerTimes::Best(std::string_view shape) const {
  const auto found = best_.find(shape);
  return found == best_.end() ? nullptr : &found->second;
}

void PeerRatios::Add(std::string_view shape, double ratio) {
  if (ratios_.empty() || ratio < *std::min_element(ratios_.begin(), ratios_.end())) {
    slowest_ = shape;
  }
  ratios_.push_back(ratio);
}

std::string PeerRatios::Summary() const {
  if (ratios_.empty()) return "no shape with a peer";
  const auto [least, most] = std::minmax_element(ratios_.begin(), ratios_.end());
  double logs = 0;
  for (const double ratio : ratios_) logs += std::log(ratio);
  const auto below =
      std::count_if(ratios_.begin(), ratios_.end(), [](double ratio) { return ratio < 1; });
  return absl::StrFormat(
      "%d %s with a peer: ratio %.2f (%s) to %.2f, geometric mean %.2f, %d below 1.00",
      ratios_.size(), ratios_.size() == 1 ? "shape" : "shapes", *least, slowest_, *most,
      std::exp(logs / static_cast<double>(ratios_.size())), below);
}

}  // namespace mla::bench
