#include "client/mlactl/query_commands.h"

#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "client/cpp/client.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/fleet/sequence_list.h"
#include "client/mlactl/text/units.h"

namespace mla::mlactl {
namespace {

constexpr char kGroup[] = "State of a server";

constexpr char kSequencesNotes[] =
    "The oldest of a tenant come first. age: since it was opened, forked or imported on this\n"
    "server. pages and size: what it holds in the cache, pages that it shares with others "
    "included.\n"
    "state: idle, step, or import while its rows arrive.\n"
    "Over TLS --all-tenants needs the certificate of an operator (server.operators).\n";

std::string NumberText(const std::string& field, uint64_t value, bool wide) {
  return wide ? absl::StrCat(value) : FieldForPeople(field, value);
}

// Returns every plain field of a message, one a line.
std::string Lines(const google::protobuf::Message& message, bool wide,
                  const std::string& indent = "") {
  using Field = google::protobuf::FieldDescriptor;
  std::string text;
  const auto* reflection = message.GetReflection();
  const auto* descriptor = message.GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const Field* field = descriptor->field(i);
    if (field->is_repeated()) continue;
    std::string value;
    switch (field->cpp_type()) {
      case Field::CPPTYPE_UINT32:
        value = NumberText(field->name(), reflection->GetUInt32(message, field), wide);
        break;
      case Field::CPPTYPE_UINT64:
        value = field->name() == "boot_id"
                    ? absl::StrFormat("%016x", reflection->GetUInt64(message, field))
                    : NumberText(field->name(), reflection->GetUInt64(message, field), wide);
        break;
      case Field::CPPTYPE_STRING:
        value = reflection->GetString(message, field);
        break;
      default:
        continue;
    }
    absl::StrAppendFormat(&text, "%s%-24s %s\n", indent, field->name(), value);
  }
  return text;
}

std::string DTypeNames(const google::protobuf::RepeatedField<int>& dtypes) {
  std::string names;
  for (const int dtype : dtypes) {
    const std::string& name = v1::DType_Name(static_cast<v1::DType>(dtype));
    absl::StrAppend(&names, names.empty() ? "" : ", ",
                    absl::AsciiStrToLower(absl::StripPrefix(name, "DTYPE_")));
  }
  return names;
}

// Returns "fp8_row" for KV_FORMAT_FP8_ROW.
std::string KvFormatName(v1::KvFormat format) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::KvFormat_Name(format), "KV_FORMAT_"));
}

std::string KvFormatNames(const google::protobuf::RepeatedField<int>& formats) {
  return absl::StrJoin(formats, ", ", [](std::string* out, int format) {
    absl::StrAppend(out, KvFormatName(static_cast<v1::KvFormat>(format)));
  });
}

std::string InfoText(const v1::GetServerInfoReply& info, bool wide) {
  std::string text = Lines(info, wide);
  for (const auto& [name, value] :
       {std::pair("wire_dtypes", DTypeNames(info.wire_dtypes())),
        std::pair("kv_dtypes", DTypeNames(info.kv_dtypes())),
        std::pair("kv_formats", KvFormatNames(info.kv_formats())),
        std::pair("profiles", absl::StrJoin(info.profiles(), ", ")),
        std::pair("capabilities", absl::StrJoin(info.capabilities(), ", "))}) {
    absl::StrAppendFormat(&text, "%-24s %s\n", name, value);
  }
  for (const v1::Backend& backend : info.backends()) {
    absl::StrAppendFormat(&text, "backend %-16s %s\n", backend.name(),
                          backend.chosen()
                              ? absl::StrCat("chosen: ", backend.device(), ", ", backend.arch(),
                                             ", ", backend.units(), " units")
                              : backend.reason());
    if (backend.unused_hardware().empty()) continue;
    absl::StrAppendFormat(&text, "warning: not used, though this machine has it: %s\n",
                          backend.unused_hardware());
  }
  for (const v1::BackendNote& note : info.notes()) {
    absl::StrAppendFormat(&text, "note %-19s %s\n", note.name(), note.text());
  }
  return absl::StrCat(text, "limits\n", Lines(info.limits(), wide, "  "));
}

int Sequences(const CommonOptions& common, bool all_tenants) {
  return CallAndPrint(
      common, [&](client::Client* client) { return OpenSequences(client, all_tenants); },
      [&](const v1::GetReply& reply) {
        fleet::FleetSequences list;
        AddSequences(reply, "", &list);
        OrderSequences(&list);
        return SequencesText(list, common.wide);
      });
}

// Returns the name of the choice for 8-bit products over the model's rows.
std::string Fp8ComputeName(const v1::ModelSpec& model) {
  if (model.fp8_compute() == v1::FP8_COMPUTE_AUTO) return "-";  // rows of bf16
  return model.fp8_compute() == v1::FP8_COMPUTE_ON ? "on" : "off";
}

// Models without a window have no sinks.
std::string SinksName(const v1::ModelInfo& info) {
  if (info.model().window() == 0) return "-";
  return info.sinks_complete() ? "complete" : "missing";
}

