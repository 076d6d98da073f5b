#include "client/mlactl/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "client/mlactl/cli/completion.h"
#include "client/mlactl/operator_commands.h"

namespace mla::mlactl {
namespace {

using ::testing::HasSubstr;

Program* AllCommands() {
  static Program* const kProgram = [] {
    auto* const program = new Program;
    AddCommands(program);
    return program;
  }();
  return kProgram;
}

TEST(CommandsTest, EveryCommandHasHelpThatFitsATerminal) {
  const CLI::App& app = AllCommands()->app();
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  ASSERT_GT(commands.size(), 22u);
  for (const CLI::App* command : commands) {
    const std::string& name = command->get_name();
    EXPECT_FALSE(command->get_description().empty()) << name;
    const std::string help = AllCommands()->Help(name);
    EXPECT_THAT(help, HasSubstr("Examples:\n  ")) << name;
    EXPECT_THAT(help, HasSubstr("mlactl " + name)) << name;
    EXPECT_THAT(help, HasSubstr("--tls-server-name=NAME")) << name;
    std::istringstream lines(help + AllCommands()->Help());
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(line.size(), 110u) << name << ": " << line;
    }
    for (const CLI::Option* option : command->get_options()) {
      if (option->get_group().empty()) continue;
      EXPECT_FALSE(option->get_description().empty()) << name << " " << option->get_name();
      EXPECT_EQ(app.get_option_no_throw(option->get_name()), nullptr) << option->get_name();
    }
  }
}

TEST(CommandsTest, ADrainAsksTheServersAfterItselfFirst) {
  using ::testing::ElementsAre;
  const std::string list = "mla-0.mla:1,mla-1.mla:1,mla-2.mla:1";
  EXPECT_THAT(PeersOf(list, "mla-1"), ElementsAre("mla-2.mla:1", "mla-0.mla:1"));
  EXPECT_THAT(PeersOf(list, "mla-2"), ElementsAre("mla-0.mla:1", "mla-1.mla:1"));
  EXPECT_THAT(PeersOf("mla-10.mla:1,mla-1.mla:1", "mla-1"), ElementsAre("mla-10.mla:1"));
  EXPECT_THAT(PeersOf("a:1", ""), ElementsAre("a:1"));
  EXPECT_THAT(PeersOf("a:1", "a"), ::testing::IsEmpty());
  EXPECT_THAT(PeersOf("", "a"), ::testing::IsEmpty());
}

// Words that the script offers for a line, by running it in bash.
std::string Completed(const std::string& words, int cursor) {
  const std::string path = testing::TempDir() + "/completion.bash";
  std::ofstream(path) << CompletionScript("bash", *AllCommands());
  const std::string command = "bash -c 'source " + path + "; compopt() { :; }; COMP_WORDS=(" +
                              words + "); COMP_CWORD=" + std::to_string(cursor) +
                              "; _mlactl; echo ${COMPREPLY[*]}'";
  FILE* const pipe = popen(command.c_str(), "r");
  std::string output(4096, '\0');
  output.resize(fread(output.data(), 1, output.size(), pipe));
  pclose(pipe);
  return output;
}

TEST(CommandsTest, BashCompletesCommandsOptionsAndChoices) {
  EXPECT_EQ(Completed("mlactl st", 1), "status\n");
  EXPECT_EQ(Completed("mlactl --output=json dra", 2), "drain\n");
  EXPECT_THAT(Completed("mlactl bench --conc", 2), HasSubstr("--concurrency="));
  EXPECT_THAT(Completed("mlactl bench --tar", 2), HasSubstr("--target="));
  EXPECT_EQ(Completed("mlactl bench --qui", 2), "--quiet\n");
  EXPECT_EQ(Completed("mlactl info --conc", 2), "\n");
  EXPECT_EQ(Completed("mlactl bench --transport = ring", 4), "ring-futex ring-spin\n");
  EXPECT_EQ(Completed("mlactl bench --transport =", 3),
            "auto ucx ucx-puts ucx-device inline shm ring-futex ring-spin all\n");
  EXPECT_EQ(Completed("mlactl replay --transport =", 3),
            "auto inline shm ring-futex ring-spin ucx ucx-puts ucx-device\n");
  EXPECT_EQ(Completed("mlactl bench --arrivals uni", 3), "uniform\n");
  EXPECT_EQ(Completed("mlactl bench --output = j", 4), "json\n");
  EXPECT_EQ(Completed("mlactl --output = t", 3), "text table\n");
}

TEST(CommandsTest, OtherShellsHaveScriptsToo) {
  EXPECT_THAT(CompletionScript("zsh", *AllCommands()), HasSubstr("bashcompinit"));
  const std::string fish = CompletionScript("fish", *AllCommands());
  EXPECT_THAT(fish, HasSubstr("complete -c mlactl -f -n __fish_use_subcommand -a bench"));
  EXPECT_THAT(fish, HasSubstr("server\\'s"));
  EXPECT_EQ(CompletionScript("tcsh", *AllCommands()), "");
}

}  // namespace
}  // namespace mla::mlactl
