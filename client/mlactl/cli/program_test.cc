#include "client/mlactl/cli/program.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

namespace mla::mlactl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A program with two commands, one without options and one with options of every kind, and the
// values they were given.
struct Sample {
  Sample() {
    unsetenv("MLA_TARGET");
    setenv("MLA_CLIENT_CONTEXTS", "/nonexistent", 1);  // not those of the user
    Command plain = program.Add({.name = "plain",
                                 .group = "First",
                                 .summary = "does nothing",
                                 .examples = "mlactl plain\n"});
    plain.Run([this](const CommonOptions& options) { return Finish("plain", options); });
    Command take = program.Add({.name = "take",
                                .group = "Second",
                                .summary = "takes a file",
                                .examples = "mlactl take x\n",
                                .notes = "Notes.\n"});
    take.Word("FILE", "the file", &file);
    take.Number({"size", "N", "how large"}, 1, 9, &size);
    take.Number({"wide", "N", "64 bits"}, 0, UINT64_MAX, &wide);
    take.Numbers({"sizes", "LIST", "how large"}, 1, 30, 3, &sizes);
    take.Real({"part", "X", "how much"}, 0, 1, &part);
    take.Reals({"parts", "LIST", "how much"}, 0, 1, 2, &parts);
    take.Choice({"mode", "MODE", "fast or exact"}, {"fast", "exact"}, &mode);
    take.Choices({"kinds", "LIST", "a, b, all or auto"}, {"a", "b"}, {"auto"}, &kinds);
    take.Text({"name", "NAME", "its name"}, &name);
    take.Flag("fast", "at once", &fast);
    take.Run([this](const CommonOptions& options) { return Finish("take", options); });
  }

  int Finish(const std::string& name_of_command, const CommonOptions& options) {
    ran = name_of_command;
    common = options;
    return 42;
  }

  int Run(std::vector<const char*> words) {
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    const int code = program.Run(words);
    out = testing::internal::GetCapturedStdout();
    err = testing::internal::GetCapturedStderr();
    return code;
  }

  Program program;
  std::string file, mode = "fast", name, ran, out, err;
  uint32_t size = 4;
  uint64_t wide = 4;
  std::vector<uint64_t> sizes = {4};
  double part = 0.5;
  std::vector<double> parts = {0.5};
  std::vector<std::string> kinds = {"auto"};
  bool fast = false;
  CommonOptions common;
};

TEST(ProgramTest, OutputThatIsLostIsNoSuccess) {
  setenv("MLA_CLIENT_CONTEXTS", "/nonexistent", 1);
  Program program;
  int code = kOk;
  program.Add({.name = "say", .group = "First", .summary = "says it", .examples = "mlactl say\n"})
      .Run([&code](const CommonOptions&) {
        std::fputs("it\n", stdout);
        return code;
      });
  const auto run = [&program](const char* option) {
    const std::vector<const char*> words = {"say", option};
    std::fflush(stdout);
    const int kept = dup(STDOUT_FILENO), full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    dup2(full, STDOUT_FILENO);
    testing::internal::CaptureStderr();
    const int result = program.Run(std::span(words).first(option == nullptr ? 1 : 2));
    EXPECT_THAT(testing::internal::GetCapturedStderr(),
                HasSubstr("DATA_LOSS: standard output: No space left on device"));
    dup2(kept, STDOUT_FILENO);
    std::clearerr(stdout);
    close(kept);
    close(full);
    return result;
  };
  EXPECT_EQ(run(nullptr), kOutputLost);
  EXPECT_EQ(run("--watch=0.1"), kOutputLost);
  EXPECT_EQ(run("--help"), kOutputLost);
  code = kNotServing;
  EXPECT_EQ(run(nullptr), kNotServing);
  EXPECT_EQ(run("--watch=0.1"), kNotServing);
}

TEST(ProgramTest, OptionsTakeValuesInBothForms) {
  Sample sample;
  EXPECT_EQ(sample.Run({"--target=a:1", "take", "--size", "7", "file", "--fast", "--tenant", "t",
                        "--timeout-ms=10"}),
            42);
  EXPECT_EQ(sample.ran, "take");
  EXPECT_EQ(sample.common.target, "a:1");
  EXPECT_EQ(sample.common.client.tenant, "t");
  EXPECT_EQ(sample.common.client.call_timeout_ms, 10);
  EXPECT_FALSE(sample.common.client.renew_leases);
  EXPECT_EQ(sample.size, 7u);
  EXPECT_EQ(sample.file, "file");
  EXPECT_TRUE(sample.fast);
}

