// What all commands share: connecting as the options say, printing a result, and failing in the
// same words with the same exit codes.
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

// A client of the common options' target.
absl::StatusOr<std::unique_ptr<client::Client>> Connect(const CommonOptions& common);

// A name for a model that no other run has chosen: mlactl-PURPOSE-RANDOM.
std::string NewModelId(const std::string& purpose);

// How long a step lives without a message: 30 s, since layers of a large batch, and comparing
// them, take their time on a CPU, or the most that the server grants.
uint32_t StepLeaseMs(const client::Client& client);

// The same status, with the server's detail, and the context before its message.
absl::Status WithContext(const std::string& context, const absl::Status& status);

// Prints why, with the server's reason and retry hint, and returns the exit code that fits.
int Fail(const absl::Status& status);
// After an interrupt, once the command has given back what it had created: asks the server whether
// any of the models is still there (a model that is gone has no sequences), prints what it says,
// and returns kInterrupted.
int Interrupted(client::Client* client, std::span<const std::string> model_ids);
// Fail for options that make no sense: kUsageError.
int FailUsage(const absl::Status& status);

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
  return Emit(common, ToJson(*reply), format(*reply));
}

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_OUTPUT_H_
