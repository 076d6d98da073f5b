#include "client/mlactl/admin_commands.h"

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cpp/client.h"
#include "client/mlactl/cli/option_reader.h"
#include "client/mlactl/cli/output.h"

namespace mla::mlactl {
namespace {

// Every plain field of a message, one a line.
std::string Lines(const google::protobuf::Message& message, const std::string& indent = "") {
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
        value = absl::StrCat(reflection->GetUInt32(message, field));
        break;
      case Field::CPPTYPE_UINT64:
        value = field->name() == "boot_id"
                    ? absl::StrFormat("%016x", reflection->GetUInt64(message, field))
                    : absl::StrCat(reflection->GetUInt64(message, field));
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

std::string InfoText(const v1::GetServerInfoReply& info) {
  std::string text = Lines(info);
  for (const auto& [name, value] :
       {std::pair("wire_dtypes", DTypeNames(info.wire_dtypes())),
        std::pair("kv_dtypes", DTypeNames(info.kv_dtypes())),
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
  }
  return absl::StrCat(text, "limits\n", Lines(info.limits(), "  "));
}

std::string SequencesText(const v1::GetReply& reply) {
  std::string text = absl::StrFormat("%-16s %8s %10s %10s %-20s %s\n", "sequence", "epoch",
                                     "length", "lease ms", "model", "client");
  for (const v1::SequenceInfo& sequence : reply.sequences()) {
    absl::StrAppendFormat(&text, "%016x %8d %10d %10d %-20s %s%s\n", sequence.sequence_id(),
                          sequence.epoch(), sequence.length(), sequence.lease_left_ms(),
                          sequence.model_id(), sequence.client_id(),
                          sequence.in_step() ? " (in a step)" : "");
  }
  return text;
}

std::string ModelsText(const v1::ListModelsReply& reply) {
  std::string text =
      absl::StrFormat("%-24s %6s %6s %6s %6s %6s %7s %5s %-7s %-9s %s\n", "model", "heads", "lora",
                      "rope", "nope", "v", "layers", "page", "queries", "weights", "sequences");
  for (const v1::ModelInfo& info : reply.models()) {
    const v1::Geometry& geometry = info.model().geometry();
    absl::StrAppendFormat(
        &text, "%-24s %6d %6d %6d %6d %6d %7d %5d %-7s %-9s %d\n", info.model().model_id(),
        geometry.num_heads(), geometry.kv_lora_rank(), geometry.rope_dim(), geometry.nope_dim(),
        geometry.v_dim(), info.model().layers(), info.model().page_size(),
        info.model().query_precision() == v1::QUERY_PRECISION_SPLIT ? "split" : "bf16",
        info.weights_complete() ? "complete" : "missing", info.sequences());
  }
  return text;
}

std::string NumberText(uint64_t number) {
  return number > uint64_t{INT64_MAX} - 1 ? "none" : absl::StrCat(number);
}

std::string UsageLines(absl::string_view tenant,
                       const google::protobuf::RepeatedPtrField<v1::QuotaUsage>& usages) {
  std::string text;
  for (const v1::QuotaUsage& usage : usages) {
    const std::string source = absl::AsciiStrToLower(
        absl::StripPrefix(v1::QuotaSource_Name(usage.source()), "QUOTA_SOURCE_"));
    absl::StrAppendFormat(&text, "%-24s %-16s %16d %16s %-10s %8d\n", tenant, usage.name(),
                          usage.used(), NumberText(usage.bound()), source, usage.refused());
  }
  return text;
}

std::string QuotaText(const google::protobuf::RepeatedPtrField<v1::TenantQuota>& tenants,
                      const google::protobuf::RepeatedPtrField<v1::QuotaUsage>& server) {
  std::string text = absl::StrFormat("%-24s %-16s %16s %16s %-10s %8s\n", "tenant", "resource",
                                     "used", "bound", "from", "refused");
  absl::StrAppend(&text, UsageLines("(server)", server));
  for (const v1::TenantQuota& tenant : tenants) {
    absl::StrAppend(&text, UsageLines(tenant.tenant(), tenant.resources()));
    absl::StrAppendFormat(&text, "%-24s %-16s %16d\n", tenant.tenant(), "weight", tenant.weight());
  }
  return text;
}

// "kv_bytes=4GiB" and the like. False: no such resource or no number.
bool ReadBound(absl::string_view text, v1::QuotaBound* bound) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits('=', 1));
  v1::QuotaResource resource;
  if (!v1::QuotaResource_Parse("QUOTA_RESOURCE_" + absl::AsciiStrToUpper(parts.first), &resource)) {
    return false;
  }
  absl::string_view number = parts.second;
  int shift = 0;
  for (const auto& [suffix, bits] : {std::pair("KiB", 10), {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}) {
    if (absl::ConsumeSuffix(&number, suffix)) shift = bits;
  }
  uint64_t value = 0;
  if (!absl::SimpleAtoi(number, &value) || value > uint64_t{INT64_MAX} >> shift) return false;
  bound->set_resource(resource);
  bound->set_bound(value << shift);
  return true;
}

// Calls `ask` on a connected client and prints what it returns.
template <typename Ask, typename Format>
int Show(const Arguments& arguments, Ask ask, Format format) {
  const auto client = Connect(arguments);
  if (!client.ok()) return Fail(client.status());
  const auto reply = ask(client->get());
  if (!reply.ok()) return Fail(reply.status());
  return Emit(arguments, ToJson(*reply), format(*reply));
}

std::string StateName(v1::ServerState state) {
  return absl::StrReplaceAll(v1::ServerState_Name(state), {{"SERVER_STATE_", ""}});
}

}  // namespace

int Info(const Arguments& arguments) {
  return Show(
      arguments, [](client::Client* client) { return client->GetServerInfo(); }, InfoText);
}

int Status(const Arguments& arguments) {
  return Show(
      arguments, [](client::Client* client) { return client->GetStats(); },
      [](const v1::GetStatsReply& stats) { return Lines(stats); });
}

int Models(const Arguments& arguments) {
  return Show(
      arguments, [](client::Client* client) { return client->ListModels(); }, ModelsText);
}

int Sequences(const Arguments& arguments) {
  return Show(
      arguments, [](client::Client* client) { return client->GetSequences({}, false); },
      SequencesText);
}

int Health(const Arguments& arguments) {
  const auto client = Connect(arguments);
  if (!client.ok()) return Fail(client.status());
  const auto serving = (*client)->IsServing();
  if (!serving.ok()) return Fail(serving.status());
  const std::string word = *serving ? "SERVING" : "NOT_SERVING";
  const int code =
      Emit(arguments, absl::StrCat("{\"status\": \"", word, "\"}\n"), absl::StrCat(word, "\n"));
  return code != kOk ? code : *serving ? kOk : kNotServing;
}

int Drain(const Arguments& arguments) {
  uint32_t deadline_ms = 0;
  OptionReader reader(arguments);
  reader.Number("deadline-ms", 0, 86400000, &deadline_ms);
  if (!reader.status().ok()) return FailUsage(reader.status());
  const auto client = Connect(arguments);
  if (!client.ok()) return Fail(client.status());
  const auto reply = (*client)->Drain(deadline_ms, arguments.Has("exit"));
  if (!reply.ok()) return Fail(reply.status());
  const int code =
      Emit(arguments, ToJson(*reply),
           absl::StrCat(reply->drained() ? "drained: " : "not drained: ", reply->message(), "\n"));
  return code != kOk ? code : reply->drained() ? kOk : kNotServing;
}

int CancelDrain(const Arguments& arguments) {
  return Show(
      arguments, [](client::Client* client) { return client->CancelDrain(); },
      [](const v1::CancelDrainReply&) { return "the server takes new work\n"; });
}

int Quotas(const Arguments& arguments) {
  return Show(
      arguments,
      [](client::Client* client) {
        v1::GetQuotaRequest request;
        request.set_all(true);
        return client->GetQuota(request);
      },
      [](const v1::GetQuotaReply& reply) { return QuotaText(reply.tenants(), reply.server()); });
}

int Quota(const Arguments& arguments) {
  return Show(
      arguments,
      [&](client::Client* client) {
        v1::GetQuotaRequest request;
        request.set_tenant(arguments.words()[0]);
        return client->GetQuota(request);
      },
      [](const v1::GetQuotaReply& reply) { return QuotaText(reply.tenants(), {}); });
}

int SetQuota(const Arguments& arguments) {
  v1::SetQuotaRequest request;
  request.set_tenant(arguments.words()[0]);
  request.set_reset(arguments.Has("reset"));
  OptionReader reader(arguments);
  uint32_t weight = 0;
  reader.Number("weight", 1, 1000, &weight);
  request.set_weight(weight);
  const std::string bounds = arguments.Get("bounds");
  for (absl::string_view bound : absl::StrSplit(bounds, ',', absl::SkipEmpty())) {
    if (ReadBound(bound, request.add_bounds())) continue;
    reader.Fault("bounds", std::string(bound), "RESOURCE=NUMBER, RESOURCE as quotas shows it");
  }
  if (request.bounds_size() == 0 && weight == 0 && !request.reset()) {
    reader.Fault("bounds", "nothing", "given, or --weight, or --reset");
  }
  if (!reader.status().ok()) return FailUsage(reader.status());
  return Show(
      arguments, [&](client::Client* client) { return client->SetQuota(request); },
      [](const v1::SetQuotaReply& reply) {
        google::protobuf::RepeatedPtrField<v1::TenantQuota> one;
        *one.Add() = reply.quota();
        return QuotaText(one, {});
      });
}

int EvictSequences(const Arguments& arguments) {
  v1::EvictSequencesRequest request;
  request.set_tenant(arguments.words()[0]);
  request.set_client_id(arguments.Get("client"));
  request.set_all(arguments.Has("all"));
  OptionReader reader(arguments);
  const std::string ids = arguments.Get("ids");
  for (const std::string& text :
       std::vector<std::string>(absl::StrSplit(ids, ',', absl::SkipEmpty()))) {
    uint64_t id = 0;
    if (absl::SimpleHexAtoi(text, &id)) {
      request.add_sequence_ids(id);
    } else {
      reader.Fault("ids", text, "ids as sequences shows them, separated by commas");
    }
  }
  if ((request.sequence_ids_size() > 0) + !request.client_id().empty() + request.all() != 1) {
    reader.Fault("ids", "none or several", "one of --ids, --client and --all");
  }
  if (!reader.status().ok()) return FailUsage(reader.status());
  return Show(
      arguments, [&](client::Client* client) { return client->EvictSequences(request); },
      [](const v1::EvictSequencesReply& reply) {
        return absl::StrCat(reply.evicted(), " sequences evicted, ", reply.not_found_size(),
                            " not found\n");
      });
}

int EvictModel(const Arguments& arguments) {
  return Show(
      arguments,
      [&](client::Client* client) {
        return client->EvictModel(arguments.words()[0], arguments.words()[1]);
      },
      [](const v1::EvictModelReply& reply) {
        return absl::StrCat("model evicted, and ", reply.evicted_sequences(), " sequences\n");
      });
}

int Watch(const Arguments& arguments) {
  uint32_t interval_ms = 1000;
  uint64_t count = 0;
  OptionReader reader(arguments);
  reader.Number("interval-ms", 100, 60000, &interval_ms);
  reader.Number("count", 1, UINT64_MAX, &count);
  if (!reader.status().ok()) return FailUsage(reader.status());
  const auto client = Connect(arguments);
  if (!client.ok()) return Fail(client.status());
  const bool json = arguments.Has("json") || arguments.Get("output") == "json";
  uint64_t seen = 0;
  const absl::Status status =
      (*client)->WatchStatus(interval_ms, [&](const v1::StatusUpdate& update) {
        std::string line = absl::StrFormat(
            "%-9s %3d %%  %d open steps, %d sequences  %s\n", StateName(update.state()),
            update.percent(), update.open_steps(), update.sequences(), update.message());
        if (json) line = absl::StrReplaceAll(ToJson(update), {{"\n ", " "}, {"\n}", "}"}});
        std::fputs(line.c_str(), stdout);
        std::fflush(stdout);
        return ++seen != count;
      });
  return status.ok() ? kOk : Fail(status);
}

}  // namespace mla::mlactl
