#include "client/mlactl/context/context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <string>

namespace mla::mlactl {
namespace {

using ::testing::HasSubstr;

Connection To(const std::string& target, const std::string& tenant = "") {
  Connection connection;
  connection.target = target;
  connection.tenant = tenant;
  return connection;
}

// An environment with a file of two contexts.
struct Sample {
  Sample() {
    variables["MLA_CLIENT_CONTEXTS"] = path;
    Contexts contexts;
    contexts.current = "lab";
    contexts.all["lab"] = To("lab:1", "t");
    contexts.all["prod"] = {"prod:2", "", "ca", "c", "k", ""};
    EXPECT_EQ(WriteContexts(path, contexts), absl::OkStatus());
  }
  ~Sample() { std::remove(path.c_str()); }
  Environment environment() {
    return [this](const char* name) {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    };
  }
  Connection Of(const Connection& given, const std::string& name = "") {
    auto connection = Complete(given, name, environment());
    EXPECT_TRUE(connection.ok()) << connection.status();
    return *connection;
  }

  const std::string path = testing::TempDir() + "/contexts/contexts.json";
  std::map<std::string, std::string> variables;
};

TEST(ContextTest, TheCommandLineThenTheEnvironmentThenTheContext) {
  Sample sample;
  EXPECT_EQ(sample.Of({}).target, "lab:1");
  EXPECT_EQ(sample.Of({}).tenant, "t");
  EXPECT_EQ(sample.Of({}, "prod").target, "prod:2");
  EXPECT_EQ(sample.Of({}, "prod").tls_key, "k");
  EXPECT_EQ(sample.Of(To("", "mine"), "prod").tenant, "mine");
  sample.variables["MLA_CLIENT_TENANT"] = "env";
  EXPECT_EQ(sample.Of({}).tenant, "env");
  EXPECT_EQ(sample.Of(To("", "mine")).tenant, "mine");
  sample.variables["MLA_CLIENT_CONTEXT"] = "prod";
  EXPECT_EQ(sample.Of({}).target, "prod:2");
}

// Certificates of one server are not shown to another.
TEST(ContextTest, AnotherTargetDoesNotGetTheCurrentContext) {
  Sample sample;
  EXPECT_EQ(sample.Of(To("unix:/s")).tenant, "");
  sample.variables["MLA_TARGET"] = "elsewhere:3";
  EXPECT_EQ(sample.Of({}).target, "elsewhere:3");
  EXPECT_EQ(sample.Of({}).tenant, "");
  EXPECT_EQ(sample.Of({}, "prod").target, "prod:2");
}

TEST(ContextTest, WhatIsWrongIsNamed) {
  Sample sample;
  EXPECT_THAT(std::string(Complete({}, "none", sample.environment()).status().message()),
              HasSubstr("--server-context: got \"none\", not in "));
  for (const auto& [text, what] : {std::pair("[", "not a JSON object"),
                                   {"{}", "contexts: must be"},
                                   {R"({"contexts": {"a": 1}})", "contexts.a: no object"},
                                   {R"({"contexts": {"a": {"target": 1}}})", "contexts.a.target"},
                                   {R"({"current": 1, "contexts": {}})", "current: must be"}}) {
    std::ofstream(sample.path, std::ios::trunc) << text;
    EXPECT_THAT(std::string(ReadContexts(sample.path).status().message()), HasSubstr(what));
  }
  std::ofstream(sample.path, std::ios::trunc) << std::string(2 << 20, ' ');
  EXPECT_THAT(std::string(ReadContexts(sample.path).status().message()), HasSubstr("megabyte"));
  EXPECT_TRUE(ReadContexts("/nonexistent")->all.empty());
}

TEST(ContextTest, TheFileIsForTheUserAlone) {
  Sample sample;
  struct stat status {};
  ASSERT_EQ(stat(sample.path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(ReadContexts(sample.path)->all.size(), 2u);
  const Environment only_home = [](const char* name) {
    return std::string(name) == "HOME" ? "/users/x" : nullptr;
  };
  EXPECT_EQ(ContextsPath(only_home), "/users/x/.config/mlactl/contexts.json");
}

}  // namespace
}  // namespace mla::mlactl
