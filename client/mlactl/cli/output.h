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
#include "client/mlactl/cli/command_line.h"

namespace mla::mlactl {

// Of --target and $MLA_TARGET.
std::string TargetOf(const Arguments& arguments);
// Of --tenant, --timeout-ms and --tls-*; leases are not renewed.
absl::StatusOr<client::ClientOptions> ClientOptionsOf(const Arguments& arguments);
absl::StatusOr<std::unique_ptr<client::Client>> Connect(const Arguments& arguments);

// Of a --transport and a spinning time: "auto", "inline", "shm", "ring-futex" or "ring-spin".
void SetTransport(const std::string& name, uint32_t spin_us, client::ClientOptions* options);
// The names that SetTransport knows, without "auto".
const std::vector<std::string>& TransportNames();
inline constexpr uint32_t kDefaultSpinMicros = 100;
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

// Prints `text`, or `json` with --output=json or a bare --json; writes `json` to the file of
// --json=FILE. kRefused when it cannot be written, else kOk.
int Emit(const Arguments& arguments, const std::string& json, const std::string& text);
absl::Status WriteFile(const std::string& path, const std::string& bytes);

std::string ToJson(const google::protobuf::Message& message);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_OUTPUT_H_
