#include "client/mlactl/cli/command_line.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace mla::mlactl {
namespace {

constexpr Option kGlobalOptions[] = {
    {"target", "ADDRESS", "host:port or unix:PATH (default $MLA_TARGET, else 127.0.0.1:50551)"},
    {"output", "FORMAT", "text or json on standard output (default text)", "text,json"},
    {"json", "[FILE]", "without FILE the same as --output=json; else write JSON to FILE"},
    {"tenant", "NAME", "tenant to act for, without TLS"},
    {"timeout-ms", "N", "of each call (default 5000)"},
    {"tls-ca", "FILE", "authorities that sign the server's certificate; with it mutual TLS"},
    {"tls-cert", "FILE", "this client's certificate"},
    {"tls-key", "FILE", "its key"},
    {"tls-server-name", "NAME", "name to expect in the server's certificate"},
    {"help", "", "this text, or that of the command"},
};

constexpr std::string_view kExitCodes =
    "Exit codes: 0 success, 1 wrong usage, 2 the server cannot be reached, 3 it answered with an\n"
    "error, 4 not serving or not drained, 5 outputs differ, 130 interrupted.\n";

// Abseil's own view type in this distribution is not the standard one.
absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

bool IsOptional(const Option& option) { return absl::StartsWith(View(option.value), "["); }

const Option* FindOption(std::span<const Option> options, std::string_view name) {
  const auto found = std::find_if(options.begin(), options.end(),
                                  [&](const Option& option) { return option.name == name; });
  return found == options.end() ? nullptr : &*found;
}

const Command* FindCommand(std::span<const Command> commands, std::string_view name) {
  const auto found = std::find_if(commands.begin(), commands.end(),
                                  [&](const Command& command) { return command.name == name; });
  return found == commands.end() ? nullptr : &*found;
}

std::string SeeHelp(const Command* command) {
  return command == nullptr ? "; see mlactl --help"
                            : absl::StrCat("; see mlactl ", View(command->name), " --help");
}

std::string OptionsText(std::span<const Option> options) {
  std::string text;
  for (const Option& option : options) {
    std::string left = absl::StrCat("--", View(option.name));
    if (IsOptional(option)) {
      absl::StrAppend(&left, "[=", View(option.value.substr(1)));
    } else if (!option.value.empty()) {
      absl::StrAppend(&left, "=", View(option.value));
    }
    absl::StrAppendFormat(&text, "  %-24s %s\n", left, View(option.help));
  }
  return text;
}

std::vector<std::string> Names(std::span<const Option> options) {
  std::vector<std::string> names;
  for (const Option& option : options) {
    names.push_back(absl::StrCat("--", View(option.name), option.value.empty() ? "" : "="));
  }
  return names;
}

// Where parsing stands.
struct Parser {
  std::span<const char* const> words;
  size_t next = 0;
  const Command* command = nullptr;
  size_t plain = 0;  // words so far that are no options

  const Option* Find(std::string_view name) const {
    const Option* option = FindOption(kGlobalOptions, name);
    if (option == nullptr && command != nullptr) option = FindOption(command->options, name);
    return option;
  }
  bool MayTake(const Option& option) const {
    if (next >= words.size() || absl::StartsWith(words[next], "--")) return false;
    return !IsOptional(option) || (command != nullptr && plain >= command->word_count);
  }
};

}  // namespace

std::span<const Option> GlobalOptions() { return kGlobalOptions; }

std::string Arguments::Get(std::string_view name, std::string_view otherwise) const {
  const auto found = options_.find(name);
  return found == options_.end() ? std::string(otherwise) : found->second;
}

absl::StatusOr<Arguments> ParseArguments(std::span<const char* const> words,
                                         std::span<const Command> commands) {
  Arguments arguments;
  Parser parser{words};
  while (parser.next < words.size()) {
    const std::string word = words[parser.next++];
    if (!absl::StartsWith(word, "--")) {
      if (parser.command != nullptr) {
        arguments.words_.push_back(word);
        parser.plain = arguments.words_.size();
      } else if (parser.command = FindCommand(commands, word); parser.command == nullptr) {
        return absl::InvalidArgumentError(
            absl::StrCat("no command \"", word, "\"", SeeHelp(nullptr)));
      }
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    const Option* option = parser.Find(name);
    if (option == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown option --", name, SeeHelp(parser.command)));
    }
    std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (option->value.empty() && equals != std::string::npos) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, " takes no value"));
    }
    if (!option->value.empty() && equals == std::string::npos) {
      if (parser.MayTake(*option)) {
        value = words[parser.next++];
      } else if (!IsOptional(*option)) {
        return absl::InvalidArgumentError(
            absl::StrCat("--", name, " needs a value: --", name, "=", View(option->value)));
      }
    }
    arguments.options_[name] = value;
  }
  arguments.command_ = parser.command;
  if (arguments.Has("help")) return arguments;
  if (parser.command == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("no command given", SeeHelp(nullptr)));
  }
  if (arguments.words_.size() != parser.command->word_count) {
    return absl::InvalidArgumentError(absl::StrCat(
        View(parser.command->name), " takes ",
        parser.command->word_count == 0 ? "no words" : View(parser.command->words), ", got \"",
        absl::StrJoin(arguments.words_, " "), "\"", SeeHelp(parser.command)));
  }
  return arguments;
}

