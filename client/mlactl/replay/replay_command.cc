#include "client/mlactl/replay/replay_command.h"

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/mlactl/cli/interrupt.h"
#include "client/mlactl/cli/option_reader.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/cli/progress.h"
#include "client/mlactl/replay/recording.h"
#include "client/mlactl/replay/replayer.h"
#include "nlohmann/json.hpp"

namespace mla::mlactl {
namespace {

// What bf16 outputs lose at the wire, as a cosine difference.
constexpr double kBf16Cosine = 3e-5;

struct Inputs {
  client::ClientOptions client;
  ReplayOptions replay;
  std::string recording, save_file;
  bool quiet = false;
};

absl::StatusOr<Inputs> ReadInputs(const Arguments& arguments) {
  const auto client = ClientOptionsOf(arguments);
  if (!client.ok()) return client.status();
  Inputs inputs;
  inputs.client = *client;
  inputs.client.renew_leases = true;
  inputs.recording = arguments.words()[0];
  inputs.save_file = arguments.Get("save");
  inputs.quiet = arguments.Has("quiet");
  OptionReader reader(arguments);
  std::string transport = "auto", dtype = "f32";
  uint32_t spin_us = kDefaultSpinMicros;
  if (arguments.Get("transport", "auto") != "auto") {
    reader.Choice("transport", TransportNames(), &transport);
  }
  reader.Number("spin-us", 1, 10'000'000, &spin_us);
  reader.Choice("output-dtype", {"f32", "bf16"}, &dtype);
  SetTransport(transport, spin_us, &inputs.client);
  OutputRule& rule = inputs.replay.rule;
  if (dtype == "bf16") {
    inputs.replay.o_dtype = v1::DTYPE_BF16;
    rule.cosine = kBf16Cosine;
  }
  reader.Real("abs-of-v", 0, 1, &rule.abs_of_v);
  reader.Real("rel", 0, 1, &rule.rel);
  reader.Real("cosine", 0, 2, &rule.cosine);
  reader.Real("lse", 0, 100, &rule.lse);
  if (!reader.status().ok()) return reader.status();
  std::error_code none;
  if (!inputs.save_file.empty() &&
      std::filesystem::equivalent(inputs.save_file, inputs.recording, none)) {
    return absl::InvalidArgumentError("--save: got the recording itself, must be another file");
  }
  return inputs;
}

std::string FigureLine(const char* name, const WorstFigure& worst, double bound) {
  if (worst.where.empty()) return absl::StrFormat("  %-22s none compared\n", name);
  std::string line = absl::StrFormat("  %-22s %-10.3g", name, worst.value);
  absl::StrAppend(&line, bound > 0 ? absl::StrFormat(" of %-8.3g", bound) : std::string(12, ' '),
                  "  ", worst.where, "\n");
  return line;
}

// `cut`: it was interrupted, and what there is counts.
std::string ReplayText(const Replayer& replayer, const v1::GetServerInfoReply& server,
                       const std::string& target, bool cut) {
  const OutputComparison& comparison = replayer.comparison();
  const OutputRule& rule = comparison.rule();
  const ReplayCounts& counts = replayer.counts();
  std::string text = absl::StrFormat(
      "server  %s, mla-server %s, backend %s (%s), over %s\n"
      "replayed %d steps, %d attends, %d rows; attend p50 %.0f us, p99 %.0f us\n"
      "worst of %d row heads, %d elements:\n",
      target, server.server_version(), server.backend().name(), server.backend().device(),
      replayer.transport(), counts.steps, counts.attends, counts.rows,
      static_cast<double>(counts.attend_times.ValueAt(0.5)) * 1e-3,
      static_cast<double>(counts.attend_times.ValueAt(0.99)) * 1e-3, comparison.rows(),
      comparison.elements());
  absl::StrAppend(&text, FigureLine("error / allowed", comparison.of_allowed(), 1),
                  FigureLine("error", comparison.abs(), 0),
                  FigureLine("error / max |V|", comparison.abs_of_v(), rule.abs_of_v),
                  FigureLine("cosine difference", comparison.cosine(), rule.cosine),
                  FigureLine("lse error", comparison.lse(), rule.lse));
  absl::StrAppendFormat(&text, "rule: |error| <= %g max |V| or %g %%, cosine < %g, lse <= %g\n",
                        rule.abs_of_v, 100 * rule.rel, rule.cosine, rule.lse);
  if (cut) absl::StrAppend(&text, "interrupted: the rest of the recording was not replayed\n");
  if (comparison.agrees()) {
    return text + (cut ? "the outputs agree as far as they go\n" : "the outputs agree\n");
  }
  absl::StrAppendFormat(
      &text, "the outputs DIFFER: %d elements, %d row heads by cosine, %d lse outside; first %s\n",
      comparison.outside_elements(), comparison.outside_cosines(), comparison.outside_lse(),
      comparison.first_outside());
  return text;
}

std::string ReplayJson(const Replayer& replayer, const v1::GetServerInfoReply& server,
                       const std::string& target, bool cut) {
  using Json = nlohmann::ordered_json;
  const OutputComparison& comparison = replayer.comparison();
  const OutputRule& rule = comparison.rule();
  const ReplayCounts& counts = replayer.counts();
  const auto figure = [](const WorstFigure& worst) {
    return Json{{"value", worst.value}, {"where", worst.where}};
  };
  Json json{{"format", "mlactl-replay"}, {"version", 1}};
  json["server"] = {{"target", target},
                    {"version", server.server_version()},
                    {"backend", server.backend().name()},
                    {"device", server.backend().device()}};
  json["transport"] = replayer.transport();
  json["interrupted"] = cut;
  json["steps"] = counts.steps;
  json["attends"] = counts.attends;
  json["rows"] = counts.rows;
  json["elements"] = comparison.elements();
  json["attend_us"] = {{"p50", static_cast<double>(counts.attend_times.ValueAt(0.5)) * 1e-3},
                       {"p99", static_cast<double>(counts.attend_times.ValueAt(0.99)) * 1e-3}};
  json["rule"] = {
      {"abs_of_v", rule.abs_of_v}, {"rel", rule.rel}, {"cosine", rule.cosine}, {"lse", rule.lse}};
  json["worst"] = {{"error_of_allowed", figure(comparison.of_allowed())},
                   {"error", figure(comparison.abs())},
                   {"error_of_v", figure(comparison.abs_of_v())},
                   {"cosine", figure(comparison.cosine())},
                   {"lse", figure(comparison.lse())}};
  json["outside"] = {{"elements", comparison.outside_elements()},
                     {"cosine", comparison.outside_cosines()},
                     {"lse", comparison.outside_lse()}};
  json["first_outside"] = comparison.first_outside();
  json["agrees"] = comparison.agrees();
  return json.dump(2) + "\n";
}

// The whole recording, or as much of it as there is time for. Prints what came of it; `model_ids`
// gets the names of the models that were on the server meanwhile.
absl::Status RunReplay(const Arguments& arguments, const Inputs& inputs, client::Client* client,
                       std::vector<std::string>* model_ids, int* code) {
  auto reader = RecordingReader::Open(inputs.recording);
  if (!reader.ok()) return reader.status();
  std::unique_ptr<RecordingWriter> writer;
  if (!inputs.save_file.empty()) {
    auto created = RecordingWriter::Create(inputs.save_file, (*reader)->header_line());
    if (!created.ok()) return created.status();
    writer = *std::move(created);
  }
  const std::atomic<bool>& interrupted = CatchInterrupts();
  Progress progress(stderr, inputs.quiet);
  Replayer replayer(client, reader->get(), writer.get(), inputs.replay);
  absl::Status status = replayer.Run([&] {
    progress.Show("replaying", (*reader)->fraction_read(),
                  absl::StrCat(replayer.counts().attends, " attends"));
    return !interrupted.load();
  });
  progress.Clear();
  *model_ids = replayer.model_ids();
  if (status.ok() && writer != nullptr) status = writer->Close();
  const bool cut = absl::IsCancelled(status) && interrupted.load();
  if (!status.ok() && !(cut && replayer.counts().attends > 0)) return status;
  const v1::GetServerInfoReply& server = client->info();
  const std::string target = TargetOf(arguments);
  *code = Emit(arguments, ReplayJson(replayer, server, target, cut),
               ReplayText(replayer, server, target, cut));
  if (*code == kOk && !replayer.comparison().agrees()) *code = kDifferent;
  return status;
}

}  // namespace

std::vector<Option> ReplayOptionTable() {
  return {
      {"transport", "NAME", "inline, shm, ring-futex, ring-spin, or auto (default)",
       "auto,inline,shm,ring-futex,ring-spin"},
      {"spin-us", "N", "how long each side of ring-spin spins before it sleeps (default 100)"},
      {"save", "FILE", "write the recording with this server's outputs, to replay elsewhere"},
      {"output-dtype", "TYPE", "asked of the server: f32 (default) or bf16", "f32,bf16"},
      {"abs-of-v", "X", "error allowed, as a part of the largest |V| in sight (default 2e-3)"},
      {"rel", "X", "error allowed, as a part of the expected value (default 1.6e-2)"},
      {"cosine", "X", "cosine difference allowed of a row's head (default 1e-5; bf16 3e-5)"},
      {"lse", "X", "error of the log-sum-exp allowed (default 1e-3)"},
      {"quiet", "", "show no progress"},
  };
}

int Replay(const Arguments& arguments) {
  const auto inputs = ReadInputs(arguments);
  if (!inputs.ok()) return FailUsage(inputs.status());
  auto client = client::Client::Connect(TargetOf(arguments), inputs->client);
  if (!client.ok()) return Fail(client.status());
  int code = kOk;
  std::vector<std::string> model_ids;
  const absl::Status status = RunReplay(arguments, *inputs, client->get(), &model_ids, &code);
  if (!CatchInterrupts().load()) return status.ok() ? code : Fail(status);
  if (!status.ok() && !absl::IsCancelled(status)) Fail(status);
  return Interrupted(client->get(), model_ids);
}

}  // namespace mla::mlactl
