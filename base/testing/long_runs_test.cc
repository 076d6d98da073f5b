#include "base/testing/long_runs.h"

#include <gtest/gtest.h>

namespace mla {
namespace {

TEST(LongRunsTest, AnEmptyVariableIsNotSet) {
  unsetenv("MLA_TEST_LONG");
  EXPECT_FALSE(IsLongRun());
  for (const char* const value : {"", "1", "yes"}) {
    setenv("MLA_TEST_LONG", value, /*replace=*/1);
    EXPECT_EQ(IsLongRun(), *value != '\0') << value;
  }
}

}  // namespace
}  // namespace mla
