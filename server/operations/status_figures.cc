// Computes the texts and rates of the status page.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/operations/status_page.h"

namespace mla::server {
namespace {

// Returns the value below which a share of the observations lies, from cumulative counts; -1
// without observations.
double Quantile(double share, const std::vector<double>& bounds,
                const std::vector<uint64_t>& counts, const std::vector<uint64_t>& before) {
  if (counts.empty()) return -1;
  const auto count = [&](size_t i) {
    return static_cast<double>(counts[i] - (i < before.size() ? before[i] : 0));
  };
  const double total = count(counts.size() - 1);
  if (total <= 0) return -1;
  for (size_t i = 0; i < bounds.size() && i < counts.size(); ++i) {
    if (count(i) < share * total) continue;
    const double low = i == 0 ? 0 : bounds[i - 1], under = i == 0 ? 0 : count(i - 1);
    const double within = count(i) - under;
    return within <= 0 ? bounds[i] : low + (bounds[i] - low) * (share * total - under) / within;
  }
  return bounds.empty() ? -1 : bounds.back();
}

StatusTile LatencyTile(const char* name, const std::vector<double>& bounds,
                       const std::vector<uint64_t>& counts, const std::vector<uint64_t>& before) {
  const double half = Quantile(0.5, bounds, counts, before);
  if (half < 0) return {name, "–", "no Attend in this time"};
  return {name, LatencyText(half),
          absl::StrCat("median; p99 ", LatencyText(Quantile(0.99, bounds, counts, before)))};
}

}  // namespace

std::string DurationText(int64_t seconds) {
  constexpr int64_t kMinute = 60, kHour = 60 * kMinute, kDay = 24 * kHour;
  if (seconds >= kDay) return absl::StrCat(seconds / kDay, " d ", seconds % kDay / kHour, " h");
  if (seconds >= kHour) {
    return absl::StrCat(seconds / kHour, " h ", seconds % kHour / kMinute, " min");
  }
  if (seconds >= kMinute) return absl::StrCat(seconds / kMinute, " min ", seconds % kMinute, " s");
  return absl::StrCat(seconds, " s");
}

std::string BytesText(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  if (unit == 0) return absl::StrFormat("%.0f B", bytes);
  const int digits = bytes < 10 ? 2 : bytes < 100 ? 1 : 0;
  return absl::StrFormat("%.*f %s", digits, bytes, kUnits[unit]);
}

std::string NumberText(double number) {
  if (number > 0 && number < 10 && number != std::floor(number)) {
    return absl::StrFormat("%.2f", number);
  }
  std::string digits = absl::StrFormat("%.0f", number);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), 1, ',');
  }
  return digits;
}

std::string LatencyText(double seconds) {
  if (seconds < 1e-3) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 1) return absl::StrFormat("%.1f ms", seconds * 1e3);
  return absl::StrFormat("%.1f s", seconds);
}

void RateWindow::Note(Clock::time_point now, const StatusTotals& totals) {
  if (now - samples_.back().time < kShortest) return;
  samples_.push_back({now, totals});
  // Keeps one sample that is at least kLongest old, with which a window can begin.
  while (samples_.size() > 2 && now - samples_[1].time >= kLongest) samples_.pop_front();
}

std::vector<StatusTile> RateWindow::Tiles(Clock::time_point now, const StatusTotals& totals,
                                          std::string* window) const {
  const Sample* from = &samples_.front();
  for (const Sample& sample : samples_) {
    if (now - sample.time >= kLongest) from = &sample;
  }
  const StatusTotals& old = from->totals;
  const double seconds = std::max(std::chrono::duration<double>(now - from->time).count(), 1e-3);
  *window = absl::StrCat("Rates and times of the last ",
                         DurationText(std::llround(std::max(seconds, 1.0))));
  const auto rate = [seconds](uint64_t now_total, uint64_t then) {
    return static_cast<double>(now_total - std::min(then, now_total)) / seconds;
  };
  const double decode = rate(totals.rows_decode, old.rows_decode);
  const double extend = rate(totals.rows_extend, old.rows_extend);
  const double prefill = rate(totals.rows_prefill, old.rows_prefill);
  const double hits = rate(totals.plan_hits, old.plan_hits);
  const double plans = hits + rate(totals.plan_misses, old.plan_misses);
  std::vector<StatusTile> tiles;
  tiles.push_back({"Decode rows", NumberText(decode) + " /s", "rows x layers"});
  tiles.push_back({"Prompt rows", NumberText(extend + prefill) + " /s",
                   absl::StrCat("prefill ", NumberText(prefill), ", extend ", NumberText(extend))});
  tiles.push_back(LatencyTile("Attend time", totals.bounds, totals.latency, old.latency));
  tiles.push_back(LatencyTile("Wait for a launch", totals.bounds, totals.queue, old.queue));
  tiles.push_back({"Launches", NumberText(rate(totals.launches, old.launches)) + " /s",
                   plans > 0 ? absl::StrFormat("plan reused by %.0f %%", 100 * hits / plans)
                             : std::string("no plan in this time")});
  tiles.push_back({"Requests", NumberText(rate(totals.requests, old.requests)) + " /s",
                   absl::StrCat(NumberText(rate(totals.failed, old.failed)), " /s failed")});
  tiles.push_back({"Received", BytesText(rate(totals.received_bytes, old.received_bytes)) + "/s",
                   "all transports"});
  tiles.push_back(
      {"Sent", BytesText(rate(totals.sent_bytes, old.sent_bytes)) + "/s", "all transports"});
  return tiles;
}

}  // namespace mla::server
