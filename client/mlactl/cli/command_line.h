// Commands, their options and their help, from one table: parsing, --help and shell completion
// cannot drift apart.
//
// Options are --NAME=VALUE or --NAME VALUE. Those of all commands may stand before the command. An
// option whose value is optional ("[FILE]") takes a following word only once the command has all
// the words that it needs, so that `replay --json REC` prints and `replay REC --json OUT` writes.
#ifndef MLA_CLIENT_MLACTL_CLI_COMMAND_LINE_H_
#define MLA_CLIENT_MLACTL_CLI_COMMAND_LINE_H_

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mla::mlactl {

// Of the process. docs/operations.md lists them.
enum ExitCode {
  kOk = 0,
  kUsageError = 1,
  kUnreachable = 2,
  kRefused = 3,
  kNotServing = 4,  // health; or drain, when steps had to be aborted
  kDifferent = 5,   // outputs are not what they should be
  kInterrupted = 130,
};

struct Option {
  std::string_view name;          // without dashes
  std::string_view value;         // what to call it in the help; empty: a flag; "[X]": optional
  std::string_view help;          // one line
  std::string_view choices = "";  // values to complete, separated by commas
};

class Arguments;

struct Command {
  std::string_view name;
  std::string_view words;  // what follows it, e.g. "FILE"
  size_t word_count;
  std::string_view summary;  // one line
  std::vector<Option> options;
  std::string_view notes;     // paragraphs of the help; lines of at most 100 columns
  std::string_view examples;  // one a line
  int (*run)(const Arguments& arguments);
};

// What was typed. Views into the table that it was parsed with.
class Arguments final {
 public:
  const Command* command() const { return command_; }  // null: none was given
  const std::vector<std::string>& words() const { return words_; }
  bool Has(std::string_view name) const { return options_.contains(name); }
  std::string Get(std::string_view name, std::string_view otherwise = "") const;

 private:
  friend absl::StatusOr<Arguments> ParseArguments(std::span<const char* const>,
                                                  std::span<const Command>);
  const Command* command_ = nullptr;
  std::vector<std::string> words_;
  std::map<std::string, std::string, std::less<>> options_;
};

// Options that every command takes.
std::span<const Option> GlobalOptions();

// `words` without the program's name. INVALID_ARGUMENT says what is wrong and where help is; with
// --help among the words only the command has to be right.
absl::StatusOr<Arguments> ParseArguments(std::span<const char* const> words,
                                         std::span<const Command> commands);

// The help of one command, or, for null, of the program.
std::string HelpText(const Command* command, std::span<const Command> commands);

// A script that makes `shell` ("bash", "zsh" or "fish") complete commands, options and choices.
// Empty for another shell.
std::string CompletionScript(std::string_view shell, std::span<const Command> commands);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_COMMAND_LINE_H_
