#include "client/mlactl/cli/completion.h"

#include <CLI/CLI.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace mla::mlactl {
namespace {

constexpr char kBash[] = R"(# mlactl completion; in bash: source <(mlactl completion bash)
_mlactl() {
  local word="${COMP_WORDS[COMP_CWORD]}" previous="" command="" options="" value i
  [[ $COMP_CWORD -gt 0 ]] && previous="${COMP_WORDS[COMP_CWORD-1]}"
  for ((i = 1; i < COMP_CWORD; i++)); do
    [[ " @COMMANDS@ " == *" ${COMP_WORDS[i]} "* ]] && command="${COMP_WORDS[i]}"
  done
  # Bash splits words at '='.
  value="${word#=}"
  if [[ "$previous" == "=" && $COMP_CWORD -gt 1 ]]; then
    previous="${COMP_WORDS[COMP_CWORD-2]}"
  fi
  case "$command $previous" in
@CHOICES@  esac
  [[ ${#COMPREPLY[@]} -gt 0 ]] && return
  case "$command" in
@OPTIONS@  esac
  if [[ "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "$options @COMMON@" -- "$word"))
    [[ "${COMPREPLY[0]:-}" == *= ]] && compopt -o nospace
  elif [[ -z "$command" ]]; then
    COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$value"))
  fi
}
complete -F _mlactl mlactl
)";

std::vector<const CLI::App*> CommandsOf(const Program& program) {
  return program.app().get_subcommands([](const CLI::App*) { return true; });
}

// Options listed in the help of `app` itself.
std::vector<const CLI::Option*> OptionsOf(const CLI::App& app) {
  return app.get_options([](const CLI::Option* option) {
    return option->nonpositional() && !option->get_group().empty();
  });
}

bool NeedsValue(const CLI::Option* option) { return option->get_expected_max() != 0; }

std::string NamesOf(const CLI::App& app) {
  return absl::StrJoin(OptionsOf(app), " ", [](std::string* text, const CLI::Option* option) {
    absl::StrAppend(text, option->get_name(), NeedsValue(option) ? "=" : "");
  });
}

// Returns a case for each option with choices, because commands may have options of the same name
// with different choices.
std::string BashChoices(const Program& program, const CLI::App& app, const std::string& command) {
  std::string text;
  for (const CLI::Option* option : OptionsOf(app)) {
    const std::vector<std::string> choices = program.ChoicesOf(option);
    if (choices.empty()) continue;
    absl::StrAppend(&text, "    ", command, "\" ", option->get_name(),
                    "\") COMPREPLY=($(compgen -W \"", absl::StrJoin(choices, " "),
                    "\" -- \"$value\")) ;;\n");
  }
  return text;
}

std::string BashScript(const Program& program) {
  std::vector<std::string> names;
  std::string options, choices = BashChoices(program, program.app(), "*");
  for (const CLI::App* command : CommandsOf(program)) {
    names.push_back(command->get_name());
    absl::StrAppend(&options, "    ", command->get_name(), ") options=\"", NamesOf(*command),
                    "\" ;;\n");
    choices += BashChoices(program, *command, command->get_name());
  }
  return absl::StrReplaceAll(kBash, {{"@COMMANDS@", absl::StrJoin(names, " ")},
                                     {"@CHOICES@", choices},
                                     {"@OPTIONS@", options},
                                     {"@COMMON@", NamesOf(program.app())}});
}

// Escapes the text for single quotes of fish.
std::string Quoted(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"'", "\\'"}}), "'");
}

std::string FishOptions(const Program& program, const CLI::App& app, const std::string& condition) {
  std::string text;
  for (const CLI::Option* option : OptionsOf(app)) {
    absl::StrAppend(&text, "complete -c mlactl", condition, " -l ", option->get_lnames()[0],
                    NeedsValue(option) ? " -r" : "", " -d ", Quoted(option->get_description()));
    const std::vector<std::string> choices = program.ChoicesOf(option);
    if (!choices.empty()) absl::StrAppend(&text, " -f -a '", absl::StrJoin(choices, " "), "'");
    text += "\n";
  }
  return text;
}

std::string FishScript(const Program& program) {
  std::string text = "# mlactl completion; in fish: mlactl completion fish | source\n" +
                     FishOptions(program, program.app(), "");
  for (const CLI::App* command : CommandsOf(program)) {
    const std::string& name = command->get_name();
    absl::StrAppend(&text, "complete -c mlactl -f -n __fish_use_subcommand -a ", name, " -d ",
                    Quoted(command->get_description()), "\n",
                    FishOptions(program, *command,
                                absl::StrCat(" -n '__fish_seen_subcommand_from ", name, "'")));
  }
  return text;
}

}  // namespace

std::string CompletionScript(const std::string& shell, const Program& program) {
  if (shell == "bash") return BashScript(program);
  if (shell == "zsh") return "autoload -U +X bashcompinit && bashcompinit\n" + BashScript(program);
  if (shell == "fish") return FishScript(program);
  return "";
}

}  // namespace mla::mlactl
