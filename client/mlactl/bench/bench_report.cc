#include "client/mlactl/bench/bench_report.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace mla::mlactl {
namespace {

using Json = nlohmann::ordered_json;

constexpr struct {
  const char* name;
  double quantile;
} kQuantiles[] = {{"p50", 0.5}, {"p90", 0.9}, {"p95", 0.95}, {"p99", 0.99}, {"p99.9", 0.999}};

double Micros(int64_t ns) { return static_cast<double>(ns) * 1e-3; }

// Rates of a run, and means over its attends.
struct Rates {
  explicit Rates(const BenchRun& run) {
    const LoadCounts& counts = run.result.counts;
    const double seconds = std::max(run.result.seconds, 1e-9);
    const auto per = [](uint64_t sum, double by) { return static_cast<double>(sum) / by; };
    steps = per(counts.steps, seconds);
    attends = per(counts.attends, seconds);
    tokens = steps * run.point.batch * run.point.rows;
    gigabytes = per(counts.bytes, seconds) * 1e-9;
    const double n = std::max(1.0, static_cast<double>(counts.attends));
    requests = per(counts.launch_requests, n);
    layers = per(counts.launch_layers, n);
    clients = per(counts.launch_clients, n);
    reused = per(counts.plans_reused, n);
  }
  double steps, attends, tokens, gigabytes;
  double requests, layers, clients, reused;
};

// Returns the value with three significant digits.
std::string Short(double value) {
  const int decimals = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return absl::StrFormat("%.*f", decimals, value);
}

std::string StageLine(const char* name, const LatencyHistogram& times) {
  std::string line = absl::StrFormat("  %-14s", name);
  for (const auto& [label, quantile] : kQuantiles) {
    absl::StrAppendFormat(&line, " %9s", Short(Micros(times.ValueAt(quantile))));
  }
  absl::StrAppendFormat(&line, " %9s %9s\n", Short(Micros(times.max_ns())),
                        Short(times.mean_ns() * 1e-3));
  return line;
}

Json StageJson(const LatencyHistogram& times) {
  Json json{{"count", times.count()}, {"mean", times.mean_ns() * 1e-3}};
  json["min"] = Micros(times.min_ns());
  for (const auto& [label, quantile] : kQuantiles) json[label] = Micros(times.ValueAt(quantile));
  json["max"] = Micros(times.max_ns());
  return json;
}

Json PointJson(const BenchPoint& point) {
  return {{"transport", point.transport},
          {"profile", v1::Profile_Name(point.profile).substr(8)},
          {"batch", point.batch},
          {"rows", point.rows},
          {"context", point.context},
          {"concurrency", point.concurrency},
          {"loop", point.rate_per_s > 0 ? "open" : "closed"},
          {"rate_per_s", point.rate_per_s > 0 ? Json(point.rate_per_s) : Json(nullptr)}};
}

Json RunJson(const BenchRun& run) {
  const LoadCounts& counts = run.result.counts;
  const Rates rates(run);
  Json json{{"name", run.point.Name()},
            {"asked", PointJson(run.point)},
            {"transport", run.transport},
            {"seconds", run.result.seconds},
            {"interrupted", run.result.interrupted},
            {"steps", counts.steps},
            {"attends", counts.attends},
            {"unfinished_steps", counts.unfinished},
            {"failures", counts.failures},
            {"steps_per_s", rates.steps},
            {"attends_per_s", rates.attends},
            {"tokens_per_s", rates.tokens},
            {"gigabytes_per_s", rates.gigabytes},
            {"copied_bytes_per_attend", run.copied_bytes_per_attend}};
  json["launch"] = {{"requests", rates.requests},
                    {"layers", rates.layers},
                    {"clients", rates.clients},
                    {"plan_reused", rates.reused}};
  for (size_t i = 0; i < kStages; ++i) {
    json["latency_us"][kStageNames[i]] = StageJson(counts.stages[i]);
  }
  json["step_curve"] = Json::array();
  for (const auto& [quantile, ns] : counts.of(Stage::kStep).Curve()) {
    json["step_curve"].push_back({quantile, Micros(ns)});
  }
  json["series"] = Json::array();
  for (const SeriesPoint& point : run.result.series) {
    json["series"].push_back({{"at_s", point.at_s},
                              {"steps_per_s", point.steps_per_s},
                              {"p50_us", Micros(point.p50_ns)},
                              {"p99_us", Micros(point.p99_ns)},
                              {"max_us", Micros(point.max_ns)}});
  }
  return json;
}

}  // namespace