TEST(ProgramTest, OptionsThatAreNotGivenKeepTheirDefaults) {
  Sample sample;
  EXPECT_EQ(sample.Run({"take", "x"}), 42);
  EXPECT_EQ(sample.common.target, "127.0.0.1:50551");
  EXPECT_EQ(sample.common.client.call_timeout_ms, 5000);
  EXPECT_EQ(sample.common.client.tenant, "");
  EXPECT_FALSE(sample.common.json);
  EXPECT_EQ(sample.size, 4u);
  EXPECT_THAT(sample.sizes, ElementsAre(4));
  EXPECT_EQ(sample.mode, "fast");
  EXPECT_FALSE(sample.fast);
}

TEST(ProgramTest, TheEnvironmentNamesTheTarget) {
  setenv("MLA_CLIENT_CONTEXTS", "/nonexistent", 1);
  setenv("MLA_TARGET", "unix:/e", 1);
  Program program;
  std::string target;
  program.Add({.name = "show", .group = "G", .summary = "s", .examples = "e\n"})
      .Run([&](const CommonOptions& common) {
        target = common.target;
        return 0;
      });
  const char* const words[] = {"show"};
  EXPECT_EQ(program.Run(words), 0);
  unsetenv("MLA_TARGET");
  EXPECT_EQ(target, "unix:/e");
}

TEST(ProgramTest, ListsChoicesAndRealsAreRead) {
  Sample sample;
  EXPECT_EQ(
      sample.Run({"take", "x", "--sizes=1,2,30", "--part=1e-2", "--parts", "0,1", "--mode=exact",
                  "--kinds=auto,b", "--wide=18446744073709551615", "--size=007"}),
      42);
  EXPECT_THAT(sample.sizes, ElementsAre(1, 2, 30));
  EXPECT_EQ(sample.part, 0.01);
  EXPECT_THAT(sample.parts, ElementsAre(0, 1));
  EXPECT_EQ(sample.mode, "exact");
  EXPECT_THAT(sample.kinds, ElementsAre("auto", "b"));
  EXPECT_EQ(sample.wide, UINT64_MAX);
  EXPECT_EQ(sample.size, 7u);
  Sample all;
  EXPECT_EQ(all.Run({"take", "x", "--kinds=all"}), 42);
  EXPECT_THAT(all.kinds, ElementsAre("a", "b"));
  Sample more;
  EXPECT_EQ(more.Run({"take", "x", "--kinds=b,all,auto"}), 42);
  EXPECT_THAT(more.kinds, ElementsAre("a", "b", "auto"));
}

TEST(ProgramTest, TheLastOfSeveralValuesCounts) {
  Sample sample;
  EXPECT_EQ(sample.Run({"--target=a", "take", "x", "--size=1", "--size=2", "--target=b"}), 42);
  EXPECT_EQ(sample.size, 2u);
  EXPECT_EQ(sample.common.target, "b");
}

TEST(ProgramTest, AnEmptyValueIsNotTheNextWord) {
  Sample sample;
  EXPECT_EQ(sample.Run({"--tenant=", "take", "--name=", "x"}), 42);
  EXPECT_EQ(sample.common.client.tenant, "");
  EXPECT_EQ(sample.name, "");
  EXPECT_EQ(sample.file, "x");
}

TEST(ProgramTest, WordsMayBeNamesOfCommands) {
  Sample sample;
  EXPECT_EQ(sample.Run({"take", "plain"}), 42);
  EXPECT_EQ(sample.ran, "take");
  EXPECT_EQ(sample.file, "plain");
}

TEST(ProgramTest, JsonTakesAFileOnlyWhenTheCommandHasAllItsWords) {
  const struct {
    std::vector<const char*> words;
    bool json;
    std::string json_file, file;
  } cases[] = {
      {{"plain", "--json"}, true, "", ""},
      {{"plain", "--json="}, true, "", ""},
      {{"plain", "--json", "out.json"}, false, "out.json", ""},
      {{"plain", "--json=out.json", "--output=json"}, true, "out.json", ""},
      {{"plain", "--output", "json"}, true, "", ""},
      {{"plain", "-o", "json"}, true, "", ""},
      {{"plain", "-o", "yaml"}, true, "", ""},
      {{"plain", "-o", "wide"}, false, "", ""},
      {{"take", "in", "--json", "out.json"}, false, "out.json", "in"},
      {{"take", "in", "--json", "plain"}, false, "plain", "in"},
      {{"take", "--json", "in"}, true, "", "in"},
      {{"take", "--json", "in", "--fast"}, true, "", "in"},
      {{"--json", "plain"}, true, "", ""},
      {{"plain", "--json=out", "--target", "x"}, false, "out", ""},
  };
  for (const auto& one : cases) {
    Sample sample;
    EXPECT_EQ(sample.Run(one.words), 42) << sample.err;
    EXPECT_EQ(sample.common.json, one.json) << one.words[1];
    EXPECT_EQ(sample.common.json_file, one.json_file) << one.words[1];
    EXPECT_EQ(sample.file, one.file) << one.words[1];
  }
}

