// Makes the status page of the operations port, the first page for an operator: in HTML without
// scripts that reloads itself, and with the same content as JSON. In JSON numbers stay numbers, and
// names have underscores instead of spaces.
//
// All texts may come from a client, so they are escaped. Pure functions; RateWindow is not
// thread-safe.
#ifndef MLA_SERVER_OPERATIONS_STATUS_PAGE_H_
#define MLA_SERVER_OPERATIONS_STATUS_PAGE_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace mla::server {

using StatusValue = std::variant<std::string, uint64_t, bool>;

struct StatusSection {
  std::string title;
  std::vector<std::pair<std::string, StatusValue>> rows;
};

// Use of something that has a bound.
struct StatusMeter {
  std::string name;
  uint64_t used = 0;
  uint64_t bound = 0;  // 0: no bound
  bool bytes = false;  // false: a count
  std::string note;    // small print next to it; may be empty
};

// A single figure, for example "Attend latency", "1.2 ms", "p99 4.0 ms".
struct StatusTile {
  std::string name, value, note;
};

struct StatusTenant {
  std::string name;
  std::vector<StatusMeter> meters;  // the same meters in the same order for every tenant
};

struct StatusModel {
  std::string tenant, name;
  std::string shape;  // in words
  uint64_t layers = 0, page_rows = 0;
};

struct StatusPage {
  std::string state;    // "serving", ...
  bool good = false;    // takes new work
  std::string message;  // the fault, or the reason for waiting; may be empty
  std::string version, backend;
  int64_t uptime_seconds = 0;
  std::vector<StatusTile> tiles;
  std::string window;               // the time over which the tiles' rates are taken
  std::vector<StatusMeter> meters;  // for the server; the page pool first
  std::vector<StatusTenant> tenants;
  uint64_t tenants_left_out = 0;  // beyond kMaxTenantRows
  std::vector<StatusModel> models;
  std::vector<StatusSection> sections;                     // everything else, folded
  std::vector<std::pair<std::string, std::string>> links;  // address, text
};

inline constexpr size_t kMaxTenantRows = 100;
inline constexpr int kStatusRefreshSeconds = 5;

std::string StatusHtml(const StatusPage& page);
std::string StatusJson(const StatusPage& page);

// Return texts for people, e.g. "3 d 4 h" or "12 min 3 s", "1.5 GiB" or "12 KiB", "12,345" or
// "0.25".
std::string DurationText(int64_t seconds);
std::string BytesText(double bytes);
std::string NumberText(double number);
// Returns a time for people, e.g. "180 us", "1.2 ms" or "3.4 s".
std::string LatencyText(double seconds);

// Totals at one time, with their changes within a window of time.
struct StatusTotals {
  uint64_t rows_decode = 0, rows_extend = 0, rows_prefill = 0;
  uint64_t launches = 0, plan_hits = 0, plan_misses = 0;
  uint64_t requests = 0, failed = 0;
  uint64_t received_bytes = 0, sent_bytes = 0;
  // Attend's time inside the server and its wait for a launch: observations up to each bound
  // (cumulative; the last count is without a bound).
  std::vector<double> bounds;  // seconds
  std::vector<uint64_t> latency, queue;
};

class RateWindow {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kLongest{60}, kShortest{2};

  // Begins with the totals at the start, usually zeros.
  explicit RateWindow(Clock::time_point start) { samples_.push_back({start, {}}); }
  // Records totals now and then, as beginnings of later windows. The call is cheap, so it may be
  // made often.
  void Note(Clock::time_point now, const StatusTotals& totals);
  // Returns the rates between the beginning of the window and `totals`; sets `window` to its
  // length.
  std::vector<StatusTile> Tiles(Clock::time_point now, const StatusTotals& totals,
                                std::string* window) const;

 private:
  struct Sample {
    Clock::time_point time;
    StatusTotals totals;
  };
  std::deque<Sample> samples_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_OPERATIONS_STATUS_PAGE_H_
