#include "client/mlactl/replay/replay_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/mlactl/cli/interrupt.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/cli/progress.h"
#include "client/mlactl/cli/transport.h"
#include "client/mlactl/replay/recording.h"
#include "client/mlactl/replay/replayer.h"
#include "nlohmann/json.hpp"

namespace mla::mlactl {
namespace {

// Outputs that are rounded to bf16 may have this cosine difference.
constexpr double kBf16Cosine = 3e-5;

constexpr char kNotes[] =
    "FILE holds requests and the outputs that they should give, as ./dev demo --record writes it.\n"
    "It is sent to the server under model names of its own. Exit code 5 when outputs are outside\n"
    "the rule; the worst errors are printed either way.\n"
    "\n"
    "With --save the answers of this server replace the expected ones in a new recording, so that\n"
    "another backend can be compared with it. Ctrl-C prints the results so far.\n";

constexpr char kExamples[] =
    "mlactl replay demo.rec\n"
    "mlactl --target=unix:/run/cpu.sock replay demo.rec --save=cpu.rec\n"
    "mlactl --target=unix:/run/gpu.sock replay cpu.rec --transport=inline --json=gpu.json\n";

struct Inputs {
  std::string recording, save_file;
  std::string transport = "auto", output_dtype = "f32";
  uint32_t spin_us = kDefaultSpinMicros;
  OutputRule rule;
  bool has_cosine = false;  // --cosine is given
  bool quiet = false;
};

ReplayOptions OptionsOf(const Inputs& inputs) {
  ReplayOptions options;
  options.rule = inputs.rule;
  if (inputs.output_dtype == "bf16") {
    options.o_dtype = v1::DTYPE_BF16;
    if (!inputs.has_cosine) options.rule.cosine = kBf16Cosine;
  }
  return options;
}

std::string ErrorLine(const char* name, const WorstError& worst, double bound) {
  if (worst.where.empty()) return absl::StrFormat("  %-22s none compared\n", name);
  std::string line = absl::StrFormat("  %-22s %-10.3g", name, worst.value);
  absl::StrAppend(&line, bound > 0 ? absl::StrFormat(" of %-8.3g", bound) : std::string(12, ' '),
                  "  ", worst.where, "\n");
  return line;
}

// `partial`: the replay was interrupted, and the results cover the records so far.
std::string ReplayText(const Replayer& replayer, const v1::GetServerInfoReply& server,
                       const std::string& target, bool partial) {
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
  absl::StrAppend(&text, ErrorLine("error / allowed", comparison.of_allowed(), 1),
                  ErrorLine("error", comparison.abs(), 0),
                  ErrorLine("error / max |V|", comparison.abs_of_v(), rule.abs_of_v),
                  ErrorLine("cosine difference", comparison.cosine(), rule.cosine),
                  ErrorLine("lse error", comparison.lse(), rule.lse));
  absl::StrAppendFormat(&text, "rule: |error| <= %g max |V| or %g %%, cosine < %g, lse <= %g\n",
                        rule.abs_of_v, 100 * rule.rel, rule.cosine, rule.lse);
  if (partial) absl::StrAppend(&text, "interrupted: the rest of the recording was not replayed\n");
  if (comparison.agrees()) {
    return text + (partial ? "the outputs agree as far as they go\n" : "the outputs agree\n");
  }
  absl::StrAppendFormat(
      &text, "the outputs DIFFER: %d elements, %d row heads by cosine, %d lse outside; first %s\n",
      comparison.outside_elements(), comparison.outside_cosines(), comparison.outside_lse(),
      comparison.first_outside());
  return text;
}

std::string ReplayJson(const Replayer& replayer, const v1::GetServerInfoReply& server,
                       const std::string& target, bool partial) {
  using Json = nlohmann::ordered_json;
  const OutputComparison& comparison = replayer.comparison();
  const OutputRule& rule = comparison.rule();
  const ReplayCounts& counts = replayer.counts();
  const auto worst_json = [](const WorstError& worst) {
    return Json{{"value", worst.value}, {"where", worst.where}};
  };
  Json json{{"format", "mlactl-replay"}, {"version", 1}};
  json["server"] = {{"target", target},
                    {"version", server.server_version()},
                    {"backend", server.backend().name()},
                    {"device", server.backend().device()}};
  json["transport"] = replayer.transport();
  json["interrupted"] = partial;
  json["steps"] = counts.steps;
  json["attends"] = counts.attends;
  json["rows"] = counts.rows;
  json["elements"] = comparison.elements();
  json["attend_us"] = {{"p50", static_cast<double>(counts.attend_times.ValueAt(0.5)) * 1e-3},
                       {"p99", static_cast<double>(counts.attend_times.ValueAt(0.99)) * 1e-3}};
  json["rule"] = {
      {"abs_of_v", rule.abs_of_v}, {"rel", rule.rel}, {"cosine", rule.cosine}, {"lse", rule.lse}};
  json["worst"] = {{"error_of_allowed", worst_json(comparison.of_allowed())},
                   {"error", worst_json(comparison.abs())},
                   {"error_of_v", worst_json(comparison.abs_of_v())},
                   {"cosine", worst_json(comparison.cosine())},
                   {"lse", worst_json(comparison.lse())}};
  json["outside"] = {{"elements", comparison.outside_elements()},
                     {"cosine", comparison.outside_cosines()},
                     {"lse", comparison.outside_lse()}};
  json["first_outside"] = comparison.first_outside();
  json["agrees"] = comparison.agrees();
  return json.dump(2) + "\n";
}

// Replays the recording until its end or an interrupt, and prints the results. `model_ids` gets the
// names of the models that the replay registered.
absl::Status RunReplay(const CommonOptions& common, const Inputs& inputs, client::Client* client,
                       std::vector<std::string>* model_ids, int* code) {
  MLA_ASSIGN_OR_RETURN(auto reader, RecordingReader::Open(inputs.recording));
  std::unique_ptr<RecordingWriter> writer;
  if (!inputs.save_file.empty()) {
    MLA_ASSIGN_OR_RETURN(writer, RecordingWriter::Create(inputs.save_file, reader->header_line()));
  }
  const std::atomic<bool>& interrupted = CatchInterrupts();
  Progress progress(stderr, inputs.quiet);
  Replayer replayer(client, reader.get(), writer.get(), OptionsOf(inputs));
  absl::Status status = replayer.Run([&] {
    progress.Show("replaying", reader->fraction_read(),
                  absl::StrCat(replayer.counts().attends, " attends"));
    return !interrupted.load();
  });
  progress.Clear();
  *model_ids = replayer.model_ids();
  if (status.ok() && writer != nullptr) status = writer->Close();
  const bool partial = absl::IsCancelled(status) && interrupted.load();
  if (!status.ok() && !(partial && replayer.counts().attends > 0)) return status;
  const v1::GetServerInfoReply& server = client->info();
  *code = Emit(common, ReplayJson(replayer, server, common.target, partial),
               ReplayText(replayer, server, common.target, partial));
  if (*code == kOk && !replayer.comparison().agrees()) *code = kDifferent;
  return status;
}

int Replay(const CommonOptions& common, const Inputs& inputs) {
  std::error_code none;
  if (!inputs.save_file.empty() &&
      std::filesystem::equivalent(inputs.save_file, inputs.recording, none)) {
    return FailUsage(
        absl::InvalidArgumentError("--save: got the recording itself, must be another file"));
  }
  client::ClientOptions options = common.client;
  options.renew_leases = true;
  SetTransport(inputs.transport, inputs.spin_us, &options);
  auto client = client::Client::Connect(common.target, options);
  if (!client.ok()) return Fail(client.status());
  int code = kOk;
  std::vector<std::string> model_ids;
  const absl::Status status = RunReplay(common, inputs, client->get(), &model_ids, &code);
  if (!CatchInterrupts().load()) return status.ok() ? code : Fail(status);
  if (!status.ok() && !absl::IsCancelled(status)) Fail(status);
  return Interrupted(client->get(), model_ids);
}

}  // namespace

void AddReplayCommand(Program* program) {
  const auto inputs = std::make_shared<Inputs>();
  Command command =
      program->Add({.name = "replay",
                    .group = "Checks and load",
                    .summary = "send a recording to the server and compare the outputs",
                    .examples = kExamples,
                    .notes = kNotes});
  command.Word("FILE", "the recording", &inputs->recording);
  AddTransport(&command, &inputs->transport);
  AddSpin(&command, &inputs->spin_us);
  command.Text(
      {"save", "FILE", "write the recording with this server's outputs, to replay elsewhere"},
      &inputs->save_file);
  command.Choice({"output-dtype", "TYPE", "type of the server's outputs: f32 (default) or bf16"},
                 {"f32", "bf16"}, &inputs->output_dtype);
  OutputRule* const rule = &inputs->rule;
  command.Real(
      {"abs-of-v", "X", "error allowed, as a part of the largest |V| in sight (default 2e-3)"}, 0,
      1, &rule->abs_of_v);
  command.Real({"rel", "X", "error allowed, as a part of the expected value (default 1.6e-2)"}, 0,
               1, &rule->rel);
  CLI::Option* const cosine = command.Real(
      {"cosine", "X", "cosine difference allowed of a row's head (default 1e-5; bf16 3e-5)"}, 0, 2,
      &rule->cosine);
  command.Real({"lse", "X", "error of the log-sum-exp allowed (default 1e-3)"}, 0, 100, &rule->lse);
  command.Flag("quiet", "show no progress", &inputs->quiet);
  command.Run([inputs, cosine](const CommonOptions& common) {
    inputs->has_cosine = cosine->count() > 0;
    return Replay(common, *inputs);
  });
}

}  // namespace mla::mlactl
