#include "client/mlactl/cli/program.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "client/mlactl/cli/interrupt.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/context/context.h"
#include "client/mlactl/text/nearest.h"

namespace mla::mlactl {
namespace {

constexpr char kDefaultTarget[] = "127.0.0.1:50551";
constexpr char kCommonGroup[] = "Options of all commands";
// A --json without a file has this value.
constexpr char kStandardOutput[] = "-";
constexpr char kExitCodes[] =
    "Exit codes: 0 success, 1 wrong usage, 2 the server cannot be reached, 3 it answered with an\n"
    "error or a file cannot be read or written, 4 not serving or not drained, 5 outputs differ,\n"
    "6 standard output was cut off, 130 interrupted.";

// Returns the exit code of a command that has written all it prints; a script would take what a
// full disk has cut off for the whole.
int Written(int code) {
  const bool flushed = std::fflush(stdout) == 0;
  // If an earlier print has failed, errno may be that of any call since.
  const std::string why = flushed ? "cannot be written" : std::strerror(errno);
  if (flushed && std::ferror(stdout) == 0) return code;
  Fail(absl::DataLossError("standard output: " + why));
  return code == kOk ? kOutputLost : code;
}

// Completes what the command line says of the server: client/mlactl/context/context.h.
absl::Status FillFromContext(const std::string& name, CommonOptions* common) {
  client::ClientOptions& options = common->client;
  MLA_ASSIGN_OR_RETURN(const auto connection,
                       Complete({common->target, options.tenant, options.tls_ca, options.tls_cert,
                                 options.tls_key, options.tls_server_name},
                                name, [](const char* variable) { return std::getenv(variable); }));
  common->target = connection.target.empty() ? kDefaultTarget : connection.target;
  options.tenant = connection.tenant;
  options.tls_ca = connection.tls_ca;
  options.tls_cert = connection.tls_cert;
  options.tls_key = connection.tls_key;
  options.tls_server_name = connection.tls_server_name;
  return absl::OkStatus();
}

// Prints help in CLI11's layout, with --NAME=VALUE, the words of each command, and the common
// options under every command.
class HelpFormatter final : public CLI::Formatter {
 public:
  // CLI11 would add the value that a flag stands for.
  std::string make_option_name(const CLI::Option* option, bool) const override {
    return option->get_name();
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    if (!option->get_option_text().empty()) return option->get_option_text();
    if (option->get_expected_max() == 0 || option->get_positional()) return "";
    return "=" + option->get_type_name();
  }
  std::string make_subcommand(const CLI::App* command) const override {
    std::string name = command->get_name();
    for (const CLI::Option* option : command->get_options()) {
      if (option->get_positional()) absl::StrAppend(&name, " ", option->get_name(true, false));
    }
    std::ostringstream text;
    CLI::detail::format_help(text, name, command->get_description(), column_width_);
    return text.str();
  }
  std::string make_subcommands(const CLI::App* app, CLI::AppFormatMode mode) const override {
    return app->get_parent() == nullptr ? CLI::Formatter::make_subcommands(app, mode)
                                        : make_groups(app->get_parent(), mode);
  }
};

}  // namespace

// ------------------------------------------------------------------------------------- Command

void Command::Fault(const std::string& name, const std::string& got, const std::string& must) {
  program_->faults_.push_back(absl::StrCat("--", name, ": got \"", got, "\", must be ", must));
}

CLI::Option* Command::AddText(const OptionText& text,
                              const std::function<void(const std::string& value)>& read) {
  const auto on_results = [self = *this, name = text.name,
                           read](const CLI::results_t& results) mutable {
    // CLI11 takes any word that follows.
    if (absl::StartsWith(results.front(), "--")) {
      self.Fault(name, results.front(), "a value");
    } else {
      read(results.front());
    }
    return true;
  };
  const std::string names = (text.letter.empty() ? "" : "-" + text.letter + ",") + "--" + text.name;
  return app_->add_option(names, CLI::callback_t(on_results), text.help)->type_name(text.label);
}

template <typename T>
CLI::Option* Command::AddList(const OptionText& text, size_t count, const std::string& must,
                              const std::function<bool(const std::string& part, T* value)>& parse,
                              const std::function<void(std::vector<T>)>& commit) {
  return AddText(text, [=, self = *this, name = text.name](const std::string& list) mutable {
    const std::vector<std::string> parts = absl::StrSplit(list, ',');
    if (parts.size() > count) {
      return self.Fault(name, list,
                        absl::StrCat("at most ", count, " value", count == 1 ? "" : "s"));
    }
    std::vector<T> values(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parse(parts[i], &values[i])) return self.Fault(name, parts[i], must);
    }
    commit(std::move(values));
  });
}

