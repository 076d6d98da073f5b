// Exit codes of the process, and the options that every command has.
#ifndef MLA_CLIENT_MLACTL_CLI_COMMON_H_
#define MLA_CLIENT_MLACTL_CLI_COMMON_H_

#include <string>

#include "client/cpp/client.h"

namespace mla::mlactl {

// docs/operations.md lists them.
enum ExitCode {
  kOk = 0,
  kUsageError = 1,
  kUnreachable = 2,
  kRefused = 3,
  kNotServing = 4,  // of health; also of drain if steps had to be aborted
  kDifferent = 5,   // outputs are outside the rule
  kOutputLost = 6,  // standard output was cut off, as on a full disk
  kInterrupted = 130,
};

// The options that all commands have, as read from the command line.
struct CommonOptions {
  std::string target;            // --target, else $MLA_TARGET, else the context's, else the default
  client::ClientOptions client;  // found in the same order as `target`; leases are not renewed
  bool json = false;             // JSON instead of text on standard output
  bool yaml = false;             // the JSON's values as YAML; json is true, too
  bool wide = false;             // text with more columns, and numbers as they are
  std::string json_file;         // JSON is written to this file too; empty: to none
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_COMMON_H_
