#include "client/cpp/cluster/targets.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "client/cpp/cluster/faults.h"

namespace mla::client {
namespace {

TEST(TargetsTest, TellClustersFromServers) {
  for (const char* target : {"etcd://a/p", "etcds://a/p", "dns:///name", "a,b", "a:1,unix:/x"}) {
    EXPECT_TRUE(NamesCluster(target)) << target;
  }
  for (const char* target : {"a:1", "unix:/a,b", "ipv4:1.2.3.4,5.6.7.8", "ipv6:[::1],[::2]", ""}) {
    EXPECT_FALSE(NamesCluster(target)) << target;
  }
}

TEST(TargetsTest, ParseEtcd) {
  const auto target = ParseEtcdTarget("etcd://a,b-1.x:23,[::1]:7,[fe80::2]/fleet/gpu_1//");
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_FALSE(target->tls);
  EXPECT_EQ(target->prefix, "fleet/gpu_1");
  EXPECT_EQ(
      target->endpoints,
      (std::vector<Endpoint>{{"a", kEtcdPort}, {"b-1.x", 23}, {"::1", 7}, {"fe80::2", kEtcdPort}}));
  EXPECT_EQ(target->endpoints[2].ToString(), "[::1]:7");
  EXPECT_TRUE(ParseEtcdTarget("etcds://a/p")->tls);
}

TEST(TargetsTest, RefuseOtherFormsOfEtcd) {
  std::string many = "etcd://a";
  for (size_t i = 0; i < kMostEndpoints; ++i) absl::StrAppend(&many, ",b", i);
  for (const std::string& target :
       {std::string("etcd://a"), std::string("etcd://a/"), std::string("etcd:///p"),
        std::string("http://a/p"), std::string("etcd://user@a/p"), std::string("etcd://a/p/../q r"),
        std::string("etcd://a//p"), std::string("etcd://a:0/p"), std::string("etcd://a:65536/p"),
        std::string("etcd://a:/p"), std::string("etcd://a:1x/p"), std::string("etcd://[::1/p"),
        std::string("etcd://[::1]x/p"), std::string("etcd://a b/p"), many + "/p"}) {
    const auto parsed = ParseEtcdTarget(target);
    ASSERT_FALSE(parsed.ok()) << target;
    EXPECT_EQ(DetailOf(parsed.status())->field(), "target") << target;
  }
  // A password in a target must not reach a log.
  EXPECT_EQ(ParseEtcdTarget("etcd://u:secret@a/p").status().ToString().find("secret"),
            std::string::npos);
}

TEST(TargetsTest, ParseNamesAndLists) {
  EXPECT_EQ(*ParseDnsTarget("dns:///fleet.svc:7"), (Endpoint{"fleet.svc", 7}));
  EXPECT_EQ(ParseDnsTarget("dns:///fleet.svc")->port, kServerPort);
  EXPECT_FALSE(ParseDnsTarget("dns:///a/b").ok());
  EXPECT_EQ(*ParseStaticTarget("a, b:7,unix:/run/x.sock,[::1]"),
            (std::vector<std::string>{"a:50551", "b:7", "unix:/run/x.sock", "[::1]:50551"}));
  EXPECT_FALSE(ParseStaticTarget("a,a:50551").ok());
  EXPECT_FALSE(ParseStaticTarget("a,").ok());
  std::string many = "a";
  for (size_t i = 0; i < kMostStatic; ++i) absl::StrAppend(&many, ",b", i);
  EXPECT_FALSE(ParseStaticTarget(many).ok());
}

}  // namespace
}  // namespace mla::client
