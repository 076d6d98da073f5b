// mlactl: what a server is and does, from the command line.
//
//   mlactl [--target=ADDRESS] [--json] info | status | sequences | drain | health
//
// Exit codes: 0 success, 1 wrong usage, 2 the server cannot be reached, 3 it answered with an
// error, 4 it is not serving (health) or steps had to be aborted (drain).
#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"

namespace mla::client {
namespace {

constexpr char kUsage[] =
    "usage: mlactl [OPTION...] COMMAND\n"
    "\n"
    "commands:\n"
    "  info        what the server is: backend, limits, profiles\n"
    "  status      what it does now: counters and gauges\n"
    "  sequences   open sequences of the tenant\n"
    "  drain       refuse new work, wait for open steps (--deadline-ms, --exit)\n"
    "  health      exit 0 when it takes new work, 4 when not\n"
    "\n"
    "options:\n"
    "  --target=ADDRESS      host:port or unix:PATH (default $MLA_TARGET, else 127.0.0.1:50551)\n"
    "  --json                print the reply as JSON\n"
    "  --tenant=NAME         tenant to act for, without TLS\n"
    "  --timeout-ms=N        of each call (default 5000)\n"
    "  --tls-ca=FILE --tls-cert=FILE --tls-key=FILE   mutual TLS\n"
    "  --tls-server-name=NAME   name to expect in the server's certificate\n"
    "  --deadline-ms=N       of drain; 0: the server's own\n"
    "  --exit                of drain: stop the process when drained\n";

enum ExitCode { kOk = 0, kUsageError = 1, kUnreachable = 2, kRefused = 3, kNotServing = 4 };

struct Arguments {
  std::map<std::string, std::string> options;
  std::vector<std::string> words;
  bool Has(const std::string& name) const { return options.count(name) != 0; }
  std::string Get(const std::string& name, const std::string& otherwise) const {
    const auto found = options.find(name);
    return found == options.end() ? otherwise : found->second;
  }
};

constexpr const char* kOptions[] = {"--target", "--json",        "--tenant",         "--timeout-ms",
                                    "--tls-ca", "--tls-cert",    "--tls-key",        "--exit",
                                    "--help",   "--deadline-ms", "--tls-server-name"};

bool Parse(int argc, char** argv, Arguments* arguments) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (!absl::StartsWith(word, "--")) {
      arguments->words.push_back(word);
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    bool known = false;
    for (const char* option : kOptions) known |= name == option;
    if (!known) {
      std::fprintf(stderr, "mlactl: unknown option %s\n", name.c_str());
      return false;
    }
    arguments->options[name] = equals == std::string::npos ? "" : word.substr(equals + 1);
  }
  return true;
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "mlactl: %s\n", status.ToString().c_str());
  if (const auto detail = DetailOf(status); detail && !detail->reason().empty()) {
    std::fprintf(stderr, "mlactl: reason %s, retry after %u ms\n", detail->reason().c_str(),
                 detail->retry_after_ms());
  }
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ? kUnreachable : kRefused;
}

std::string Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) return "{}\n";
  return text;
}

// Every field of a flat message, one a line.
std::string Lines(const google::protobuf::Message& message, const std::string& indent = "") {
  std::string text;
  const auto* reflection = message.GetReflection();
  const auto* descriptor = message.GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const auto* field = descriptor->field(i);
    if (field->is_repeated()) continue;
    std::string value;
    switch (field->cpp_type()) {
      case google::protobuf::FieldDescriptor::CPPTYPE_UINT32:
        value = absl::StrCat(reflection->GetUInt32(message, field));
        break;
      case google::protobuf::FieldDescriptor::CPPTYPE_UINT64:
        value = field->name() == "boot_id"
                    ? absl::StrFormat("%016x", reflection->GetUInt64(message, field))
                    : absl::StrCat(reflection->GetUInt64(message, field));
        break;
      case google::protobuf::FieldDescriptor::CPPTYPE_STRING:
        value = reflection->GetString(message, field);
        break;
      default:
        continue;
    }
    absl::StrAppendFormat(&text, "%s%-24s %s\n", indent, field->name(), value);
  }
  return text;
}

std::string InfoText(const v1::GetServerInfoReply& info) {
  std::string text = Lines(info);
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

template <typename Reply, typename Format>
int Show(const absl::StatusOr<Reply>& reply, bool json, Format format) {
  if (!reply.ok()) return Fail(reply.status());
  std::fputs((json ? Json(*reply) : format(*reply)).c_str(), stdout);
  return kOk;
}

int Health(Client* client, bool json) {
  const auto serving = client->IsServing();
  if (!serving.ok()) return Fail(serving.status());
  const char* word = *serving ? "SERVING" : "NOT_SERVING";
  std::printf(json ? "{\"status\": \"%s\"}\n" : "%s\n", word);
  return *serving ? kOk : kNotServing;
}

int Drain(Client* client, const Arguments& arguments, bool json) {
  uint32_t deadline_ms = 0;
  if (!absl::SimpleAtoi(arguments.Get("--deadline-ms", "0"), &deadline_ms)) return kUsageError;
  const auto reply = client->Drain(deadline_ms, arguments.Has("--exit"));
  const int code = Show(reply, json, [](const v1::DrainReply& r) {
    return absl::StrCat(r.drained() ? "drained: " : "not drained: ", r.message(), "\n");
  });
  return code == kOk && !reply->drained() ? kNotServing : code;
}

int Run(const std::string& command, Client* client, const Arguments& arguments) {
  const bool json = arguments.Has("--json");
  if (command == "info") return Show(client->GetServerInfo(), json, InfoText);
  if (command == "status") {
    return Show(client->GetStats(), json, [](const auto& stats) { return Lines(stats); });
  }
  if (command == "sequences") return Show(client->GetSequences({}, false), json, SequencesText);
  if (command == "health") return Health(client, json);
  return Drain(client, arguments, json);
}

int Main(int argc, char** argv) {
  Arguments arguments;
  if (!Parse(argc, argv, &arguments)) return kUsageError;
  if (arguments.Has("--help")) {
    std::fputs(kUsage, stdout);
    return kOk;
  }
  const std::string command = arguments.words.size() == 1 ? arguments.words[0] : "";
  if (command != "info" && command != "status" && command != "sequences" && command != "drain" &&
      command != "health") {
    std::fputs(kUsage, stderr);
    return kUsageError;
  }
  ClientOptions options;
  options.tenant = arguments.Get("--tenant", "");
  options.tls_ca = arguments.Get("--tls-ca", "");
  options.tls_cert = arguments.Get("--tls-cert", "");
  options.tls_key = arguments.Get("--tls-key", "");
  options.tls_server_name = arguments.Get("--tls-server-name", "");
  options.renew_leases = false;
  if (!absl::SimpleAtoi(arguments.Get("--timeout-ms", "5000"), &options.call_timeout_ms)) {
    std::fputs("mlactl: --timeout-ms needs a number\n", stderr);
    return kUsageError;
  }
  const char* from_environment = std::getenv("MLA_TARGET");
  const std::string target =
      arguments.Get("--target", from_environment == nullptr ? "127.0.0.1:50551" : from_environment);
  const auto client = Client::Connect(target, options);
  if (!client.ok()) return Fail(client.status());
  return Run(command, client->get(), arguments);
}

}  // namespace
}  // namespace mla::client

int main(int argc, char** argv) { return mla::client::Main(argc, argv); }