std::string HelpText(const Command* command, std::span<const Command> commands) {
  std::string text;
  if (command == nullptr) {
    text = "usage: mlactl [OPTION...] COMMAND\n\ncommands:\n";
    for (const Command& one : commands) {
      const std::string left = absl::StrCat(View(one.name), " ", View(one.words));
      absl::StrAppendFormat(&text, "  %-24s %s\n", left, View(one.summary));
    }
    absl::StrAppend(&text, "\noptions of all commands:\n", OptionsText(kGlobalOptions),
                    "\nmlactl COMMAND --help explains one command.\n", View(kExitCodes));
    return text;
  }
  absl::StrAppend(&text, "usage: mlactl ", View(command->name), " [OPTION...]",
                  command->words.empty() ? "" : " ", View(command->words), "\n\n",
                  View(command->summary), "\n");
  if (!command->notes.empty()) absl::StrAppend(&text, "\n", View(command->notes));
  if (!command->options.empty()) {
    absl::StrAppend(&text, "\noptions:\n", OptionsText(command->options));
  }
  absl::StrAppend(&text, "\noptions of all commands:\n", OptionsText(kGlobalOptions));
  if (!command->examples.empty()) {
    absl::StrAppend(&text, "\nexamples:\n");
    for (const auto line : absl::StrSplit(View(command->examples), '\n', absl::SkipEmpty())) {
      absl::StrAppend(&text, "  ", line, "\n");
    }
  }
  absl::StrAppend(&text, "\n", View(kExitCodes));
  return text;
}

namespace {

std::string BashScript(std::span<const Command> commands) {
  std::vector<std::string> names;
  std::string options, values;
  // Options of one name may differ between commands.
  const auto add_choices = [&](absl::string_view command, const Option& option) {
    if (option.choices.empty()) return;
    absl::StrAppend(
        &values, "    ", command, "\" --", View(option.name), "\") COMPREPLY=($(compgen -W \"",
        absl::StrJoin(absl::StrSplit(View(option.choices), ','), " "), "\" -- \"$value\")) ;;\n");
  };
  for (const Option& option : kGlobalOptions) add_choices("*", option);
  for (const Command& command : commands) {
    names.emplace_back(command.name);
    absl::StrAppend(&options, "    ", View(command.name), ") options=\"",
                    absl::StrJoin(Names(command.options), " "), "\" ;;\n");
    for (const Option& option : command.options) add_choices(View(command.name), option);
  }
  return absl::StrCat(
      "# mlactl completion; in bash: source <(mlactl completion bash)\n"
      "_mlactl() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" previous=\"\" command=\"\" options=\"\" value i\n"
      "  [[ $COMP_CWORD -gt 0 ]] && previous=\"${COMP_WORDS[COMP_CWORD-1]}\"\n"
      "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
      "    [[ \" ",
      absl::StrJoin(names, " "),
      " \" == *\" ${COMP_WORDS[i]} \"* ]] && command=\"${COMP_WORDS[i]}\"\n"
      "  done\n"
      "  # Bash cuts words at '='.\n"
      "  value=\"${word#=}\"\n"
      "  if [[ \"$previous\" == \"=\" && $COMP_CWORD -gt 1 ]]; then\n"
      "    previous=\"${COMP_WORDS[COMP_CWORD-2]}\"\n"
      "  fi\n"
      "  case \"$command $previous\" in\n",
      values,
      "  esac\n"
      "  [[ ${#COMPREPLY[@]} -gt 0 ]] && return\n"
      "  case \"$command\" in\n",
      options,
      "  esac\n"
      "  if [[ \"$word\" == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$options ",
      absl::StrJoin(Names(kGlobalOptions), " "),
      "\" -- \"$word\"))\n"
      "    [[ \"${COMPREPLY[0]:-}\" == *= ]] && compopt -o nospace\n"
      "  elif [[ -z \"$command\" ]]; then\n"
      "    COMPREPLY=($(compgen -W \"",
      absl::StrJoin(names, " "),
      "\" -- \"$word\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -f -- \"$value\"))\n"
      "  fi\n"
      "}\n"
      "complete -F _mlactl mlactl\n");
}

// For single quotes of fish.
std::string Quoted(std::string_view text) {
  return absl::StrCat("'", absl::StrReplaceAll(View(text), {{"\\", "\\\\"}, {"'", "\\'"}}), "'");
}

std::string FishLine(const Option& option, std::string_view condition) {
  const bool needs_value = !option.value.empty() && !IsOptional(option);
  std::string text = absl::StrCat("complete -c mlactl", View(condition), " -l ", View(option.name),
                                  needs_value ? " -r" : "", " -d ", Quoted(option.help));
  if (!option.choices.empty()) {
    absl::StrAppend(&text, " -f -a '",
                    absl::StrJoin(absl::StrSplit(View(option.choices), ','), " "), "'");
  }
  return text + "\n";
}

std::string FishScript(std::span<const Command> commands) {
  std::string text = "# mlactl completion; in fish: mlactl completion fish | source\n";
  for (const Option& option : kGlobalOptions) text += FishLine(option, "");
  for (const Command& command : commands) {
    absl::StrAppend(&text, "complete -c mlactl -f -n __fish_use_subcommand -a ", View(command.name),
                    " -d ", Quoted(command.summary), "\n");
    const std::string condition =
        absl::StrCat(" -n '__fish_seen_subcommand_from ", View(command.name), "'");
    for (const Option& option : command.options) text += FishLine(option, condition);
  }
  return text;
}

}  // namespace

std::string CompletionScript(std::string_view shell, std::span<const Command> commands) {
  if (shell == "bash") return BashScript(commands);
  if (shell == "zsh") {
    return "autoload -U +X bashcompinit && bashcompinit\n" + BashScript(commands);
  }
  if (shell == "fish") return FishScript(commands);
  return "";
}

}  // namespace mla::mlactl
