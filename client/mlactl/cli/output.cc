#include "client/mlactl/cli/output.h"

#include <google/protobuf/util/json_util.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/printable.h"
#include "base/random_bytes.h"
#include "client/cpp/streams/errors.h"
#include "client/mlactl/text/yaml.h"

namespace mla::mlactl {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Follows the error of a call that no server answered.
constexpr char kNoAnswer[] =
    "no answer from the server: --target=ADDRESS, MLA_TARGET or a context (mlactl contexts) says "
    "where it is";

// Colours are for terminals, unless the user wants none (https://no-color.org).
bool Coloured(std::FILE* stream) {
  const char* const none = std::getenv("NO_COLOR");
  return isatty(fileno(stream)) != 0 && (none == nullptr || *none == '\0');
}

void PrintLines(const std::string& text) {
  const bool coloured = Coloured(stderr);
  for (const auto line : absl::StrSplit(text, '\n')) {
    std::fprintf(stderr, "%smlactl:%s %s\n", coloured ? "\x1b[31m" : "", coloured ? "\x1b[0m" : "",
                 base::Printable({line.data(), line.size()}).c_str());
  }
}

}  // namespace

void Print(const std::string& text) { std::fputs(base::Printable(text, "\n").c_str(), stdout); }

void EscapeTexts(Message* message) {
  const auto* const reflection = message->GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(*message, &fields);
  for (const FieldDescriptor* const field : fields) {
    const int count = field->is_repeated() ? reflection->FieldSize(*message, field) : 1;
    for (int i = 0; i < count; ++i) {
      if (field->type() == FieldDescriptor::TYPE_STRING) {
        std::string text = field->is_repeated() ? reflection->GetRepeatedString(*message, field, i)
                                                : reflection->GetString(*message, field);
        text = base::Printable(text);
        if (field->is_repeated()) {
          reflection->SetRepeatedString(message, field, i, std::move(text));
        } else {
          reflection->SetString(message, field, std::move(text));
        }
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        EscapeTexts(field->is_repeated() ? reflection->MutableRepeatedMessage(message, field, i)
                                         : reflection->MutableMessage(message, field));
      }
    }
  }
}

uint32_t StepLeaseMs(const client::Client& client) {
  constexpr uint32_t kWanted = 30000;
  const uint32_t most = client.info().limits().max_lease_ms();
  return most == 0 ? kWanted : std::min(kWanted, most);
}

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const CommonOptions& common) {
  return client::Client::Connect(common.target, common.client);
}

std::string NewModelId(const std::string& purpose) {
  return absl::StrFormat("mlactl-%s-%016x", purpose, RandomNumber());
}

absl::Status WithContext(const std::string& context, const absl::Status& status) {
  absl::Status named(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view type, const absl::Cord& payload) { named.SetPayload(type, payload); });
  return named;
}

int Fail(const absl::Status& status) {
  // Prints one line, whatever the server's message contains. The detail is printed separately: its
  // bytes mean nothing to people.
  PrintLines(base::Printable(status.ToString(absl::StatusToStringMode::kWithNoExtraData)));
  if (const auto detail = client::DetailOf(status); detail && !detail->reason().empty()) {
    std::string line = "reason " + base::Printable(detail->reason());
    if (detail->retry_after_ms() > 0) {
      absl::StrAppend(&line, ", retry after ", detail->retry_after_ms(), " ms");
    }
    PrintLines(line);
  }
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return kRefused;
  // A server that answers gives a detail.
  if (!client::DetailOf(status)) PrintLines(kNoAnswer);
  return kUnreachable;
}

int Interrupted(client::Client* client, std::span<const std::string> model_ids) {
  const auto listed = client->ListModels();
  if (!listed.ok()) {
    PrintLines("interrupted; its model may still be on the server, which cannot be reached: " +
               listed.status().ToString());
    return kInterrupted;
  }
  std::string names;
  for (const v1::ModelInfo& info : listed->models()) {
    const std::string& id = info.model().model_id();
    if (std::find(model_ids.begin(), model_ids.end(), id) == model_ids.end()) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", id, " with ", info.sequences(),
                    " sequences");
  }
  PrintLines(names.empty() ? "interrupted; what it had created is gone from the server"
                           : "interrupted; still on the server: model " + names);
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

int Emit(const CommonOptions& common, const std::string& json, const std::string& text) {
  Print(common.yaml ? YamlOfJson(json) : common.json ? json : text);
  if (common.json_file.empty()) return kOk;
  const absl::Status written = WriteFile(common.json_file, json);
  return written.ok() ? kOk : Fail(written);
}

std::string ToJson(const Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) return "{}\n";
  // The JSON may still contain characters that a terminal should not get.
  return base::Printable(text, "\n");
}

}  // namespace mla::mlactl
