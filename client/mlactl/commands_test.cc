#include "client/mlactl/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

namespace mla::mlactl {
namespace {

using ::testing::HasSubstr;

TEST(CommandsTest, EveryCommandHasHelpThatFitsATerminal) {
  ASSERT_GT(Commands().size(), 7u);
  for (const Command& command : Commands()) {
    EXPECT_FALSE(command.summary.empty()) << command.name;
    EXPECT_FALSE(command.examples.empty()) << command.name;
    EXPECT_NE(command.run, nullptr) << command.name;
    std::istringstream lines(HelpText(&command, Commands()));
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(line.size(), 110u) << command.name << ": " << line;
    }
    for (const Option& option : command.options) {
      for (const Option& global : GlobalOptions()) EXPECT_NE(option.name, global.name);
    }
  }
}

// What the script offers for a line, by running it in bash.
std::string Completed(const std::string& words, int at) {
  const std::string path = testing::TempDir() + "/completion.bash";
  std::ofstream(path) << CompletionScript("bash", Commands());
  const std::string command = "bash -c 'source " + path + "; compopt() { :; }; COMP_WORDS=(" +
                              words + "); COMP_CWORD=" + std::to_string(at) +
                              "; _mlactl; echo ${COMPREPLY[*]}'";
  FILE* const pipe = popen(command.c_str(), "r");
  std::string output(4096, '\0');
  output.resize(fread(output.data(), 1, output.size(), pipe));
  pclose(pipe);
  return output;
}

TEST(CommandsTest, BashCompletesCommandsOptionsAndChoices) {
  EXPECT_EQ(Completed("mlactl st", 1), "status\n");
  EXPECT_EQ(Completed("mlactl --output=json dr", 2), "drain\n");
  EXPECT_THAT(Completed("mlactl bench --conc", 2), HasSubstr("--concurrency="));
  EXPECT_THAT(Completed("mlactl bench --tar", 2), HasSubstr("--target="));
  EXPECT_EQ(Completed("mlactl info --conc", 2), "\n");
  EXPECT_EQ(Completed("mlactl bench --transport = ring", 4), "ring-futex ring-spin\n");
  EXPECT_EQ(Completed("mlactl bench --transport =", 3),
            "auto inline shm ring-futex ring-spin all\n");
  EXPECT_EQ(Completed("mlactl replay --transport =", 3), "auto inline shm ring-futex ring-spin\n");
  EXPECT_EQ(Completed("mlactl bench --arrivals uni", 3), "uniform\n");
  EXPECT_EQ(Completed("mlactl bench --output = j", 4), "json\n");
  EXPECT_EQ(Completed("mlactl --output = t", 3), "text\n");
}

TEST(CommandsTest, OtherShellsHaveScriptsToo) {
  EXPECT_THAT(CompletionScript("zsh", Commands()), HasSubstr("bashcompinit"));
  const std::string fish = CompletionScript("fish", Commands());
  EXPECT_THAT(fish, HasSubstr("complete -c mlactl -f -n __fish_use_subcommand -a bench"));
  EXPECT_THAT(fish, HasSubstr("server\\'s"));
  EXPECT_EQ(CompletionScript("tcsh", Commands()), "");
}

}  // namespace
}  // namespace mla::mlactl