std::string BenchHeaderText(const BenchOptions& options, const v1::GetServerInfoReply& server) {
  const v1::Geometry& geometry = options.model.geometry();
  const LoadOptions& load = options.load;
  const std::string projected =
      options.model.q_lora_rank() == 0
          ? ""
          : absl::StrFormat(", %d -> %d with weights of %s", options.model.q_lora_rank(),
                            options.model.hidden_size(),
                            v1::DType_Name(options.model.projected_dtype()));
  return absl::StrFormat(
      "server  %s, mla-server %s, backend %s (%s, %d units)\n"
      "model   %d heads, latent %d + %d, head %d + %d -> %d, %d layers%s\n"
      "load    %s after %g s of warm-up; %d runs on %d cores; the context %s\n",
      options.target, server.server_version(), server.backend().name(), server.backend().device(),
      server.backend().units(), geometry.num_heads(), geometry.kv_lora_rank(), geometry.rope_dim(),
      geometry.nope_dim(), geometry.rope_dim(), geometry.v_dim(), options.model.layers(), projected,
      load.steps > 0 ? absl::StrCat(load.steps, " steps") : absl::StrCat(load.duration_s, " s"),
      load.warmup_s, options.points.size(), std::thread::hardware_concurrency(),
      options.grow ? "grows with each step" : "stays as it is");
}

std::string BenchRunText(const BenchRun& run) {
  const LoadCounts& counts = run.result.counts;
  const Rates rates(run);
  std::string text = absl::StrFormat(
      "\n%s, over %s%s\n  %s steps/s, %s layers/s, %s tokens/s, %.3f GB/s of tensors; %d steps in "
      "%.2f s\n",
      run.point.Name(), run.transport, run.result.interrupted ? ", interrupted" : "",
      Short(rates.steps), Short(rates.attends), Short(rates.tokens), rates.gigabytes, counts.steps,
      run.result.seconds);
  absl::StrAppendFormat(&text, "  %-14s", "us");
  for (const auto& [label, quantile] : kQuantiles) absl::StrAppendFormat(&text, " %9s", label);
  absl::StrAppendFormat(&text, " %9s %9s\n", "max", "mean");
  for (size_t i = 0; i < kStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    if (stage == Stage::kStartDelay && run.point.rate_per_s == 0) continue;
    const bool part = stage >= Stage::kNetwork && stage <= Stage::kWrite;
    text += StageLine(absl::StrCat(part ? "  " : "", kStageNames[i]).c_str(), counts.stages[i]);
  }
  absl::StrAppendFormat(
      &text,
      "  each launch: %.2f requests, %.2f layers, %.2f clients; plan reused by %.0f %%; payload "
      "bytes copied per attend: %.0f\n",
      rates.requests, rates.layers, rates.clients, 100 * rates.reused, run.copied_bytes_per_attend);
  if (counts.unfinished > 0) {
    absl::StrAppendFormat(&text,
                          "  %d steps had arrived but not finished at the end; they count with the "
                          "time they had waited\n",
                          counts.unfinished);
  }
  for (const auto& [reason, count] : counts.failures) {
    absl::StrAppendFormat(&text, "  refused with %s: %d steps\n", reason, count);
  }
  return text;
}

