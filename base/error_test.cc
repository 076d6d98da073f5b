#include "base/error.h"

#include <gtest/gtest.h>

#include <string>

namespace mla {
namespace {

TEST(ErrorTest, OkHasNoDetail) {
  EXPECT_EQ(DetailOf(absl::OkStatus()), ErrorDetail());
  EXPECT_EQ(DetailOf(absl::InternalError("no detail")), ErrorDetail());
}

TEST(ErrorTest, EveryFieldComesBack) {
  const ErrorDetail detail{.field = "attend.row_count",
                           .got = std::string("a=b\nc\0\xff\\n", 9),
                           .limit = "1..4",
                           .reason = "out_of_range",
                           .retry_after_ms = 5,
                           .last_good_position = int64_t{1} << 60,
                           .next_row = 0,
                           .resource = "kv_bytes",
                           .wanted = 7,
                           .free = 3,
                           .bound = -1,
                           .bound_of = BoundOwner::kServer,
                           .peer = "host:50551"};
  const absl::Status status = MakeError(absl::StatusCode::kAborted, "why", detail);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "why");
  EXPECT_EQ(DetailOf(status), detail);
}

TEST(ErrorTest, UnsetFieldsStayUnset) {
  const absl::Status status = MakeError(absl::StatusCode::kInternal, "", {});
  EXPECT_EQ(DetailOf(status), ErrorDetail());
  EXPECT_EQ(DetailOf(status).next_row, -1);
}

TEST(ErrorTest, AFieldIsRefusedInOneForm) {
  const absl::Status status = RefuseField("lease_ms", "-1", "0..9");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "lease_ms: got -1, must be 0..9");
  EXPECT_EQ(
      DetailOf(status),
      (ErrorDetail{.field = "lease_ms", .got = "-1", .limit = "0..9", .reason = "out_of_range"}));
}

TEST(ErrorTest, RangesIncludeTheirEnds) {
  EXPECT_TRUE(CheckRange("x", 0, 0, 3).ok());
  EXPECT_TRUE(CheckRange("x", 3, 0, 3).ok());
  EXPECT_EQ(CheckRange("x", 4, 0, 3).message(), "x: got 4, must be 0..3");
  EXPECT_EQ(CheckRange("x", -1, 0, 3).message(), "x: got -1, must be 0..3");
  EXPECT_TRUE(CheckRange("x", uint8_t{3}, 0, 3).ok());
  EXPECT_EQ(CheckRange("x", UINT64_MAX, 0, INT64_MAX).message(),
            "x: got 18446744073709551615, must be 0..9223372036854775807");
  EXPECT_EQ(CheckRange("x", INT64_MIN, 0, 3).message(),
            "x: got -9223372036854775808, must be 0..3");
}

TEST(ErrorTest, AFieldsNameIsMadeForARefusalOnly) {
  int names_made = 0;
  const auto field = [&names_made] {
    ++names_made;
    return std::string("x[1]");
  };
  EXPECT_TRUE(CheckRange(field, 1, 0, 3).ok());
  EXPECT_EQ(names_made, 0);
  EXPECT_EQ(CheckRange(field, 4, 0, 3).message(), "x[1]: got 4, must be 0..3");
}

TEST(ErrorTest, AmendingKeepsTheRest) {
  const absl::Status status =
      AmendDetail(RefuseField("x", "1", "2", "other", absl::StatusCode::kNotFound),
                  [](ErrorDetail& detail) { detail.next_row = 4; });
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "x: got 1, must be 2");
  EXPECT_EQ(DetailOf(status).reason, "other");
  EXPECT_EQ(DetailOf(status).next_row, 4);
}

}  // namespace
}  // namespace mla
