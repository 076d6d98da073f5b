// The program and its commands, parsed by CLI11. Parsing, help and shell completion read the same
// definitions.
//
//   Program program;
//   auto size = std::make_shared<uint32_t>(4);
//   Command grow = program.Add({.name = "grow", .group = "Examples", .summary = "makes it larger",
//                               .examples = "mlactl grow --size=7\n"});
//   grow.Number({"size", "N", "how large (default 4)"}, 1, 9, size.get());
//   grow.Run([size](const CommonOptions& common) { return Grow(common, *size); });
//   return program.Run(words);
//
// Settings of the connection come from the command line; then from the environment; then from the
// context (client/mlactl/context/context.h).
//
// Options are --NAME=VALUE or --NAME VALUE; the last of several counts. The common options may
// stand before the command. Threading: one thread.
#ifndef MLA_CLIENT_MLACTL_CLI_PROGRAM_H_
#define MLA_CLIENT_MLACTL_CLI_PROGRAM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/mlactl/cli/common.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace mla::mlactl {

struct CommandText {
  std::string name;
  std::string group;       // heading in the program's help
  std::string summary;     // one line
  std::string examples;    // one a line
  std::string notes = "";  // paragraphs of the help; lines of at most 100 columns
};

struct OptionText {
  std::string name;         // without dashes
  std::string label;        // stands for the value in the help
  std::string help;         // one line
  std::string letter = "";  // a short form, without its dash; empty: none
};

class Program;

// Defines the words and options of one command. Each method returns CLI11's option, for needs() and
// excludes(). An option that is not given leaves its variable unchanged. A wrong value is reported
// together with all other wrong values, e.g. "--batch: got \"0\", must be 1..4096".
class Command final {
 public:
  using RunFunction = std::function<int(const CommonOptions& common)>;

  // Adds a required word after the command, in the order of the calls.
  CLI::Option* Word(const std::string& name, const std::string& help, std::string* value);
  CLI::Option* Flag(const std::string& name, const std::string& help, bool* value);
  CLI::Option* Text(const OptionText& text, std::string* value);
  // Adds an option with a decimal number, `least`..`most`.
  template <typename Integer>
  CLI::Option* Number(const OptionText& text, uint64_t least, uint64_t most, Integer* value) {
    return AddNumbers(text, least, most, 1, [value](std::vector<uint64_t> read) {
      *value = static_cast<Integer>(read[0]);
    });
  }
  CLI::Option* Real(const OptionText& text, double least, double most, double* value);
  // Adds an option with numbers separated by commas; at most `count` of them.
  CLI::Option* Numbers(const OptionText& text, uint64_t least, uint64_t most, size_t count,
                       std::vector<uint64_t>* values);
  CLI::Option* Reals(const OptionText& text, double least, double most, size_t count,
                     std::vector<double>* values);
  CLI::Option* Choice(const OptionText& text, const std::vector<std::string>& choices,
                      std::string* value);
  // Adds an option with choices separated by commas. "all" stands for `choices`; `others` may be
  // given too, also next to "all".
  CLI::Option* Choices(const OptionText& text, const std::vector<std::string>& choices,
                       const std::vector<std::string>& others, std::vector<std::string>* values);
  // Calls `read` with each part between commas, without empty ones. False: it must be `must`.
  CLI::Option* Parts(const OptionText& text, const std::string& must,
                     const std::function<bool(const std::string& part)>& read);

  // Sets the function that runs the command once its options are read; it returns the exit code.
  void Run(RunFunction run);

 private:
  friend class Program;
  Command(Program* program, CLI::App* app) : program_(program), app_(app) {}
  // Calls `read` with the option's value.
  CLI::Option* AddText(const OptionText& text,
                       const std::function<void(const std::string& value)>& read);
  // Calls `commit` with the parts between commas, if there are at most `count` and `parse` accepts
  // each; otherwise a part must be `must`.
  template <typename T>
  CLI::Option* AddList(const OptionText& text, size_t count, const std::string& must,
                       const std::function<bool(const std::string& part, T* value)>& parse,
                       const std::function<void(std::vector<T>)>& commit);
  CLI::Option* AddNumbers(const OptionText& text, uint64_t least, uint64_t limit, size_t count,
                          const std::function<void(std::vector<uint64_t>)>& commit);
  CLI::Option* AddReals(const OptionText& text, double least, double limit, size_t count,
                        const std::function<void(std::vector<double>)>& commit);
  CLI::Option* AddChoices(const OptionText& text, size_t count,
                          const std::vector<std::string>& choices,
                          const std::function<void(std::vector<std::string>)>& commit);
  void Fault(const std::string& name, const std::string& got, const std::string& must);

  Program* const program_;
  CLI::App* const app_;
};

class Program final {
 public:
  Program();
  ~Program();

  Command Add(const CommandText& text);

  // Parses `words` (without the program's name), runs the command and returns its exit code.
  // If the words are wrong, writes all faults to standard error and returns kUsageError. REQUIRES:
  // called once.
  int Run(std::span<const char* const> words);

  // Returns the help of the program, or of one command.
  std::string Help(const std::string& command = "") const;
  const CLI::App& app() const { return *app_; }
  // Returns the values that an option takes, for completion; empty if it takes any.
  std::vector<std::string> ChoicesOf(const CLI::Option* option) const;

 private:
  friend class Command;
  void AddCommonOptions();
  // Runs the command, with --watch again and again until an interrupt or a failure.
  int RunCommand(const CLI::App* command);
  std::vector<std::string> OptionNames() const;  // of the program and of the command given
  void CheckExtras(const std::vector<std::string>& words);

  const std::unique_ptr<CLI::App> app_;
  CommonOptions common_;
  std::string json_, output_ = "text";
  std::string context_;       // --server-context
  double watch_seconds_ = 0;  // 0: once
  std::vector<std::string> faults_;
  std::map<const CLI::Option*, std::vector<std::string>> choices_;
  std::map<const CLI::App*, Command::RunFunction> run_;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_PROGRAM_H_
