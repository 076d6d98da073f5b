// Shared by all commands: connecting, printing results and errors, and exit codes.
#ifndef MLA_CLIENT_MLACTL_CLI_OUTPUT_H_
#define MLA_CLIENT_MLACTL_CLI_OUTPUT_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/mlactl/cli/common.h"

namespace mla::mlactl {

// Moves a terminal's cursor to the first place and clears the screen.
inline constexpr char kClearScreen[] = "\x1b[H\x1b[J";

// Returns a client of the common options' target.
absl::StatusOr<std::unique_ptr<client::Client>> Connect(const CommonOptions& common);

// Returns a new model name: mlactl-PURPOSE-RANDOM.
std::string NewModelId(const std::string& purpose);

// Returns the lease of a step: 30 s, or the server's maximum if that is less. On a CPU the layers
// of a large batch and their comparison are slow.
uint32_t StepLeaseMs(const client::Client& client);

// Returns the same status and detail, with the context before its message.
absl::Status WithContext(const std::string& context, const absl::Status& status);

// Prints the error with the server's reason and retry hint, or how to name another server if none
// answered; returns the exit code for it.
int Fail(const absl::Status& status);
// Called after an interrupt, when the command has cleaned up: prints which of the models are still
// on the server and returns kInterrupted. A model that is gone does not have sequences either.
int Interrupted(client::Client* client, std::span<const std::string> model_ids);
// Prints a usage error and returns kUsageError.
int FailUsage(const absl::Status& status);

// Writes text to standard output. Invisible characters and terminal controls are escaped, except
// for ends of lines: names and messages of a server may hold anything.
void Print(const std::string& text);

// Escapes invisible characters and terminal controls, ends of lines too, in all texts of a message.
void EscapeTexts(google::protobuf::Message* message);
template <typename M>
M WithPlainTexts(M message) {
  EscapeTexts(&message);
  return message;
}

// Prints `json` or `text`, whichever the options name, and writes `json` to their file, if any.
// kRefused when it cannot be written, else kOk.
int Emit(const CommonOptions& common, const std::string& json, const std::string& text);
absl::Status WriteFile(const std::string& path, const std::string& bytes);

std::string ToJson(const google::protobuf::Message& message);

// Connects, calls `call` and prints its reply; returns the exit code. `call` takes a Client* and
// returns a StatusOr of a message, of which `format` makes text.
template <typename Call, typename Format>
int CallAndPrint(const CommonOptions& common, Call call, Format format) {
  const auto client = Connect(common);
  if (!client.ok()) return Fail(client.status());
  const auto reply = call(client->get());
  if (!reply.ok()) return Fail(reply.status());
  return Emit(common, ToJson(*reply), format(WithPlainTexts(*reply)));
}

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_OUTPUT_H_