std::string ModelsText(const v1::ListModelsReply& reply) {
  std::string text =
      absl::StrFormat("%-24s %6s %6s %6s %6s %6s %7s %5s %-7s %-10s %-4s %-9s %-9s %s\n", "model",
                      "heads", "lora", "rope", "nope", "v", "layers", "page", "queries", "rows",
                      "fp8", "weights", "sinks", "sequences");
  for (const v1::ModelInfo& info : reply.models()) {
    const v1::Geometry& geometry = info.model().geometry();
    absl::StrAppendFormat(
        &text, "%-24s %6d %6d %6d %6d %6d %7d %5d %-7s %-10s %-4s %-9s %-9s %d\n",
        info.model().model_id(), geometry.num_heads(), geometry.kv_lora_rank(), geometry.rope_dim(),
        geometry.nope_dim(), geometry.v_dim(), info.model().layers(), info.model().page_size(),
        info.model().query_precision() == v1::QUERY_PRECISION_SPLIT ? "split" : "bf16",
        KvFormatName(info.model().kv_format()), Fp8ComputeName(info.model()),
        info.weights_complete() ? "complete" : "missing", SinksName(info), info.sequences());
  }
  return text;
}

std::string StateName(v1::ServerState state) {
  return absl::StrReplaceAll(v1::ServerState_Name(state), {{"SERVER_STATE_", ""}});
}

int Health(const CommonOptions& common) {
  const auto client = Connect(common);
  if (!client.ok()) return Fail(client.status());
  const auto serving = (*client)->IsServing();
  if (!serving.ok()) return Fail(serving.status());
  const std::string word = *serving ? "SERVING" : "NOT_SERVING";
  const int code =
      Emit(common, absl::StrCat("{\"status\": \"", word, "\"}\n"), absl::StrCat(word, "\n"));
  return code != kOk ? code : *serving ? kOk : kNotServing;
}

struct WatchOptions {
  uint32_t interval_ms = 1000;
  uint64_t count = 0;  // 0: no end
};

int Watch(const CommonOptions& common, const WatchOptions& options) {
  const auto client = Connect(common);
  if (!client.ok()) return Fail(client.status());
  uint64_t updates = 0;
  std::string last;
  const absl::Status status =
      (*client)->WatchStatus(options.interval_ms, [&](const v1::StatusUpdate& update) {
        std::string line =
            absl::StrFormat("%-9s %3d %%  %d open steps, %d sequences  %s\n",
                            StateName(update.state()), update.percent(), update.open_steps(),
                            update.sequences(), WithPlainTexts(update).message());
        if (common.json) line = absl::StrReplaceAll(ToJson(update), {{"\n ", " "}, {"\n}", "}"}});
        // An unchanged line is printed again only if the user asked for a number of lines.
        if (options.count != 0 || line != last) Print(line);
        last = line;
        std::fflush(stdout);
        return ++updates != options.count;
      });
  return status.ok() ? kOk : Fail(status);
}

void AddWatch(Program* program) {
  const auto options = std::make_shared<WatchOptions>();
  Command command = program->Add({.name = "watch",
                                  .group = kGroup,
                                  .summary = "show the server's state at each change, until Ctrl-C",
                                  .examples = "mlactl watch\nmlactl watch --count=1 --json\n"});
  command.Number({"interval-ms", "N", "a line at least this often (default 1000)"}, 100, 60000,
                 &options->interval_ms);
  command.Number({"count", "N", "end after N lines"}, 1, UINT64_MAX, &options->count);
  command.Run([options](const CommonOptions& common) { return Watch(common, *options); });
}

void AddSequencesCommand(Program* program) {
  const auto all_tenants = std::make_shared<bool>(false);
  Command command = program->Add({.name = "sequences",
                                  .group = kGroup,
                                  .summary = "list the open sequences of a tenant, or of all",
                                  .examples = "mlactl sequences --tenant=research\n"
                                              "mlactl sequences --all-tenants -o wide\n",
                                  .notes = kSequencesNotes});
  command.Flag("all-tenants", "list those of all tenants, for operators", all_tenants.get());
  command.Run(
      [all_tenants](const CommonOptions& common) { return Sequences(common, *all_tenants); });
}

}  // namespace

void AddQueryCommands(Program* program) {
  program
      ->Add({.name = "info",
             .group = kGroup,
             .summary = "show what the server is: backends, limits, profiles",
             .examples = "mlactl info\n"
                         "mlactl --target=unix:/run/mla-server/mla.sock info --json\n"})
      .Run([](const CommonOptions& common) {
        return CallAndPrint(
            common, [](client::Client* client) { return client->GetServerInfo(); },
            [&](const v1::GetServerInfoReply& info) { return InfoText(info, common.wide); });
      });
  program
      ->Add({.name = "status",
             .group = kGroup,
             .summary = "show what the server does now: counters and gauges",
             .examples = "mlactl status\nmlactl status --json | jq .kv_bytes_used\n"})
      .Run([](const CommonOptions& common) {
        return CallAndPrint(
            common, [](client::Client* client) { return client->GetStats(); },
            [&](const v1::GetStatsReply& stats) { return Lines(stats, common.wide); });
      });
  AddWatch(program);
  program
      ->Add({.name = "models",
             .group = kGroup,
             .summary = "list the tenant's models",
             .examples = "mlactl models\n"})
      .Run([](const CommonOptions& common) {
        return CallAndPrint(
            common, [](client::Client* client) { return client->ListModels(); }, ModelsText);
      });
  AddSequencesCommand(program);
  program
      ->Add({.name = "health",
             .group = kGroup,
             .summary = "exit 0 when it takes new work, 4 when not",
             .examples = "mlactl health && echo ready\n"})
      .Run(Health);
}

}  // namespace mla::mlactl
