#include "client/mlactl/agents/scene_report.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/mlactl/load/latency_histogram.h"
#include "nlohmann/json.hpp"

namespace mla::mlactl {
namespace {

using Json = nlohmann::ordered_json;

// Turns grouped by the share of their rows that was found in the cache.
struct HitClass {
  const char* name;
  double least;  // share
};
constexpr std::array<HitClass, 4> kClasses = {
    {{"96 % or more", 0.955}, {"80 to 96 %", 0.8}, {"less than 80 %", 1e-9}, {"none", 0}}};
constexpr char kPool[] = "pool";
constexpr std::array<std::pair<const char*, double>, 4> kQuantiles = {
    {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"max", 1.0}}};

double Share(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

size_t ClassOf(const Turn& turn, const TurnResult& result) {
  const double share = Share(result.found, turn.input_rows);
  size_t at = 0;
  while (share < kClasses[at].least) ++at;
  return at;
}

std::string EndName(v1::MatchEnd end) {
  const std::string name = v1::MatchEnd_Name(end);
  return absl::AsciiStrToLower(absl::StripPrefix(name, "MATCH_END_"));
}

// Returns the tier from which rows came back last while the turn's sequence was opened. With
// several workers these may be the rows of another one. The pool if none came back.
std::string TierOf(const SceneRun& run, const TurnResult& result) {
  const auto behind =
      std::upper_bound(run.restored.begin(), run.restored.end(), result.open_to_ms,
                       [](int64_t at, const auto& event) { return at < event.first; });
  if (behind == run.restored.begin()) return kPool;
  const auto& [at, tier] = *std::prev(behind);
  return at < result.open_from_ms ? kPool : tier;
}

struct Sums {
  uint64_t turns = 0, branches = 0, asked = 0, found = 0, outputs = 0, refused = 0;
  std::map<std::string, uint64_t> ends;
  std::array<LatencyHistogram, kClasses.size()> first;  // by class
  std::map<std::string, LatencyHistogram> by_tier;      // turns that found rows
  LatencyHistogram first_all, next;

  explicit Sums(const SceneRun& run) {
    for (size_t i = 0; i < run.turns.size(); ++i) {
      const TurnResult& result = run.turns[i];
      const Turn& turn = run.trace.turns[i];
      refused += result.refused;
      if (!result.done) continue;
      ++turns;
      branches += turn.branch ? 1 : 0;
      asked += turn.input_rows;
      found += result.found;
      outputs += turn.output_rows;
      ++ends[EndName(result.end)];
      first[ClassOf(turn, result)].Record(result.first_ns);
      first_all.Record(result.first_ns);
      if (result.found > 0) by_tier[TierOf(run, result)].Record(result.first_ns);
      for (const int64_t ns : result.next_ns) next.Record(ns);
    }
  }
  // Returns the median time to the first output of turns that found nothing, divided by that of
  // turns that found rows: the saving by the cache if both have the same lengths. 0 if either kind
  // is missing.
  double Speedup() const {
    LatencyHistogram with;
    for (size_t i = 0; i + 1 < first.size(); ++i) with.Merge(first[i]);
    const auto divisor = static_cast<double>(with.ValueAt(0.5));
    return divisor == 0 ? 0 : static_cast<double>(first.back().ValueAt(0.5)) / divisor;
  }
};

double Millis(int64_t ns) { return static_cast<double>(ns) * 1e-6; }

std::string Line(const std::string& name, const LatencyHistogram& times) {
  std::string line = absl::StrFormat("  %-30s %7d", name, times.count());
  for (const auto& [label, quantile] : kQuantiles) {
    absl::StrAppendFormat(&line, " %10.3f", Millis(times.ValueAt(quantile)));
  }
  return line + "\n";
}

Json TimesJson(const LatencyHistogram& times) {
  Json json{{"count", times.count()}, {"mean", times.mean_ns() * 1e-6}};
  for (const auto& [label, quantile] : kQuantiles) json[label] = Millis(times.ValueAt(quantile));
  return json;
}

Json CountersJson(const SceneRun& run) {
  const auto rise = [&](auto get) { return (run.after.*get)() - (run.before.*get)(); };
  using Stats = v1::GetStatsReply;
  return {{"prefix_rows_asked", rise(&Stats::prefix_rows_asked)},
          {"prefix_rows_found", rise(&Stats::prefix_rows_found)},
          {"page_groups_evicted", rise(&Stats::page_groups_evicted)},
          {"copies_on_write", rise(&Stats::copies_on_write)}};
}

Json TurnsJson(const SceneRun& run) {
  Json turns = Json::array();
  for (size_t i = 0; i < run.turns.size(); ++i) {
    const Turn& turn = run.trace.turns[i];
    const TurnResult& result = run.turns[i];
    if (!result.done) continue;
    LatencyHistogram next;
    for (const int64_t ns : result.next_ns) next.Record(ns);
    turns.push_back({{"conversation", turn.conversation},
                     {"branch", turn.branch},
                     {"start_s", result.start_s},
                     {"input_rows", turn.input_rows},
                     {"found_rows", result.found},
                     {"end", EndName(result.end)},
                     {"first_ms", Millis(result.first_ns)},
                     {"next_ms", next.mean_ns() * 1e-6}});
  }
  return turns;
}

}  // namespace

std::string SceneText(const BenchOptions& options, const SceneRun& run) {
  const Sums sums(run);
  std::string text = absl::StrFormat(
      "\n%s: %d turns, %d of them branches, in %.2f s over %s, %d workers%s\n"
      "  rows of the inputs %d, found %.2f %%, computed %d; outputs %d; page groups evicted %d\n"
      "  matches ended:",
      options.scene.name, sums.turns, sums.branches, run.seconds, run.transport,
      options.points.front().concurrency, run.interrupted ? ", interrupted" : "", sums.asked,
      100 * Share(sums.found, sums.asked), sums.asked - sums.found, sums.outputs,
      run.after.page_groups_evicted() - run.before.page_groups_evicted());
  for (const auto& [end, count] : sums.ends) absl::StrAppendFormat(&text, " %s %d", end, count);
  if (sums.refused > 0) {
    absl::StrAppendFormat(&text, "; tried again for want of room: %d", sums.refused);
  }
  for (const auto& [tier, kinds] : run.tiers) {
    absl::StrAppend(&text, "\n  rows of tier ", tier, ":");
    for (const auto& [kind, rows] : kinds) absl::StrAppend(&text, " ", kind, " ", rows);
    if (!run.tiers_complete) absl::StrAppend(&text, ", and what was lost");
  }
  absl::StrAppendFormat(&text, "\n  %-30s %7s", "ms", "turns");
  for (const auto& [label, quantile] : kQuantiles) absl::StrAppendFormat(&text, " %10s", label);
  text += "\n";
  for (size_t i = 0; i < kClasses.size(); ++i) {
    if (sums.first[i].count() == 0) continue;
    text += Line(absl::StrCat("first output, found ", kClasses[i].name), sums.first[i]);
  }
  for (const auto& [tier, times] : sums.by_tier) {
    // If only the pool is used, these times equal the lines above.
    if (sums.by_tier.size() > 1) text += Line(absl::StrCat("first output, rows of ", tier), times);
  }
  text += Line("first output, all", sums.first_all);
  if (sums.next.count() > 0) text += Line("next output", sums.next);
  if (options.scene.name == "agent-turn" && sums.Speedup() > 0) {
    absl::StrAppendFormat(&text, "  first output without the cache over that with it: %.2f\n",
                          sums.Speedup());
  }
  return text;
}

std::string SceneJson(const BenchOptions& options, const v1::GetServerInfoReply& server,
                      const SceneRun& run) {
  const Sums sums(run);
  const v1::Geometry& geometry = options.model.geometry();
  Json json{{"format", "mlactl-agents"}, {"version", 1}, {"scene", options.scene.name}};
  json["server"] = {{"target", options.target},
                    {"version", server.server_version()},
                    {"backend", server.backend().name()},
                    {"device", server.backend().device()},
                    {"units", server.backend().units()}};
  json["client_cores"] = std::thread::hardware_concurrency();
  json["model"] = {{"num_heads", geometry.num_heads()},
                   {"kv_lora_rank", geometry.kv_lora_rank()},
                   {"rope_dim", geometry.rope_dim()},
                   {"layers", options.model.layers()},
                   {"kv_format", v1::KvFormat_Name(options.model.kv_format())}};
  json["profile"] = v1::Profile_Name(options.points.front().profile).substr(8);
  json["workers"] = options.points.front().concurrency;
  json["transport"] = run.transport;
  json["seconds"] = run.seconds;
  json["interrupted"] = run.interrupted;
  json["turns_done"] = sums.turns;
  json["branches"] = sums.branches;
  json["rows"] = {{"input", sums.asked},
                  {"found", sums.found},
                  {"computed", sums.asked - sums.found},
                  {"output", sums.outputs}};
  json["hit_rate"] = Share(sums.found, sums.asked);
  json["match_ends"] = sums.ends;
  json["refused"] = sums.refused;
  json["server_counters"] = CountersJson(run);
  json["tiers"] = run.tiers;
  json["tiers_complete"] = run.tiers_complete;
  json["first_ms"] = {{"all", TimesJson(sums.first_all)}};
  for (size_t i = 0; i < kClasses.size(); ++i) {
    json["first_ms"][kClasses[i].name] = TimesJson(sums.first[i]);
  }
  for (const auto& [tier, times] : sums.by_tier) json["first_ms_by_tier"][tier] = TimesJson(times);
  json["next_ms"] = TimesJson(sums.next);
  if (options.scene.name == "agent-turn") json["speedup"] = sums.Speedup();
  json["turns"] = TurnsJson(run);
  return json.dump(2) + "\n";
}

}  // namespace mla::mlactl
