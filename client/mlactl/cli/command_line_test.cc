#include "client/mlactl/cli/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/mlactl/cli/option_reader.h"

namespace mla::mlactl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

int Nothing(const Arguments&) { return kOk; }

const std::vector<Command>& Table() {
  static const auto* const kTable =
      new std::vector<Command>{{"plain", "", 0, "does nothing", {}, "", "mlactl plain\n", Nothing},
                               {"take",
                                "FILE",
                                1,
                                "takes a file",
                                {{"size", "N", "how large"}, {"fast", "", "at once"}},
                                "Notes.\n",
                                "mlactl take x\n",
                                Nothing}};
  return *kTable;
}

absl::StatusOr<Arguments> Parse(const std::vector<const char*>& words) {
  return ParseArguments(words, Table());
}

TEST(CommandLineTest, OptionsTakeValuesInBothForms) {
  const auto arguments = Parse({"--target=a:1", "take", "--size", "7", "file", "--fast"});
  ASSERT_TRUE(arguments.ok()) << arguments.status();
  EXPECT_EQ(arguments->command()->name, "take");
  EXPECT_EQ(arguments->Get("target"), "a:1");
  EXPECT_EQ(arguments->Get("size"), "7");
  EXPECT_EQ(arguments->Get("other", "default"), "default");
  EXPECT_TRUE(arguments->Has("fast"));
  EXPECT_FALSE(arguments->Has("tenant"));
  EXPECT_THAT(arguments->words(), ElementsAre("file"));
}

TEST(CommandLineTest, AnOptionalValueIsAWordOnlyWhenTheCommandHasAllOfIts) {
  EXPECT_EQ(Parse({"plain", "--json"})->Get("json", "none"), "");
  EXPECT_EQ(Parse({"plain", "--json", "out.json"})->Get("json"), "out.json");
  EXPECT_EQ(Parse({"take", "in", "--json", "out.json"})->Get("json"), "out.json");
  EXPECT_EQ(Parse({"take", "--json", "in"})->Get("json", "none"), "");
  EXPECT_THAT(Parse({"take", "--json", "in"})->words(), ElementsAre("in"));
  EXPECT_EQ(Parse({"--json", "plain"})->Get("json", "none"), "");
  EXPECT_EQ(Parse({"plain", "--json=out", "--target", "x"})->Get("json"), "out");
}

TEST(CommandLineTest, FaultsSayWhatAndWhereHelpIs) {
  const std::pair<std::vector<const char*>, const char*> cases[] = {
      {{}, "no command given; see mlactl --help"},
      {{"dance"}, "no command \"dance\"; see mlactl --help"},
      {{"take"}, "take takes FILE, got \"\"; see mlactl take --help"},
      {{"take", "a", "b"}, "take takes FILE, got \"a b\""},
      {{"plain", "x"}, "plain takes no words, got \"x\""},
      {{"plain", "--size=1"}, "unknown option --size; see mlactl plain --help"},
      {{"--size=1", "take", "x"}, "unknown option --size; see mlactl --help"},
      {{"take", "x", "--fast=1"}, "--fast takes no value"},
      {{"take", "x", "--size"}, "--size needs a value: --size=N"},
      {{"take", "x", "--size", "--fast"}, "--size needs a value: --size=N"},
  };
  for (const auto& [words, message] : cases) {
    const auto arguments = Parse(words);
    EXPECT_EQ(arguments.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(arguments.status().message()), HasSubstr(message));
  }
}

TEST(CommandLineTest, HelpNeedsNothingElse) {
  EXPECT_EQ(Parse({"--help"})->command(), nullptr);
  EXPECT_EQ(Parse({"take", "--help"})->command()->name, "take");
  const std::string all = HelpText(nullptr, Table());
  EXPECT_THAT(all, HasSubstr("take FILE"));
  EXPECT_THAT(all, HasSubstr("--target=ADDRESS"));
  EXPECT_THAT(all, HasSubstr("--json[=FILE]"));
  EXPECT_THAT(all, HasSubstr("Exit codes: 0 success"));
  const std::string one = HelpText(&Table()[1], Table());
  EXPECT_THAT(one, HasSubstr("usage: mlactl take [OPTION...] FILE"));
  EXPECT_THAT(one, HasSubstr("Notes."));
  EXPECT_THAT(one, HasSubstr("--size=N"));
  EXPECT_THAT(one, HasSubstr("  mlactl take x\n"));
}

TEST(OptionReaderTest, ReadsNumbersListsAndChoices) {
  const auto arguments = Parse({"take", "x", "--size=1,2,30"});
  ASSERT_TRUE(arguments.ok());
  OptionReader reader(*arguments);
  std::vector<uint64_t> values = {9}, untouched = {4};
  reader.Numbers("size", 1, 30, 3, &values);
  reader.Numbers("absent", 1, 30, 3, &untouched);
  EXPECT_EQ(reader.status(), absl::OkStatus());
  EXPECT_THAT(values, ElementsAre(1, 2, 30));
  EXPECT_THAT(untouched, ElementsAre(4));
}

TEST(OptionReaderTest, TellsAllFaultsAtOnce) {
  const auto arguments = Parse({"take", "x", "--size=0", "--tenant=x,y", "--output=xml"});
  OptionReader reader(*arguments);
  uint32_t size = 5;
  double real = 1.5;
  std::string format = "text";
  std::vector<std::string> names = {"a"};
  reader.Number("size", 1, 9, &size);
  reader.Real("output", 0, 1, &real);
  reader.Choice("output", {"text", "json"}, &format);
  reader.Choices("tenant", {"x", "z"}, &names);
  EXPECT_EQ(std::string(reader.status().message()),
            "--size: got \"0\", must be 1..9\n"
            "--output: got \"xml\", must be 0..1\n"
            "--output: got \"xml\", must be one of text, json\n"
            "--tenant: got \"y\", must be one of x, z");
  EXPECT_EQ(size, 5u);
  EXPECT_EQ(real, 1.5);
  EXPECT_EQ(format, "text");
  EXPECT_THAT(names, ElementsAre("a"));
}

TEST(OptionReaderTest, RefusesWhatIsNoNumber) {
  for (const char* text : {"--size=", "--size=x", "--size=-1", "--size=1.5",
                           "--size=99999999999999999999", "--size=1,,2", "--size=1,2,3,4"}) {
    const auto arguments = Parse({"take", "x", text});
    ASSERT_TRUE(arguments.ok());
    OptionReader reader(*arguments);
    std::vector<uint64_t> values;
    reader.Numbers("size", 0, 100, 3, &values);
    EXPECT_FALSE(reader.status().ok()) << text;
    EXPECT_TRUE(values.empty());
  }
  const auto arguments = Parse({"take", "x", "--size=nan"});
  OptionReader reader(*arguments);
  double value = 2;
  reader.Real("size", 0, 100, &value);
  EXPECT_FALSE(reader.status().ok());
}

}  // namespace
}  // namespace mla::mlactl