CLI::Option* Command::AddNumbers(const OptionText& text, uint64_t least, uint64_t limit,
                                 size_t count,
                                 const std::function<void(std::vector<uint64_t>)>& commit) {
  // CLI11's own conversion takes octal and lets 64 bits overflow.
  const auto parse = [least, limit](const std::string& part, uint64_t* value) {
    return absl::SimpleAtoi(part, value) && *value >= least && *value <= limit;
  };
  return AddList<uint64_t>(text, count, absl::StrCat(least, "..", limit), parse, commit);
}

CLI::Option* Command::AddReals(const OptionText& text, double least, double limit, size_t count,
                               const std::function<void(std::vector<double>)>& commit) {
  const auto parse = [least, limit](const std::string& part, double* value) {
    return absl::SimpleAtod(part, value) && *value >= least && *value <= limit;
  };
  return AddList<double>(text, count, absl::StrCat(least, "..", limit), parse, commit);
}

CLI::Option* Command::AddChoices(const OptionText& text, size_t count,
                                 const std::vector<std::string>& choices,
                                 const std::function<void(std::vector<std::string>)>& commit) {
  const auto parse = [choices](const std::string& part, std::string* value) {
    *value = part;
    return std::find(choices.begin(), choices.end(), part) != choices.end();
  };
  const std::string must = absl::StrCat("one of ", absl::StrJoin(choices, ", "));
  CLI::Option* const option = AddList<std::string>(text, count, must, parse, commit);
  program_->choices_[option] = choices;
  return option;
}

CLI::Option* Command::Word(const std::string& name, const std::string& help, std::string* value) {
  return app_->add_option(name, *value, help)->required();
}

CLI::Option* Command::Flag(const std::string& name, const std::string& help, bool* value) {
  return app_->add_flag("--" + name, *value, help)->disable_flag_override();
}

CLI::Option* Command::Text(const OptionText& text, std::string* value) {
  return AddText(text, [value](const std::string& read) { *value = read; });
}

CLI::Option* Command::Numbers(const OptionText& text, uint64_t least, uint64_t most, size_t count,
                              std::vector<uint64_t>* values) {
  return AddNumbers(text, least, most, count,
                    [values](std::vector<uint64_t> read) { *values = std::move(read); });
}

CLI::Option* Command::Real(const OptionText& text, double least, double most, double* value) {
  return AddReals(text, least, most, 1, [value](std::vector<double> read) { *value = read[0]; });
}

CLI::Option* Command::Reals(const OptionText& text, double least, double most, size_t count,
                            std::vector<double>* values) {
  return AddReals(text, least, most, count,
                  [values](std::vector<double> read) { *values = std::move(read); });
}

CLI::Option* Command::Choice(const OptionText& text, const std::vector<std::string>& choices,
                             std::string* value) {
  return AddChoices(text, 1, choices, [value](std::vector<std::string> read) { *value = read[0]; });
}

CLI::Option* Command::Choices(const OptionText& text, const std::vector<std::string>& choices,
                              const std::vector<std::string>& others,
                              std::vector<std::string>* values) {
  std::vector<std::string> known = others;
  known.insert(known.end(), choices.begin(), choices.end());
  known.emplace_back("all");
  const auto commit = [choices, values](std::vector<std::string> read) {
    if (std::find(read.begin(), read.end(), "all") == read.end()) {
      *values = std::move(read);
      return;
    }
    *values = choices;
    for (std::string& named : read) {
      const bool there = std::find(values->begin(), values->end(), named) != values->end();
      if (!there && named != "all") values->push_back(std::move(named));
    }
  };
  return AddChoices(text, known.size(), known, commit);
}

