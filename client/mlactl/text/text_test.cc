#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/mlactl/text/nearest.h"
#include "client/mlactl/text/units.h"
#include "client/mlactl/text/yaml.h"

namespace mla::mlactl {
namespace {

TEST(NearestTest, SlipsOfTheHandAreFound) {
  const std::vector<std::string> commands = {"status", "sequences", "set-quota", "models",
                                             "health", "quota",     "quotas"};
  EXPECT_EQ(Nearest("statu", commands), "status");
  EXPECT_EQ(Nearest("stauts", commands), "status");
  EXPECT_EQ(Nearest("helth", commands), "health");
  EXPECT_EQ(Nearest("setquota", commands), "set-quota");
  EXPECT_EQ(Nearest("seq", commands), "sequences");
  EXPECT_EQ(Nearest("dance", commands), "");
  EXPECT_EQ(Nearest("", commands), "");
  EXPECT_EQ(Nearest(std::string(1000, 's'), commands), "");
  EXPECT_EQ(DidYouMean("modles", commands), "; did you mean models?");
  EXPECT_EQ(DidYouMean("xyzzy", commands), "");
}

TEST(UnitsTest, NumbersForPeople) {
  EXPECT_EQ(BytesForPeople(0), "0 B");
  EXPECT_EQ(BytesForPeople(1023), "1023 B");
  EXPECT_EQ(BytesForPeople(1024), "1.00 KiB");
  EXPECT_EQ(BytesForPeople(1.5 * (1u << 30)), "1.50 GiB");
  EXPECT_EQ(BytesForPeople(5e15), "4547 TiB");
  EXPECT_EQ(CountForPeople(9999), "9999");
  EXPECT_EQ(CountForPeople(163840), "163.8k");
  EXPECT_EQ(CountForPeople(3640000), "3.64M");
  EXPECT_EQ(MillisForPeople(12), "12 ms");
  EXPECT_EQ(MillisForPeople(4200), "4.2 s");
  EXPECT_EQ(MillisForPeople(200000), "3 min 20 s");
  EXPECT_EQ(MillisForPeople(7500000), "2 h 5 min");
  EXPECT_EQ(FieldForPeople("kv_bytes_used", 2048), "2.00 KiB");
  EXPECT_EQ(FieldForPeople("uptime_ms", 2000), "2.0 s");
  EXPECT_EQ(FieldForPeople("checkpoint_last_unix_ms", 2000), "2000");
  EXPECT_EQ(FieldForPeople("models", 2000), "2000");
}

TEST(UnitsTest, SizesAreRead) {
  EXPECT_EQ(SizeOf("1024"), 1024u);
  EXPECT_EQ(SizeOf("4GiB"), uint64_t{4} << 30);
  EXPECT_EQ(SizeOf("288GB"), 288'000'000'000u);
  EXPECT_EQ(SizeOf("1.5TB"), 1'500'000'000'000u);
  for (const char* wrong : {"", "GiB", "-1GiB", "x", "0", "nan", "1e30GB", "4 GiB B"}) {
    EXPECT_EQ(SizeOf(wrong), 0u) << wrong;
  }
}

TEST(YamlTest, ValuesStayWhatTheyAre) {
  EXPECT_EQ(YamlOfJson(R"({"b": 1, "a": "x: y", "on": true, "list": [1, {"k": "v", "l": []}],
                           "empty": {}, "7": null, "rows": [[1, 2], [3]]})"),
            "b: 1\n"
            "a: \"x: y\"\n"
            "\"on\": true\n"
            "list:\n"
            "  - 1\n"
            "  - k: \"v\"\n"
            "    l: []\n"
            "empty: {}\n"
            "\"7\": null\n"
            "rows:\n"
            "  - - 1\n"
            "    - 2\n"
            "  - - 3\n");
  EXPECT_EQ(YamlOfJson("no json"), "no json");
}

}  // namespace
}  // namespace mla::mlactl
