#include "client/mlactl/text/units.h"

#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace mla::mlactl {
namespace {

constexpr double kSecondMs = 1000, kMinuteMs = 60 * kSecondMs, kHourMs = 60 * kMinuteMs;

// Returns the value with three significant digits.
std::string ThreeDigits(double value) {
  if (value >= 100) return absl::StrFormat("%.0f", value);
  return value >= 10 ? absl::StrFormat("%.1f", value) : absl::StrFormat("%.2f", value);
}

}  // namespace

std::string BytesForPeople(double bytes) {
  constexpr double kStep = 1024;
  if (bytes < kStep) return absl::StrFormat("%.0f B", bytes);
  for (const char* unit : {"KiB", "MiB", "GiB"}) {
    bytes /= kStep;
    if (bytes < kStep) return absl::StrCat(ThreeDigits(bytes), " ", unit);
  }
  return absl::StrCat(ThreeDigits(bytes / kStep), " TiB");
}

std::string CountForPeople(double count) {
  constexpr double kFirst = 10000, kStep = 1000;
  if (count < kFirst) return absl::StrFormat("%.0f", count);
  for (const char* unit : {"k", "M"}) {
    count /= kStep;
    if (count < kStep) return absl::StrFormat("%.*f%s", count < 100 ? 2 : 1, count, unit);
  }
  return absl::StrFormat("%.2fG", count / kStep);
}

std::string MillisForPeople(double millis) {
  if (millis < kSecondMs) return absl::StrFormat("%.0f ms", millis);
  if (millis < kMinuteMs) return absl::StrFormat("%.1f s", millis / kSecondMs);
  if (millis < kHourMs) {
    return absl::StrFormat("%.0f min %.0f s", std::floor(millis / kMinuteMs),
                           std::floor(std::fmod(millis, kMinuteMs) / kSecondMs));
  }
  return absl::StrFormat("%.0f h %.0f min", std::floor(millis / kHourMs),
                         std::floor(std::fmod(millis, kHourMs) / kMinuteMs));
}

std::string FieldForPeople(const std::string& name, uint64_t value) {
  const auto number = static_cast<double>(value);
  if (absl::EndsWith(name, "_unix_ms")) return absl::StrCat(value);
  if (absl::StrContains(name, "bytes")) return BytesForPeople(number);
  if (absl::EndsWith(name, "_ms")) return MillisForPeople(number);
  if (absl::EndsWith(name, "_us")) return absl::StrCat(value, " us");
  return absl::StrCat(value);
}

uint64_t SizeOf(const std::string& text) {
  constexpr double kKilo = 1000;
  absl::string_view number = text;
  double factor = 1;
  const struct {
    const char* suffix;
    double factor;
  } kSuffixes[] = {{"KiB", 1024.0},
                   {"MiB", 1024.0 * 1024},
                   {"GiB", 1024.0 * 1024 * 1024},
                   {"TiB", 1024.0 * 1024 * 1024 * 1024},
                   {"KB", kKilo},
                   {"MB", kKilo * kKilo},
                   {"GB", kKilo * kKilo * kKilo},
                   {"TB", kKilo * kKilo * kKilo * kKilo}};
  for (const auto& one : kSuffixes) {
    if (absl::ConsumeSuffix(&number, one.suffix)) {
      factor = one.factor;
      break;
    }
  }
  double value = 0;
  constexpr double kMost = 1e18;
  if (!absl::SimpleAtod(number, &value) || !(value > 0) || !(value * factor < kMost)) return 0;
  return static_cast<uint64_t>(value * factor);
}

}  // namespace mla::mlactl
