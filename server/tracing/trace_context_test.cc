#include "server/tracing/trace_context.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace mla::server {
namespace {

// The example of the specification.
constexpr char kHeader[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(TraceContextTest, ReadsAndWritesAHeader) {
  const TraceContext context = ParseTraceparent(kHeader);
  ASSERT_TRUE(context.valid());
  EXPECT_EQ(context.trace.high, 0x4bf92f3577b34da6);
  EXPECT_EQ(context.trace.low, 0xa3ce929d0e0e4736);
  EXPECT_EQ(context.span, 0x00f067aa0ba902b7u);
  EXPECT_TRUE(context.sampled);
  EXPECT_EQ(Traceparent(context), kHeader);
  EXPECT_EQ(TraceIdText(context.trace), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(TraceIdBytes(context.trace).substr(0, 2), "\x4b\xf9");
  EXPECT_EQ(SpanIdBytes(context.span), std::string("\0\xf0\x67\xaa\x0b\xa9\x02\xb7", 8));
}

TEST(TraceContextTest, ReadsTheFlag) {
  std::string header = kHeader;
  header.back() = '0';
  EXPECT_FALSE(ParseTraceparent(header).sampled);
  EXPECT_EQ(Traceparent(ParseTraceparent(header)), header);
  header[53] = 'f';  // other flags mean nothing yet
  EXPECT_FALSE(ParseTraceparent(header).sampled);
}

TEST(TraceContextTest, LaterVersionsMayAppendFields) {
  const std::string later = absl::StrCat("01", std::string(kHeader).substr(2));
  EXPECT_TRUE(ParseTraceparent(later).valid());
  EXPECT_TRUE(ParseTraceparent(absl::StrCat(later, "-more")).valid());
  EXPECT_FALSE(ParseTraceparent(absl::StrCat(later, "more")).valid());
  EXPECT_FALSE(ParseTraceparent(absl::StrCat(later, "-", std::string(200, 'x'))).valid());
}

TEST(TraceContextTest, RefusesEverythingElse) {
  const std::string good = kHeader;
  EXPECT_FALSE(ParseTraceparent("").valid());
  EXPECT_FALSE(ParseTraceparent(absl::StrCat(good, "-more")).valid());  // version 00 has one length
  EXPECT_FALSE(ParseTraceparent(absl::StrCat("ff", good.substr(2))).valid());
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_FALSE(ParseTraceparent(good.substr(0, length)).valid()) << length;
  }
  for (size_t index = 0; index < good.size(); ++index) {
    for (const char c : {'G', 'A', '\0', ' '}) {
      std::string bad = good;
      bad[index] = c;
      EXPECT_FALSE(ParseTraceparent(bad).valid()) << index;
    }
  }
  std::string zeros = good;
  zeros.replace(3, 32, 32, '0');
  EXPECT_FALSE(ParseTraceparent(zeros).valid());
  zeros = good;
  zeros.replace(36, 16, 16, '0');
  EXPECT_FALSE(ParseTraceparent(zeros).valid());
}

}  // namespace
}  // namespace mla::server