std::string BenchSummaryText(const std::vector<BenchRun>& runs) {
  std::string text = absl::StrFormat("\n%-64s %10s %10s %10s %10s %8s\n", "run", "steps/s",
                                     "step p50", "step p99", "layer p50", "GB/s");
  for (const BenchRun& run : runs) {
    const LatencyHistogram& steps = run.result.counts.of(Stage::kStep);
    const LatencyHistogram& attends = run.result.counts.of(Stage::kAttend);
    const Rates rates(run);
    absl::StrAppendFormat(&text, "%-64s %10s %10s %10s %10s %8.3f\n", run.point.Name(),
                          Short(rates.steps), Short(Micros(steps.ValueAt(0.5))),
                          Short(Micros(steps.ValueAt(0.99))), Short(Micros(attends.ValueAt(0.5))),
                          rates.gigabytes);
  }
  return text;
}

std::string BenchRateText(const BenchOptions& options, const BenchRate& rate) {
  return absl::StrFormat(
      "\n%s: p99 of a step within %g ms up to %s\n", rate.point.Name(), options.within_p99_ms,
      rate.rate_per_s > 0 ? Short(rate.rate_per_s) + " steps/s" : "no rate that was tried");
}

std::string BenchJson(const BenchOptions& options, const v1::GetServerInfoReply& server,
                      const std::vector<BenchRun>& runs, const std::vector<BenchRate>& rates) {
  const v1::Geometry& geometry = options.model.geometry();
  const LoadOptions& load = options.load;
  Json json{{"format", "mlactl-bench"}, {"version", 1}};
  json["server"] = {{"target", options.target},
                    {"version", server.server_version()},
                    {"boot_id", absl::StrFormat("%016x", server.boot_id())},
                    {"backend", server.backend().name()},
                    {"device", server.backend().device()},
                    {"units", server.backend().units()}};
  json["client_cores"] = std::thread::hardware_concurrency();
  json["model"] = {{"num_heads", geometry.num_heads()},
                   {"kv_lora_rank", geometry.kv_lora_rank()},
                   {"rope_dim", geometry.rope_dim()},
                   {"nope_dim", geometry.nope_dim()},
                   {"v_dim", geometry.v_dim()},
                   {"layers", options.model.layers()},
                   {"kv_format", v1::KvFormat_Name(options.model.kv_format())},
                   {"attention", v1::AttentionKind_Name(options.model.attention())},
                   {"top_k", options.model.top_k()},
                   {"page_size", options.model.page_size()}};
  if (options.model.q_lora_rank() > 0) {
    json["model"]["q_lora_rank"] = options.model.q_lora_rank();
    json["model"]["hidden_size"] = options.model.hidden_size();
    json["model"]["projected_dtype"] = v1::DType_Name(options.model.projected_dtype());
  }
  json["load"] = {{"warmup_s", load.warmup_s},
                  {"arrivals", load.arrivals == ArrivalKind::kPoisson ? "poisson" : "uniform"},
                  {"seed", load.seed},
                  {"shared_context", options.shared_context},
                  {"grow", options.grow},
                  {"lse", options.want_lse},
                  {"touch", options.touch},
                  {"q_dtype", v1::DType_Name(options.q_dtype)},
                  {"kv_row_dtype", v1::DType_Name(options.kv_row_dtype)},
                  {"output_dtype", options.o_dtype == v1::DTYPE_F32 ? "f32" : "bf16"},
                  {"spin_us", options.spin_us}};
  if (load.steps > 0) {
    json["load"]["steps"] = load.steps;
  } else {
    json["load"]["duration_s"] = load.duration_s;
  }
  json["runs"] = Json::array();
  for (const BenchRun& run : runs) json["runs"].push_back(RunJson(run));
  if (options.within_p99_ms > 0) {
    json["load"]["within_p99_ms"] = options.within_p99_ms;
    json["rates"] = Json::array();
    for (const BenchRate& one : rates) {
      json["rates"].push_back(
          {{"name", one.point.Name()},
           {"asked", PointJson(one.point)},
           {"rate_per_s", one.rate_per_s > 0 ? Json(one.rate_per_s) : Json(nullptr)}});
    }
  }
  return json.dump(2) + "\n";
}

}  // namespace mla::mlactl