CLI::Option* Command::Parts(const OptionText& text, const std::string& must,
                            const std::function<bool(const std::string& part)>& read) {
  return AddText(text, [=, self = *this, name = text.name](const std::string& list) mutable {
    const std::vector<std::string> parts = absl::StrSplit(list, ',', absl::SkipEmpty());
    for (const std::string& part : parts) {
      if (!read(part)) self.Fault(name, part, must);
    }
  });
}

void Command::Run(RunFunction run) { program_->run_[app_] = std::move(run); }

// ------------------------------------------------------------------------------------- Program

Program::Program()
    : app_(std::make_unique<CLI::App>("Inspects, operates and measures an mla-server.", "mlactl")) {
  common_.client.renew_leases = false;
  common_.client.call_timeout_ms = 5000;
  auto formatter = std::make_shared<HelpFormatter>();
  formatter->column_width(28);
  formatter->label("SUBCOMMAND", "COMMAND");
  formatter->label("OPTIONS", "OPTION...");
  app_->formatter(formatter);
  app_->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app_->require_subcommand(0, 1);
  app_->allow_extras();  // see CheckExtras
  app_->fallthrough();
  app_->set_help_flag("--help", "this text, or that of the command");
  app_->footer(absl::StrCat("mlactl COMMAND --help explains one command.\n", kExitCodes));
  AddCommonOptions();
}

Program::~Program() = default;

void Program::AddCommonOptions() {
  app_->option_defaults()->group(kCommonGroup);
  Command common_options(this, app_.get());
  common_options.Text(
      {"target", "ADDRESS", "host:port or unix:PATH (default $MLA_TARGET, else 127.0.0.1:50551)"},
      &common_.target);
  common_options.Text(
      {"server-context", "NAME", "a server by its name in the contexts ($MLA_CLIENT_CONTEXT)"},
      &context_);
  common_options.Choice(
      {"output", "FORMAT", "text, wide, json or yaml on standard output (default text)", "o"},
      {"text", "table", "wide", "json", "yaml"}, &output_);
  common_options.Real({"watch", "SECONDS", "the same again after so long, until Ctrl-C"}, 0.1,
                      86400, &watch_seconds_);
  app_->add_flag(absl::StrCat("--json{", kStandardOutput, "}"), json_,
                 "without FILE the same as --output=json; else write JSON to FILE")
      ->option_text("[=FILE]");
  common_options.Text({"tenant", "NAME", "tenant to act for, without TLS ($MLA_CLIENT_TENANT)"},
                      &common_.client.tenant);
  common_options.Number({"timeout-ms", "N", "time limit of each call (default 5000)"}, 1, 86400000,
                        &common_.client.call_timeout_ms);
  common_options.Text(
      {"tls-ca", "FILE", "authorities of the server's certificate: mutual TLS ($MLA_CLIENT_CA)"},
      &common_.client.tls_ca);
  common_options.Text({"tls-cert", "FILE", "this client's certificate ($MLA_CLIENT_CERT)"},
                      &common_.client.tls_cert);
  common_options.Text({"tls-key", "FILE", "its key ($MLA_CLIENT_KEY)"}, &common_.client.tls_key);
  common_options.Text(
      {"tls-server-name", "NAME", "name in the server's certificate ($MLA_CLIENT_SERVER_NAME)"},
      &common_.client.tls_server_name);
  app_->get_help_ptr()->group(kCommonGroup);
  app_->option_defaults()->group("Options");
}

Command Program::Add(const CommandText& text) {
  CLI::App* const command = app_->add_subcommand(text.name, text.summary)->group(text.group);
  command->get_help_ptr()->group("");  // listed with the common options
  std::string footer = text.notes.empty() ? "" : text.notes + "\n";
  absl::StrAppend(&footer, "Examples:\n");
  for (const auto line : absl::StrSplit(text.examples, '\n', absl::SkipEmpty())) {
    absl::StrAppend(&footer, "  ", line, "\n");
  }
  command->footer(absl::StrCat(footer, "\n", kExitCodes));
  return Command(this, command);
}

