#include "client/mlactl/cli/output.h"

#include <google/protobuf/util/json_util.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/cpp/errors.h"
#include "client/mlactl/cli/option_reader.h"

namespace mla::mlactl {
namespace {

constexpr char kDefaultTarget[] = "127.0.0.1:50551";

void PrintLines(const std::string& text) {
  for (const auto line : absl::StrSplit(text, '\n')) {
    std::fprintf(stderr, "mlactl: %.*s\n", static_cast<int>(line.size()), line.data());
  }
}

}  // namespace

std::string TargetOf(const Arguments& arguments) {
  const char* from_environment = std::getenv("MLA_TARGET");
  return arguments.Get("target", from_environment == nullptr ? kDefaultTarget : from_environment);
}

absl::StatusOr<client::ClientOptions> ClientOptionsOf(const Arguments& arguments) {
  client::ClientOptions options;
  options.tenant = arguments.Get("tenant");
  options.tls_ca = arguments.Get("tls-ca");
  options.tls_cert = arguments.Get("tls-cert");
  options.tls_key = arguments.Get("tls-key");
  options.tls_server_name = arguments.Get("tls-server-name");
  options.renew_leases = false;
  options.call_timeout_ms = 5000;
  OptionReader reader(arguments);
  reader.Number("timeout-ms", 1, 86400000, &options.call_timeout_ms);
  std::string format;
  reader.Choice("output", {"text", "json"}, &format);
  if (!reader.status().ok()) return reader.status();
  return options;
}

uint32_t StepLeaseMs(const client::Client& client) {
  constexpr uint32_t kWanted = 30000;
  const uint32_t most = client.info().limits().max_lease_ms();
  return most == 0 ? kWanted : std::min(kWanted, most);
}

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const Arguments& arguments) {
  const auto options = ClientOptionsOf(arguments);
  if (!options.ok()) return options.status();
  return client::Client::Connect(TargetOf(arguments), *options);
}

void SetTransport(const std::string& name, uint32_t spin_us, client::ClientOptions* options) {
  using Transport = client::ClientOptions::Transport;
  options->spin_us = 0;
  if (name == "inline") options->transport = Transport::kGrpc;
  if (name == "shm") options->transport = Transport::kShared;
  if (name == "ring-futex") options->transport = Transport::kRing;
  if (name == "ring-spin") {
    options->transport = Transport::kRing;
    options->spin_us = spin_us;
  }
}

const std::vector<std::string>& TransportNames() {
  static const auto* const kNames =
      new std::vector<std::string>{"inline", "shm", "ring-futex", "ring-spin"};
  return *kNames;
}

std::string NewModelId(const std::string& purpose) {
  uint64_t value = 0;
  while (getrandom(&value, sizeof(value), 0) != static_cast<ssize_t>(sizeof(value))) {
  }
  return absl::StrFormat("mlactl-%s-%016x", purpose, value);
}

absl::Status WithContext(const std::string& context, const absl::Status& status) {
  absl::Status named(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view type, const absl::Cord& payload) { named.SetPayload(type, payload); });
  return named;
}

int Fail(const absl::Status& status) {
  PrintLines(status.ToString());
  if (const auto detail = client::DetailOf(status); detail && !detail->reason().empty()) {
    std::fprintf(stderr, "mlactl: reason %s, retry after %u ms\n", detail->reason().c_str(),
                 detail->retry_after_ms());
  }
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ? kUnreachable : kRefused;
}

int Interrupted(client::Client* client, std::span<const std::string> model_ids) {
  const auto listed = client->ListModels();
  if (!listed.ok()) {
    PrintLines("interrupted; what it had created may still be on the server, which does not say: " +
               listed.status().ToString());
    return kInterrupted;
  }
  std::string left;
  for (const v1::ModelInfo& info : listed->models()) {
    const std::string& id = info.model().model_id();
    if (std::find(model_ids.begin(), model_ids.end(), id) == model_ids.end()) continue;
    absl::StrAppend(&left, left.empty() ? "" : ", ", id, " with ", info.sequences(), " sequences");
  }
  PrintLines(left.empty() ? "interrupted; what it had created is gone from the server"
                          : "interrupted; still on the server: model " + left);
  return kInterrupted;
}

int FailUsage(const absl::Status& status) {
  PrintLines(std::string(status.message()));
  return kUsageError;
}

absl::Status WriteFile(const std::string& path, const std::string& bytes) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
  if (std::fclose(file) != 0 || !written) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

int Emit(const Arguments& arguments, const std::string& json, const std::string& text) {
  const std::string file = arguments.Get("json");
  const bool bare = arguments.Has("json") && file.empty();
  const bool as_json = bare || arguments.Get("output", "text") == "json";
  std::fputs((as_json ? json : text).c_str(), stdout);
  if (file.empty()) return kOk;
  const absl::Status written = WriteFile(file, json);
  return written.ok() ? kOk : Fail(written);
}

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) return "{}\n";
  return text;
}

}  // namespace mla::mlactl