TEST(ProgramTest, WrongWordsAreUsageErrorsThatNameTheHelp) {
  const std::pair<std::vector<const char*>, const char*> cases[] = {
      {{}, "mlactl: no command given\nmlactl: see mlactl --help\n"},
      {{"dance"}, "mlactl: no command \"dance\"\nmlactl: see mlactl --help\n"},
      {{"tkae"}, "mlactl: no command \"tkae\"; did you mean take?\n"},
      {{"take", "x", "--siez=1"}, "unknown option --siez; did you mean --size?\n"},
      {{"take"}, "FILE is required\nmlactl: see mlactl take --help\n"},
      {{"take", "a", "b"}, "unexpected word \"b\"\nmlactl: see mlactl take --help\n"},
      {{"take", "a", "b", "--json"}, "unexpected word \"b\""},
      {{"take", "--json", "a", "b"}, "unexpected word \"b\""},
      {{"plain", "x"}, "unexpected word \"x\""},
      {{"plain", "take"}, "unexpected word \"take\""},
      {{"plain", "--size=1"}, "unknown option --size\nmlactl: see mlactl plain --help\n"},
      {{"--size=1", "take", "x"}, "unknown option --size\n"},
      {{"take", "x", "-f"}, "unknown option -f\n"},
      {{"take", "x", "--fast=1"}, "fast takes no value"},
      {{"take", "x", "--size"}, "--size"},
      {{"take", "x", "--size", "--fast"}, "--size: got \"--fast\", must be a value"},
      {{"plain", "--output=xml"},
       "--output: got \"xml\", must be one of text, table, wide, json, yaml"},
      {{"plain", "--timeout-ms=0"}, "--timeout-ms: got \"0\", must be 1..86400000"},
  };
  for (const auto& [words, message] : cases) {
    Sample sample;
    EXPECT_EQ(sample.Run(words), kUsageError) << message;
    EXPECT_THAT(sample.err, HasSubstr(message));
    EXPECT_EQ(sample.out, "");
    EXPECT_EQ(sample.ran, "");
  }
}

TEST(ProgramTest, AllWrongValuesAreReportedAtOnce) {
  Sample sample;
  EXPECT_EQ(sample.Run({"take", "x", "--size=0", "--part=nan", "--mode=slow", "--kinds=a,c"}),
            kUsageError);
  EXPECT_EQ(sample.err,
            "mlactl: --size: got \"0\", must be 1..9\n"
            "mlactl: --part: got \"nan\", must be 0..1\n"
            "mlactl: --mode: got \"slow\", must be one of fast, exact\n"
            "mlactl: --kinds: got \"c\", must be one of auto, a, b, all\n"
            "mlactl: see mlactl take --help\n");
  EXPECT_EQ(sample.size, 4u);
  EXPECT_EQ(sample.part, 0.5);
  EXPECT_EQ(sample.mode, "fast");
  EXPECT_THAT(sample.kinds, ElementsAre("auto"));
}

TEST(ProgramTest, WhatIsNoNumberIsRefused) {
  for (const char* text :
       {"--size=", "--size=x", "--size=-1", "--size=1.5", "--size=0x1", "--size=1,2", "--wide=-1",
        "--wide=18446744073709551616", "--wide=99999999999999999999", "--sizes=1,,2",
        "--sizes=1,2,3,4", "--part=x", "--part=", "--part=inf", "--parts=0,2"}) {
    Sample sample;
    EXPECT_EQ(sample.Run({"take", "x", text}), kUsageError) << text;
    EXPECT_EQ(sample.size, 4u);
    EXPECT_EQ(sample.wide, 4u);
    EXPECT_THAT(sample.sizes, ElementsAre(4));
    EXPECT_EQ(sample.part, 0.5);
  }
}

TEST(ProgramTest, HelpNeedsNothingElse) {
  Sample all, one, wrong;
  EXPECT_EQ(all.Run({"--help"}), kOk);
  for (const char* text :
       {"Usage: mlactl [OPTION...]", "\nFirst:\n", "\nSecond:\n", "take FILE", "--target=ADDRESS",
        "--json[=FILE]", "Exit codes: 0 success", "6 standard output was cut off"}) {
    EXPECT_THAT(all.out, HasSubstr(text));
  }
  EXPECT_EQ(one.Run({"take", "--help"}), kOk);
  for (const char* text :
       {"Usage: mlactl take [OPTION...] FILE", "takes a file", "Notes.", "--size=N", "  --fast   ",
        "  mlactl take x\n", "Options of all commands:", "--help", "Exit codes: 0 success"}) {
    EXPECT_THAT(one.out, HasSubstr(text));
  }
  EXPECT_EQ(one.program.Help("take"), one.out);
  EXPECT_EQ(wrong.Run({"take", "--size=0", "--wrong", "--help"}), kOk);
  EXPECT_EQ(wrong.out, one.out);
  EXPECT_EQ(wrong.ran, "");
}

}  // namespace
}  // namespace mla::mlactl