// Checks words and options that CLI11 has left over. One of them may be valid: the file of `--json
// FILE`, because a flag of CLI11 takes no following word.
void Program::CheckExtras(const std::vector<std::string>& words) {
  std::vector<std::string> extras = app_->remaining(true);
  const bool has_command = !app_->get_subcommands().empty();
  const auto is_file = [&](const std::string& word) {
    const std::string pair[] = {"--json", word};
    return std::search(words.begin(), words.end(), std::begin(pair), std::end(pair)) != words.end();
  };
  if (has_command && json_ == kStandardOutput && extras.size() == 1 && is_file(extras[0])) {
    if (!extras[0].empty()) json_ = extras[0];
    return;
  }
  for (const std::string& extra : extras) {
    if (absl::StartsWith(extra, "-")) {
      const std::string name = extra.substr(0, extra.find('='));
      faults_.push_back(absl::StrCat("unknown option ", name, DidYouMean(name, OptionNames())));
    } else if (has_command) {
      faults_.push_back(absl::StrCat("unexpected word \"", extra, "\""));
    } else {
      std::vector<std::string> names;
      for (const auto& [command, run] : run_) names.push_back(command->get_name());
      std::sort(names.begin(), names.end());
      faults_.push_back(absl::StrCat("no command \"", extra, "\"", DidYouMean(extra, names)));
      return;
    }
  }
  if (!has_command && extras.empty()) faults_.push_back("no command given");
}

std::vector<std::string> Program::OptionNames() const {
  std::vector<std::string> names;
  std::vector<const CLI::App*> apps = {app_.get()};
  for (const CLI::App* command : app_->get_subcommands()) apps.push_back(command);
  for (const CLI::App* app : apps) {
    for (const CLI::Option* option : app->get_options()) {
      if (!option->get_positional()) names.push_back(option->get_name());
    }
  }
  return names;
}

int Program::RunCommand(const CLI::App* command) {
  const Command::RunFunction& run = run_.at(command);
  if (watch_seconds_ == 0) return Written(run(common_));
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  for (;;) {
    if (terminal) std::fputs(kClearScreen, stdout);
    const int code = Written(run(common_));
    const bool goes_on = code == kOk || code == kNotServing;
    if (!goes_on || std::ferror(stdout) != 0) return code;
    std::this_thread::sleep_for(std::chrono::duration<double>(watch_seconds_));
  }
}

int Program::Run(std::span<const char* const> words) {
  std::vector<std::string> given;
  for (const std::string word : words) {
    // An empty value is a word of its own to CLI11.
    if (absl::StartsWith(word, "--") && word.find('=') == word.size() - 1) {
      given.push_back(word.substr(0, word.size() - 1));
      given.emplace_back();
    } else {
      given.push_back(word);
    }
  }
  try {
    app_->parse(std::vector<std::string>(given.rbegin(), given.rend()));
    CheckExtras(given);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app_->help().c_str(), stdout);
    return Written(kOk);
  } catch (const CLI::ParseError& error) {
    faults_.push_back(absl::StrReplaceAll(
        error.what(), {{"was given a disallowed flag override", "takes no value"}}));
  }
  const std::vector<CLI::App*> commands = app_->get_subcommands();
  if (!faults_.empty()) {
    const std::string place = commands.empty() ? "" : " " + commands[0]->get_name();
    faults_.push_back(absl::StrCat("see mlactl", place, " --help"));
    return FailUsage(absl::InvalidArgumentError(absl::StrJoin(faults_, "\n")));
  }
  common_.yaml = output_ == "yaml";
  common_.wide = output_ == "wide";
  common_.json = common_.yaml || output_ == "json" || json_ == kStandardOutput;
  if (json_ != kStandardOutput) common_.json_file = json_;
  if (const absl::Status status = FillFromContext(context_, &common_); !status.ok()) {
    return FailUsage(status);
  }
  ExitOnInterrupts();
  return RunCommand(commands[0]);
}

std::string Program::Help(const std::string& command) const {
  return command.empty() ? app_->help() : app_->get_subcommand(command)->help("mlactl");
}

std::vector<std::string> Program::ChoicesOf(const CLI::Option* option) const {
  const auto found = choices_.find(option);
  return found == choices_.end() ? std::vector<std::string>() : found->second;
}

}  // namespace mla::mlactl
